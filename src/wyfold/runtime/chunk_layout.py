"""Index tables of chunks and segments.

`ChunkTable` says which tokens each chunk of a part holds. It is made on the host. A part is a run of whole chunks that
one pass over the stages processes (`autograd/workspace.py` cuts them). Inside a part, chunks are numbered column by
column: column j holds the j-th chunk of every sequence that has one, longest sequences first. A scan steps through
columns, and the sequences that are not finished are always a prefix of the states.

`ChunkGrid` and `Segments` describe a whole call for the kernels. They are made on the device, without waiting for it.
`EvenSegments` are those of a dense batch, for kernels that need no tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
        tokens: Tokens of each of the n buffer rows if the sequences are uniform, else of the one row they share.
        order: [n] rank -> sequence, longest first; None if uniform.
        token: [chunks, C] token in the shared row, or -1 in padding; None if uniform.
        slot: [tokens] chunk * C + row of each token; None if uniform.
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
        """Whether every sequence is a separate buffer row, each of `tokens` tokens."""
        return self.token is None

    @cached_property
    def chunks(self) -> int:
        return sum(self.columns)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Number of the first chunk of each column."""
        starts = [0]
        for count in self.columns[:-1]:
            starts.append(starts[-1] + count)
        return tuple(starts[: len(self.columns)])

    @cached_property
    def valid(self) -> Tensor:
        """[chunks] int64 rows of each chunk that hold a token; fewer than C only in the last chunk of a sequence."""
        if self.token is not None:
            return (self.token >= 0).sum(1)
        valid = torch.full((self.chunks,), self.chunk_size)
        if self.columns:
            valid[self.starts[-1] :] = self.tokens - (len(self.columns) - 1) * self.chunk_size
        return valid

    def column_rows(self) -> list[tuple[slice, int]]:
        """Chunks of each column, and the rows of its longest chunk that hold a token."""
        return [
            (slice(first, first + count), int(self.valid[first : first + count].max()))
            for first, count in zip(self.starts, self.columns, strict=True)
        ]

    @cached_property
    def padding(self) -> Tensor | None:
        """[chunks, C] bool, True in rows that hold no token; None if every row holds one."""
        if self.uniform and self.tokens % self.chunk_size == 0:
            return None
        return torch.arange(self.chunk_size) >= self.valid[:, None]


def dense_table(rows: int, tokens: int, chunk_size: int) -> ChunkTable:
    """Chunk table of `rows` buffer rows, each with one sequence of `tokens` tokens."""
    return ChunkTable(chunk_size, rows, (rows,) * math.ceil(tokens / chunk_size), tokens)


def packed_table(lengths: Tensor, chunk_size: int) -> ChunkTable:
    """Chunk table of sequences that lie one after another in one buffer row.

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
    """Chunk grid of a whole call, on the tensors' device. Its tensors are sized by capacity, without device waits.

    Chunks are numbered sequence by sequence. A packed batch has at most `chunks` chunks. Unused numbers belong to a
    pseudo-sequence N, the tokens past the last boundary.

    Attributes:
        chunk_size: Rows of a chunk tile, C.
        batch, tokens: B and T of the token tensors.
        sequences: N.
        chunks: Number of chunks, or its bound for a packed batch.
        cu: [N+2] int64 boundaries and T. Made legal, whatever the caller's tensor holds. None for a dense batch.
        first: [N+1] int64 first chunk of each sequence, and of the pseudo-sequence; None for a dense batch.
        sequence: [chunks] int64 sequence of each chunk; None for a dense batch.
        every: Tokens between the kept states of a sequence; 0 if none are kept.
        first_state: [N+1] int64 number of kept states in the sequences before each, and in all; None for a dense batch,
            or if none are kept.
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
        """Row of each sequence's first state among all kept states: `first_state`, or [N] for a dense batch."""
        if self.first_state is not None:
            return self.first_state
        step = self.tokens // self.every
        if step == 0:
            return torch.full((self.sequences,), 0, device=device)
        return torch.arange(0, self.sequences * step, step, device=device)


