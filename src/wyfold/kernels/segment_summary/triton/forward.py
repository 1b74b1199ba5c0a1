"""The kernel of `segment_summary` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.decay.horizon.triton import chunks_in_reach
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import TokenRows, load_upper, load_vector, sequence_span
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.state.triton import advance, load_state, residual, store_state


class Inputs(NamedTuple):
    """Descriptors of what a chunk's step reads, or pointers without TMA: tokens, and the tiles of `prepare`."""

    k: Any
    v: Any
    rows: Any
    total: Any
    E: Any


@triton.jit(do_not_specialize=["N", "T"])
def wyfold_segment_summary_triton(
    x_k,
    x_v,
    x_rows,
    x_total,
    x_E,
    bounds,
    tokens,
    maps,
    segments,
    packing,
    N,
    T,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % TILES, (pid // TILES) % HV, tl.load(segments.leading + pid // (TILES * HV))
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    inputs = Inputs(x_k, x_v, x_rows, x_total, x_E)
    if (i_n < N) & (ends == 0):
        holds_S0, without_M = begins, begins
        if bounds.rows is not None:
            at = TokenRows(b, t + (steps - 1) * BT, length, T)
            reach = chunks_in_reach(bounds, i_tile + (steps - 1) * HV, -HV, steps, at, i_h, CHANNEL, BT, K, BK)
            holds_S0, without_M = begins & (reach == steps), begins | (reach < steps)
            i_tile += (steps - reach) * HV
            t += (steps - reach) * BT
            steps = reach
        total = 0.0
        if i_v < NV:
            column = (i_v * BV).to(tl.int32)
            b_S = tl.zeros((BV, BK), tl.float32)
            if maps.S0 is not None:
                if holds_S0:
                    b_S = load_state(maps.S0, maps.s_S0, i_n, i_hv, column, K, V, BK, BV)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, inputs, tokens, i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T, SIZES, True,
                    CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            store_state(maps.H, maps.s_H, i_border, i_hv, column, b_S, K, V, BK, BV)
        else:
            column = ((i_v - NV) * BV).to(tl.int32)
            # The first segment needs no M: its entering state is known.
            steps = tl.where(without_M, 0, steps)
            b_S = (column + tl.arange(0, BV)[:, None] == tl.arange(0, BK)[None, :]).to(tl.float32)
            b_S = tl.where(without_M, 0.0, b_S)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, inputs, tokens, i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T, SIZES, False,
                    CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            # Mark for `segment_fold`: rows of zeros get the other sign, which no other zero has.
            zeros = tl.max((b_S != 0.0).to(tl.int32)) == 0
            b_S = tl.where(b_S == 0.0, 0.0, b_S) * tl.where(zeros, -1.0, 1.0)
            store_state(maps.M, maps.s_M, i_border, i_hv, column, b_S, K, K, BK, BV)


@triton.jit
def _step(
    b_S,
    total,
    inputs,
    tokens,
    i_tile,
    b,
    t,
    i_h,
    i_hv,
    column,
    T,
    SIZES: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State leaving a chunk of tokens only. VALUES: include the values of its tokens; else they count as zeros."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, TokenRows(b, t, BT, T), i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
    b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, _, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    if VALUES:
        b_v = load_token_block(inputs.v, tokens.s_v, TokenRows(b, t, BT, T), i_hv, column, V, BT, BV, USE_TMA, USE_TMA)
        b_R = residual(b_v, b_Sk, b_in_k)
    else:
        b_R = -b_Sk * b_in_k[None, :]
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, (b_R * b_beta[None, :]).to(OP), b_E, OP, PRECISION)
    else:
        b_WT = load_upper(tokens.W, i_tile, BT)
        b_e = mm(b_R, b_WT, None, OP, PRECISION)
        return advance(b_S, total, b_e * b_out[None, :], b_k, OP, PRECISION)
