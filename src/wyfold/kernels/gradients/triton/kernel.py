"""The kernel of `gradients` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.gradients.triton.steps import channel_slice, gram_gradients, through_states
from wyfold.kernels.gradients.triton.stores import store_accumulated, store_slice, store_zeros
from wyfold.tile.decay.triton import load_gate, running_sum, scalar_rows
from wyfold.tile.decay.triton.gradient import log_gate_bwd, state_gate_gradient, store_gate_gradient
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import TokenRows, chunk_span, load_tokens
from wyfold.tile.index.triton.blocks import load_token_block
from wyfold.tile.index.triton.prefetch import prefetch_tile, prefetch_tokens
from wyfold.tile.index.triton.strength import load_strength


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_triton(
    x_q,
    x_k,
    x_do,
    x_S,
    x_dS,
    x_e,
    x_X,
    x_dq,
    x_dk,
    x_dv,
    tokens,
    gate,
    strength,
    outputs,
    dgate,
    scratch,
    packing,
    factors,
    N,
    T,
    per_sequence,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program computes the gradients of a chunk of one key head.

    For each value head it first computes the gradients of the two grams, then loops over K in slices of BK. Where a key
    head has several value heads, or rows are normalised here, dq and dk accumulate in float32 tiles in global memory.
    """
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    PACKED: tl.constexpr = FLAGS.PACKED
    GATE: tl.constexpr = FLAGS.GATE
    SCALAR: tl.constexpr = FLAGS.SCALAR
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    CLAMPED: tl.constexpr = FLAGS.CLAMPED
    NORM: tl.constexpr = FLAGS.NORM
    LOGIT: tl.constexpr = FLAGS.LOGIT
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    PREFETCH: tl.constexpr = FLAGS.PREFETCH
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    GR: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    ACCUMULATED: tl.constexpr = NORM or GR > 1
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows, T)
    zero = tl.zeros((BT,), tl.float32)
    # A 0 that the compiler cannot fold, for addresses in sub-chunks.
    opaque_zero = tl.minimum(T, 0)
    if PACKED:
        if i_n == N:
            store_zeros(x_dq, x_dk, x_dv, outputs, dgate, at, i_c, i_h, opaque_zero, SIZES, FLAGS)
            return

    if PREFETCH:
        # Occupancy is too low for programs to hide each other's memory latency.
        prefetch_tokens(x_q, tokens.s_q, at, i_h, K, BT)
        prefetch_tokens(x_k, tokens.s_k, at, i_h, K, BT)
    b_rq, b_rk = zero + 1.0, zero + 1.0
    if NORM:
        b_rq = _reciprocal_norms(x_q, tokens.s_q, at, i_h, K, BT, BK)
        b_rk = _reciprocal_norms(x_k, tokens.s_k, at, i_h, K, BT, BK)
    for i_hv in range(i_h * GR, i_h * GR + GR):
        i_tile = i_c * HV + i_hv
        if PREFETCH:
            prefetch_tile(tokens.S, i_tile, V * K)
            prefetch_tile(tokens.dS, i_tile, V * K)
            if CHANNEL:
                prefetch_tokens(gate.g, gate.s_g, at, i_hv, K, BT)
        b_beta = load_strength(strength, at, i_hv, LOGIT, BT)
        b_raw, b_g = zero, zero
        if not CHANNEL:
            b_raw, b_g = load_gate(gate, at, i_hv, 0, GATE, ACTIVATION, K, BT, BK)
        b_G = running_sum(b_g, GATE)
        b_in, b_out, total = scalar_rows(b_G, GATE, BT)

        b_dJ, b_dP, b_dJr, b_dPr, b_dg = gram_gradients(
            x_q, x_k, x_do, x_e, x_X, x_dv, tokens, strength, outputs, scratch, factors, i_tile, at, i_h, i_hv,
            b_beta, b_G, b_rq, b_rk, SIZES, FLAGS,
        )  # fmt: skip
        b_read, b_write, carried = zero, zero, 0.0
        b_trace = tl.zeros((BV,), tl.float32)
        for i_k in range(NK):
            b_dq, b_dk, b_dk_write, b_carried, b_SdS = through_states(
                x_do, x_S, x_dS, x_e, x_X, tokens, i_tile, at, i_hv, i_k, SIZES, FLAGS
            )
            b_carried *= factors.unit
            if SCALAR and OP == tl.bfloat16:
                o_v = tl.arange(0, BV)
                b_trace += tl.sum(tl.where(o_v[:, None] == o_v[None, :], b_SdS, 0.0), axis=1)
            b_dq *= (factors.scale * b_in)[:, None]
            b_dk *= (-b_beta * factors.erased_unit * b_in)[:, None]
            b_dk_write *= (b_beta * factors.unit * b_out)[:, None]
            if CHANNEL:
                b_dq, b_dk = channel_slice(
                    x_q, x_k, tokens, gate, dgate, scratch, i_tile, at, i_h, i_hv, i_k * BK, b_rq, b_rk,
                    b_dq, b_dk, b_dk_write, b_carried, opaque_zero, SIZES, FLAGS,
                )  # fmt: skip
            else:
                b_q = load_token_block(x_q, tokens.s_q, at, i_h, i_k * BK, K, BT, BK, USE_TMA, USE_TMA)
                b_k = load_token_block(x_k, tokens.s_k, at, i_h, i_k * BK, K, BT, BK, USE_TMA, USE_TMA)
                if SCALAR:
                    if NORM:
                        b_read += b_rq * tl.sum(b_q * b_dq, axis=1) + b_rk * tl.sum(b_k * b_dk, axis=1)
                    else:
                        b_read += tl.sum(tl.fma(b_q.to(tl.float32), b_dq, b_k * b_dk), axis=1)
                    b_write += b_rk * tl.sum(b_k * b_dk_write, axis=1)
                    carried += tl.sum(b_carried, axis=0)
                b_dq = mm(b_dP, b_k, b_dq, OP, PRECISION)
                b_dk = mm(b_dJ, b_k, b_dk + b_dk_write, OP, PRECISION)
                b_dkT = mm(tl.trans(b_k), b_dJr, None, OP, PRECISION)
                b_dk += tl.trans(mm(tl.trans(b_q), b_dPr, b_dkT, OP, PRECISION))
            store_slice(
                x_dq, x_dk, outputs, scratch, pid, at, i_h, i_k * BK, b_dq, b_dk, i_hv > i_h * GR, opaque_zero,
                SIZES, FLAGS,
            )  # fmt: skip
        if SCALAR:
            if OP == tl.bfloat16:
                # Summed as a tile's row: for sm_100, Triton 3.6 fails to compile a one-dimensional sum of a product.
                carried = tl.sum(b_trace[None, :], axis=1) * factors.unit
            b_dg += state_gate_gradient(b_read, b_write, carried * total, BT)
            b_dx, b_dA = log_gate_bwd(b_raw, b_dg, gate, i_hv, 0, CLAMPED, GATE, ACTIVATION, K, BK)
            store_gate_gradient(dgate, i_tile, at, i_hv, 0, b_dx, b_dA, opaque_zero, GATE, K)
        if ACCUMULATED:
            tl.debug_barrier()  # other threads may load what a thread stored

    if ACCUMULATED:
        if x_dq is not None:
            store_accumulated(x_q, tokens.s_q, scratch.dq, x_dq, outputs.s_dq, pid, at, i_h, b_rq, NORM, K, BT, BK)
        if x_dk is not None:
            store_accumulated(x_k, tokens.s_k, scratch.dk, x_dk, outputs.s_dk, pid, at, i_h, b_rk, NORM, K, BT, BK)


@triton.jit
def _reciprocal_norms(p_x, s_x, at, h, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, eps: tl.constexpr = 1e-6):
    """(sum x^2 + eps)^(-1/2) of rows, loaded in slices of BK.   [BT]"""
    b_square = tl.zeros((BT,), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32)
        b_square += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_square + eps)
