"""Intermediate states of an eager call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from wyfold.autograd.workspace import WorkspacePart

if TYPE_CHECKING:
    from wyfold.autograd.delta_eager import EagerCall


class Checkpoints:
    """Writer of the intermediate states: states after every `checkpoint_every`-th token of a sequence."""

    def __init__(self, call: EagerCall, states: Tensor):
        self.call, self.every = call, call.options.checkpoint_every
        self.rows = states.flatten(0, 1) if call.cu is None else states
        counts = call.lengths // self.every
        self.first = counts.cumsum(0) - counts

    def leaving(self, part: WorkspacePart) -> Tensor:
        """Allocate [chunks, HV, K, V] for the states that leave the chunks of a part."""
        call = self.call
        return call.tensors.q.new_empty(part.table.chunks, call.HV, call.K, call.V, dtype=call.dtype)

    def put(self, part: WorkspacePart, leaving: Tensor) -> None:
        """Store those of a part's leaving states that are asked for."""
        sequence, position = part.chunk_ends()
        wanted = (position % self.every == 0).nonzero().flatten()
        row = self.first[sequence[wanted]] + position[wanted] // self.every - 1
        self.rows[row.to(self.rows.device)] = self.call.outside(leaving[wanted.to(leaving.device)])
