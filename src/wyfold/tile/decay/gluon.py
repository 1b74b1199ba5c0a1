"""A chunk's whole decay, one number under a scalar gate, for Hopper kernels that hold a state."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def chunk_decay(p_total, tile, there, opaque_zero, BW: gl.constexpr, LAYOUT: gl.constexpr):
    """The decay of a tile's chunk, for each of BW rows of a state in LAYOUT; zeros unless it is there.   [BW, 1]

    Each thread loads it for itself, from an address that is not known to be everyone's: a number known to be the warp's
    goes to a register of the whole warp as soon as it is asked for, and the warp waits for it there, a chunk before it
    is wanted (docs/facts/hopper.md, SASS-5).

    Args:
        p_total: [tiles] float32.
        nothing: 0, which the compiler does not know.
    """
    o_v = gl.arange(0, BW, layout=gl.SliceLayout(1, LAYOUT)) * opaque_zero
    return gl.load(p_total + tile + o_v, mask=(o_v == 0) & there, other=0.0)[:, None]
