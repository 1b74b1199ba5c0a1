"""Cuts a batch into parts that run one after another, so that workspace does not grow with sequence length.

A part is a run of whole chunks. Only the state passes from one part to the next, in full precision, so parts change no
bit: a border between parts is like a user's own split of a call at a chunk boundary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable, dense_table, packed_table

WORKSPACE_BYTES = 4 << 20  # of one tensor of states at chunk borders (docs/facts/cpu.md, CPU-3)
MIN_COLUMNS = 8  # chunks of a sequence in a part, at least


@dataclass(frozen=True)
class WorkspacePart:
    """A run of whole chunks that the launches process in one pass.

    Attributes:
        rows, tokens: Slices of the [B, T, ...] tensors: the part's block.
        table: Chunk table of the block.
        sequences: Slice of the states [N, HV, K, V]: the sequences of the table.
        index: Row at which the saved border states [rows, HV, K, V] hold the part's first entering state.
        entered: Number of leading sequences that began in an earlier part.
        left: Number of trailing sequences that continue in a later part.
        done: Tokens of the `entered` sequences before this part.
        first_chunk: Number of chunks in all earlier parts.
    """

    rows: slice
    tokens: slice
    table: ChunkTable
    sequences: slice
    index: int
    entered: int
    left: int
    done: int
    first_chunk: int

    def chunk_ends(self) -> tuple[Tensor, Tensor]:
        """[chunks] sequence of each chunk, and [chunks] number of that sequence's tokens up to the end of the chunk."""
        table = self.table
        counts = torch.tensor(table.columns, dtype=torch.int64)
        column = torch.repeat_interleave(torch.arange(len(table.columns)), counts)
        rank = torch.arange(table.chunks) - (counts.cumsum(0) - counts)[column]
        sequence = rank if table.order is None else table.order[rank]
        done = torch.where(sequence < self.entered, self.done, 0)
        return sequence + self.sequences.start, done + column * table.chunk_size + table.valid

    def block(self, x: Tensor) -> Tensor:
        """View the part's tokens of x [B, T, ...]."""
        return x[self.rows, self.tokens]


def chunks_per_part(state_bytes: int) -> int:
    """Number of chunks whose states, `state_bytes` each, fit the workspace; at least MIN_COLUMNS."""
    return max(MIN_COLUMNS, WORKSPACE_BYTES // max(1, state_bytes))


def border_rows(B: int, T: int, N: int | None, chunk_size: int, per_part: int) -> int:
    """Upper bound on the states that enter parts, from sizes alone; N is None for a dense batch."""
    if N is not None:
        return _ceil_div(chunk_rows(B, T, N, chunk_size), per_part)
    _, columns = _dense_block(B, per_part, MIN_COLUMNS)  # shorter batch rows fit one part with the most columns as well
    return B * _ceil_div(_ceil_div(T, chunk_size), columns)


def part_count(B: int, T: int, N: int | None, chunk_size: int, per_part: int) -> int:
    """Upper bound on the parts of a call, from sizes alone; N is None for a dense batch."""
    if N is not None:
        return border_rows(B, T, N, chunk_size, per_part)
    needed = _ceil_div(T, chunk_size)
    rows, columns = _dense_block(B, per_part, needed)
    return _ceil_div(B, rows) * _ceil_div(needed, columns)


def chunk_rows(B: int, T: int, N: int | None, chunk_size: int) -> int:
    """Upper bound on the chunks of a batch, from sizes alone; N is None for a dense batch."""
    return B * _ceil_div(T, chunk_size) if N is None else T // chunk_size + N


def parts(B: int, T: int, cu_seqlens: Tensor | None, chunk_size: int, per_part: int) -> list[WorkspacePart]:
    """Cut a dense batch (cu_seqlens None) or one packed buffer row into parts, in the order in which states pass.

    Args:
        B, T: Sizes of the token tensors; B = 1 if packed.
        cu_seqlens: [N+1] legal boundaries, int64 on the CPU, or None.
        chunk_size: C.
        per_part: Maximum number of chunks in a part.
    """
    if cu_seqlens is None:
        return list(_dense_parts(B, T, chunk_size, per_part))
    return list(_packed_parts(cu_seqlens, chunk_size, per_part))


def _dense_block(B: int, per_part: int, needed: int) -> tuple[int, int]:
    """Batch rows and chunk columns of one part of a dense batch.

    Args:
        B: Batch rows.
        per_part: Maximum number of chunks in a part.
        needed: Chunk columns of each batch row. A part gets at least min(MIN_COLUMNS, needed) of them.
    """
    rows = max(1, min(B, per_part // max(1, min(MIN_COLUMNS, needed))))
    return rows, max(1, per_part // rows)


def _dense_parts(B: int, T: int, C: int, per_part: int) -> Iterator[WorkspacePart]:
    rows, columns = _dense_block(B, per_part, _ceil_div(T, C))
    border = chunk = 0
    for first in range(0, B, rows):
        last = min(B, first + rows)
        for start in range(0, T, columns * C):
            stop = min(T, start + columns * C)
            n = last - first
            table = dense_table(n, stop - start, C)
            across = slice(first, last)
            entered, left = n if start else 0, n if stop < T else 0
            yield WorkspacePart(across, slice(start, stop), table, across, border, entered, left, start, chunk)
            border, chunk = border + n, chunk + table.chunks


def _packed_parts(cu_seqlens: Tensor, C: int, per_part: int) -> Iterator[WorkspacePart]:
    """Cut after every `per_part` chunks, counted in buffer order."""
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    counts = (ends - begins + (C - 1)) // C
    after = counts.cumsum(0)
    total = int(after[-1]) if after.shape[0] else 0
    for index, chunk in enumerate(range(0, total, per_part)):
        stop = min(total, chunk + per_part)
        edge = torch.tensor([chunk, stop - 1])
        first, last = torch.searchsorted(after, edge, right=True).tolist()
        done = (chunk - int(after[first] - counts[first])) * C
        start = int(begins[first]) + done
        end = min(int(ends[last]), int(begins[last]) + (stop - int(after[last] - counts[last])) * C)
        lengths = ends[first : last + 1].clamp(max=end) - begins[first : last + 1].clamp(min=start)
        table, sequences = packed_table(lengths, C), slice(first, last + 1)
        entered, left = int(done > 0), int(end < int(ends[last]))
        yield WorkspacePart(slice(0, 1), slice(start, end), table, sequences, index, entered, left, done, chunk)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
