"""Gradients of keys, values, gates and maps of blocks from the queries of later blocks, turn by turn.

The queries of a turn lie in the scratch as they meet each block, so keys need not be moved. Each turn adds to what
earlier turns wrote.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    load_numbers,
    load_rows,
    store_rows,
    to_columns,
    weights,
)
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import chunk_span, load_tile, map_slot, store_tile


class KeyGradients(NamedTuple):
    """Kernel argument: what is added to; fields of `PathWorkspace`, contiguous."""

    dblocks: Any
    dv: Any
    dblock_end: Any


@triton.jit(do_not_specialize=["first", "lanes", "begin", "count", "N", "T", "per_sequence"])
def wyfold_path_far_keys_triton(
    queries, keys, scratch, first, lanes, begin, count, out, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one key head from the queries of later blocks in one turn."""
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    TILE: tl.constexpr = SIZES.TILE
    S: tl.constexpr = SIZES.BLOCK * BT
    G: tl.constexpr = HQ // H
    GROUPS: tl.constexpr = triton.next_power_of_2(G)
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    block, start = i_s // SIZES.BLOCK, t - i_s * BT
    chunk = i_c - i_s - b * per_sequence - first  # lane of the sequence's first chunk
    slot = start // S + block - begin  # of the turn
    fresh, tiles, end = later_tiles(chunk, lanes, block, left + i_s * BT, SIZES)
    if (slot < 0) | (slot >= count) | (tiles >= end):
        return
    token = b * T + t
    held = tl.where(fresh, 0, BT)
    b_k = load_rows(keys.blocks, token, i_h, BT, H, K, BT, BK)
    b_v = load_rows(keys.v, token, i_h, BT, H, V, BT, BV)
    b_dk = load_rows(out.dblocks, token, i_h, held, H, K, BT, BK)
    b_dv = load_rows(out.dv, token, i_h, held, H, V, BT, BV)
    b_dend = tl.zeros((BT, GROUPS), tl.float32)
    if keys.g is not None:
        b_dend = load_group(out.dblock_end, token, i_h, held, HQ, G, BT)
    # Query heads in the inner loop, so that the order of the sums does not depend on the turns.
    for i in range(tiles * G, end * G):
        tile, e = i // G, i % G
        i_q = i_h * G + e
        place = ((b * lanes + chunk + tile * (TILE // BT)) * count + slot) * HQ + i_q
        for part in tl.static_range(0, TILE, BT):
            from_here = b * T + start + tile * TILE + part
            queried = tl.minimum(left + i_s * BT - tile * TILE - part, BT).to(tl.int32)
            b_x = load_rows(scratch.x, place * TILE + part, 0, BT, 1, BK, BT, BK)
            b_do = load_rows(queries.do, from_here, i_q, queried, HQ, V, BT, BV)
            b_delta = to_columns(load_numbers(queries.delta, from_here, i_q, queried, HQ, BT), BT)
            b_offset = -to_columns(load_numbers(queries.lse, from_here, i_q, queried, HQ, BT), BT)[None, :]
            if keys.g is not None:
                b_passed = tl.load(scratch.passed + place * TILE + part + tl.arange(0, BT))
                b_end = load_numbers(keys.block_stop, token, i_q, BT, HQ, BT)
                b_after = b_end[:, None] + to_columns(b_passed, BT)[None, :]
                b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            b_p = weights(mm(b_k, tl.trans(b_x), None, OP, PRECISION), factor.logit_scale, b_offset)
            b_dv = mm(b_p, b_do, b_dv, OP, PRECISION)
            b_ds = b_p * (mm(b_v, tl.trans(b_do), None, OP, PRECISION) - b_delta[None, :])
            if keys.g is not None:
                b_dend += of_head(factor.gate * tl.sum(b_ds, 1), e, GROUPS)
            b_dk = mm(b_ds * factor.scale, b_x, b_dk, OP, PRECISION)
    if keys.g is not None:
        store_group(out.dblock_end, token, i_h, b_dend, HQ, G, BT)
    store_rows(out.dblocks, token, i_h, BT, b_dk, H, K)
    store_rows(out.dv, token, i_h, BT, b_dv, H, V)


@triton.jit(do_not_specialize=["first", "lanes", "begin", "count", "N", "T", "per_sequence"])
def wyfold_path_far_maps_triton(
    keys, scratch, first, lanes, begin, count, p_dM, p_dtotal, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of 64 rows of the map of one block of one key head, and of its sum of log gates, from one turn.

    p_dM, p_dtotal: `dM` and `dblock_total` of `PathWorkspace`.
    """
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    TILE: tl.constexpr = SIZES.TILE
    G: tl.constexpr = HQ // H
    GROUPS: tl.constexpr = triton.next_power_of_2(G)
    BR: tl.constexpr = 64  # rows of the map of this program
    i_tile = tl.program_id(0).to(tl.int64)
    part = i_tile % (BK // BR) * BR
    i_h = i_tile // (BK // BR) % H
    i_c = i_tile // (BK // BR * H)
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    block = i_s // SIZES.BLOCK
    chunk = i_c - i_s - b * per_sequence - first  # lane of the sequence's first chunk
    slot = t // (SIZES.BLOCK * BT) - begin  # of the turn
    _, tiles, end = later_tiles(chunk, lanes, block, left + i_s * BT, SIZES)
    if (i_s % SIZES.BLOCK != 0) | (block == 0) | (slot < 0) | (slot >= count) | (tiles >= end):
        return
    i_block = map_slot(b, t, T, SIZES.BLOCK * BT)
    i_map = i_block * H + i_h
    b_dM = load_tile(p_dM, i_map, part, 0, BK, BK, BR, BK)
    p_sums = p_dtotal + i_block * HQ
    o_g = tl.arange(0, GROUPS)
    b_total = tl.zeros((GROUPS,), tl.float32)
    if keys.g is not None:
        b_total = tl.load(p_sums + i_h * G + o_g, mask=o_g < G, other=0.0)
    for i in range(tiles * G, end * G):
        tile, e = i // G, i % G
        place = ((b * lanes + chunk + tile * (TILE // BT)) * count + slot) * HQ + i_h * G + e
        b_x = load_tile(scratch.x, place, 0, part, TILE, BK, TILE, BR)
        b_dx = load_tile(scratch.dx, place, 0, 0, TILE, BK, TILE, BK)
        b_dM = mm(tl.trans(b_x), b_dx, b_dM, OP, PRECISION)
        if keys.g is not None:
            added = factor.gate * tl.sum(tl.load(scratch.others + place * TILE + tl.arange(0, TILE)), 0)
            b_total += tl.where(o_g == e, added, 0.0)
    if keys.g is not None:
        if part == 0:
            tl.store(p_sums + i_h * G + o_g, b_total, mask=o_g < G)
    store_tile(p_dM, i_map, part, 0, b_dM, BK, BK, BR, BK)


@triton.jit
def later_tiles(chunk, lanes, block, length, SIZES: tl.constexpr):
    """Whether a turn has the first tile after a block; its first tile after the block, and the one after its last.

    chunk: Lane of the first chunk of the sequence, which is negative if it precedes the turn.
    """
    CHUNKS: tl.constexpr = SIZES.TILE // SIZES.BT
    first = (block + 1) * (SIZES.BLOCK // CHUNKS)
    begin = tl.maximum(first, (CHUNKS - 1 - chunk) // CHUNKS)
    end = tl.minimum((length + SIZES.TILE - 1) // SIZES.TILE, (lanes - chunk + CHUNKS - 1) // CHUNKS)
    return begin == first, begin, end


@triton.jit
def load_group(p, token, i_h, rows, HEADS: tl.constexpr, G: tl.constexpr, BT: tl.constexpr):
    """Numbers per token of the G query heads of a key head, of a contiguous [tokens, HEADS].   [BT, G or more]"""
    offsets, mask = _group_offsets(rows, HEADS, G, BT)
    return tl.load(p + (token * HEADS + i_h * G) + offsets, mask=mask, other=0.0)


@triton.jit
def store_group(p, token, i_h, b_x, HEADS: tl.constexpr, G: tl.constexpr, BT: tl.constexpr):
    """Store what `load_group` loads."""
    offsets, mask = _group_offsets(BT, HEADS, G, BT)
    tl.store(p + (token * HEADS + i_h * G) + offsets, b_x, mask=mask)


@triton.jit
def _group_offsets(rows, HEADS: tl.constexpr, G: tl.constexpr, BT: tl.constexpr):
    o_r, o_g = tl.arange(0, BT), tl.arange(0, triton.next_power_of_2(G))
    return (o_r * HEADS)[:, None] + o_g[None, :], (o_r < rows)[:, None] & (o_g < G)[None, :]


@triton.jit
def of_head(b_x, e, GROUPS: tl.constexpr):
    """x of query head e of its key head, and zero for the others.   [BT, GROUPS]"""
    if GROUPS == 1:
        return b_x[:, None]
    else:
        return tl.where(tl.arange(0, GROUPS)[None, :] == e, b_x[:, None], 0.0)
