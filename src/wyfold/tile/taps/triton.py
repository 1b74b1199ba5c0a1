"""Depthwise filter of a few taps over tokens in Triton kernels; the window is a tuple of rows, oldest first.

The window is shifted instead of reloaded, so each row is loaded once. Sums run tap by tap in one order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(p, o, mask):
    """Load one row as float32; zeros where the mask is false.   [BD]"""
    return tl.load(p + o, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_taps(p_w, s_w, p_bias, o_d, m_d, W: tl.constexpr):
    """Load the taps, oldest first, and the bias; the bias is zeros if there is none."""
    w: tl.tuple = ()
    for i in tl.static_range(W):
        w = w + (load_row(p_w, o_d * s_w[0] + i * s_w[1], m_d),)
    if p_bias is not None:
        bias = load_row(p_bias, o_d, m_d)
    else:
        bias = o_d * 0.0
    return w, bias


@triton.jit
def taps(window, w, W: tl.constexpr):
    """sum_i w[i] window[i], last tap first; both are tuples of W rows."""
    y = window[W - 1] * w[W - 1]
    for i in tl.static_range(W - 1):
        y = tl.fma(window[W - 2 - i], w[W - 2 - i], y)
    return y


@triton.jit
def tap_products(window, d, sums, W: tl.constexpr):
    """sums[i] + d window[i], as a tuple: adds one token's term to the gradient of each tap."""
    added: tl.tuple = ()
    for i in tl.static_range(W):
        added = added + (tl.fma(d, window[i], sums[i]),)
    return added


@triton.jit
def taps_bwd(d, w, pending, W: tl.constexpr):
    """Adjoint of one token's `taps` in its inputs.

    Args:
        d: Row, gradient of the token's output.
        w: Tuple of W rows.
        pending: Tuple of W - 1 rows, partial gradients of the preceding inputs, oldest first.

    Returns:
        The oldest gradient, now complete, and the W - 1 pending ones of the inputs after it.
    """
    complete = tl.fma(w[0], d, pending[0])
    later: tl.tuple = ()
    for i in tl.static_range(1, W - 1):
        later = later + (tl.fma(w[i], d, pending[i]),)
    return complete, later + (w[W - 1] * d,)


@triton.jit
def zeros(ROWS: tl.constexpr, BD: tl.constexpr):
    """Tuple of rows of zeros."""
    rows: tl.tuple = ()
    for _ in tl.static_range(ROWS):
        rows = rows + (tl.zeros((BD,), tl.float32),)
    return rows
