"""Sigmoid, SiLU and softplus on the device, in float32.

Inside them every exponential is of a number <= 0, so that nothing overflows on the way to a finite result, and of the
two sides of a sigmoid the smaller one is computed: the other is 1 less that, which loses nothing.
Fused multiply-adds are asked for where they are wanted, and `tl.exp2` and `tl.rsqrt` are one instruction each where
`tl.exp` is five and a division eight; `* -1.0` becomes a sign on an operand where unary minus is a subtraction from
zero. A kernel that only moves memory has no more than some thirty to spend per number.
"""

from __future__ import annotations

import triton
import triton.language as tl


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
    return tl.maximum(x, 0.0) + log1p(exp(tl.abs(x) * -1.0))


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
    """e^x to about an ulp, for rates and slow gates, whose error every token shares; 0 below 2^-126.

    `tl.exp` is 2^(x log2 e) with the product rounded once, which costs some |x| / 2 ulp. Here x loses n ln 2 first, n
    the nearest integer to x log2 e: adding and subtracting 1.5 * 2^23 rounds to one, and the upper part of ln 2 is
    short enough for its product with n to be exact. What is left, at most ln(2) / 2, has its series, whose first term
    left out is below 6e-9: a card's own power of two is off by 2 ulp.
    """
    x = tl.where(x > 90.0, 90.0, tl.where(x < -110.0, -110.0, x))  # infinity and 0 there; a NaN stays one
    n = tl.minimum((x * 1.4426950408889634 + 12582912.0) - 12582912.0, 127.0)
    rest = tl.fma(n, -1.428606765330187e-06, tl.fma(n, -0.693145751953125, x))
    series = tl.fma(rest, 1.0 / 5040.0, 1.0 / 720.0)
    series = tl.fma(series, rest, 1.0 / 120.0)
    series = tl.fma(series, rest, 1.0 / 24.0)
    series = tl.fma(series, rest, 1.0 / 6.0)
    series = tl.fma(series, rest, 0.5)
    return (tl.fma(rest * rest, series, rest) + 1.0) * tl.exp2(n)


@triton.jit
def log1p(x):
    """log(1 + x) for x in [0, 1], to about an ulp of the result, however small.

    2 artanh(s), s = x / (2 + x) <= 1/3, by its series, whose first term left out is below 2e-8 of the sum. As 2 s is
    x - s x, the series stands as a correction to x.
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
    """sigmoid(-|x|), at most 1/2. Its exponential's error, some |x| / 2 ulp, is little beside the 1 it is added to."""
    e = tl.exp2(tl.abs(x) * -1.4426950408889634)
    return e * reciprocal(1.0 + e)


@triton.jit
def reciprocal(x):
    """1 / x for x in [1, 3], to half an ulp: the square of an inverse root, and a Newton step."""
    r = tl.rsqrt(x)
    r = r * r
    return tl.fma(r, tl.fma(x * -1.0, r, 1.0), r)
