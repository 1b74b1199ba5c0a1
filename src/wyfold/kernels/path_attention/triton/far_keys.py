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
    store_numbers,
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


@triton.jit(do_not_specialize=["slots", "turn", "lanes", "N", "T", "per_sequence"])
def wyfold_path_far_keys_triton(
    queries, keys, scratch, slots, turn, lanes, out, packing, N, T, per_sequence, factor,
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
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    block, start = i_s // SIZES.BLOCK, t - i_s * BT
    first, begin, end = later_tiles(turn, lanes, block, left + i_s * BT, SIZES)
    if begin >= end:
        return
    token, slot, fresh = b * T + t, map_slot(b, start + block * S, T, S), begin == first
    held = tl.where(fresh, 0, BT)
    b_k = load_rows(keys.blocks, token, i_h, BT, H, K, BT, BK)
    b_v = load_rows(keys.v, token, i_h, BT, H, V, BT, BV)
    b_dk = load_rows(out.dblocks, token, i_h, held, H, K, BT, BK)
    b_dv = load_rows(out.dv, token, i_h, held, H, V, BT, BV)
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        b_dend = tl.zeros((BT,), tl.float32)
        b_end = tl.zeros((BT,), tl.float32)
        if keys.g is not None:
            b_dend = load_numbers(out.dblock_end, token, i_q, held, HQ, BT)
            b_end = load_numbers(keys.block_stop, token, i_q, BT, HQ, BT)
        for tile in range(begin, end):
            place = ((tile - turn * lanes) * slots + slot) * HQ + i_q
            for part in tl.static_range(0, TILE, BT):
                from_here = b * T + start + tile * TILE + part
                queried = tl.minimum(left + i_s * BT - tile * TILE - part, BT).to(tl.int32)
                b_x = load_rows(scratch.x, place * TILE + part, 0, BT, 1, BK, BT, BK)
                b_do = load_rows(queries.do, from_here, i_q, queried, HQ, V, BT, BV)
                b_delta = to_columns(load_numbers(queries.delta, from_here, i_q, queried, HQ, BT), BT)
                b_offset = -to_columns(load_numbers(queries.lse, from_here, i_q, queried, HQ, BT), BT)[None, :]
                if keys.g is not None:
                    b_passed = tl.load(scratch.passed + place * TILE + part + tl.arange(0, BT))
                    b_after = b_end[:, None] + to_columns(b_passed, BT)[None, :]
                    b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
                b_p = weights(mm(b_k, tl.trans(b_x), None, OP, PRECISION), factor.logit_scale, b_offset)
                b_dv = mm(b_p, b_do, b_dv, OP, PRECISION)
                b_ds = b_p * (mm(b_v, tl.trans(b_do), None, OP, PRECISION) - b_delta[None, :])
                b_dend += factor.gate * tl.sum(b_ds, 1)
                b_dk = mm(b_ds * factor.scale, b_x, b_dk, OP, PRECISION)
        if keys.g is not None:
            store_numbers(out.dblock_end, token, i_q, BT, b_dend, HQ, BT)
    store_rows(out.dblocks, token, i_h, BT, b_dk, H, K)
    store_rows(out.dv, token, i_h, BT, b_dv, H, V)


@triton.jit(do_not_specialize=["slots", "turn", "lanes", "N", "T", "per_sequence"])
def wyfold_path_far_maps_triton(
    keys, scratch, slots, turn, lanes, p_dM, p_dtotal, packing, N, T, per_sequence, factor,
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
    _, begin, end = later_tiles(turn, lanes, block, left + i_s * BT, SIZES)
    if (i_s % SIZES.BLOCK != 0) | (block == 0) | (begin >= end):
        return
    slot = map_slot(b, t, T, SIZES.BLOCK * BT)
    i_map = slot * H + i_h
    b_dM = load_tile(p_dM, i_map, part, 0, BK, BK, BR, BK)
    p_sums = p_dtotal + slot * HQ
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        total = 0.0
        if keys.g is not None:
            total = tl.load(p_sums + i_q)
        for tile in range(begin, end):
            place = ((tile - turn * lanes) * slots + slot) * HQ + i_q
            b_x = load_tile(scratch.x, place, 0, part, TILE, BK, TILE, BR)
            b_dx = load_tile(scratch.dx, place, 0, 0, TILE, BK, TILE, BK)
            b_dM = mm(tl.trans(b_x), b_dx, b_dM, OP, PRECISION)
            if keys.g is not None:
                total += factor.gate * tl.sum(tl.load(scratch.others + place * TILE + tl.arange(0, TILE)), 0)
        if keys.g is not None:
            if part == 0:
                tl.store(p_sums + i_q, total)
    store_tile(p_dM, i_map, part, 0, b_dM, BK, BK, BR, BK)


@triton.jit
def later_tiles(turn, lanes, block, length, SIZES: tl.constexpr):
    """First tile after a block of a sequence; the first of the turn, and the one after its last."""
    first = (block + 1) * (SIZES.BLOCK * SIZES.BT // SIZES.TILE)
    end = tl.minimum((length + SIZES.TILE - 1) // SIZES.TILE, (turn + 1) * lanes)
    return first, tl.maximum(first, turn * lanes), end
