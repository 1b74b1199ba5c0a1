"""Which slot a sequence uses, and where its tokens lie."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid


def entered(slots: Slots, sequences: int, pool: Tensor) -> tuple[Tensor, Tensor]:
    """[N] slot that each sequence enters from, and whether that slot is live."""
    slot = torch.arange(sequences, device=pool.device)
    if slots.source is not None:
        column = torch.zeros_like(slot)
        if slots.accepted is not None:
            column = (slots.accepted.to(torch.int64) - 1).clamp(0, slots.source.shape[1] - 1)
        slot = slots.source.to(torch.int64).gather(1, column[:, None])[:, 0]
    return slot, is_slot(slot, pool, slots.pad)


def is_slot(slot: Tensor, pool: Tensor, pad: int) -> Tensor:
    """Whether each number is a slot of the pool."""
    return (slot > pad) & (slot < pool.shape[0])


def spans(grid: ChunkGrid, device: torch.device) -> tuple[Tensor, Tensor]:
    """[N] first token of each sequence in the call's buffer, and its number of tokens."""
    if grid.cu is None:
        begin = torch.arange(grid.sequences, device=device) * grid.tokens
        return begin, torch.full_like(begin, grid.tokens)
    cu = grid.cu[: grid.sequences + 1]
    return cu[:-1], cu.diff()