def max_chunks(batch: int, tokens: int, chunk_size: int, packed_sequences: int | None) -> int:
    """Number of chunks of a dense batch (packed_sequences None), or an upper bound for a packed batch."""
    per_row = -(-tokens // chunk_size)
    return batch * per_row if packed_sequences is None else per_row + packed_sequences


def chunk_grid(batch: int, tokens: int, chunk_size: int, cu_seqlens: Tensor | None, every: int = 0) -> ChunkGrid:
    """Chunk grid of a call; cu_seqlens [N+1] on any device, or None for a dense batch."""
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
    """Rule for cutting long sequences into segments: runs of whole chunks that are scanned in parallel.

    A sequence of n chunks is left whole if n < fewest. Otherwise it is cut after every
    max(shortest, ceil(n / most)) chunks, where shortest is `chunks`, or less if n / SHORT chunks are fewer and `most`
    is at least SHORT. Only the length of the sequence matters, not the rest of the batch.

    Attributes:
        chunks: Fewest chunks of a segment other than the last, in a sequence of more than SHORT segments; 0 if nothing
            is cut.
        most: Most segments of a sequence.
        fewest: Chunks of the shortest sequence that is cut.
    """

    chunks: int
    most: int
    fewest: int

    def segments(self, chunks: int) -> int:
        """Number of segments of a sequence of so many chunks."""
        return max(1, -(-chunks // self.length(chunks)))

    def length(self, chunks: int) -> int:
        """Chunks of every segment of a sequence of so many chunks, except its last segment."""
        if not self.chunks or chunks < self.fewest:
            return max(1, chunks)
        shortest = self.chunks if self.most < SHORT else min(self.chunks, -(-chunks // SHORT))
        return max(shortest, -(-chunks // self.most))


SHORT = 8
"""Most segments of a sequence that may be shorter than `Cut.chunks`."""


@dataclass(frozen=True)
class Segments:
    """Segments of a call, on the tensors' device. Sized by capacity, like the chunk grid that they are cut from.

    A scan treats segments as the sequences of one packed buffer, in which the rows of a dense batch follow each other.
    Segments are numbered sequence by sequence. Unused numbers belong to the pseudo-sequence N and have no token. A
    border is the point between two segments of one sequence: border i - n follows segment i of sequence n.

    Attributes:
        grid: Chunk grid of the buffer whose sequences are the segments. Its chunks are those of the call's grid.
        sequences: N of the call.
        borders: Number of borders, or its bound for a packed batch.
        sequence: [segments] int64 sequence of each segment.
        first: [N+1] int64 first segment of each sequence, and of the pseudo-sequence.
        leading: [borders] int64 segment before each border. For an unused border, a segment that ends its sequence and
            is followed by no segment of a sequence.
        divided: [max_divided] int64 sequences that are cut, in order; N in unused entries.
        expected: Number of segments if all sequences have equal lengths. Selects launches while the lengths are known
            on the device only.
    """

    grid: ChunkGrid
    sequences: int
    borders: int
    sequence: Tensor
    first: Tensor
    leading: Tensor
    divided: Tensor
    expected: int


@dataclass(frozen=True)
class EvenSegments:
    """Segments of a dense batch for kernels that compute the tables of `Segments` from sizes. It needs no launch.

    Attributes:
        grid: Chunk grid of the buffer whose sequences are the segments, without tables.
        sequences, borders, expected: As in `Segments`.
        length: Chunks of every segment but the last one of a sequence, which may have fewer.
    """

    grid: ChunkGrid
    sequences: int
    borders: int
    expected: int
    length: int


def max_borders(batch: int, tokens: int, chunk_size: int, packed: bool, cut: Cut) -> int:
    """Number of borders of a dense batch, or an upper bound for a packed batch; from sizes alone."""
    if not packed:
        return batch * (cut.segments(-(-tokens // chunk_size)) - 1)
    if cut.segments(-(-tokens // chunk_size)) == 1:
        return 0
    # Of one sequence: a border for each `chunks` full chunks, or at most SHORT - 1 from `fewest` chunks on.
    few = SHORT - 1 if cut.most >= SHORT else 0
    return max(tokens // (chunk_size * cut.chunks), few * tokens // _fewest_tokens(chunk_size, cut))


def _fewest_tokens(chunk_size: int, cut: Cut) -> int:
    """Tokens of the shortest sequence that is cut."""
    return (cut.fewest - 1) * chunk_size + 1


def max_divided(grid: ChunkGrid, cut: Cut) -> int:
    """Number of sequences of a dense batch that are cut, or an upper bound for a packed batch."""
    if grid.cu is None:
        return grid.sequences if cut.segments(grid.per_sequence) > 1 else 0
    return min(grid.sequences, grid.tokens // _fewest_tokens(grid.chunk_size, cut))


def expected_segments(sequences: int, tokens: int, chunk_size: int, cut: Cut) -> int:
    """Number of segments if the sequences share `tokens` tokens (B T) evenly, as in a dense batch."""
    return sequences * cut.segments(-(-tokens // (chunk_size * max(1, sequences))))


def in_chunks_of(segments: Segments, longer: ChunkGrid, grid: ChunkGrid) -> Segments:
    """The segments of a call whose chunks are shorter than those that they were cut from.

    Args:
        segments: Segments of whole chunks of `longer`.
        longer, grid: Chunk grids of the call; a chunk of `longer` has a multiple of the rows of one of `grid`.
    """
    ratio, first = longer.chunk_size // grid.chunk_size, segments.grid.first
    if first is not None and longer.first is not None and grid.first is not None:
        first = (first - longer.first[segments.sequence]) * ratio + grid.first[segments.sequence]
    elif first is not None:
        first = first * ratio + segments.sequence * (grid.per_sequence - ratio * longer.per_sequence)
    buffer = replace(segments.grid, chunk_size=grid.chunk_size, chunks=grid.chunks, first=first)
    return replace(segments, grid=buffer)


WITHOUT_TABLES = ("segment_summary", "segment_fold", "scan")
"""Stages of a forward that have no tables of a dense batch's segments, if all of them are Gluon kernels."""


def without_tables(stages: tuple[str, ...], backends: Mapping[str, str]) -> tuple[str, ...]:
    """The stages of a forward, without `segment_grid` if no kernel needs it.

    Args:
        stages: Names of the stages in order, with `chunk_grid` for a packed batch.
        backends: Stage -> backend of its kernel.
    """
    if "chunk_grid" in stages or any(backends.get(stage) != "gluon" for stage in WITHOUT_TABLES):
        return stages
    return tuple([stage for stage in stages if stage != "segment_grid"])


def even_segments(grid: ChunkGrid, cut: Cut) -> EvenSegments:
    """Segments of a dense batch, from its chunk grid."""
    N, chunks = grid.sequences, grid.per_sequence
    count = N * cut.segments(chunks)
    buffer = replace(grid, batch=1, tokens=grid.batch * grid.tokens, sequences=count)
    return EvenSegments(buffer, N, count - N, count, cut.length(chunks))


def segment_grid(grid: ChunkGrid, cut: Cut, device: torch.device) -> Segments:
    """Segments of a call, from its chunk grid."""
    N, C = grid.sequences, grid.chunk_size
    borders = max_borders(grid.batch, grid.tokens, C, grid.cu is not None, cut)
    begins = torch.arange(N + 1, device=device) * grid.tokens if grid.cu is None else grid.cu[: N + 1]
    chunks = (begins.diff() + (C - 1)) // C
    long = chunks >= cut.fewest
    shortest = torch.full_like(chunks, cut.chunks)
    if cut.most >= SHORT:
        shortest = torch.minimum(shortest, (chunks + (SHORT - 1)) // SHORT)
    length = torch.where(long, torch.maximum((chunks + (cut.most - 1)) // cut.most, shortest), chunks.clamp(min=1))
    first, before = chunks.new_zeros(N + 1), chunks.new_zeros(N + 1)
    counts = ((chunks + (length - 1)) // length).clamp(min=1)
    torch.cumsum(counts, 0, out=first[1:])
    torch.cumsum(chunks, 0, out=before[1:])
    number = torch.arange(N + borders, device=device)
    sequence = torch.searchsorted(first[1:], number, right=True)
    # An entry for the pseudo-sequence, whose segments have no token.
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
