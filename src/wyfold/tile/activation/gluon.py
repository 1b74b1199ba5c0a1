"""Sigmoid and softplus for Hopper kernels that activate a gate of channels, in float32.

Such a kernel applies them to as many numbers as it loads, with few warps to hide what they cost. So they are shorter
than those in Triton: a softplus is 12 instructions instead of 35, a sigmoid 4 instead of 11. They use the GPU's own
exponential and reciprocal. A softplus is off by a few ulp of its value, also where it is tiny; of e^x the error is
|x| / 2 ulp and 2 more. A gate's own rounding to 16 bits is a thousand times that.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.dot.gluon import exp2, one_over


@gluon.jit
def softplus(x):
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), without overflow."""
    e = exp2(gl.abs(x) * -LOG2_E)
    return gl.fma(e, _log1p_over(e), gl.maximum(x, 0.0))


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), accurate relative to its value on both sides; 0 below 2^-126."""
    return one_over(1.0 + exp2(x * -LOG2_E))


@gluon.jit
def both_sides(x):
    """sigmoid(x) and sigmoid(-x), each accurate relative to its value."""
    power = x * -LOG2_E
    e = exp2(gl.where(power > 126.0, 126.0, power))  # finite, since the product below would be inf * 0; a NaN stays NaN
    s = one_over(1.0 + e)
    return s, e * s


@gluon.jit
def _log1p_over(x):
    """log(1 + x) / x for x in [0, 1]: a polynomial with the least relative error, 1e-7 in float32, and 1 at 0."""
    y = gl.fma(x, 0.005364825017750263, -0.03006579540669918)
    y = gl.fma(y, x, 0.07920453697443008)
    y = gl.fma(y, x, -0.13753803074359894)
    y = gl.fma(y, x, 0.191536545753479)
    y = gl.fma(y, x, -0.24857163429260254)
    y = gl.fma(y, x, 0.3332132399082184)
    y = gl.fma(y, x, -0.49999648332595825)
    return gl.fma(y, x, 1.0)
