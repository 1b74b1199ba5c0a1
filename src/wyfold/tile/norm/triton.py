"""Row norms and their adjoints in Triton kernels: the last axis is a row."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def reciprocal_norm(b_x, eps: tl.constexpr = 1e-6):
    """(sum x^2 + eps)^(-1/2) of each row.   [BT, BK] -> [BT] float32"""
    b_x = b_x.to(tl.float32)
    return tl.rsqrt(tl.sum(b_x * b_x, axis=1) + eps)


@triton.jit
def row_norm(b_x, eps, COUNT: tl.constexpr):
    """y = x r with r = (sum x^2 / COUNT + eps)^(-1/2); COUNT is 1 for `l2norm`, the width for `rms_norm`.

    Returns:
        y: [BR, BW] float32.
        r: [BR, 1].
    """
    b_r = inverse_root(tl.div_rn(row_sum(b_x * b_x), COUNT * 1.0) + eps)
    return b_x * b_r, b_r


@triton.jit
def row_norm_bwd(b_y, b_r, b_dy, COUNT: tl.constexpr):
    """dx = r (dy - y sum(y dy) / COUNT), exact with eps included."""
    return b_r * tl.fma(b_y * -1.0, tl.div_rn(row_sum(b_y * b_dy), COUNT * 1.0), b_dy)


@triton.jit
def inverse_root(x):
    """x^(-1/2) to half an ulp, by an approximation and a Newton step: an error here affects the whole row.

    The step needs 1 - x r^2 to a few digits, so the rounding error of the product x r is included. The step is skipped
    for an infinite x.
    """
    r = tl.rsqrt(x)
    product = x * r
    lost = tl.fma(x, r, product * -1.0)
    step = tl.fma(product * -1.0, r, 1.0) - lost * r
    return tl.where(r > 0, tl.fma(0.5 * r, step, r), r)


@triton.jit
def row_sum(b_x):
    """Sum of each row, in one order for every register layout.   [BR, BW] -> [BR, 1]

    `tl.sum` first adds the numbers one thread holds. That set depends on the width of its loads, so on the alignment of
    the input. Here neighbours are added level by level, and a pair has only one sum.
    """
    for _ in tl.static_range(levels(b_x.shape[1])):
        b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)), axis=2)
    return b_x


@triton.jit
def column_sum(b_x):
    """Sum of each column, in one order as in `row_sum`.   [BR, BW] -> [1, BW]"""
    for _ in tl.static_range(levels(b_x.shape[0])):
        b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0] // 2, 2, b_x.shape[1])), axis=1)
    return b_x


@triton.jit
def vector_sum(b_x):
    """Sum of a vector, in one order as in `row_sum`.   [BW] -> one number"""
    for _ in tl.static_range(levels(b_x.shape[0]) - 1):
        b_x = tl.sum(tl.reshape(b_x, (b_x.shape[0] // 2, 2)), axis=1)
    return tl.sum(b_x, axis=0)


@triton.jit
def normalised(b_x, eps: tl.constexpr = 1e-6):
    """x (sum x^2 + eps)^(-1/2) of a vector.   [BW] float32"""
    return b_x * inverse_root(vector_sum(b_x * b_x) + eps)


@triton.constexpr_function
def levels(width):
    """Binary logarithm of a power of two."""
    return int(width).bit_length() - 1
