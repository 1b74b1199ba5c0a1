"""How the partitions of `segment_summary` in Gluon agree that M is zeros."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.index.gluon import barrier


class Smem(NamedTuple):
    """Numbers that the partitions tell each other through shared memory.

    Attributes:
        map_is_zero: [PARTS, 1] flags: the part's rows of M are zeros.
        count: [1] number of chunks to load; reduced once all flags are set.
    """

    map_is_zero: Any
    count: Any


@gluon.jit
def next_check(chunks):
    """Number of chunks after which M is checked next; early checks are close together."""
    return chunks + gl.maximum(gl.minimum(chunks, 16), 3)


@gluon.jit
def all_zeros(S):
    """Whether all numbers of S are zero."""
    return gl.max(gl.max((S != 0.0).to(gl.int32), 1), 0) == 0


@gluon.jit
def write_flag(flag, value):
    """Write a number [1] to shared memory, visible to every warp that is signalled afterwards."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    flag.store(gl.zeros([1], gl.int32, L) + value)
    barrier()


@gluon.jit
def read_flag(flag):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(flag.load(L), 0)
