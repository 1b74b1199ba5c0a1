"""The state in Triton kernels, transposed: [V, K], value rows in registers."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm
from wyfold.tile.norm.triton import levels, vector_sum


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
    """Load value rows column.. of a state as float32.   [BV, BK]"""
    offsets, mask = state_offsets(strides, i_n, i_h, column, K, V, BK, BV)
    return tl.load(p + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_state(
    p, strides, i_n, i_h, column, b_S, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr
):
    """Store value rows column.. of a state, rounding once to its storage dtype."""
    offsets, mask = state_offsets(strides, i_n, i_h, column, K, V, BK, BV)
    tl.store(p + offsets, b_S.to(p.dtype.element_ty), mask=mask)


class StateAt(NamedTuple):
    """One of the states that a program may start from.

    Attributes:
        p: States [N, HV, K, V], or None: the state is zero.
        strides: Strides of p.
        i: Number of the state.
        chosen: Whether the program starts from it.
    """

    p: Any
    strides: Any
    i: Any
    chosen: Any
    end: None = None


@triton.jit
def load_end(own, border, i_h, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """Load the state at an end of a segment.   [BV, BK]

    Args:
        own, border: `StateAt` of the sequence's own state and of the state at the segment's border. The own state comes
            first; neither is chosen at the end of an unused segment, whose state is zero.
    """
    b_S = tl.zeros((BV, BK), tl.float32)
    if border.p is None:
        if own.p is not None:
            if own.chosen:
                b_S = load_state(own.p, own.strides, own.i, i_h, column, K, V, BK, BV)
    elif own.chosen:
        if own.p is not None:
            b_S = load_state(own.p, own.strides, own.i, i_h, column, K, V, BK, BV)
    elif border.chosen:
        b_S = load_state(border.p, border.strides, border.i, i_h, column, K, V, BK, BV)
    return b_S


@triton.jit
def slot_offsets(
    strides, slot, h, column, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    V_FIRST: tl.constexpr,
):  # fmt: skip
    """`state_offsets` of a contiguous state per head: [K, V], or with V_FIRST [V, K].   [BV, BK]

    The compiler knows the distances, so the register layout follows the memory layout in every variant of the kernel. A
    sum over K then has one order.
    """
    o_v = column + tl.arange(0, BV)[:, None]
    o_k = tl.arange(0, BK)[None, :]
    first = slot * strides[0] + h * strides[1]
    inside = tl.broadcast_to(o_k < K, (BV, BK)) if V % BV == 0 else (o_v < V) & (o_k < K)
    if V_FIRST:
        return first + (o_v * K + o_k), inside
    else:
        return first + (o_k * V + o_v), inside


@triton.jit
def key_sum(b_x, V_FIRST: tl.constexpr):
    """Sum of every value row over K, pair by pair in one order that no register layout changes.   [BV, BK] -> [BV]

    The pairs follow the storage order, since a thread holds neighbours in memory. In [V, K] a thread holds neighbours
    in K, which are added before lanes are crossed. In [K, V] it holds several value rows, so halves of K are added
    first.
    """
    for _ in tl.static_range(levels(b_x.shape[1]) - 1):
        if V_FIRST:
            b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)), axis=2)
        else:
            b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0], 2, b_x.shape[1] // 2)), axis=1)
    return tl.sum(b_x, axis=1)


@triton.jit
def token_step(b_S, decay, b_q, b_k, b_v, beta, erases, V_FIRST: tl.constexpr):
    """One token of the recurrence: decay, correct, read.

        S^T <- decay S^T        y = beta (v - S^T k)        o = S^T q + (q.k) y        S^T <- S^T + y k^T

    The output is read from the decayed state, so both products use one state and neither waits for the other.

    Args:
        b_S: [BV, BK] float32.
        decay: One number or [1, BK].
        b_q, b_k: [BK] float32.
        b_v: [BV] float32.
        beta: One number.
        erases: 1, or 0 for y = beta v.
        V_FIRST: The state is stored as [V, K].

    Returns:
        S: [BV, BK].
        o: [BV] before scale.
    """
    b_S = b_S * decay
    qk = vector_sum(b_q * b_k)
    b_Sq = key_sum(b_S * b_q[None, :], V_FIRST)
    b_y = (b_v - erases * key_sum(b_S * b_k[None, :], V_FIRST)) * beta
    return tl.fma(b_y[:, None], b_k[None, :], b_S), tl.fma(b_y, qk, b_Sq)


@triton.jit
def token_step_bwd(b_S, b_dS, b_q, b_k, b_v, b_do, beta, erases):
    """Adjoint of `token_step` on one tile of value rows; sums over value rows cover this tile only.

    Args:
        b_S: [BV, BK] state, decayed, before the token's write.
        b_dS: [BV, BK] gradient of the state leaving the token.
        b_q, b_k, b_v, beta, erases: As given to `token_step`.
        b_do: [BV] gradient of the output, times scale.

    Returns:
        Gradients of the decayed state [BV, BK], of q and k [BK], of v [BV] and of beta; and the sum of S dS over value
        rows [BK], from which a gate's gradient follows.
    """
    b_e = b_v - erases * tl.sum(b_S * b_k[None, :], axis=1)
    b_y = b_e * beta
    b_dS = tl.fma(b_do[:, None], b_q[None, :], b_dS)
    b_dq = tl.fma(b_k, tl.sum(b_y * b_do, axis=0), tl.sum(b_S * b_do[:, None], axis=0))
    b_dn = tl.sum(b_dS * b_k[None, :], axis=1)
    b_de = b_dn * beta
    b_dk = tl.sum(b_dS * b_y[:, None] - b_S * (erases * b_de)[:, None], axis=0)
    b_dS = tl.fma(b_de[:, None], b_k[None, :] * -erases, b_dS)
    return b_dS, b_dq, b_dk, b_de, tl.sum(b_dn * b_e, axis=0), tl.sum(b_S * b_dS, axis=0)


@triton.jit
def residual(b_v, b_Sk, b_in):
    """Residual R^T = v^T - (S^T k^T) in, given S^T k^T, or None for 0; not rounded.   [BV, BT] float32"""
    if b_Sk is None:
        return tl.trans(b_v).to(tl.float32)
    else:
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
        b_k: None if writes erase nothing.
    """
    b_dS = mm(b_doT, b_q, b_dS * total, OP, PRECISION)
    if b_k is None:
        return b_dS
    else:
        return mm(-b_dRT, b_k, b_dS, OP, PRECISION)
