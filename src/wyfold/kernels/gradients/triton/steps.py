"""Steps of the kernel of `gradients`."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton import sub_chunk_gate
from wyfold.tile.decay.channel.triton.adjoint import PairMemory, PairRows, channel_bwd
from wyfold.tile.decay.channel.triton.near_pairs import store_near_pairs
from wyfold.tile.decay.triton import NEAR
from wyfold.tile.decay.triton.gradient import interval_sum, log_gate_bwd, store_gate_gradient
from wyfold.tile.decay.triton.pairs import pair_decay
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    load_tokens,
    store_tile,
    store_token_scalars,
)
from wyfold.tile.index.triton.blocks import load_tile_block, load_token_block, store_token_block
from wyfold.tile.index.triton.strength import strength_bwd
from wyfold.tile.index.triton.sub_chunks import (
    load_sub_chunks,
)


@triton.jit
def gram_gradients(
    x_q, x_k, x_do, x_e, x_X, x_dv, tokens, strength, outputs, scratch, factors, i_tile, at, i_h, i_hv,
    b_beta, b_G, b_rq, b_rk, SIZES: tl.constexpr, FLAGS: tl.constexpr
):  # fmt: skip
    """Gradients of a tile's grams; the gradients of v and of the write strength are stored on the way.

    With a channel gate, the gradients of pairs are stored for `channel_slice`, and their transposes are computed as
    separate products.

    Returns:
        dJ and dP as left operands, and as right operands of the products of later rows with keys, [BT, BT] each; and
        the part of a scalar gate's gradient that comes through the grams, [BT].
    """
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    GATE: tl.constexpr = FLAGS.GATE
    SCALAR: tl.constexpr = FLAGS.SCALAR
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    LOGIT: tl.constexpr = FLAGS.LOGIT
    USE_TMA_TILES: tl.constexpr = FLAGS.USE_TMA_TILES
    USE_TMA_DO: tl.constexpr = FLAGS.USE_TMA_DO
    TMA_STORES: tl.constexpr = FLAGS.TMA_STORES
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    NV: tl.constexpr = (V + BV - 1) // BV
    o_r, zero = tl.arange(0, BT), tl.zeros((BT,), tl.float32)
    upper, lower = o_r[:, None] < o_r[None, :], o_r[:, None] > o_r[None, :]
    # Where raw rows are operands of the grams' adjoints, their norms scale the other operand.
    b_nq, b_nk = zero + 1.0, zero + 1.0
    if not CHANNEL:
        b_nq, b_nk = b_rq, b_rk
    b_dg, b_dbeta = zero, zero
    b_dJ, b_dP = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
    b_dJT, b_dPT = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
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
        _store_pairs(scratch, i_tile, tl.where(upper, b_dJT, b_dJ).to(OP), b_dP, b_dJT, b_dPT, BT)
    return b_dJ.to(OP), b_dP.to(OP), b_dJr, b_dPr, b_dg


@triton.jit
def _store_pairs(scratch, i_tile, b_dJ, b_dP, b_dJT, b_dPT, BT: tl.constexpr):
    """Store the gradients of a tile's pairs as in `PairMemory`. b_dJ: Below the diagonal; its transpose above."""
    store_near_pairs(scratch.near, i_tile, 0, b_dPT, BT)
    store_near_pairs(scratch.near, i_tile, 1, b_dJT, BT)
    store_tile(scratch.pairs, i_tile * 3, 0, 0, b_dJ, BT, BT, BT, BT)
    store_tile(scratch.pairs, i_tile * 3 + 1, 0, 0, b_dP, BT, BT, BT, BT)
    store_tile(scratch.pairs, i_tile * 3 + 2, 0, 0, b_dPT, BT, BT, BT, BT)
    tl.debug_barrier()  # other threads may load what a thread stored


@triton.jit
def through_states(
    x_do, x_S, x_dS, x_e, x_X, tokens, i_tile, at, i_hv, i_k, SIZES: tl.constexpr, FLAGS: tl.constexpr
):  # fmt: skip
    """Gradients of some channels through the states: reads of the entering state, writes to the leaving one.

    Returns:
        dq and dk of the reads, and dk of the writes, [BT, BK] each; the entering state times the leaving one's
        gradient, summed over V, [BK], or, in bfloat16 with a scalar gate, its product [BV, BV].
    """
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    SCALAR: tl.constexpr = FLAGS.SCALAR
    USE_TMA_TILES: tl.constexpr = FLAGS.USE_TMA_TILES
    USE_TMA_DO: tl.constexpr = FLAGS.USE_TMA_DO
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    NV: tl.constexpr = (V + BV - 1) // BV
    zeros = tl.zeros((BT, BK), tl.float32)
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
    return b_dq, b_dk, b_dk_write, b_carried, b_SdS


@triton.jit
def channel_slice(
    x_q, x_k, tokens, gate, dgate, scratch, i_tile, at, i_h, i_hv, column, b_rq, b_rk,
    b_dq, b_dk, b_dk_write, b_carried, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr
):  # fmt: skip
    """Add all that a channel gate decays to dq and dk of the channels from `column` on, and store the gate's gradient.

    Args:
        b_dq, b_dk, b_dk_write, b_carried: From `through_states`, decayed.

    Returns:
        dq, dk of the normalised rows: [BT / NEAR, NEAR, BK] each.
    """
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    GATE: tl.constexpr = FLAGS.GATE
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    CLAMPED: tl.constexpr = FLAGS.CLAMPED
    NORM: tl.constexpr = FLAGS.NORM
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_q = load_sub_chunks(x_q, tokens.s_q, at, i_h, column, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
    b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
    b_x = load_sub_chunks(gate.g, gate.s_g, at, i_hv, column, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
    if NORM:
        b_q *= b_rq.reshape(BT // NEAR, NEAR, 1)
        b_k *= b_rk.reshape(BT // NEAR, NEAR, 1)
    b_gate = sub_chunk_gate(b_x, gate, i_hv, column, at.rows, ACTIVATION, K)
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
    b_x = load_sub_chunks(gate.g, gate.s_g, at, i_hv, column, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
    b_dx, b_dA = log_gate_bwd(b_x, b_dgate, gate, i_hv, column, CLAMPED, GATE, ACTIVATION, K, BK)
    store_gate_gradient(dgate, i_tile, at, i_hv, column, b_dx, b_dA, opaque_zero, GATE, K)
    return b_dq, b_dk


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
