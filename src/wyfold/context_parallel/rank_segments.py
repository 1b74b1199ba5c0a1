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

from wyfold.context_parallel.partition import Partition, Piece
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.runtime.chunk_layout import ChunkGrid, Cut, Segments


class RankSegments(NamedTuple):
    """Index tables of the segments of a rank's pieces, over all batch rows.

    Attributes:
        chunks: Number of chunks with a token of a piece.
        tokens: Number of tokens up to the end of the last piece.
        through: `Piece.incoming` and `Piece.outgoing` of each piece that has both.
        cu, chunk: [segments + 1] first token of each segment in the buffer of all rows, and [segments] first chunk.
        piece, first, leading, divided: As `sequence` and the others in `Segments`, whose sequences are the pieces.
        incoming_border, incoming_piece: [incoming] border at which the state of another rank enters, and the piece
            that it enters; ordered by piece, then by batch row.
        outgoing_border, outgoing_piece: [outgoing] last border before the state leaves for another rank, and the piece
            that it leaves; ordered likewise.
        forward_routes, backward_routes: As of `routes`.
        grid_cu, grid_first, grid_piece: Tables of the `ChunkGrid` of the pieces. `grid_piece` also has the chunks of
            the tokens after the last piece, which belong to piece number `pieces`.
    """

    chunks: int
    tokens: int
    through: list[tuple[int, int]]
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
    forward_routes: Tensor
    backward_routes: Tensor
    grid_cu: Tensor
    grid_first: Tensor
    grid_piece: Tensor

    @classmethod
    def of(cls, buffer: Tensor, counts: Sequence[int]) -> RankSegments:
        """Cut the buffer of `SegmentTables.numbers`, on the call's device, into tables."""
        chunks, tokens, *rest = counts
        names = cls._fields[3:]
        lengths, pairs = rest[: len(names)], rest[len(names) :]
        tables, at = {}, 0
        for name, length in zip(names, lengths, strict=True):
            tables[name] = buffer[at : at + length]
            at += _aligned(length)
        return cls(chunks, tokens, list(zip(pairs[::2], pairs[1::2])), **tables)

    @property
    def pieces(self) -> int:
        """Number of pieces over all batch rows: each is one sequence of the kernels."""
        return self.first.shape[0] - 1

    @property
    def borders(self) -> int:
        return self.leading.shape[0]

    @property
    def incoming(self) -> int:
        """Number of pieces, over all rows, whose sequences began on another rank."""
        return self.incoming_piece.shape[0]

    @property
    def outgoing(self) -> int:
        """Number of pieces, over all rows, whose sequences continue on another rank."""
        return self.outgoing_piece.shape[0]

    def grid(self, chunk_size: int, tokens: int) -> ChunkGrid:
        """Chunk grid of the pieces, in a buffer of `tokens` tokens."""
        tables = self.grid_cu, self.grid_first, self.grid_piece
        return ChunkGrid(chunk_size, 1, tokens, self.pieces, self.grid_piece.shape[0], *tables)

    def segments(self, grid: ChunkGrid) -> Segments:
        """The segments as the scans read them; `grid` is the chunk grid of the pieces."""
        count = self.piece.shape[0]
        buffer = replace(grid, sequences=count, cu=self.cu, first=self.chunk, sequence=None)
        places = self.piece, self.first, self.leading, self.divided
        return Segments(buffer, self.pieces, self.borders, *places, expected=count)


class SegmentTables(NamedTuple):
    """The tables of `RankSegments` on the host.

    Attributes:
        numbers: All tables, one after another. Each begins at a multiple of 16 bytes: Triton would compile another
            kernel for unaligned pointers.
        counts: `chunks`, `tokens`, the length of each table, in the order of `RankSegments`, and `through`.
        segments: Number of segments.
    """

    numbers: list[int]
    counts: tuple[int, ...]
    segments: int


def segment_tables(partition: Partition, rank: int, batch: int, chunk_size: int, cut: Cut) -> SegmentTables:
    """Compute the tables of a rank's pieces.

    Args:
        partition, rank: The partition of a row's tokens, and the rank.
        batch: Number of batch rows.
        chunk_size: C.
        cut: Rule by which long pieces are cut.
    """
    pieces, tokens = partition.pieces[rank], partition.tokens(rank)
    tables: dict[str, list[int]] = {name: [] for name in RankSegments._fields[3:]}
    cu, chunk, piece_of, first = (tables[name] for name in ("cu", "chunk", "piece", "first"))
    leading, divided, grid_piece = (tables[name] for name in ("leading", "divided", "grid_piece"))
    edges: dict[str, dict[tuple[int, int], tuple[int, int]]] = {"incoming": {}, "outgoing": {}}
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
            tables["grid_cu"].append(token - piece.length)
            tables["grid_first"].append(chunks)
            grid_piece += [n] * -(-piece.length // chunk_size)
            chunks, end = len(grid_piece), token
            borders = range(before, before + len(lengths) - 1)
            leading += borders
            if borders:
                divided.append(n)
            if not piece.first:
                edges["incoming"][piece.incoming, row] = borders[0] - n, n
            if not piece.last:
                edges["outgoing"][piece.outgoing, row] = borders[-1] - n, n
    for edge, found in edges.items():
        tables[f"{edge}_border"], tables[f"{edge}_piece"] = ([found[key][i] for key in sorted(found)] for i in (0, 1))
    tables["forward_routes"] = forward_routes(partition, rank)
    tables["backward_routes"] = backward_routes(partition, rank)
    cu.append(end)
    first.append(len(piece_of))
    tables["grid_cu"] += [end, batch * tokens]
    tables["grid_first"].append(chunks)
    grid_piece += [batch * len(pieces)] * -(-(batch * tokens - end) // chunk_size)
    numbers = [n for table in tables.values() for n in (*table, *[0] * (_aligned(len(table)) - len(table)))]
    through = (n for piece in pieces if not (piece.first or piece.last) for n in (piece.incoming, piece.outgoing))
    return SegmentTables(numbers, (chunks, end, *map(len, tables.values()), *through), len(piece_of))


def _aligned(length: int) -> int:
    """Length of a table of int64 with its padding to a multiple of 16 bytes."""
    return length + length % 2


def _lengths(piece: Piece, chunk_size: int, cut: Cut) -> list[int]:
    """Number of tokens in each segment of a piece."""
    full = piece.length // chunk_size * chunk_size
    inside = piece.length if piece.last else full
    step = chunk_size * cut.length(-(-inside // chunk_size))
    found = [min(step, inside - start) for start in range(0, inside, step)]
    if not piece.first or not found:
        found.insert(0, 0)
    return found if piece.last else [*found, piece.length - full]
