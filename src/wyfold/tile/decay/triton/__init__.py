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

from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import exp, sigmoid, softplus
from wyfold.tile.decay.eager import log_gate_floor
from wyfold.tile.index.triton import load_token_number, load_token_row, load_token_scalars, load_tokens, strides

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


def gate_argument(g: Tensor | None, A_log: Tensor | None, dt_bias: Tensor | None, options: DeltaOptions) -> Gate:
    """The gate of a call as a kernel argument. options: Uses `lower_bound`, `clamp`."""
    return Gate(g, strides(g), A_log, dt_bias, options.lower_bound, options.clamp or FLOOR)


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
