"""Gradient of the gate in Triton: adjoints of its activation and of its sums, and the store."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.tile.activation.triton import sigmoid, softplus
from wyfold.tile.decay.triton import NEAR, load_gate_parameters
from wyfold.tile.dot.triton import mm_exact
from wyfold.tile.index.triton import store_token_scalars, strides
from wyfold.tile.index.triton.sub_chunks import store_token_sub_chunks


def channel_gradient(dg: Tensor | None, q: Tensor) -> Tensor | None:
    """Where a kernel with a gate per channel writes: dg itself, or float32 [B, T, heads, K] for `sum_channels`."""
    return dg if dg is None or dg.ndim == 4 else dg.new_empty(*dg.shape, q.shape[3], dtype=torch.float32)


def sum_channels(found: Tensor | None, dg: Tensor | None) -> None:
    """Write dg [B, T, heads] from the gradients of channels; nothing if they are dg itself."""
    if found is not None and dg is not None and dg.ndim == 3:
        dg.copy_(found.sum(-1))


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


def gate_gradient_argument(
    dg: Tensor | None, dA_log: Tensor | None, ddt_bias: Tensor | None, shape: tuple[int, int, int], gates: int
) -> GateGradient:
    """The gradients of a call's gate as a kernel argument, with memory for the terms of its parameters' gradients.

    Args:
        dg, dA_log, ddt_bias: Gradients that are requested, or None.
        shape: Tiles, value heads, and slices of K.
        gates: Gates of a token and value head.
    """
    terms = None if dA_log is None else dA_log.new_empty(shape, dtype=torch.float32)
    bias_terms = None if ddt_bias is None else ddt_bias.new_empty((*shape[:2], gates), dtype=torch.float32)
    return GateGradient(dg, strides(dg), terms, bias_terms)


def sum_terms(dgate: GateGradient, dA_log: Tensor | None, ddt_bias: Tensor | None) -> None:
    """Write the gradients of a gate's parameters from their terms, summed in a fixed order."""
    if dA_log is not None:
        dA_log.copy_(dgate.A_log.sum((0, 2)).view_as(dA_log))
    if ddt_bias is not None:
        ddt_bias.copy_(dgate.dt_bias.sum(0).view_as(ddt_bias))


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
            return softplus_gate_bwd(u, g, b_dg, rate)
        else:
            s = sigmoid(u * rate)
            if CLAMPED:
                b_dg = tl.where(lower_bound * s < clamp, 0.0, b_dg)
            b_dx = b_dg * (lower_bound * s * sigmoid(-u * rate)) * rate
            return b_dx, tl.where(b_dx == 0.0, 0.0, u * b_dx)


@triton.jit
def softplus_gate_bwd(u, g, b_dg, rate):
    """Gradients of u, and of A_log before its sum, for g = -rate * softplus(u)."""
    # After a reset dg is zero, and -inf * 0 would be NaN.
    return b_dg * sigmoid(u) * -rate, tl.where(b_dg == 0.0, 0.0, g * b_dg)


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
