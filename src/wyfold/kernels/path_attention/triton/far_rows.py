"""Queries between blocks, in turns: at every earlier block, and their gradients there.

A turn takes the chunks [first, first + lanes) of every buffer row as queries, and the slots [begin, begin + count) of
the row as blocks. A tile of queries is kept at each of these blocks in a scratch, which the next turn overwrites, so
memory is linear in the tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    average,
    load_block_map,
    load_numbers,
    load_rows,
    load_sums,
    load_total,
    moved,
    store_numbers,
    store_rows,
    weights,
)
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import chunk_span, map_slot


class Scratch(NamedTuple):
    """Kernel argument: tiles of queries at the blocks of a turn, for every lane, slot and query head; contiguous.

    Attributes:
        x: [B lanes count HQ, TILE, BK] rows at the block's end.
        dx: The same of their gradients at the block's start.
        passed: [B lanes count HQ, TILE] sums of log gates from the block's end to each query.
        others: [B lanes count HQ, TILE] sums of the gradients of the logits of all keys before the block.
    """

    x: Any
    dx: Any
    passed: Any
    others: Any


@triton.jit(do_not_specialize=["first", "lanes", "begin", "count", "N", "T", "per_sequence"])
def wyfold_path_far_starts_triton(
    queries, keys, scratch, first, lanes, begin, count, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one query head at the end of the blocks of a turn, from near to far.

    With SUMS, <do, o> gets the part of these blocks. Such a turn has all blocks.
    """
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    TILE: tl.constexpr = SIZES.TILE
    S: tl.constexpr = BLOCK * BT
    i_q = tl.program_id(0).to(tl.int64) % HQ
    i_h = i_q // (HQ // H)
    i_n, b, start, tile, rows, lane = tile_span(packing, T, per_sequence, first, SIZES, PACKED)
    if PACKED:
        if i_n == N:
            return
    n_begin, n_end = blocks_of_turn(start, tile, begin, count, SIZES)
    if (rows <= 0) | (lane < 0) | (lane >= lanes) | (n_begin >= n_end):
        return
    place = ((b * lanes + lane) * count + start // S - begin) * HQ + i_q  # of block 0
    token = b * T + start + tile * TILE
    b_x = load_rows(queries.x, token, i_q, rows, HQ, K, TILE, BK).to(tl.float32)
    b_passed = tl.zeros((TILE,), tl.float32)
    if keys.g is not None:
        b_passed = load_numbers(keys.block_start, token, i_q, rows, HQ, TILE)
    b_delta = tl.zeros((TILE,), tl.float32)
    block = tile * TILE // S
    for back in range(block - n_begin):
        n = block - 1 - back
        t_block = start + n * S
        slot = map_slot(b, t_block, T, S)
        if n < n_end:
            store_kept(scratch, place + n * HQ, b_x, b_passed, TILE, BK)
        if SUMS:
            b_do = load_rows(queries.do, token, i_q, rows, HQ, V, TILE, BV)
            b_lse = load_numbers(queries.lse, token, i_q, rows, HQ, TILE)
            for c in range(BLOCK):
                at = b * T + t_block + (BLOCK - 1 - c) * BT
                b_k = load_rows(keys.blocks, at, i_h, BT, H, K, BT, BK)
                b_v = load_rows(keys.v, at, i_h, BT, H, V, BT, BV)
                b_offset = -b_lse[:, None]
                if keys.g is not None:
                    b_after = b_passed[:, None] + load_sums(keys.block_stop, at, i_q, HQ, BT)[None, :]
                    b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
                b_delta += average(b_x, b_do, b_k, b_v, b_offset, factor, OP, PRECISION)
        b_x = moved(b_x, load_block_map(keys.M, slot * H + i_h, K, BK), OP, PRECISION)
        if keys.g is not None:
            b_passed += load_total(keys.block_start, b * T + t_block, i_q, HQ, S)
    if SUMS:
        b_delta += load_numbers(queries.delta, token, i_q, rows, HQ, TILE)
        store_numbers(queries.delta, token, i_q, rows, b_delta, HQ, TILE)


@triton.jit(do_not_specialize=["first", "lanes", "begin", "count", "N", "T", "per_sequence"])
def wyfold_path_far_rows_triton(
    queries, keys, scratch, first, lanes, begin, count, p_dq, p_others, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one tile of queries of one query head from the blocks of a turn, from far to near.

    They are added to those of earlier turns, which had the blocks before these.
    p_dq, p_others: Fields of `PathWorkspace`.
    """
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    TILE: tl.constexpr = SIZES.TILE
    S: tl.constexpr = BLOCK * BT
    i_q = tl.program_id(0).to(tl.int64) % HQ
    i_h = i_q // (HQ // H)
    i_n, b, start, tile, rows, lane = tile_span(packing, T, per_sequence, first, SIZES, PACKED)
    if PACKED:
        if i_n == N:
            return
    n_begin, n_end = blocks_of_turn(start, tile, begin, count, SIZES)
    if (rows <= 0) | (lane < 0) | (lane >= lanes) | (n_begin >= n_end):
        return
    place = ((b * lanes + lane) * count + start // S - begin) * HQ + i_q  # of block 0
    token = b * T + start + tile * TILE
    b_do = load_rows(queries.do, token, i_q, rows, HQ, V, TILE, BV)
    b_lse = load_numbers(queries.lse, token, i_q, rows, HQ, TILE)
    b_delta = load_numbers(queries.delta, token, i_q, rows, HQ, TILE)
    written = tl.where(n_begin > 0, rows, 0)
    b_grad = load_rows(p_dq, token, i_q, written, HQ, K, TILE, BK)
    b_far = load_numbers(p_others, token, i_q, written, HQ, TILE)
    for n in range(n_begin, n_end):
        t_block = start + n * S
        slot, kept = map_slot(b, t_block, T, S), place + n * HQ
        store_rows(scratch.dx, kept * TILE, 0, TILE, b_grad, 1, BK)
        tl.store(scratch.others + kept * TILE + tl.arange(0, TILE), b_far)
        if n > 0:  # without a branch, the map would be in shared memory until the products of the keys are summed
            b_grad = moved(b_grad, tl.trans(load_block_map(keys.M, slot * H + i_h, K, BK)), OP, PRECISION)
        b_x = load_rows(scratch.x, kept * TILE, 0, TILE, 1, BK, TILE, BK)
        b_passed = tl.load(scratch.passed + kept * TILE + tl.arange(0, TILE))
        for c in range(BLOCK):
            at = b * T + t_block + (BLOCK - 1 - c) * BT
            b_k = load_rows(keys.blocks, at, i_h, BT, H, K, BT, BK)
            b_v = load_rows(keys.v, at, i_h, BT, H, V, BT, BV)
            b_offset = -b_lse[:, None]
            if keys.g is not None:
                b_after = b_passed[:, None] + load_sums(keys.block_stop, at, i_q, HQ, BT)[None, :]
                b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            b_s = mm(b_x, tl.trans(b_k), None, OP, PRECISION)
            b_dp = mm(b_do, tl.trans(b_v), None, OP, PRECISION)
            b_ds = weights(b_s, factor.logit_scale, b_offset) * (b_dp - b_delta[:, None])
            b_far += tl.sum(b_ds, 1)
            b_grad = mm(b_ds * factor.scale, b_k, b_grad, OP, PRECISION)
    store_rows(p_dq, token, i_q, rows, b_grad, HQ, K)
    store_numbers(p_others, token, i_q, rows, b_far, HQ, TILE)


@triton.jit
def tile_span(packing, T, per_sequence, first, SIZES: tl.constexpr, PACKED: tl.constexpr):
    """Sequence of this program's tile, its buffer row and first token, number of the tile, its tokens, and its lane.

    A program has a chunk; those of chunks that begin no tile have no tokens. The last chunks are first, since they have
    the most keys.
    """
    i_c = (tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) // SIZES.HQ
    CHUNKS: tl.constexpr = SIZES.TILE // SIZES.BT
    i_n, i_s, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, SIZES.BT)
    left = T - t
    if PACKED:
        left = tl.load(packing.cu + i_n + 1) - t
    tile = i_s // CHUNKS
    whole = tl.minimum(left, SIZES.TILE).to(tl.int32)
    queried = tl.where((i_s == tile * CHUNKS) & (rows > 0), whole, 0)
    return i_n, b, t - i_s * SIZES.BT, tile, queried, i_c - b * per_sequence - first


@triton.jit
def blocks_of_turn(start, tile, begin, count, SIZES: tl.constexpr):
    """First block of a turn that lies before a tile of a sequence from token `start` on, and the one after the last."""
    S: tl.constexpr = SIZES.BLOCK * SIZES.BT
    skipped = begin - start // S
    return tl.maximum(skipped, 0), tl.minimum(skipped + count, tile * SIZES.TILE // S)


@triton.jit
def store_kept(scratch, place, b_x, b_passed, TILE: tl.constexpr, BK: tl.constexpr):
    """Store a tile and its sums of log gates in a place of the scratch."""
    store_rows(scratch.x, place * TILE, 0, TILE, b_x, 1, BK)
    tl.store(scratch.passed + place * TILE + tl.arange(0, TILE), b_passed)
