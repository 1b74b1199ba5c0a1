"""A chunk's whole decay in shared memory, for Hopper kernels that hold a state."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LEAST = 32
"""Numbers that the copy engine brings at least, of which the first counts where a gate has one a chunk: what it writes
to shared memory begins at a multiple of 128 bytes.

They are not loaded into registers a chunk ahead: a number that all threads have alike goes to a register of the whole
warp as soon as it is there, which stops the warp until then, in every chunk (docs/facts.md, SASS-5).
"""


@gluon.jit
def decay(total, LAYOUT: gl.constexpr, CHANNEL: gl.constexpr):
    """What a state [value rows, K] in LAYOUT is multiplied by over a chunk: [1, K] of a channel gate, else [1, 1].

    Args:
        total: [K], or [LEAST], float32 in shared memory.
    """
    if CHANNEL:
        return total.load(gl.SliceLayout(0, LAYOUT))[None, :]
    else:
        return total.slice(0, 1).load(gl.SliceLayout(1, LAYOUT))[:, None]
