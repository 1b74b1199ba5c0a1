"""The gate in Triton: loads, activation, decays and their adjoints, for every kind of gate.

GATE is "none", "scalar" (one number per token) or "channel" (one per token and key channel). A channel gate is inside
the contraction; `channel` splits it for the grams and their adjoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.tile.activation.triton import LOG2_E, exp, sigmoid, softplus
from wyfold.tile.decay.eager import log_gate_floor
from wyfold.tile.dot.triton import mm, mm_exact, no_fma
from wyfold.tile.index.triton import (
    load_token_number,
    load_token_row,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_token_sub_chunks,
)

FLOOR = log_gate_floor(torch.float32)

NEAR: tl.constexpr = tl.constexpr(8)
"""Rows of a sub-chunk in the adjoint of a channel gate; pairs inside one are computed one by one."""


def gate_kind(g: Tensor | None) -> str:
    """Value of GATE for a gate [B, T, HV] or [B, T, HV, K], or None."""
    return "none" if g is None else "scalar" if g.ndim == 3 else "channel"


def gate_flags(g: Tensor | None) -> dict[str, Any]:
    """GATE, SCALAR and CHANNEL as keyword arguments of a launch."""
    kind = gate_kind(g)
    return {"GATE": kind, "SCALAR": kind == "scalar", "CHANNEL": kind == "channel"}


def gate_width(g: Tensor | None) -> int:
    """Number of gates per token and value head: K for a channel gate, else 1."""
    return g.shape[3] if g is not None and g.ndim == 4 else 1


def as_channels(g: Tensor | None, q: Tensor, heads: int) -> Tensor:
    """View any gate as one per channel, [B, T, heads, K]: by strides of zero, and without a gate of one zero."""
    (B, T, _, K), gate = q.shape, g
    if gate is None:
        return q.new_zeros(()).expand(B, T, heads, K)
    return gate if gate.ndim == 4 else gate[..., None].expand(B, T, heads, K)


def channel_gradient(dg: Tensor | None, q: Tensor) -> Tensor | None:
    """Where a kernel with a gate per channel writes: dg itself, or float32 [B, T, heads, K] for `sum_channels`."""
    return dg if dg is None or dg.ndim == 4 else dg.new_empty(*dg.shape, q.shape[3], dtype=torch.float32)


def sum_channels(found: Tensor | None, dg: Tensor | None) -> None:
    """Write dg [B, T, heads] from the gradients of channels; nothing if they are dg itself."""
    if found is not None and dg is not None and dg.ndim == 3:
        dg.copy_(found.sum(-1))


class Gate(NamedTuple):
    """Kernel argument: a call's gate.

    Attributes:
        g: Gate of every token, raw or its log; None without a gate.
        s_g: Strides of g.
        A_log, dt_bias: Parameters of an activation inside the kernel, contiguous; None without them.
        lower_bound: Bound of the bounded activation.
        clamp: Smallest log gate; the floor unless the caller requests one.
    """

    g: Any = None
    s_g: Any = None
    A_log: Any = None
    dt_bias: Any = None
    lower_bound: Any = None
    clamp: Any = None
    end: None = None


class GateGradient(NamedTuple):
    """Kernel argument: receives the gradients of a call's gate; None where a gradient is not requested.

    Attributes:
        g: Gradient of every token's gate.
        s_g: Strides of g.
        A_log: [tiles, slices of K or 1] float32 terms of A_log's gradient.
        dt_bias: [tiles, K or 1] float32 terms of dt_bias's gradient.
    """

    g: Any
    s_g: Any
    A_log: Any
    dt_bias: Any
    end: None = None


@triton.jit
def load_gate(
    gate,
    at,
    h,
    column,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Load the raw gate, for channels from `column` on, and the log gate: activated, floored, zero in padding.

    Both are [BT, BK] for a channel gate, [BT] for a scalar gate, and zeros [BT] without one; float32.
    """
    if GATE == "none":
        return tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    else:
        x = load_raw_gate(gate, at, h, column, GATE, K, BT, BK)
        g = log_gate(x, gate, h, column, GATE, ACTIVATION, K, BK)
        o_r = tl.arange(0, BT)
        if GATE == "channel":
            o_k = column + tl.arange(0, BK)
            return x, tl.where((o_r < at.rows)[:, None] & (o_k < K)[None, :], g, 0.0)
        else:
            return x, tl.where(o_r < at.rows, g, 0.0)


