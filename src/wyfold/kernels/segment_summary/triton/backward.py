"""The kernel of `segment_summary_bwd` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.decay.horizon.triton import chunks_in_reach
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import TokenRows, load_upper, load_vector, sequence_span
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.triton import load_state, retreat, store_state


class ReverseInputs(NamedTuple):
    """`Inputs` of the backward."""

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    E: Any


@triton.jit(do_not_specialize=["N", "T", "unit", "scale"])
def wyfold_segment_summary_bwd_triton(
    x_q,
    x_k,
    x_do,
    x_rows,
    x_total,
    x_E,
    bounds,
    tokens,
    gradients,
    segments,
    packing,
    N,
    T,
    unit,
    scale,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BV value rows of c. Gradients are in units of `DeltaOptions.unit`, as in `scan_bwd`."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, tl.load(segments.leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    inputs = ReverseInputs(x_q, x_k, x_do, x_rows, x_total, x_E)
    if (i_n < N) & (begins == 0):
        if bounds.rows is not None:
            count = tl.cdiv(length, BT).to(tl.int32)
            at = TokenRows(b, t, length, T)
            reach = chunks_in_reach(bounds, i_tile, HV, count, at, i_h, CHANNEL, BT, K, BK)
            ends = ends & (reach == count)
            length = tl.where(reach < count, reach * BT, length)
            steps = tl.minimum(reach, steps)
        total = 0.0
        b_dS = tl.zeros((BV, BK), tl.float32)
        if gradients.dST is not None:
            if ends:
                b_dS = load_state(gradients.dST, gradients.s_dST, i_n, i_hv, column, K, V, BK, BV) * (1.0 / unit)
        if USE_TMA:
            if steps * BT < length:
                if not CHANNEL:
                    total = tl.load(x_total + i_tile + steps * HV)
                b_dS = _reverse_step(
                    b_dS, total, inputs, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, scale, SIZES, CHANNEL,
                    FOLDED, USE_TMA, False, OP, PRECISION,
                )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile + (steps - 1) * HV, mask=steps > 0, other=0.0)
        for j in tl.range(0, steps, num_stages=STAGES):
            i = steps - 1 - j
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i - 1) * HV, mask=i > 0, other=0.0)
            b_dS = _reverse_step(
                b_dS, total, inputs, tokens, i_tile + i * HV, TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv,
                column, scale, SIZES, CHANNEL, FOLDED, USE_TMA, USE_TMA, OP, PRECISION,
            )  # fmt: skip
            total = next_total
        store_state(gradients.c, gradients.s_c, i_border - 1, i_hv, column, b_dS * unit, K, V, BK, BV)


@triton.jit
def _reverse_step(
    b_dS,
    total,
    inputs,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    scale,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    FULL: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state entering a chunk, as in `scan_bwd`. FULL: all its rows are tokens."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    if CHANNEL:
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_do = load_token_block(inputs.do, tokens.s_do, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)
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
        b_X += mm(b_dY * (b_out * b_divisor)[None, :], tl.trans(b_WT), None, OP, PRECISION) * (1.0 / b_divisor)[None, :]
    b_doT = b_doT.to(tl.float32) * (b_in_q * scale)[None, :]
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    return retreat(b_dS, total, b_doT, b_q, b_X * (b_beta * b_in_k)[None, :], b_k, OP, PRECISION)
