"""The kernel of `scan_bwd` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.records import TokenBorders
from wyfold.tile.dot.triton import mm, mm_unit_diagonal
from wyfold.tile.index.triton import TokenRows, load_upper, load_vector, sequence_span
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block, store_tile_block
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.triton import StateAt, advance, load_end, residual, retreat, store_state


@triton.jit(do_not_specialize=["N", "going_back", "T", "per_sequence", "unit", "scale"])
def wyfold_scan_bwd_triton(
    x_q,
    x_k,
    x_v,
    x_do,
    x_rows,
    x_total,
    x_E,
    x_S,
    x_dS,
    x_e,
    x_X,
    tokens,
    states,
    segments,
    packing,
    N,
    going_back,
    T,
    per_sequence,
    unit,
    scale,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program owns BV value rows of one state, or of its gradient; `going_back` sequences or segments have the
    latter."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = FLAGS.PACKED
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    half = going_back * HV * NV
    reverse = pid < half
    pid -= tl.where(reverse, 0, half)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    inputs = Inputs(x_q, x_k, x_v, x_do, x_rows, x_total, x_E)
    results = TokenBorders(x_S, x_dS, x_e, x_X)
    total = 0.0
    begins, ends, i_border = True, True, i_n
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)

    if reverse:
        b_dS = load_end(
            StateAt(states.dST, states.s_dST, i_n, ends),
            StateAt(segments.leaving, segments.s_leaving, i_border, i_n < N),
            i_hv, column, K, V, BK, BV,
        )  # fmt: skip
        unit = tl.where(length > 0, unit, 1.0)  # without a token the gradient passes through unchanged
        b_dS *= 1.0 / unit
        if USE_TMA:
            if steps * BT < length:
                if not CHANNEL:
                    total = tl.load(x_total + i_tile + steps * HV)
                b_dS = _reverse_step(
                    b_dS, total, inputs, results, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, False,
                )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile + (steps - 1) * HV, mask=steps > 0, other=0.0)
        for j in tl.range(0, steps, num_stages=STAGES):
            i = steps - 1 - j
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i - 1) * HV, mask=i > 0, other=0.0)
            b_dS = _reverse_step(
                b_dS, total, inputs, results, tokens, i_tile + i * HV,
                TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, USE_TMA,
            )  # fmt: skip
            total = next_total
        b_dS *= unit
        if states.dS0 is not None:
            if segments.sequence is None:
                store_state(states.dS0, states.s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
            elif begins:
                store_state(states.dS0, states.s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
    else:
        b_S = load_end(
            StateAt(states.S0, states.s_S0, i_n, begins),
            StateAt(segments.entering, segments.s_entering, i_border - 1, i_n < N),
            i_hv, column, K, V, BK, BV,
        )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile, mask=length > 0, other=0.0)
        for i in tl.range(0, steps, num_stages=STAGES):
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=length > (i + 1) * BT, other=0.0)
            b_S = _forward_step(
                b_S, total, inputs, results, tokens, i_tile + i * HV,
                TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv, column, SIZES, FLAGS, USE_TMA,
            )  # fmt: skip
            total = next_total
        if USE_TMA:
            if steps * BT < length:
                _forward_step(
                    b_S, total, inputs, results, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, SIZES, FLAGS, False,
                )  # fmt: skip


class Inputs(NamedTuple):
    """Descriptors of what a chunk's step reads, or pointers without TMA: tokens, and the tiles of `prepare`."""

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any
    total: Any
    E: Any


@triton.jit
def _reverse_step(
    b_dS,
    total,
    inputs,
    results,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    scale,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write dS and X of a chunk; return the gradient of the state entering it. FULL: all its rows are tokens.

    scale: Factor of do, in units.
    """
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    FOLDED: tl.constexpr = FLAGS.FOLDED
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_k = None
    if CHANNEL:
        if inputs.k is not None:
            b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_do = load_token_block(inputs.do, tokens.s_do, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)

    store_tile_block(results.dS, i_tile, column, 0, b_dS, V, K, BV, BK, USE_TMA)
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_dY = mm(b_dS, tl.trans(b_E), None, OP, PRECISION)
    else:
        b_dY = mm(b_dS, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, b_in_q, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    # Never taken. It puts do^T into the accumulator's layout, which the next products read as their left operand.
    b_doT = tl.where(at.rows < 0, b_dY.to(b_do.dtype), tl.trans(b_do))
    b_X = mm(b_doT, tl.trans(b_FT), None, OP, PRECISION) * scale
    if FOLDED:
        b_X += b_dY
    else:
        b_WT = load_upper(tokens.W, i_tile, BT)
        b_divisor = nonzero_beta(b_beta)
        b_dR = mm_unit_diagonal(b_dY, (b_out * b_divisor)[None, :], tl.trans(b_WT), OP, PRECISION)
        b_X += b_dR * (1.0 / b_divisor)[None, :]
    store_tile_block(results.X, i_tile, 0, column, tl.trans(b_X), BT, V, BT, BV, USE_TMA)
    b_doT = b_doT.to(tl.float32) * (b_in_q * scale)[None, :]
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    return retreat(b_dS, total, b_doT, b_q, b_X * (b_beta * b_in_k)[None, :], b_k, OP, PRECISION)


@triton.jit
def _forward_step(
    b_S,
    total,
    inputs,
    results,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write S and e of a chunk; return the state leaving it. FULL: all its rows are tokens."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    FOLDED: tl.constexpr = FLAGS.FOLDED
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_k, b_WT, b_Sk = None, None, None
    if CHANNEL:
        if inputs.k is not None:
            b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_v = load_token_block(inputs.v, tokens.s_v, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    if tokens.W is not None:
        b_WT = load_upper(tokens.W, i_tile, BT)

    store_tile_block(results.S, i_tile, column, 0, b_S, V, K, BV, BK, USE_TMA)
    if b_k is not None:
        b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, _, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    b_R = residual(b_v, b_Sk, b_in_k)
    if b_WT is None:
        b_e = b_R
    elif FOLDED:
        b_e = mm_unit_diagonal(b_R, None, b_WT, OP, PRECISION)
    else:
        b_e = mm(b_R, b_WT, None, OP, PRECISION)
    store_tile_block(results.e, i_tile, 0, column, tl.trans(b_e), BT, V, BT, BV, USE_TMA)
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, b_R * b_beta[None, :], b_E, OP, PRECISION)
    else:
        return advance(b_S, total, b_e * (b_beta * b_out)[None, :], b_k, OP, PRECISION)