@triton.jit
def load_raw_gate(gate, at, h, column, GATE: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr):
    """Load the raw gate as float32.   [BT, BK] for a channel gate, from channel `column` on, else [BT]"""
    if GATE == "channel":
        return load_tokens(gate.g, gate.s_g, at, h, column, K, BT, BK).to(tl.float32)
    else:
        return load_token_scalars(gate.g, gate.s_g, at, h, BT)


@triton.jit
def load_gate_parameters(p_A_log, p_dt_bias, h, column, GATE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Load exp(A_log) of the head, and dt_bias ([BK] for a channel gate); 1 and 0 where a parameter is None."""
    rate = 1.0
    if p_A_log is not None:
        rate = tl.exp(tl.load(p_A_log + h).to(tl.float32))
    bias = 0.0
    if p_dt_bias is not None:
        if GATE == "channel":
            o_k = column + tl.arange(0, BK)
            bias = tl.load(p_dt_bias + h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        else:
            bias = tl.load(p_dt_bias + h).to(tl.float32)
    return rate, bias


@triton.jit
def log_gate(x, gate, h, column, GATE: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Log gate from the raw gate, as `eager.log_gate`; without a requested clamp, `clamp` is the floor."""
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        rate, bias = load_gate_parameters(gate.A_log, gate.dt_bias, h, column, GATE, K, BK)
    return activated(x, rate, bias, gate.lower_bound, gate.clamp, ACTIVATION)


@triton.jit
def activated(x, rate, bias, lower_bound, clamp, ACTIVATION: tl.constexpr):
    """`log_gate` with its parameters loaded."""
    if ACTIVATION == "given":
        g = x
    elif ACTIVATION == "softplus":
        g = -rate * softplus(x + bias)
    else:
        g = lower_bound * sigmoid((x + bias) * rate)
    # A comparison, not a maximum: NaN must stay NaN.
    return tl.where(g < clamp, clamp, g)


@triton.jit
def load_token_parameters(
    p_A_log, p_dt_bias, h, GATE: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):
    """`load_gate_parameters` for kernels of single tokens: a channel gate's dt_bias is [BK], not [1, BK]."""
    if GATE == "channel" and ACTIVATION != "given":
        rate, _ = load_gate_parameters(p_A_log, None, h, 0, GATE, K, BK)
        if p_dt_bias is None:
            return rate, 0.0
        else:
            o_k = tl.arange(0, BK)
            return rate, tl.load(p_dt_bias + h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    elif ACTIVATION != "given":
        return load_gate_parameters(p_A_log, p_dt_bias, h, 0, GATE, K, BK)
    else:
        return 1.0, 0.0


@triton.jit
def load_token_gate(p_g, s_g, b, t, h, exists, GATE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Load one token's raw gate.   [BK] for a channel gate, else one number; 0 without a gate"""
    if GATE == "channel":
        return load_token_row(p_g, s_g, b, t, h, 0, exists, K, BK)
    elif GATE == "scalar":
        return load_token_number(p_g, s_g, b, t, h, exists)
    else:
        return 0.0


@triton.jit
def token_decay(x, rate, bias, lower_bound, clamp, GATE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Decay of the state over one token; x is from `load_token_gate`.   [1, BK] or a number"""
    if GATE == "none":
        return 1.0
    elif GATE == "channel":
        return exp(activated(x.to(tl.float32), rate, bias, lower_bound, clamp, ACTIVATION))[None, :]
    else:
        return exp(activated(x, rate, bias, lower_bound, clamp, ACTIVATION))


@triton.jit
def running_sum(b_g, GATE: tl.constexpr):
    """G, the running sum of the log gate inside its chunk.   [BT] for a scalar gate; zeros without one"""
    if GATE == "scalar":
        return tl.cumsum(b_g, axis=0)
    else:
        return b_g * 0.0


@triton.jit
def decayed_grams_transposed(
    b_q, b_k, b_rq, b_rk, b_g, GATE: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr
):
    """Decayed grams of normalised rows, transposed to [s, r], and the key gram [r, s]; not for channel gates.

        J[r, s] = sum_c k[r, c] k[s, c] exp(G[r] - G[s])    s <  r, else 0 in J^T and undefined in J
        P[r, s] = sum_c q[r, c] k[s, c] exp(G[r] - G[s])    s <= r, else 0

    Args:
        b_q, b_k: [BT, BK] raw rows.
        b_rq, b_rk: [BT] reciprocal norms, or ones.
        b_g: From `load_gate`.

    Returns:
        J, J^T, P^T: [BT, BT] float32.
    """
    o = tl.arange(0, BT)
    b_kk = mm(b_k, tl.trans(b_k), None, OP, PRECISION) * (b_rk[:, None] * b_rk[None, :])
    b_PT, b_factor = mm(b_k, tl.trans(b_q), None, OP, PRECISION), b_rk[:, None] * b_rq[None, :]
    if GATE == "scalar":
        b_decay = pairwise_decay(tl.cumsum(b_g, axis=0), BT)
        b_kk, b_factor = b_kk * b_decay, b_factor * b_decay
    # `no_fma`: a later exact product splits the rounded number into parts.
    b_PT = tl.where(o[:, None] <= o[None, :], no_fma(b_PT * b_factor), 0.0)
    return b_kk, tl.where(o[:, None] < o[None, :], b_kk, 0.0), b_PT


@triton.jit
def pairwise_decay(b_G, BT: tl.constexpr):
    """Decay between two rows, exp(-|G_r - G_s|) for non-increasing G.   [BT, BT], symmetric

    The sign is selected by the side of the diagonal, not by the difference. So an increase in G, which is outside the
    contract, does not swap a decay for its inverse.
    """
    o = tl.arange(0, BT)
    difference = b_G[:, None] - b_G[None, :]
    # exp2, because Triton's exp spends three more instructions on subnormal results.
    return tl.exp2(tl.where(o[:, None] >= o[None, :], difference, -difference) * LOG2_E)


@triton.jit
def interval_decay(b_g, BT: tl.constexpr):
    """exp of the sum of a scalar gate after row s up to row r; undefined where r is not after s.   [BT, BT], [r, s]

    A gate is split into a multiple of 2^-10, whose running sums are exact, and a rest with small sums. So a strong gate
    before both rows costs their difference no precision.
    """
    o = tl.arange(0, BT)
    b_coarse = (b_g + 12288.0) - 12288.0
    # Both sums are gathered at once, by row number, so that the tile gets its final layout. A tile broadcast from the
    # sums would go through shared memory (docs/facts/compilers.md, TRITON-6).
    b_sums = _pack2(*tl.associative_scan((b_coarse, b_g - b_coarse), 0, _add_pairs))
    b_G_r, b_rest_r = _unpack2(tl.gather(b_sums, o, 0)[:, None])
    b_G_s, b_rest_s = _unpack2(tl.gather(b_sums, o, 0)[None, :])
    return tl.exp2(((b_G_r - b_G_s) + (b_rest_r - b_rest_s)) * LOG2_E)


@triton.jit
def _add_pairs(x, y, to_x, to_y):
    return x + to_x, y + to_y


@triton.jit
def _pack2(x, y):
    """Pack two float32 into 64 bits."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | y.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _unpack2(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def scalar_rows(b_G, GATE: tl.constexpr, BT: tl.constexpr):
    """Decays from the chunk's start to each row, from each row to the chunk's end, and over the chunk.   [BT], [BT], 1

    Ones unless the gate is scalar. Padding has g = 0, so the last row's sum is the last token's.
    """
    if GATE == "scalar":
        o = tl.arange(0, BT)
        b_last = tl.sum(tl.where(o == BT - 1, b_G, 0.0), axis=0)
        return tl.exp(b_G), tl.exp(b_last - b_G), tl.exp(b_last)
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return ones, ones, 1.0


@triton.jit
def log_gate_bwd(
    x, b_dg, gate, h, column,
    CLAMPED: tl.constexpr, GATE: tl.constexpr, ACTIVATION: tl.constexpr, K: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Adjoint of `log_gate`: gradients of x, and of A_log before its sum over rows and channels, shaped like x."""
    if GATE == "none":
        return b_dg, b_dg
    else:
        rate, bias = 1.0, 0.0
        if ACTIVATION != "given":
            rate, bias = load_gate_parameters(gate.A_log, gate.dt_bias, h, column, GATE, K, BK)
        return activated_bwd(x, b_dg, rate, bias, gate.lower_bound, gate.clamp, CLAMPED, ACTIVATION)


@triton.jit
def activated_bwd(x, b_dg, rate, bias, lower_bound, clamp, CLAMPED: tl.constexpr, ACTIVATION: tl.constexpr):
    """`log_gate_bwd` with its parameters loaded."""
    if ACTIVATION == "given":
        if CLAMPED:
            b_dg = tl.where(x < clamp, 0.0, b_dg)
        return b_dg, b_dg
    else:
        u = x + bias
        if ACTIVATION == "softplus":
            g = -rate * softplus(u)
            if CLAMPED:
                b_dg = tl.where(g < clamp, 0.0, b_dg)
            # After a reset dg is zero, and -inf * 0 would be NaN.
            return b_dg * sigmoid(u) * -rate, tl.where(b_dg == 0.0, 0.0, g * b_dg)
        else:
            s = sigmoid(u * rate)
            if CLAMPED:
                b_dg = tl.where(lower_bound * s < clamp, 0.0, b_dg)
            b_dx = b_dg * (lower_bound * s * sigmoid(-u * rate)) * rate
            return b_dx, tl.where(b_dx == 0.0, 0.0, u * b_dx)


@triton.jit
def store_gate_gradient(dgate, i_tile, at, h, column, b_dx, b_dA, opaque_zero, GATE: tl.constexpr, K: tl.constexpr):
    """Store a gate's gradient to its tokens, and this tile's terms of the parameters' gradients.

    Args:
        dgate: A `GateGradient`.
        b_dx, b_dA: From `log_gate_bwd`: [BT / NEAR, NEAR, BK] for the channels from `column` on, or [BT].
        opaque_zero: As of `load_sub_chunks`.
    """
    # Summed as a tile's row: for sm_100, Triton 3.6 fails to compile a one-dimensional sum of a product.
    o_one = i_tile + tl.arange(0, 1)
    if GATE == "channel":
        BK: tl.constexpr = b_dx.shape[2]
        NK: tl.constexpr = (K + BK - 1) // BK
        o_n, o_k = tl.arange(0, b_dx.shape[0])[:, None], column + tl.arange(0, BK)
        valid = (o_n * NEAR + tl.arange(0, NEAR)[None, :] < at.rows)[:, :, None] & (o_k < K)[None, None, :]
        if dgate.g is not None:
            store_token_sub_chunks(dgate.g, dgate.s_g, at, h, column, b_dx, opaque_zero, K)
        if dgate.dt_bias is not None:
            b_sum = tl.sum(tl.sum(tl.where(valid, b_dx, 0.0), axis=1), axis=0)
            tl.store(dgate.dt_bias + i_tile * K + o_k, b_sum, mask=o_k < K)
        if dgate.A_log is not None:
            b_sum = tl.sum(tl.sum(tl.where(valid, b_dA, 0.0), axis=1), axis=0)
            tl.store(dgate.A_log + o_one * NK + column // BK, tl.sum(b_sum[None, :], axis=1))
    elif GATE == "scalar":
        o_r = tl.arange(0, b_dx.shape[0])
        if dgate.g is not None:
            store_token_scalars(dgate.g, dgate.s_g, at, h, b_dx, b_dx.shape[0])
        if dgate.dt_bias is not None:
            tl.store(dgate.dt_bias + o_one, tl.sum(tl.where(o_r < at.rows, b_dx, 0.0)[None, :], axis=1))
        if dgate.A_log is not None:
            tl.store(dgate.A_log + o_one, tl.sum(tl.where(o_r < at.rows, b_dA, 0.0)[None, :], axis=1))


@triton.jit
def pair_decay(b_G, GATE: tl.constexpr, BT: tl.constexpr):
    """`pairwise_decay` for a scalar gate, else 1; a channel gate is inside the contraction."""
    if GATE == "scalar":
        return pairwise_decay(b_G, BT)
    else:
        return 1.0


@triton.jit
def interval_sum(b_pairs, BT: tl.constexpr, EXACT: tl.constexpr):
    """sum over r >= i > s of pairs[r, s]; entries with r <= s are ignored.   [BT, BT] -> [BT]

    The sum over r is a product with a matrix of zeros and ones as the left operand. The remaining sum runs along rows,
    which a few lanes hold.
    """
    o_i, o_s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_after = mm_exact((o_i <= o_s).to(tl.bfloat16), b_pairs, None, EXACT)
    return tl.sum(tl.where(o_s < o_i, b_after, 0.0), axis=1)


@triton.jit
def state_gate_gradient(b_read, b_write, carried, BT: tl.constexpr):
    """Gradient of a scalar gate through the states, interval form.   [BT]

    Args:
        b_read: [BT] sum over channels of x * dx, for rows decayed from the chunk's start.
        b_write: [BT] the same for rows decayed to the chunk's end.
        carried: Sum of the entering state times its gradient, decayed over the chunk.
    """
    o_i, o_r = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return tl.sum(tl.where(o_r >= o_i, b_read[None, :], b_write[None, :]), axis=1) + carried
