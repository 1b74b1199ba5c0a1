"""Parts of a call's heads, for a backward that needs less memory at once.

Between `scan_bwd` and `gradients` lie two states and two rows of values for each chunk and value head, twice the memory
of q, k and v. Heads are independent, so the launches can run for some heads after the others, with the same bits. Only
dA_log and ddt_bias may be summed over chunks in another order. A part has enough programs of `scan_bwd` to fill the
GPU, so that parts one after another take about the time of one launch.

Calls do so where the configuration of `scan_bwd` has HEAD_PARTS. No table of this version has it: on an H200 it takes
23 to 43 % off the peak, and adds 2 to 4 % to the time (docs/log/operators.md).
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

from torch import Tensor

from wyfold.autograd.delta_records import DIFFERENTIABLE, DeltaTensors
from wyfold.runtime.chunk_layout import ChunkGrid

LEAST_BYTES = 256 << 20
"""Least memory of a part's borders. Three more launches for less than that would take a few percent of its time."""

TENSORS = DeltaTensors._fields[:DIFFERENTIABLE]
"""Names of the tensors that have a gradient."""

ALIGNED = 8
"""Parts begin at a multiple of so many value heads. Their gates and write strengths then lie as those of all heads do,
at a multiple of 16 bytes in 16 bits too, and the same compiled kernels take them."""

ROWS = 64
"""Value rows of a program of `scan_bwd`."""


class HeadPart(NamedTuple):
    """A part of the heads of a call.

    Attributes:
        keys, values: Its key heads and its value heads.
        on_side: Whether its launches go to the side stream.
    """

    keys: slice
    values: slice
    on_side: bool = False

    def of_call(self, t: DeltaTensors) -> DeltaTensors:
        """The part's views of the tensors of a call."""
        given = zip(TENSORS, t[:DIFFERENTIABLE], strict=True)
        views: dict[str, Any] = {name: self._view(name, x, t.v.shape[2]) for name, x in given if x is not None}
        return t._replace(**views)

    def of_gradients(self, found: list[Tensor], HV: int) -> list[Tensor | None]:
        """The part's views of the gradients of a call with so many value heads; None for those without elements."""
        named = zip(TENSORS, found, strict=True)
        return [self._view(name, dx, HV) if dx.numel() else None for name, dx in named]

    def _view(self, name: str, x: Tensor, HV: int) -> Tensor:
        if name in ("A_log", "dt_bias"):  # of any shape with the heads first; kernels read their memory
            return x.view(HV, -1)[self.values]
        if name == "initial_state":
            return x[:, self.values]
        return x[:, :, self.keys if name in ("q", "k") else self.values]


def head_parts(t: DeltaTensors, grid: ChunkGrid, processors: int) -> list[HeadPart]:
    """Split a call's heads, evenly, into parts of which two fill the GPU and have `LEAST_BYTES` of borders or more.

    They alternate between a stream and its side stream. Where heads cannot be halved so, one part fills the GPU, and
    all are on one stream.

    Args:
        t: The call.
        grid: Its chunk grid.
        processors: Multiprocessors of the GPU.
    """
    (H, K), (HV, V) = t.q.shape[2:], t.v.shape[2:]
    group = HV // H
    # Two halves of `scan_bwd` run side by side. A sequence of a packed batch may be short, so its rows count for one.
    programs = 2 * (grid.sequences if grid.cu is None else 1) * -(-V // ROWS) * group
    at_once = max(1, processors // programs)
    of_head = grid.chunks * group * 2 * V * (K + grid.chunk_size) * t.q.element_size()
    heads = at_once * -(-LEAST_BYTES // max(1, of_head * at_once))
    count = -(-H // heads)
    step = ALIGNED // math.gcd(ALIGNED, group)
    share = -(-H // (count * step)) * step
    halves = 0 < count - 1 and share % (2 * step) == 0
    ends = [*range(0, H, share // 2 if halves else share), H]
    return [
        HeadPart(slice(begin, end), slice(begin * group, end * group), halves and number % 2 == 1)
        for number, (begin, end) in enumerate(itertools.pairwise(ends))
    ]
