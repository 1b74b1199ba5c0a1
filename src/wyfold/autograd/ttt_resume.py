"""Resumes TTT-Linear inside a mini-batch, by padding sequences to the grid of mini-batches.

Gradients of a mini-batch are taken at its entering state, so a call that resumes inside one must use the same grid of
mini-batches as the call before it. Padding rows in front of each sequence, one for every token that its open mini-batch
already has, align it. Everything else is the ordinary pass over whole mini-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Resumption:
    """A packed buffer with padding rows in front of its sequences.

    Attributes:
        cu_seqlens: [N+1] int64 on the CPU, boundaries with the padding rows.
        taken: [N] padding rows of each sequence; 0 for an empty one, whose mini-batch stays unchanged.
        position: [N] tokens in each sequence's open mini-batch after the call.
        row: [tokens] row of each token that belongs to a sequence; None without padding rows.
    """

    cu_seqlens: Tensor
    taken: Tensor
    position: Tensor
    row: Tensor | None

    def widen(self, x: Tensor) -> Tensor:
        """[1, T, ...] -> [1, rows, ...] with zeros in the padding rows; x itself if there are none."""
        if self.row is None:
            return x
        rows = x.new_zeros(1, int(self.cu_seqlens[-1]), *x.shape[2:])
        return rows.index_copy_(1, self.row.to(x.device), x[:, : self.row.shape[0]])

    def buffer(self, x: Tensor) -> Tensor:
        """Allocate [1, rows, ...] for `narrow` to copy to x [1, T, ...]; x itself if there are no padding rows."""
        return x if self.row is None else x.new_empty(1, int(self.cu_seqlens[-1]), *x.shape[2:])

    def narrow(self, rows: Tensor, x: Tensor) -> None:
        """Copy the rows that hold tokens to x."""
        if self.row is not None:
            x[:, : self.row.shape[0]] = rows.index_select(1, self.row.to(x.device))


def resume(operator: str, cu_seqlens: Tensor, position: Tensor | None, chunk_size: int) -> Resumption:
    """Compute the padding that resumes sequences whose open mini-batches have `position` tokens.

    Args:
        operator: Public name, for the message.
        cu_seqlens: [N+1] legal boundaries, int64 on the CPU.
        position: [N] integer in [0, chunk_size), or None for zeros. Copying it to the CPU waits for its device.
        chunk_size: Tokens of a mini-batch.

    Raises:
        ValueError: a position outside its mini-batch.
    """
    lengths = cu_seqlens.diff()
    position = torch.zeros_like(lengths) if position is None else position.detach().to("cpu", torch.int64)
    if bool(((position < 0) | (position >= chunk_size)).any()):
        got = f"from {int(position.min())} to {int(position.max())}"
        raise ValueError(f"{operator}: state.position must be from 0 to chunk_size - 1 = {chunk_size - 1}, got {got}")
    taken = torch.where(lengths > 0, position, 0)
    before = taken.cumsum(0)
    row = None
    if bool(taken.any()):
        row = torch.arange(int(cu_seqlens[-1])) + before.repeat_interleave(lengths)
    boundaries = cu_seqlens + torch.cat([before.new_zeros(1), before])
    return Resumption(boundaries, taken, (position + lengths) % chunk_size, row)
