"""The state on the device, transposed: [V, K], value rows in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm


@triton.jit
def state_offsets(strides, i_n, i_h, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
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
def residual(b_v, b_Sk, b_in):
    """Residual R^T = v^T - (S^T k^T) in, given S^T k^T; rounded nowhere.   [BV, BT] float32"""
    return tl.trans(b_v).to(tl.float32) - b_Sk * b_in[None, :]


@triton.jit
def read(b_S, b_q, b_y, b_FT, b_in, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Output before scale, o^T = (S^T q^T) in + y^T F^T.   [BV, BT] float32"""
    b_o = mm(b_S, tl.trans(b_q), None, OP, PRECISION) * b_in[None, :]
    return mm(b_y, b_FT, b_o, OP, PRECISION)


@triton.jit
def advance(b_S, total, b_left, b_right, OP: tl.constexpr, PRECISION: tl.constexpr):
    """State leaving the chunk, total S^T + left right.   [BV, BK] float32

    Args:
        total: Decay over the chunk, one number or [1, BK].
        b_left, b_right: y^T and E, or the written values, decayed to the chunk's end, and k.
    """
    return mm(b_left, b_right, b_S * total, OP, PRECISION)


@triton.jit
def retreat(b_dS, total, b_doT, b_q, b_dRT, b_k, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Gradient of the state entering the chunk, total dS^T + do^T q - dR^T k.   [BV, BK] float32

    Args:
        total: As in `advance`.
        b_doT, b_dRT: [BV, BT], times the decay from the chunk's start; a channel gate's is in q and k.
    """
    b_dS = mm(b_doT, b_q, b_dS * total, OP, PRECISION)
    return mm(-b_dRT, b_k, b_dS, OP, PRECISION)
