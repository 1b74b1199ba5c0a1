"""Gradients between a tile of tokens and the blocks before or after its own, in lanes.

A lane is a program of one sequence and key head that takes one of LANES neighbouring tiles after the other. It
keeps its tile at every block in a scratch, so that memory is linear in the tokens, and adds to the gradients of the
maps in a fixed order. The number of lanes depends on the number of heads alone, so no bit depends on other sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    load_sums,
    load_total,
    to_columns,
    weights,
)
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    TokenRows,
    load_map,
    load_tile,
    load_token_scalars,
    load_tokens,
    map_slot,
    sequence_span,
    store_tile,
    store_token_scalars,
    store_tokens,
)


class Scratch(NamedTuple):
    """Kernel argument: a tile at every block, for every lane, slot and key head; contiguous.

    Attributes:
        x: [LANES slots H, TILE, BK] rows.
        g: [LANES slots H, TILE] their sums of log gates.
    """

    x: Any
    g: Any


class RowGradients(NamedTuple):
    """Kernel argument: what the lanes of queries write; fields of `PathWorkspace`, contiguous.

    Attributes:
        dq, others: Have the strides of `Queries.x` and of `Queries.lse`.
        dM, dblock_total: Are added to.
    """

    dq: Any
    others: Any
    dM: Any
    dblock_total: Any


class KeyGradients(NamedTuple):
    """Kernel argument: what the lanes of keys write; fields of `PathWorkspace`.

    Attributes:
        dblocks: Has the strides of the factors.
        dblock_end: Has the strides of `Queries.lse`.
    """

    dblocks: Any
    dv: Any
    s_dv: Any
    dblock_end: Any
    end: None = None


@triton.jit(do_not_specialize=["slots", "T", "per_sequence"])
def wyfold_path_rows_triton(
    queries, keys, scratch, out, slots, packing, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One lane of queries of one sequence and key head: gradients from all blocks before their own."""
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    TILE: tl.constexpr = SIZES.TILE
    LANES: tl.constexpr = SIZES.LANES
    S: tl.constexpr = BLOCK * BT
    BR: tl.constexpr = BK if BK < 64 else 64  # rows of a map at a time
    i = tl.program_id(0).to(tl.int64)
    lane, i_h, i_n = i % LANES, i // LANES % H, i // (LANES * H)
    _, b, start, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    for turn in range((length + LANES * TILE - 1) // (LANES * TILE)):
        first_row = lane_tile(lane, turn, LANES) * TILE
        block, t = first_row // S, start + first_row
        if (first_row < length) & (block > 0):
            at = TokenRows(b, t, tl.minimum(length - first_row, TILE).to(tl.int32))
            for e in range(HQ // H):
                i_q = i_h * (HQ // H) + e
                b_x = load_tokens(queries.x, queries.s_x, at, i_q, 0, K, TILE, BK).to(tl.float32)
                b_passed = tl.zeros((TILE,), tl.float32)
                if keys.g is not None:
                    b_passed = load_token_scalars(keys.block_start, keys.s_sums, at, i_q, TILE)
                for back in range(block):
                    first = start + (block - 1 - back) * S
                    slot = map_slot(b, first, T, S)
                    store_kept(scratch, (lane * slots + slot) * H + i_h, b_x, b_passed, TILE, BK)
                    if back + 1 < block:
                        b_x += mm(b_x, load_map(keys.M, slot * H + i_h, K, BK), None, OP, PRECISION)
                    if keys.g is not None:
                        b_passed += load_total(keys.block_start, keys, b, first, i_q, S)
                tl.debug_barrier()
                b_do = load_tokens(queries.do, queries.s_do, at, i_q, 0, V, TILE, BV)
                b_lse = load_token_scalars(queries.lse, queries.s_lse, at, i_q, TILE)
                b_delta = load_token_scalars(queries.delta, queries.s_lse, at, i_q, TILE)
                b_grad = tl.zeros((TILE, BK), tl.float32)
                b_far = tl.zeros((TILE,), tl.float32)
                for n in range(block):
                    first = start + n * S
                    slot = map_slot(b, first, T, S)
                    place = (lane * slots + slot) * H + i_h
                    if n > 0:
                        for part in range(0, BK, BR):
                            b_part = load_tile(scratch.x, place, 0, part, TILE, BK, TILE, BR)
                            b_sum = load_tile(out.dM, place, part, 0, BK, BK, BR, BK)
                            b_sum = mm(tl.trans(b_part), b_grad, b_sum, OP, PRECISION)
                            store_tile(out.dM, place, part, 0, b_sum, BK, BK, BR, BK)
                        b_grad += mm(b_grad, tl.trans(load_map(keys.M, slot * H + i_h, K, BK)), None, OP, PRECISION)
                        if keys.g is not None:
                            p_sum = out.dblock_total + (lane * slots + slot) * HQ + i_q
                            tl.store(p_sum, tl.load(p_sum) + factor.gate * tl.sum(b_far, 0))
                    b_at = load_tile(scratch.x, place, 0, 0, TILE, BK, TILE, BK)
                    b_sums = tl.load(scratch.g + place * TILE + tl.arange(0, TILE))
                    for c in range(BLOCK):
                        last = first + (BLOCK - 1 - c) * BT
                        b_k = load_tokens(keys.blocks, keys.s_rows, TokenRows(b, last, BT), i_h, 0, K, BT, BK)
                        b_v = load_tokens(keys.v, keys.s_v, TokenRows(b, last, BT), i_h, 0, V, BT, BV)
                        b_offset = -b_lse[:, None]
                        if keys.g is not None:
                            b_after = b_sums[:, None] + load_sums(keys.block_stop, keys, b, last, i_q, BT)[None, :]
                            b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
                        b_s = mm(b_at, tl.trans(b_k), None, OP, PRECISION)
                        b_dp = mm(b_do, tl.trans(b_v), None, OP, PRECISION)
                        b_ds = weights(b_s, factor.logit_scale, b_offset) * (b_dp - b_delta[:, None])
                        b_far += tl.sum(b_ds, 1)
                        b_grad = mm(b_ds * factor.scale, b_k, b_grad, OP, PRECISION)
                store_tokens(out.dq, queries.s_x, at, i_q, 0, b_grad, K)
                store_token_scalars(out.others, queries.s_lse, at, i_q, b_far, TILE)
                tl.debug_barrier()


@triton.jit(do_not_specialize=["slots", "T", "per_sequence"])
def wyfold_path_keys_triton(
    queries, keys, scratch, out, slots, packing, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One lane of keys of one sequence and key head: gradients from the queries of all later blocks."""
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    TILE: tl.constexpr = SIZES.TILE
    LANES: tl.constexpr = SIZES.LANES
    S: tl.constexpr = BLOCK * BT
    i = tl.program_id(0).to(tl.int64)
    lane, i_h, i_n = i % LANES, i // LANES % H, i // (LANES * H)
    _, b, start, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    chunks = (length + BT - 1) // BT
    last = (chunks + BLOCK - 1) // BLOCK - 1
    for turn in range((last * S + LANES * TILE - 1) // (LANES * TILE)):
        first_row = lane_tile(lane, turn, LANES) * TILE
        block, t = first_row // S, start + first_row
        if block < last:
            at = TokenRows(b, t, TILE)
            b_dv = tl.zeros((TILE, BV), tl.float32)
            for e in range(HQ // H):
                i_q = i_h * (HQ // H) + e
                b_y = load_tokens(keys.blocks, keys.s_rows, at, i_h, 0, K, TILE, BK).to(tl.float32)
                b_end = tl.zeros((TILE,), tl.float32)
                if keys.g is not None:
                    b_end = load_token_scalars(keys.block_stop, keys.s_sums, at, i_q, TILE)
                for ahead in range(block + 1, last + 1):
                    slot = map_slot(b, start + (ahead - 1) * S, T, S)  # of the whole block before, which has one
                    store_kept(scratch, (lane * slots + slot) * H + i_h, b_y, b_end, TILE, BK)
                    if ahead < last:
                        slot = map_slot(b, start + ahead * S, T, S)
                        b_y += mm(b_y, tl.trans(load_map(keys.M, slot * H + i_h, K, BK)), None, OP, PRECISION)
                        if keys.g is not None:
                            b_end += load_total(keys.block_start, keys, b, start + ahead * S, i_q, S)
                tl.debug_barrier()
                b_v = load_tokens(keys.v, keys.s_v, at, i_h, 0, V, TILE, BV)
                b_grad = tl.zeros((TILE, BK), tl.float32)
                b_dend = tl.zeros((TILE,), tl.float32)
                for m in range(last - block):
                    n = last - m
                    if n < last:
                        b_M = load_map(keys.M, map_slot(b, start + n * S, T, S) * H + i_h, K, BK)
                        b_grad += mm(b_grad, b_M, None, OP, PRECISION)
                    place = (lane * slots + map_slot(b, start + (n - 1) * S, T, S)) * H + i_h
                    b_at = load_tile(scratch.x, place, 0, 0, TILE, BK, TILE, BK)
                    b_sums = tl.load(scratch.g + place * TILE + tl.arange(0, TILE))
                    for c in range(n * BLOCK, tl.minimum((n + 1) * BLOCK, chunks)):
                        later = TokenRows(b, start + c * BT, tl.minimum(length - c * BT, BT).to(tl.int32))
                        b_x = load_tokens(queries.x, queries.s_x, later, i_q, 0, K, BT, BK)
                        b_do = load_tokens(queries.do, queries.s_do, later, i_q, 0, V, BT, BV)
                        b_offset = -to_columns(load_token_scalars(queries.lse, queries.s_lse, later, i_q, BT), BT)[
                            None, :
                        ]
                        b_delta = to_columns(load_token_scalars(queries.delta, queries.s_lse, later, i_q, BT), BT)
                        if keys.g is not None:
                            b_passed = load_token_scalars(keys.block_start, keys.s_sums, later, i_q, BT)
                            b_after = b_sums[:, None] + to_columns(b_passed, BT)[None, :]
                            b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
                        b_s = mm(b_at, tl.trans(b_x), None, OP, PRECISION)
                        b_p = weights(b_s, factor.logit_scale, b_offset)
                        b_dv = mm(b_p, b_do, b_dv, OP, PRECISION)
                        b_ds = b_p * (mm(b_v, tl.trans(b_do), None, OP, PRECISION) - b_delta[None, :])
                        b_dend += tl.sum(b_ds, 1)
                        b_grad = mm(b_ds * factor.scale, b_x, b_grad, OP, PRECISION)
                if e > 0:
                    b_grad += load_tokens(out.dblocks, keys.s_rows, at, i_h, 0, K, TILE, BK)
                store_tokens(out.dblocks, keys.s_rows, at, i_h, 0, b_grad, K)
                if keys.g is not None:
                    store_token_scalars(out.dblock_end, queries.s_lse, at, i_q, factor.gate * b_dend, TILE)
                tl.debug_barrier()
            store_tokens(out.dv, out.s_dv, at, i_h, 0, b_dv, V)


@triton.jit
def lane_tile(lane, turn, LANES: tl.constexpr):
    """Number of a lane's tile in a turn. Every second turn is in reverse, so that lanes have the same work."""
    return turn * LANES + tl.where(turn % 2 == 0, lane, LANES - 1 - lane)


@triton.jit
def store_kept(scratch, i, b_x, b_sums, TILE: tl.constexpr, BK: tl.constexpr):
    """Store a tile and its sums of log gates in the i-th place of the scratch."""
    store_tile(scratch.x, i, 0, 0, b_x, TILE, BK, TILE, BK)
    tl.store(scratch.g + i * TILE + tl.arange(0, TILE), b_sums)
