"""The state on the device, transposed: [V, K], value rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm


@triton.jit
def state_offsets(
    strides, i_n, i_h, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Offsets and mask of value rows column.. of a state in [N, HV, K, V].   [BV, BK]"""
    o_v = column + tl.arange(0, BV)
    o_k = tl.arange(0, BK)
    first = i_n * strides[0] + i_h * strides[1]
    offsets = first + o_v.to(tl.int64)[:, None] * strides[3] + o_k.to(tl.int64)[None, :] * strides[2]
    return offsets, (o_v < V)[:, None] & (o_k < K)[None, :]


@triton.jit
def load_state(p, strides, i_n, i_h, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Value rows column.. of a state, float32.   [BV, BK]"""
    offsets, mask = state_offsets(strides, i_n, i_h, column, K, V, BK, BV)
    return tl.load(p + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(
    p, strides, i_n, i_h, column, b_S, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Write value rows column.. of a state, rounding once to its storage dtype."""
    offsets, mask = state_offsets(strides, i_n, i_h, column, K, V, BK, BV)
    tl.store(p + offsets, b_S.to(p.dtype.element_ty), mask=mask)


@triton.jit
def residual(b_S, b_k, b_v, b_in, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Residual R^T = v^T - (S^T k^T) in, rounded nowhere.   [BV, BT] float32"""
    return tl.trans(b_v).to(tl.float32) - mm(b_S, tl.trans(b_k), None, OP, PRECISION) * b_in[None, :]


@triton.jit
def read(b_S, b_q, b_y, b_FT, b_in, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Output before scale, o^T = (S^T q^T) in + y^T F^T.   [BV, BT] float32"""
    b_o = mm(b_S, tl.trans(b_q), None, OP, PRECISION) * b_in[None, :]
    return mm(b_y, b_FT, b_o, OP, PRECISION)


@triton.jit
def advance(
    b_S,
    p_total,
    i_tile,
    b_left,
    b_right,
    CHANNEL: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State leaving the chunk, total S^T + left right.   [BV, BK] float32"""
    return mm(b_left, b_right, decayed(b_S, p_total, i_tile, CHANNEL, K, BK), OP, PRECISION)


@triton.jit
def decayed(b_S, p_total, i_tile, CHANNEL: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """The state, or its gradient, times the decay over the whole chunk.   [BV, BK]"""
    if CHANNEL:
        o_k = tl.arange(0, BK)
        return b_S * tl.load(p_total + i_tile * K + o_k, mask=o_k < K, other=0.0)[None, :]
    else:
        return b_S * tl.load(p_total + i_tile)


@triton.jit
def output_bwd(b_do, b_FT, scale, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of y through the chunk's own output, and scale do^T itself.   [BV, BT] each, float32"""
    b_doT = tl.trans(b_do).to(tl.float32) * scale
    return mm(b_doT, tl.trans(b_FT), None, OP, PRECISION), b_doT


@triton.jit
def retreat(
    b_dS,
    p_total,
    i_tile,
    b_doT,
    b_dR,
    b_q,
    b_k,
    b_in_q,
    b_in_k,
    CHANNEL: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state entering the chunk, total dS^T + (do^T in) q - (dR^T in) k.   [BV, BK] float32"""
    b_dS = decayed(b_dS, p_total, i_tile, CHANNEL, K, BK)
    b_dS = mm(b_doT * b_in_q[None, :], b_q, b_dS, OP, PRECISION)
    return mm(-b_dR * b_in_k[None, :], b_k, b_dS, OP, PRECISION)
