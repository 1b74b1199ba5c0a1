"""Sigmoid, SiLU and softplus in Triton kernels, in float32.

Every exponential has an argument <= 0, so no intermediate result overflows. Of the two sides of a sigmoid the smaller
one is computed; the other is 1 minus it, which is accurate.

Fused multiply-adds are explicit. `tl.exp2` and `tl.rsqrt` are one instruction each, where `tl.exp` is five and a
division is eight. `* -1.0` becomes the sign of an operand, where unary minus is a subtraction from zero. A memory-bound
kernel can spend about thirty instructions per number.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    s = smaller_side(x)
    return tl.where(x >= 0, 1.0 - s, s)


@triton.jit
def sigmoid_bwd(x, dy):
    """Gradient of `sigmoid`: dy * sigmoid(x) * (1 - sigmoid(x))."""
    s = smaller_side(x)
    return dy * tl.fma(s * -1.0, s, s)


@triton.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), without overflow."""
    return tl.maximum(x, 0.0) + log1p(exp_of_negative(tl.abs(x) * -1.0))


@triton.jit
def silu(x):
    """x * sigmoid(x)."""
    return x * sigmoid(x)


@triton.jit
def silu_bwd(x, dy):
    """Gradient of `silu`: dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
    s = smaller_side(x)
    above = x >= 0
    return dy * tl.where(above, 1.0 - s, s) * tl.fma(x, tl.where(above, s, 1.0 - s), 1.0)


@triton.jit
def exp(x):
    """e^x to about an ulp, for rates and slow gates, whose error affects every token; 0 below 2^-126.

    `tl.exp` computes 2^(x log2 e) with one rounding of the product, which costs about |x| / 2 ulp. Here n ln 2 is
    subtracted from x first, where n is the integer nearest to x log2 e. Adding and subtracting 1.5 * 2^23 rounds to an
    integer, and the upper part of ln 2 is short enough for an exact product with n. The remainder, at most ln(2) / 2,
    goes through a series whose first omitted term is below 6e-9; the GPU's own power of two is off by 2 ulp.
    """
    x = tl.where(x > 90.0, 90.0, tl.where(x < -110.0, -110.0, x))  # e^x is infinite or 0 beyond; a NaN stays NaN
    return _exp_near_power(x, tl.minimum(_nearest_power(x), 127.0))


@triton.jit
def exp_of_negative(x):
    """`exp` of x <= 0, the same bits in fewer instructions."""
    x = tl.where(x < -110.0, -110.0, x)
    return _exp_near_power(x, _nearest_power(x))


@triton.jit
def _nearest_power(x):
    """The integer nearest to x log2 e."""
    return (x * LOG2_E + 12582912.0) - 12582912.0


@triton.jit
def _exp_near_power(x, n):
    """e^x = 2^n e^(x - n ln 2)."""
    remainder = tl.fma(n, -1.428606765330187e-06, tl.fma(n, -0.693145751953125, x))
    series = tl.fma(remainder, 1.0 / 5040.0, 1.0 / 720.0)
    series = tl.fma(series, remainder, 1.0 / 120.0)
    series = tl.fma(series, remainder, 1.0 / 24.0)
    series = tl.fma(series, remainder, 1.0 / 6.0)
    series = tl.fma(series, remainder, 0.5)
    return (tl.fma(remainder * remainder, series, remainder) + 1.0) * tl.exp2(n)


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], to about an ulp of the result, also for tiny x.

    2 artanh(s) with s = x / (2 + x) <= 1/3, by a series whose first omitted term is below 2e-8 of the sum. Since 2 s is
    x - s x, the series is a correction to x.
    """
    s = x * reciprocal(2.0 + x)
    z = s * s
    series = tl.fma(z, 2.0 / 13.0, 2.0 / 11.0)
    series = tl.fma(series, z, 2.0 / 9.0)
    series = tl.fma(series, z, 2.0 / 7.0)
    series = tl.fma(series, z, 2.0 / 5.0)
    series = tl.fma(series, z, 2.0 / 3.0)
    return tl.fma(s, tl.fma(series, z, x * -1.0), x)


@triton.jit
def smaller_side(x):
    """sigmoid(-|x|), at most 1/2.

    The error of its exponential, about |x| / 2 ulp, is small relative to the 1 it is added to.
    """
    e = tl.exp2(tl.abs(x) * -LOG2_E)
    return e * reciprocal(1.0 + e)


@triton.jit
def reciprocal(x):
    """1 / x for x in [1, 3], to half an ulp: the square of an inverse root, then a Newton step."""
    r = tl.rsqrt(x)
    r = r * r
    return tl.fma(r, tl.fma(x * -1.0, r, 1.0), r)
