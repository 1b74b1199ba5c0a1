"""Which tokens each chunk of a part holds, decided on the host.

A part is a run of whole chunks that one pass of the launches handles (`autograd/workspace.py` cuts them). Inside a part
chunks are numbered column by column: column j holds the j-th chunk of every sequence that has one, longest sequences
first, so that a scan steps through columns and the sequences still running are always a prefix of the states.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.runtime.choices import CHUNK_SIZES as CHUNK_SIZES


@dataclass(frozen=True)
class ChunkTable:
    """Chunk grid of one part.

    Attributes:
        chunk_size: Rows of a chunk tile, C.
        sequences: Sequences with tokens in the part, n.
        columns: columns[j] sequences have a j-th chunk.
        tokens: Tokens of each of the n buffer rows if all sequences are alike, else of the one row they share.
        order: [n] rank -> sequence, longest first; None when all are alike.
        token: [chunks, C] token in the shared row, or -1 in padding; None when all are alike.
        slot: [tokens] chunk * C + row of each token; None when all are alike.
    """

    chunk_size: int
    sequences: int
    columns: tuple[int, ...]
    tokens: int
    order: Tensor | None = None
    token: Tensor | None = None
    slot: Tensor | None = None

    @property
    def uniform(self) -> bool:
        """Every sequence is a buffer row of its own, all of `tokens` tokens."""
        return self.token is None

    @cached_property
    def chunks(self) -> int:
        return sum(self.columns)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First chunk of each column."""
        starts = [0]
        for count in self.columns[:-1]:
            starts.append(starts[-1] + count)
        return tuple(starts[: len(self.columns)])

    @cached_property
    def valid(self) -> Tensor:
        """[chunks] int64 real rows of each chunk; only the last of a sequence may have fewer than C."""
        if self.token is not None:
            return (self.token >= 0).sum(1)
        valid = torch.full((self.chunks,), self.chunk_size)
        if self.columns:
            valid[self.starts[-1] :] = self.tokens - (len(self.columns) - 1) * self.chunk_size
        return valid

    @cached_property
    def padding(self) -> Tensor | None:
        """[chunks, C] bool, True in rows that hold no token; None where every row holds one."""
        if self.uniform and self.tokens % self.chunk_size == 0:
            return None
        return torch.arange(self.chunk_size) >= self.valid[:, None]


def dense_table(rows: int, tokens: int, chunk_size: int) -> ChunkTable:
    """Grid of `rows` buffer rows that each hold one sequence of `tokens` tokens."""
    return ChunkTable(chunk_size, rows, (rows,) * math.ceil(tokens / chunk_size), tokens)


def packed_table(lengths: Tensor, chunk_size: int) -> ChunkTable:
    """Grid of sequences that lie one after another in one buffer row.

    Args:
        lengths: [n] int64 on the CPU. A sequence of length 0 has no chunk.
        chunk_size: C.
    """
    if lengths.shape[0] == 1:
        return dense_table(1, int(lengths[0]), chunk_size)
    C = chunk_size
    counts = (lengths + (C - 1)) // C
    order = torch.argsort(counts, descending=True, stable=True)
    running = torch.bincount(counts[counts > 0] - 1).flip(0).cumsum(0).flip(0)  # sequences with more than j chunks
    column = torch.repeat_interleave(torch.arange(running.shape[0]), running)
    rank = torch.arange(column.shape[0]) - (running.cumsum(0) - running)[column]
    sequence = order[rank]
    first = (lengths.cumsum(0) - lengths)[sequence] + column * C
    row = torch.arange(C)
    token = torch.where(column[:, None] * C + row < lengths[sequence][:, None], first[:, None] + row, -1)
    flat = token.flatten()
    real = flat >= 0
    tokens = int(lengths.sum())
    slot = torch.empty(tokens, dtype=torch.int64)
    slot[flat[real]] = torch.arange(flat.shape[0])[real]
    return ChunkTable(C, lengths.shape[0], tuple(running.tolist()), tokens, order, token, slot)


