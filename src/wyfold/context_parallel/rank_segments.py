"""Segments of a rank's pieces, planned on the host, which knows the pieces.

The split rule cuts each piece by the length of the piece, as it cuts a sequence. States pass between ranks at borders
between segments. A piece whose sequence crosses ranks gets one more segment on each side that it crosses:

    an empty segment in front               if the sequence began on another rank. The incoming state enters at the
                                            border after it. The segment after the border does not begin a sequence, so
                                            it has a map.
    a segment after the last full chunk     if the sequence continues on another rank. It has the tokens that do not
                                            fill a chunk, or none. The segments before it have full chunks, and maps.

Kernels treat both as ordinary segments, and each piece as one sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from wyfold.context_parallel.partition import Piece
from wyfold.runtime.chunk_layout import ChunkGrid, Cut, Segments


class SegmentCounts(NamedTuple):
    """Lengths of the tables of `RankSegments`, and other sizes that the host knows.

    Attributes:
        pieces: Number of pieces over all batch rows: each is one sequence of the kernels.
        segments, borders, divided: As in `Segments`.
        incoming, outgoing: Number of pieces, over all rows, whose sequences began on another rank, and continue on one.
        chunks: Number of chunks with a token of a piece.
        tiles: `chunks` and the chunks of the tokens after the last piece.
        tokens: Number of tokens up to the end of the last piece.
    """

    pieces: int
    segments: int
    borders: int
    divided: int
    incoming: int
    outgoing: int
    chunks: int
    tiles: int
    tokens: int


class RankSegments(NamedTuple):
    """Tables of the segments of a rank's pieces, concatenated over batch rows.

    Attributes:
        counts: Lengths of the tables.
        cu, chunk: [segments + 1] first token of each segment in the buffer of all rows, and [segments] first chunk.
        piece, first, leading, divided: As `sequence` and the others in `Segments`, whose sequences are the pieces.
        incoming_border, incoming_piece: [incoming] border at which the state of another rank enters, and the piece
            that it enters; ordered by piece, then by batch row.
        outgoing_border, outgoing_piece: [outgoing] last border before the state leaves for another rank, and the piece
            that it leaves; ordered likewise.
        grid_cu, grid_first, grid_piece: Tables of the `ChunkGrid` of the pieces.
    """

    counts: SegmentCounts
    cu: Tensor
    chunk: Tensor
    piece: Tensor
    first: Tensor
    leading: Tensor
    divided: Tensor
    incoming_border: Tensor
    incoming_piece: Tensor
    outgoing_border: Tensor
    outgoing_piece: Tensor
    grid_cu: Tensor
    grid_first: Tensor
    grid_piece: Tensor

    @classmethod
    def of(cls, table: Tensor, counts: Sequence[int]) -> RankSegments:
        """Split the concatenated tables of `segment_tables`, a tensor on the call's device."""
        N, segments, borders, divided, incoming, outgoing, _, tiles, _ = counts
        ends = incoming, incoming, outgoing, outgoing
        sizes = segments + 1, segments, segments, N + 1, borders, divided, *ends, N + 2, N + 1, tiles
        found = table.split([size + size % 2 for size in sizes])
        return cls(SegmentCounts(*counts), *(x[:size] if size % 2 else x for x, size in zip(found, sizes, strict=True)))

    def grid(self, chunk_size: int, tokens: int) -> ChunkGrid:
        """Chunk grid of the pieces, in a buffer of `tokens` tokens."""
        N, tiles = self.counts.pieces, self.counts.tiles
        return ChunkGrid(chunk_size, 1, tokens, N, tiles, self.grid_cu, self.grid_first, self.grid_piece)

    def segments(self, grid: ChunkGrid) -> Segments:
        """The segments as the scans read them; `grid` is the chunk grid of the pieces."""
        N, count, borders = self.counts[:3]
        buffer = replace(grid, sequences=count, cu=self.cu, first=self.chunk, sequence=None)
        places = self.piece, self.first, self.leading, self.divided
        return Segments(buffer, N, borders, *places, expected=count)


def segment_tables(
    pieces: Sequence[Piece], batch: int, tokens: int, chunk_size: int, cut: Cut
) -> tuple[list[int], SegmentCounts]:
    """Compute the tables of `RankSegments`.

    Args:
        pieces: Pieces of the rank.
        batch, tokens: Batch rows, and tokens of each.
        chunk_size: C.
        cut: Rule by which long pieces are cut.

    Returns:
        The concatenated tables, each padded to an even length; their lengths.
    """
    cu: list[int] = []
    chunk: list[int] = []
    piece_of: list[int] = []
    first: list[int] = []
    leading: list[int] = []
    divided: list[int] = []
    incoming_border: dict[tuple[int, int], tuple[int, int]] = {}
    outgoing_border: dict[tuple[int, int], tuple[int, int]] = {}
    grid_cu: list[int] = []
    grid_first: list[int] = []
    grid_piece: list[int] = []
    chunks = end = 0
    for row in range(batch):
        for piece in pieces:
            n, before = len(first), len(piece_of)
            first.append(before)
            token, at = row * tokens + piece.offset, chunks
            lengths = _lengths(piece, chunk_size, cut)
            for length in lengths:
                cu.append(token)
                chunk.append(at)
                piece_of.append(n)
                token, at = token + length, at + length // chunk_size
            grid_cu.append(token - piece.length)
            grid_first.append(chunks)
            grid_piece += [n] * -(-piece.length // chunk_size)
            chunks, end = len(grid_piece), token
            borders = range(before, before + len(lengths) - 1)
            leading += borders
            if borders:
                divided.append(n)
            if not piece.first:
                incoming_border[piece.incoming, row] = borders[0] - n, n
            if not piece.last:
                outgoing_border[piece.outgoing, row] = borders[-1] - n, n
    N = len(first)
    grid_piece += [N] * -(-(batch * tokens - end) // chunk_size)
    tiles = chunks, len(grid_piece)
    counts = SegmentCounts(
        N, len(piece_of), len(leading), len(divided), len(incoming_border), len(outgoing_border), *tiles, end
    )
    edges = [
        [found[key][which] for key in sorted(found)] for found in (incoming_border, outgoing_border) for which in (0, 1)
    ]
    tables = [*cu, end], chunk, piece_of, [*first, len(piece_of)], leading, divided, *edges
    tables = *tables, [*grid_cu, end, batch * tokens], [*grid_first, chunks], grid_piece
    # Each table begins at a multiple of 16 bytes: Triton would compile another kernel for unaligned pointers.
    return [number for table in tables for number in (*table, *[0] * (len(table) % 2))], counts


def _lengths(piece: Piece, chunk_size: int, cut: Cut) -> list[int]:
    """Number of tokens in each segment of a piece."""
    full = piece.length // chunk_size * chunk_size
    inside = piece.length if piece.last else full
    step = chunk_size * cut.length(-(-inside // chunk_size))
    found = [min(step, inside - start) for start in range(0, inside, step)]
    if not piece.first or not found:
        found.insert(0, 0)
    return found if piece.last else [*found, piece.length - full]
