"""The kernel of `gradients` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton import sub_chunk_gate
from wyfold.tile.decay.channel.triton.adjoint import PairMemory, PairRows, channel_bwd
from wyfold.tile.decay.channel.triton.near_pairs import store_near_pairs
from wyfold.tile.decay.triton import NEAR, load_gate, running_sum, scalar_rows
from wyfold.tile.decay.triton.gradient import (
    interval_sum,
    log_gate_bwd,
    state_gate_gradient,
    store_gate_gradient,
)
from wyfold.tile.decay.triton.pairs import pair_decay
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    load_tile,
    load_tokens,
    store_tile,
    store_token_scalars,
    store_tokens,
)
from wyfold.tile.index.triton.blocks import load_tile_block, load_token_block, store_token_block
from wyfold.tile.index.triton.prefetch import prefetch_tile, prefetch_tokens
from wyfold.tile.index.triton.strength import load_strength, strength_bwd
from wyfold.tile.index.triton.sub_chunks import (
    load_sub_chunks,
    load_tile_sub_chunks,
    store_sub_chunks,
    store_token_sub_chunks,
)


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
    USE_TMA_TILES: tl.constexpr = FLAGS.USE_TMA_TILES
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    USE_TMA_DO: tl.constexpr = FLAGS.USE_TMA_DO
    TMA_STORES: tl.constexpr = FLAGS.TMA_STORES
    PREFETCH: tl.constexpr = FLAGS.PREFETCH
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    GR: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    ACCUMULATED: tl.constexpr = NORM or GR > 1
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows, T)
    o_r = tl.arange(0, BT)
    zero = tl.zeros((BT,), tl.float32)
    zeros = tl.zeros((BT, BK), tl.float32)
    # A 0 that the compiler cannot fold, for addresses in sub-chunks.
    opaque_zero = tl.minimum(T, 0)
    if PACKED:
        if i_n == N:
            for i_hv in range(i_h * GR, i_h * GR + GR):
                i_tile = i_c * HV + i_hv
                for i_v in tl.static_range(NV):
                    if x_dv is not None:
                        store_tokens(x_dv, outputs.s_dv, at, i_hv, i_v * BV, tl.zeros((BT, BV), tl.float32), V)
                if outputs.dbeta is not None:
                    store_token_scalars(outputs.dbeta, outputs.s_dbeta, at, i_hv, zero, BT)
                for i_k in tl.static_range(NK if CHANNEL else 1):
                    b_zero = zeros.reshape(BT // NEAR, NEAR, BK) if CHANNEL else zero
                    store_gate_gradient(
                        dgate,
                        i_tile,
                        at,
                        i_hv,
                        i_k * BK,
                        b_zero,
                        b_zero,
                        opaque_zero,
                        GATE,
                        K,
                    )
            for i_k in tl.static_range(NK):
                if x_dq is not None:
                    store_tokens(x_dq, outputs.s_dq, at, i_h, i_k * BK, zeros, K)
                if x_dk is not None:
                    store_tokens(x_dk, outputs.s_dk, at, i_h, i_k * BK, zeros, K)
            return

    if PREFETCH:
        # Occupancy is too low for programs to hide each other's memory latency.
        prefetch_tokens(x_q, tokens.s_q, at, i_h, K, BT)
        prefetch_tokens(x_k, tokens.s_k, at, i_h, K, BT)
    upper, lower = o_r[:, None] < o_r[None, :], o_r[:, None] > o_r[None, :]
    b_rq, b_rk = zero + 1.0, zero + 1.0
    if NORM:
        b_rq = _reciprocal_norms(x_q, tokens.s_q, at, i_h, K, BT, BK)
        b_rk = _reciprocal_norms(x_k, tokens.s_k, at, i_h, K, BT, BK)
    # Where raw rows are operands of the grams' adjoints, their norms scale the other operand.
    b_nq, b_nk = zero + 1.0, zero + 1.0
    if not CHANNEL:
        b_nq, b_nk = b_rq, b_rk

    for i_hv in range(i_h * GR, i_h * GR + GR):
        i_tile = i_c * HV + i_hv
        if PREFETCH:
            prefetch_tile(tokens.S, i_tile, V * K)
            prefetch_tile(tokens.dS, i_tile, V * K)
            if CHANNEL:
                prefetch_tokens(gate.g, gate.s_g, at, i_hv, K, BT)
        b_beta = load_strength(strength, at, i_hv, LOGIT, BT)
        b_raw, b_g, b_dg = zero, zero, zero
        if not CHANNEL:
            b_raw, b_g = load_gate(gate, at, i_hv, 0, GATE, ACTIVATION, K, BT, BK)
        b_G = running_sum(b_g, GATE)
        b_in, b_out, total = scalar_rows(b_G, GATE, BT)

        # Gradients of the grams; with a channel gate, their transposes are computed as separate products.
        b_dJ, b_dP = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        b_dJT, b_dPT = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        b_dbeta = zero
        for i_v in range(NV):
            b_e = load_tile_block(x_e, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
            b_X = load_tile_block(x_X, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
            b_do = load_token_block(x_do, tokens.s_do, at, i_hv, i_v * BV, V, BT, BV, USE_TMA_DO, USE_TMA_DO)
            b_dJ = mm(b_X, tl.trans(b_e), b_dJ, OP, PRECISION)
            b_dP = mm(b_do, tl.trans(b_e), b_dP, OP, PRECISION)
            if CHANNEL:
                b_dJT = mm(b_e, tl.trans(b_X), b_dJT, OP, PRECISION)
                b_dPT = mm(b_e, tl.trans(b_do), b_dPT, OP, PRECISION)
            if OP != tl.bfloat16:
                b_dbeta += tl.sum(b_X.to(tl.float32) * b_e.to(tl.float32), axis=1)
            if x_dv is not None:
                b_dv = b_X.to(tl.float32) * (b_beta * factors.unit)[:, None]
                store_token_block(x_dv, outputs.s_dv, at, i_hv, i_v * BV, b_dv, V, TMA_STORES)
        if outputs.dbeta is not None:
            if OP == tl.bfloat16:  # products do not round bfloat16 operands
                b_dbeta = tl.sum(tl.where(upper | lower, 0.0, b_dJ), axis=1)
            b_dbeta *= factors.unit
            if LOGIT:
                b_dbeta = strength_bwd(strength, at, i_hv, b_dbeta, BT)
            store_token_scalars(outputs.dbeta, outputs.s_dbeta, at, i_hv, b_dbeta, BT)
        b_decay = pair_decay(b_G, GATE, BT)
        b_dJ = tl.where(lower, b_dJ, 0.0) * (b_beta[None, :] * b_decay) * (-b_beta * factors.erased_unit)[:, None]
        b_dP = tl.where(upper, 0.0, b_dP) * (b_beta[None, :] * b_decay) * factors.scale
        # Contributions of later rows to keys: right operands, while the left ones are rows transposed in shared memory.
        b_dJr, b_dPr = (b_dJ * b_nk[:, None]).to(OP), (b_dP * b_nq[:, None]).to(OP)
        b_dJ, b_dP = b_dJ * b_nk[None, :], b_dP * b_nk[None, :]
        if SCALAR:
            b_qk, b_kk = _grams(x_q, tokens.s_q, x_k, tokens.s_k, at, i_h, K, BT, BK, OP, PRECISION)
            b_dg = interval_sum(b_dP * b_qk * b_rq[:, None] + b_dJ * b_kk * b_rk[:, None], BT, EXACT)
        if CHANNEL:
            b_dJT = b_dJT * (b_beta[:, None] * b_decay) * (-b_beta * factors.erased_unit * b_nk)[None, :]
            b_dPT = tl.where(lower, 0.0, b_dPT) * (b_beta[:, None] * b_decay) * (factors.scale * b_nq)[None, :]
            store_near_pairs(scratch.near, i_tile, 0, b_dPT, BT)
            store_near_pairs(scratch.near, i_tile, 1, b_dJT, BT)
            store_tile(scratch.pairs, i_tile * 3, 0, 0, tl.where(upper, b_dJT, b_dJ).to(OP), BT, BT, BT, BT)
            store_tile(scratch.pairs, i_tile * 3 + 1, 0, 0, b_dP, BT, BT, BT, BT)
            store_tile(scratch.pairs, i_tile * 3 + 2, 0, 0, b_dPT, BT, BT, BT, BT)
            tl.debug_barrier()  # other threads may load what a thread stored
        b_dJ, b_dP = b_dJ.to(OP), b_dP.to(OP)

        b_read, b_write, carried = zero, zero, 0.0
        b_trace = tl.zeros((BV,), tl.float32)
        for i_k in range(NK):
            # Through the states: reads from the entering state, writes to the leaving one.
            b_dq, b_dk, b_dk_write = zeros, zeros, zeros
            b_carried, b_SdS = tl.zeros((BK,), tl.float32), tl.zeros((BV, BV), tl.float32)
            for i_v in range(NV):
                b_S = load_tile_block(x_S, i_tile, i_v * BV, i_k * BK, V, K, BV, BK, USE_TMA_TILES)
                b_dS = load_tile_block(x_dS, i_tile, i_v * BV, i_k * BK, V, K, BV, BK, USE_TMA_TILES)
                b_e = load_tile_block(x_e, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
                b_X = load_tile_block(x_X, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
                b_do = load_token_block(x_do, tokens.s_do, at, i_hv, i_v * BV, V, BT, BV, USE_TMA_DO, USE_TMA_DO)
                b_dq = mm(b_do, b_S, b_dq, OP, PRECISION)
                b_dk = mm(b_X, b_S, b_dk, OP, PRECISION)
                b_dk_write = mm(b_e, b_dS, b_dk_write, OP, PRECISION)
                if SCALAR and OP == tl.bfloat16:  # products do not round bfloat16 operands
                    b_SdS = mm(b_S, tl.trans(b_dS), b_SdS, OP, PRECISION)
                else:
                    b_carried += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)
            b_carried *= factors.unit
            if SCALAR and OP == tl.bfloat16:
                o_v = tl.arange(0, BV)
                b_trace += tl.sum(tl.where(o_v[:, None] == o_v[None, :], b_SdS, 0.0), axis=1)
            b_dq *= (factors.scale * b_in)[:, None]
            b_dk *= (-b_beta * factors.erased_unit * b_in)[:, None]
            b_dk_write *= (b_beta * factors.unit * b_out)[:, None]
            if CHANNEL:
                b_q = load_sub_chunks(x_q, tokens.s_q, at, i_h, i_k * BK, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, i_k * BK, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_x = load_sub_chunks(gate.g, gate.s_g, at, i_hv, i_k * BK, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                if NORM:
                    b_q *= b_rq.reshape(BT // NEAR, NEAR, 1)
                    b_k *= b_rk.reshape(BT // NEAR, NEAR, 1)
                b_gate = sub_chunk_gate(b_x, gate, i_hv, i_k * BK, rows, ACTIVATION, K)
                b_dq, b_dk, b_dgate = channel_bwd(
                    PairRows(b_q, b_k),
                    b_gate,
                    PairMemory(scratch.pairs, scratch.near, i_tile, opaque_zero),
                    b_dq,
                    b_dk,
                    b_dk_write,
                    b_carried,
                    OP,
                    PRECISION,
                )
                # Loaded again rather than kept in registers.
                b_x = load_sub_chunks(gate.g, gate.s_g, at, i_hv, i_k * BK, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_dx, b_dA = log_gate_bwd(
                    b_x,
                    b_dgate,
                    gate,
                    i_hv,
                    i_k * BK,
                    CLAMPED,
                    GATE,
                    ACTIVATION,
                    K,
                    BK,
                )
                store_gate_gradient(
                    dgate,
                    i_tile,
                    at,
                    i_hv,
                    i_k * BK,
                    b_dx,
                    b_dA,
                    opaque_zero,
                    GATE,
                    K,
                )
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
            if ACCUMULATED:
                if CHANNEL:
                    if i_hv > i_h * GR:
                        b_dq += load_tile_sub_chunks(scratch.dq, pid, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                        b_dk += load_tile_sub_chunks(scratch.dk, pid, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                    store_sub_chunks(scratch.dq, pid, i_k * BK, b_dq, opaque_zero, K, BT, BK, NEAR)
                    store_sub_chunks(scratch.dk, pid, i_k * BK, b_dk, opaque_zero, K, BT, BK, NEAR)
                else:
                    if i_hv > i_h * GR:
                        b_dq += load_tile(scratch.dq, pid, 0, i_k * BK, BT, K, BT, BK)
                        b_dk += load_tile(scratch.dk, pid, 0, i_k * BK, BT, K, BT, BK)
                    store_tile(scratch.dq, pid, 0, i_k * BK, b_dq, BT, K, BT, BK)
                    store_tile(scratch.dk, pid, 0, i_k * BK, b_dk, BT, K, BT, BK)
            elif CHANNEL:
                if x_dq is not None:
                    store_token_sub_chunks(x_dq, outputs.s_dq, at, i_h, i_k * BK, b_dq, opaque_zero, K)
                if x_dk is not None:
                    store_token_sub_chunks(x_dk, outputs.s_dk, at, i_h, i_k * BK, b_dk, opaque_zero, K)
            else:
                if x_dq is not None:
                    store_token_block(x_dq, outputs.s_dq, at, i_h, i_k * BK, b_dq, K, TMA_STORES)
                if x_dk is not None:
                    store_token_block(x_dk, outputs.s_dk, at, i_h, i_k * BK, b_dk, K, TMA_STORES)
        if SCALAR:
            if OP == tl.bfloat16:
                # Summed as a tile's row: for sm_100, Triton 3.6 fails to compile a one-dimensional sum of a product.
                carried = tl.sum(b_trace[None, :], axis=1) * factors.unit
            b_dg += state_gate_gradient(b_read, b_write, carried * total, BT)
            b_dx, b_dA = log_gate_bwd(
                b_raw,
                b_dg,
                gate,
                i_hv,
                0,
                CLAMPED,
                GATE,
                ACTIVATION,
                K,
                BK,
            )
            store_gate_gradient(dgate, i_tile, at, i_hv, 0, b_dx, b_dA, opaque_zero, GATE, K)
        if ACCUMULATED:
            tl.debug_barrier()  # other threads may load what a thread stored

    if ACCUMULATED:
        if x_dq is not None:
            _store_accumulated(x_q, tokens.s_q, scratch.dq, x_dq, outputs.s_dq, pid, at, i_h, b_rq, NORM, K, BT, BK)
        if x_dk is not None:
            _store_accumulated(x_k, tokens.s_k, scratch.dk, x_dk, outputs.s_dk, pid, at, i_h, b_rk, NORM, K, BT, BK)


@triton.jit
def _reciprocal_norms(p_x, s_x, at, h, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, eps: tl.constexpr = 1e-6):
    """(sum x^2 + eps)^(-1/2) of rows, loaded in slices of BK.   [BT]"""
    b_square = tl.zeros((BT,), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32)
        b_square += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_square + eps)


@triton.jit
def _grams(
    p_q,
    s_q,
    p_k,
    s_k,
    at,
    h,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q k^T and k k^T of a chunk's raw rows, loaded in slices of BK.   2 x [BT, BT]"""
    b_qk, b_kk = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_q = load_tokens(p_q, s_q, at, h, i_k * BK, K, BT, BK)
        b_k = load_tokens(p_k, s_k, at, h, i_k * BK, K, BT, BK)
        b_qk = mm(b_q, tl.trans(b_k), b_qk, OP, PRECISION)
        b_kk = mm(b_k, tl.trans(b_k), b_kk, OP, PRECISION)
    return b_qk, b_kk


@triton.jit
def _store_accumulated(
    p_x,
    s_x,
    p_acc,
    p_dx,
    s_dx,
    i_tile,
    at,
    h,
    b_r,
    NORM: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Store an accumulated gradient to its tokens; with NORM, dx = r (dy - y <y, dy>), y = x r."""
    NK: tl.constexpr = (K + BK - 1) // BK
    b_dot = tl.zeros((BT,), tl.float32)
    if NORM:
        for i_k in range(NK):
            b_y = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dot += tl.sum(b_y * load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK), axis=1)
    for i_k in range(NK):
        b_dx = load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK)
        if NORM:
            b_y = load_tokens(p_x, s_x, at, h, i_k * BK, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dx = b_r[:, None] * (b_dx - b_y * b_dot[:, None])
        store_tokens(p_dx, s_dx, at, h, i_k * BK, b_dx, K)