@dataclass(frozen=True)
class ChunkGrid:
    """Chunk grid of a whole call, on the tensors' device: sized by capacity, made without waiting for the device.

    Chunks are numbered sequence by sequence. Of a packed batch there are at most `chunks`; the numbers that no sequence
    needs belong to a pseudo-sequence N, the tokens past the last boundary.

    Attributes:
        chunk_size: Rows of a chunk tile, C.
        batch, tokens: B and T of the token tensors.
        sequences: N.
        chunks: Number of chunks, or its bound for a packed batch.
        cu: [N+2] int64 boundaries, legal whatever the caller's tensor held, and T; None when each row is a sequence.
        first: [N+1] int64 first chunk of each sequence, and of the pseudo-sequence; None likewise.
        sequence: [chunks] int64 sequence of each chunk; None likewise.
        every: Tokens between the states that are kept of a sequence; 0: none are.
        first_state: [N+1] int64 such states of the sequences before each, and of all; None of a dense batch, or if none
            are kept.
    """

    chunk_size: int
    batch: int
    tokens: int
    sequences: int
    chunks: int
    cu: Tensor | None = None
    first: Tensor | None = None
    sequence: Tensor | None = None
    every: int = 0
    first_state: Tensor | None = None

    @property
    def per_sequence(self) -> int:
        """Chunks of each sequence of a dense batch."""
        return -(-self.tokens // self.chunk_size)

    def first_states(self, device: torch.device) -> Tensor:
        """`first_state`, of a dense batch [N] too: the row of each sequence's first state among all that are kept."""
        if self.first_state is not None:
            return self.first_state
        step = self.tokens // self.every
        if step == 0:
            return torch.full((self.sequences,), 0, device=device)
        return torch.arange(0, self.sequences * step, step, device=device)


def max_chunks(batch: int, tokens: int, chunk_size: int, packed_sequences: int | None) -> int:
    """Chunks of a dense batch (packed_sequences None), or what a packed one cannot need more of."""
    per_row = -(-tokens // chunk_size)
    return batch * per_row if packed_sequences is None else per_row + packed_sequences


def chunk_grid(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None, every: int = 0) -> ChunkGrid:
    """The grid of a call; cu_seqlens [N+1] on any device, or None for a dense batch."""
    if cu_seqlens is None:
        return ChunkGrid(chunk_size, batch, tokens, batch, max_chunks(batch, tokens, chunk_size, None), every=every)
    N = cu_seqlens.shape[0] - 1
    chunks = max_chunks(batch, tokens, chunk_size, N)
    cu = cu_seqlens.new_full((N + 2,), tokens, dtype=torch.int64)
    cu[: N + 1] = cu_seqlens.clamp(0, tokens).cummax(0).values
    cu[0] = 0
    first = cu.new_zeros(N + 1)
    torch.cumsum((cu[1 : N + 1] - cu[:N] + (chunk_size - 1)) // chunk_size, 0, out=first[1:])
    number = torch.arange(chunks, device=cu.device)
    sequence = torch.searchsorted(first[1:], number, right=True)
    first_state = None
    if every:
        first_state = cu.new_zeros(N + 1)
        torch.cumsum((cu[1 : N + 1] - cu[:N]) // every, 0, out=first_state[1:])
    return ChunkGrid(chunk_size, batch, tokens, N, chunks, cu, first, sequence, every, first_state)


class Cut(NamedTuple):
    """How long sequences are cut into segments, runs of whole chunks that are scanned side by side.

    A sequence of n chunks is left whole if n < CUT_FROM * chunks, and is cut after every max(chunks, ceil(n / most))
    chunks otherwise: its own length decides, and numbers that are the same for every batch.

    Attributes:
        chunks: Fewest chunks of a segment that is not its sequence's last; 0: nothing is cut.
        most: Most segments of a sequence.
    """

    chunks: int
    most: int

    def segments(self, chunks: int) -> int:
        """Of a sequence of so many chunks."""
        return max(1, -(-chunks // self.length(chunks)))

    def length(self, chunks: int) -> int:
        """Chunks of every segment of such a sequence but its last."""
        if not self.chunks or chunks < CUT_FROM * self.chunks:
            return max(1, chunks)
        return max(self.chunks, -(-chunks // self.most))


CUT_FROM = 4


@dataclass(frozen=True)
class Segments:
    """Where the segments of a call lie, on the tensors' device: sized by capacity, like the grid they are cut from.

    To a scan they are the sequences of one packed buffer, all rows of a dense batch one after another. They are
    numbered sequence by sequence; numbers that no sequence needs belong to the pseudo-sequence N and have no token. A
    border is where a segment ends and its sequence goes on: after segment i of sequence n, border i - n.

    Attributes:
        grid: Chunk grid of the buffer whose sequences are the segments; chunks are those of the call's own grid.
        sequences: N of the call.
        borders: Number of borders, or its bound for a packed batch.
        sequence: [segments] int64 sequence of each.
        first: [N+1] int64 first segment of each sequence, and of the pseudo-sequence.
        leading: [borders] int64 segment before each; of a border that no sequence needs, one behind which no sequence
            goes on, and which no segment of a sequence follows.
        divided: [most_divided] int64 sequences that are cut, in their order; N in the places of those there are fewer.
        expected: Segments there are if all sequences are alike: to choose a launch by, where lengths are on the device.
    """

    grid: ChunkGrid
    sequences: int
    borders: int
    sequence: Tensor
    first: Tensor
    leading: Tensor
    divided: Tensor
    expected: int


def max_borders(batch: int, tokens: int, chunk_size: int, packed: bool, cut: Cut) -> int:
    """Borders of a dense batch, or what a packed one cannot have more of; from sizes alone."""
    if not packed:
        return batch * (cut.segments(-(-tokens // chunk_size)) - 1)
    return tokens // (chunk_size * cut.chunks) if cut.segments(-(-tokens // chunk_size)) > 1 else 0


def max_divided(grid: ChunkGrid, cut: Cut) -> int:
    """Sequences of a dense batch that are cut, or what a packed one cannot have more of."""
    if grid.cu is None:
        return grid.sequences if cut.segments(grid.per_sequence) > 1 else 0
    return min(grid.sequences, grid.tokens // ((CUT_FROM * cut.chunks - 1) * grid.chunk_size + 1))


def expected_segments(sequences: int, tokens: int, chunk_size: int, cut: Cut) -> int:
    """Segments of so many sequences that share B T tokens evenly: those of a dense batch."""
    return sequences * cut.segments(-(-tokens // (chunk_size * max(1, sequences))))


def segment_grid(grid: ChunkGrid, cut: Cut, device: torch.device) -> Segments:
    """The segments of a call's grid."""
    N, C = grid.sequences, grid.chunk_size
    borders = max_borders(grid.batch, grid.tokens, C, grid.cu is not None, cut)
    begins = torch.arange(N + 1, device=device) * grid.tokens if grid.cu is None else grid.cu[: N + 1]
    chunks = (begins.diff() + (C - 1)) // C
    long = chunks >= CUT_FROM * cut.chunks
    length = torch.where(long, ((chunks + (cut.most - 1)) // cut.most).clamp(min=cut.chunks), chunks.clamp(min=1))
    first, before = chunks.new_zeros(N + 1), chunks.new_zeros(N + 1)
    counts = ((chunks + (length - 1)) // length).clamp(min=1)
    torch.cumsum(counts, 0, out=first[1:])
    torch.cumsum(chunks, 0, out=before[1:])
    number = torch.arange(N + borders, device=device)
    sequence = torch.searchsorted(first[1:], number, right=True)
    # A place past the last sequence, so that what lies there has no token.
    length = torch.cat([length, length.new_zeros(1)])
    at = (number - first[sequence]) * length[sequence]
    cu = torch.cat([begins[sequence] + at * C, begins[-1:]])
    tokens = grid.batch * grid.tokens
    buffer = replace(grid, batch=1, tokens=tokens, sequences=N + borders, cu=cu)
    buffer = replace(buffer, first=before[sequence] + at, sequence=None)
    border, divided = number[:borders], torch.arange(1, 1 + max_divided(grid, cut), device=device)
    behind = first[1:] - torch.arange(1, N + 1, device=device)
    leading = (border + torch.searchsorted(behind, border, right=True)).clamp(max=N + borders - 2)
    divided = torch.searchsorted((counts > 1).cumsum(0), divided)
    return Segments(buffer, N, borders, sequence, first, leading, divided, expected_segments(N, tokens, C, cut))
