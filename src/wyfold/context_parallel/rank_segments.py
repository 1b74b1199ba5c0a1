"""Where the segments lie of what a rank holds, planned on the host, which knows the rank's pieces.

Each piece is cut by its own length, as any sequence is. Where its sequence comes from another rank, or goes on at one,
it has a segment more, so that what happens at the rank's edges happens at borders of segments:

    a segment without a token before it     the border behind it is where the state of the rank before enters; the
                                            segment behind the border does not begin a sequence, so it has a map
    a segment behind its last full chunk    of the tokens that do not fill another, or of none; the segments before it
                                            have full chunks, and maps

Both are ordinary segments to every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from wyfold.context_parallel.partition import Piece
from wyfold.runtime.chunk_layout import ChunkGrid, Cut, Segments


class SegmentCounts(NamedTuple):
    """Lengths of the lists below, and what else is known on the host.

    Attributes:
        sequences: Pieces of all rows.
        segments, borders, divided: As in `Segments`.
        entering, leaving: Pieces of all rows that come from another rank, and that go on at one.
        chunks: Chunks with a token.
        tiles: And those of the tokens past the last piece.
        tokens: Up to the end of the last piece.
    """

    sequences: int
    segments: int
    borders: int
    divided: int
    entering: int
    leaving: int
    chunks: int
    tiles: int
    tokens: int


class RankSegments(NamedTuple):
    """The segments of a rank's pieces, of all rows, one after another.

    Attributes:
        counts: Sizes.
        cu, chunk: [segments + 1] first token of each segment in the buffer of all rows, and [segments] first chunk.
        sequence, first, leading, divided: As in `Segments`.
        entered, came: [entering] border at which the state of another rank enters, and its sequence; by piece, then by
            row.
        exits, goes: [leaving] last border before the rank's edge, and its sequence; likewise.
        grid_cu, grid_first, grid_sequence: Of the pieces' own chunks, `ChunkGrid`'s.
    """

    counts: SegmentCounts
    cu: Tensor
    chunk: Tensor
    sequence: Tensor
    first: Tensor
    leading: Tensor
    divided: Tensor
    incoming_border: Tensor
    incoming_seq: Tensor
    outgoing_border: Tensor
    outgoing_seq: Tensor
    grid_cu: Tensor
    grid_first: Tensor
    grid_sequence: Tensor

    @classmethod
    def of(cls, table: Tensor, counts: Sequence[int]) -> RankSegments:
        """From what `segment_tables` gives, its numbers on the device of the call."""
        N, segments, borders, divided, entering, leaving, _, tiles, _ = counts
        ends = entering, entering, leaving, leaving
        sizes = segments + 1, segments, segments, N + 1, borders, divided, *ends, N + 2, N + 1, tiles
        found = table.split([size + size % 2 for size in sizes])
        return cls(SegmentCounts(*counts), *(x[:size] if size % 2 else x for x, size in zip(found, sizes, strict=True)))

    def grid(self, chunk_size: int, tokens: int) -> ChunkGrid:
        """Of the pieces, in a buffer of so many tokens."""
        N, tiles = self.counts.sequences, self.counts.tiles
        return ChunkGrid(chunk_size, 1, tokens, N, tiles, self.grid_cu, self.grid_first, self.grid_sequence)

    def segments(self, grid: ChunkGrid) -> Segments:
        """As the scans take them; grid: of the pieces."""
        N, count, borders = self.counts[:3]
        buffer = replace(grid, sequences=count, cu=self.cu, first=self.chunk, sequence=None)
        places = self.sequence, self.first, self.leading, self.divided
        return Segments(buffer, N, borders, *places, likely=count)


def segment_tables(
    pieces: Sequence[Piece], batch: int, tokens: int, chunk_size: int, cut: Cut
) -> tuple[list[int], SegmentCounts]:
    """The numbers of `RankSegments`, one list after another, each of an even length, and their counts.

    Args:
        pieces: The rank's.
        batch, tokens: Rows, and tokens of each.
        chunk_size: C.
        cut: How long pieces are cut.
    """
    cu: list[int] = []
    chunk: list[int] = []
    sequence: list[int] = []
    first: list[int] = []
    leading: list[int] = []
    divided: list[int] = []
    incoming_border: dict[tuple[int, int], tuple[int, int]] = {}
    outgoing_border: dict[tuple[int, int], tuple[int, int]] = {}
    grid_cu: list[int] = []
    grid_first: list[int] = []
    grid_sequence: list[int] = []
    chunks = end = 0
    for row in range(batch):
        for piece in pieces:
            n, before = len(first), len(sequence)
            first.append(before)
            token, at = row * tokens + piece.offset, chunks
            lengths = _lengths(piece, chunk_size, cut)
            for length in lengths:
                cu.append(token)
                chunk.append(at)
                sequence.append(n)
                token, at = token + length, at + length // chunk_size
            grid_cu.append(token - piece.length)
            grid_first.append(chunks)
            grid_sequence += [n] * -(-piece.length // chunk_size)
            chunks, end = len(grid_sequence), token
            borders = range(before, before + len(lengths) - 1)
            leading += borders
            if borders:
                divided.append(n)
            if not piece.first:
                incoming_border[piece.entering, row] = borders[0] - n, n
            if not piece.last:
                outgoing_border[piece.leaving, row] = borders[-1] - n, n
    N = len(first)
    grid_sequence += [N] * -(-(batch * tokens - end) // chunk_size)
    tiles = chunks, len(grid_sequence)
    counts = SegmentCounts(
        N, len(sequence), len(leading), len(divided), len(incoming_border), len(outgoing_border), *tiles, end
    )
    edges = [
        [found[key][which] for key in sorted(found)] for found in (incoming_border, outgoing_border) for which in (0, 1)
    ]
    tables = [*cu, end], chunk, sequence, [*first, len(sequence)], leading, divided, *edges
    tables = *tables, [*grid_cu, end, batch * tokens], [*grid_first, chunks], grid_sequence
    # Each begins at a multiple of 16 bytes: kernels for tables that do not are other kernels, to be compiled.
    return [number for table in tables for number in (*table, *[0] * (len(table) % 2))], counts


def _lengths(piece: Piece, chunk_size: int, cut: Cut) -> list[int]:
    """Tokens of the segments of a piece."""
    full = piece.length // chunk_size * chunk_size
    inside = piece.length if piece.last else full
    step = chunk_size * cut.length(-(-inside // chunk_size))
    found = [min(step, inside - start) for start in range(0, inside, step)]
    if not piece.first or not found:
        found.insert(0, 0)
    return found if piece.last else [*found, piece.length - full]
