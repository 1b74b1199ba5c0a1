"""Gates for Hopper kernels: activation of a gate of channels, and a scalar gate's decay over a whole chunk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.activation.gluon import both_sides, sigmoid, softplus


@gluon.jit
def activated(x, rate, bias, lower_bound, clamp, ACTIVATION: gl.constexpr):
    """`activated` of `tile.decay.triton`, in fewer instructions."""
    if ACTIVATION == "given":
        g = x
    elif ACTIVATION == "softplus":
        g = softplus(x + bias) * -rate
    else:
        g = lower_bound * sigmoid((x + bias) * rate)
    # A comparison, not a maximum: NaN must stay NaN.
    return gl.where(g < clamp, clamp, g)


@gluon.jit
def activated_bwd(x, dg, rate, bias, lower_bound, clamp, CLAMPED: gl.constexpr, ACTIVATION: gl.constexpr):
    """Adjoint of `activated`: gradients of x, and of A_log before its sum over rows and channels."""
    if ACTIVATION == "given":
        if CLAMPED:
            dg = gl.where(x < clamp, 0.0, dg)
        return dg, dg
    elif ACTIVATION == "softplus":
        u = x + bias
        g = softplus(u) * -rate
        if CLAMPED:
            dg = gl.where(g < clamp, 0.0, dg)
        return softplus_gate_bwd(u, g, dg, rate)
    else:
        u = x + bias
        s, other = both_sides(u * rate)
        if CLAMPED:
            dg = gl.where(lower_bound * s < clamp, 0.0, dg)
        dx = dg * (lower_bound * s * other) * rate
        return dx, gl.where(dx == 0.0, 0.0, u * dx)


@gluon.jit
def softplus_gate_bwd(u, g, dg, rate):
    """Gradients of u, and of A_log before its sum, for g = -rate * softplus(u)."""
    # After a reset dg is zero, and -inf * 0 would be NaN.
    return dg * sigmoid(u) * -rate, gl.where(dg == 0.0, 0.0, g * dg)


@gluon.jit
def chunk_decay(p_total, tile, there, opaque_zero, BW: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the decay over a tile's chunk for BW rows of a state in LAYOUT; zeros unless `there`.   [BW, 1]

    Each thread loads the number from an address that the compiler cannot prove uniform. A uniform load goes to a
    uniform register, and the warp waits for it right there, a chunk before it is needed (docs/facts/hopper.md, SASS-5).

    Args:
        p_total: [tiles] float32.
        opaque_zero: A 0 that the compiler cannot fold.
    """
    o_v = gl.arange(0, BW, layout=gl.SliceLayout(1, LAYOUT)) * opaque_zero
    return gl.load(p_total + tile + o_v, mask=(o_v == 0) & there, other=0.0)[:, None]
