"""Windows of inputs over packed sequences, and what the taps make of one, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.activation.triton import silu, silu_bwd
from wyfold.tile.taps.triton import load_row, taps

NEVER = tl.constexpr(1 << 62)


@triton.jit
def boundary(p_cu, n, T, length):
    """First token of sequence n in the row of tokens."""
    if p_cu is None:
        return n.to(tl.int64) * length
    else:
        return tl.minimum(tl.maximum(tl.load(p_cu + n).to(tl.int64), 0), T)


@triton.jit
def last_boundary(p_cu, N, T):
    """First token that belongs to no sequence."""
    if p_cu is None:
        return T
    else:
        return tl.minimum(tl.maximum(tl.load(p_cu + N).to(tl.int64), 0), T)


@triton.jit
def sequence_at(p_cu, t, n, N, T, last, length):
    """Sequence n or a later one that holds token t: its number, first token and end.

    Tokens from `last` on are sequence N, which has no end. The search doubles its step, then halves it: the result is
    usually the next sequence, but any number of empty ones may lie between.
    """
    if p_cu is None:
        n = t // tl.maximum(length, 1)
        start = n * length
        end = tl.where(t < last, start + length, NEVER)
    elif t >= last:
        n = n * 0 + N
        start = last
        end = last * 0 + NEVER
    else:
        step = n * 0 + 1
        while (n + step < N) & (boundary(p_cu, tl.minimum(n + step, N), T, length) <= t):
            n += step
            step *= 2
        high = tl.minimum(n + step, N)
        while high - n > 1:
            middle = (n + high) // 2
            if boundary(p_cu, middle, T, length) <= t:
                n = middle
            else:
                high = middle
        # Clamped, so that t is inside the sequence for any contents.
        start = tl.minimum(boundary(p_cu, n, T, length), t)
        end = tl.maximum(boundary(p_cu, n + 1, T, length), t + 1)
    return n, start, end


@triton.jit
def load_input(inputs, n, start, t, N, S, last, o_d, m_d):
    """Input at token t of sequence n; from its initial state if t is before its start."""
    b_x = load_row(inputs.x, t * inputs.s_x[0] + o_d * inputs.s_x[1], m_d & (t >= start) & (t < last))
    if inputs.state is not None:
        o_state = n * inputs.s_state[0] + o_d * inputs.s_state[1] + (S + t - start) * inputs.s_state[2]
        b_x = tl.where(t < start, load_row(inputs.state, o_state, m_d & (t < start) & (n < N)), b_x)
    return b_x


@triton.jit
def store_row(p, strides, t, o_d, b_x, mask):
    """Store channels of token t of a [T, D], rounding once."""
    tl.store(p + t * strides[0] + o_d * strides[1], b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_window(inputs, n, start, t, N, S, last, o_d, m_d, W: tl.constexpr):
    """The W - 1 inputs before token t of sequence n, oldest first."""
    window: tl.tuple = ()
    for i in tl.static_range(W - 1):
        token = t - (W - 1) + i
        window = window + (load_input(inputs, n, start, token, N, S, last, o_d, m_d),)
    return window


@triton.jit
def load_rows(p, s_rows, t, limit, o_d, m_d, BT: tl.constexpr):
    """BT neighbouring tokens, each a row; zeros from `limit` on."""
    rows: tl.tuple = ()
    for i in tl.static_range(BT):
        if p is not None:
            rows = rows + (load_row(p, (t + i) * s_rows[0] + o_d * s_rows[1], m_d & (t + i < limit)),)
        else:
            rows = rows + (o_d * 0.0,)
    return rows


@triton.jit
def output(
    window, w, b_bias, b_residual, exists, p_bias, p_residual, ACTIVATED: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """y of the token at the end of this window; zeros outside sequences."""
    b_y = taps(window, w, W)
    if p_bias is not None:
        b_y += b_bias
    if ACTIVATED:
        b_y = silu(b_y)
    if p_residual is not None:
        b_y += b_residual
    return tl.where(exists, b_y, 0.0)


@triton.jit
def activation_gradient(window, w, b_bias, b_dy, exists, p_bias, ACTIVATED: tl.constexpr, W: tl.constexpr):
    """dp = dy act'(p) of the token at the end of this window; zeros outside sequences."""
    b_d = b_dy
    if ACTIVATED:
        b_p = taps(window, w, W)
        if p_bias is not None:
            b_p += b_bias
        b_d = tl.where(exists, silu_bwd(b_p, b_d), 0.0)
    return b_d
