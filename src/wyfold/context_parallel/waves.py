"""Waves: a rank's pieces of one depth, which run together because the states before them are known at the same time."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.partition import Handover, Partition, Piece


def waves(partition: Partition, rank: int, batch: int, device: torch.device) -> list[Wave]:
    """Return one wave for every depth that any rank has.

    Args:
        partition, rank: The partition of a row's tokens, and the rank.
        batch: B, number of rows.
        device: Of the waves' tensors.
    """
    T, count = partition.tokens(rank), len(partition.pieces[rank])
    found = []
    for depth in range(partition.depth + 1):
        pieces = partition.wave(rank, depth)
        placed = [(row, piece) for row in range(batch) for piece in pieces]
        numbers = [row * count + piece.number for row, piece in placed]
        states = torch.tensor(numbers, dtype=torch.int64, device=device)
        tokens = cu = None
        if len(pieces) > 1:
            starts = [row * T + piece.offset for row, piece in placed]
            lengths = torch.tensor([0, *(piece.length for _, piece in placed)])
            runs = [torch.arange(start, start + piece.length) for start, (_, piece) in zip(starts, placed)]
            tokens, cu = torch.cat(runs).to(device), lengths.cumsum(0).to(device)
        found.append(Wave(pieces, states, tokens, cu, partition.handovers(depth)))
    return found


class Wave(NamedTuple):
    """A rank's pieces of one depth.

    Attributes:
        pieces: The pieces, in token order.
        states: [B pieces] their rows among the states of all pieces.
        tokens: [n] indices of their tokens among the B T tokens of the rank; None for a single piece, which is a dense
            batch.
        cu_seqlens: [B pieces + 1] boundaries of the pieces; None for a dense batch.
        forward: Handovers from this depth to the next, of all ranks.
    """

    pieces: list[Piece]
    states: Tensor
    tokens: Tensor | None
    cu_seqlens: Tensor | None
    forward: list[Handover]

    def take(self, x: Tensor) -> Tensor:
        """Select the pieces' tokens of x [B, T, ...]."""
        if self.tokens is None:
            return x.narrow(1, self.pieces[0].offset, self.pieces[0].length)
        return x.flatten(0, 1).index_select(0, self.tokens)[None]

    def put(self, out: Tensor, x: Tensor) -> None:
        """Write the pieces' tokens x to a contiguous out [B, T, ...]."""
        if self.tokens is None:
            self.take(out).copy_(x)
        else:
            out.view(-1, *out.shape[2:]).index_copy_(0, self.tokens, x[0].to(out.dtype))
