"""Decay of a state over a whole chunk under a scalar gate, for Hopper kernels that hold a state."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
