"""Partition of tokens over ranks, and of sequences into pieces, computed on the host and equal on all ranks.

A rank owns ranges of the global buffer. A **piece** is a run of one sequence's tokens that a rank holds. If a sequence
has more than one piece, they form a **chain**: the first piece gets the caller's initial state, every other piece the
final state of the piece before it. Gradients of states go the opposite way.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Range = tuple[int, int]
LAYOUTS = ("contiguous", "zigzag", "fragments")
_LISTED = 6  # entries of a long list that a description shows


class Piece(NamedTuple):
    """A run of one sequence's tokens that one rank holds.

    Attributes:
        sequence: Index of the sequence in the global boundaries.
        rank: Owner of the piece.
        number: Index among the owner's pieces.
        offset: Index of its first token among the owner's tokens.
        done: Number of the sequence's tokens before the piece.
        length: Number of its tokens.
        first, last: Whether the sequence begins, and ends, in the piece.
        outgoing: Index among the owner's pieces whose sequences continue in a later piece; -1 for a last piece.
        incoming: Index among the owner's pieces whose sequences began in an earlier piece; -1 for a first piece.
    """

    sequence: int
    rank: int
    number: int
    offset: int
    done: int
    length: int
    first: bool
    last: bool
    outgoing: int = -1
    incoming: int = -1


class Handover(NamedTuple):
    """A state that passes from a piece to the next piece of its sequence.

    Attributes:
        source, target: The two pieces.
    """

    source: Piece
    target: Piece


class RankSizes(NamedTuple):
    """Sizes of a rank's shard, from which a call is checked and planned.

    Attributes:
        tokens: Tokens of the shard.
        pieces: Pieces of the shard.
        starts: Sequences that begin in the shard.
        most_outgoing, most_incoming: As in `Partition`.
        dense: Whether the batch is dense, without boundaries.
    """

    tokens: int
    pieces: int
    starts: int
    most_outgoing: int
    most_incoming: int
    dense: bool


@dataclass(frozen=True)
class Partition:
    """The partition of one global buffer over ranks.

    Attributes:
        total: Tokens of the buffer.
        ranges: For each rank, the ranges it owns, ascending and not adjacent.
        pieces: For each rank, its pieces in token order.
        chains: For every sequence of more than one piece, its pieces in order.
        most_outgoing: Maximum over ranks of the number of pieces with an `outgoing` index: rows of every rank's send
            buffer in the forward.
        most_incoming: The same with `incoming`: rows in the backward.
        depth: Maximum over sequences of pieces before the last: the number of sequential handovers.
    """

    total: int
    ranges: tuple[tuple[Range, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]
    chains: tuple[tuple[Piece, ...], ...]
    most_outgoing: int
    most_incoming: int
    depth: int

    def tokens(self, rank: int) -> int:
        """Number of tokens that a rank owns."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def sizes(self, rank: int, *, dense: bool) -> RankSizes:
        starts = sum(piece.first for piece in self.pieces[rank])
        most = self.most_outgoing, self.most_incoming
        return RankSizes(self.tokens(rank), len(self.pieces[rank]), starts, *most, dense)

    def handovers(self, depth: int) -> list[Handover]:
        """Handovers from the pieces of a depth (0: the first of a sequence) to the next pieces."""
        return [Handover(*chain[depth : depth + 2]) for chain in self.chains if len(chain) > depth + 1]

    def wave(self, rank: int, depth: int) -> list[Piece]:
        """A rank's pieces of a depth, in token order."""
        found = [chain[depth] for chain in self.chains if len(chain) > depth and chain[depth].rank == rank]
        if depth == 0:
            found += [piece for piece in self.pieces[rank] if piece.first and piece.last]
        return sorted(found, key=lambda piece: piece.number)


def numbers_of_chains(chains: Sequence[Sequence[Piece]]) -> list[int]:
    """The chains as numbers, for the schema of a registered operator: of each, its length and its pieces' fields."""
    return [n for chain in chains for n in (len(chain), *(int(field) for piece in chain for field in piece))]


def chains_of_numbers(numbers: Sequence[int]) -> list[list[Piece]]:
    """The inverse of `numbers_of_chains`."""
    chains, at, width = [], 0, len(Piece._fields)
    while at < len(numbers):
        stop = at + 1 + numbers[at] * width
        chains.append([Piece._make(numbers[start : start + width]) for start in range(at + 1, stop, width)])
        at = stop
    return chains


def owned_ranges(layout: str, total: int, world: int) -> list[list[Range]]:
    """Return the ranges of every rank in a named layout.

    contiguous: rank r owns the r-th of `world` parts; zigzag: the r-th and the r-th from the end of 2 * `world` parts.
    Part i of n is tokens floor(i total / n) to floor((i + 1) total / n) - 1.
    """

    def part(i: int, n: int) -> Range:
        return i * total // n, (i + 1) * total // n

    if layout == "contiguous":
        return [[part(r, world)] for r in range(world)]
    return [[part(r, 2 * world), part(2 * world - 1 - r, 2 * world)] for r in range(world)]


def partition_sequences(boundaries: Sequence[int], total: int, ranges: Sequence[Sequence[Range]]) -> Partition:
    """Partition a packed buffer into pieces and chains.

    A sequence without tokens belongs to the rank that owns the token at its position. At the buffer's end that is the
    owner of the last token, and without any tokens rank 0.

    Args:
        boundaries: Global boundaries, from 0 to at most `total`.
        total: Tokens of the buffer.
        ranges: Ranges of every rank; together they cover every token once.
    """
    joined = tuple(tuple(_joined(owns)) for owns in ranges)
    last = max((owns[-1][1] for owns in joined if owns), default=0)
    pieces: list[tuple[Piece, ...]] = []
    chains: dict[int, list[Piece]] = {}
    for rank, owns in enumerate(joined):
        found: list[Piece] = []
        offset = 0
        if total == 0 and rank == 0:
            found = [Piece(n, 0, n, 0, 0, 0, True, True) for n in range(len(boundaries) - 1)]
        for start, stop in owns:
            for sequence in _sequences(boundaries, start, stop, at_end=stop == last):
                begin, end = max(boundaries[sequence], start), min(boundaries[sequence + 1], stop)
                first, final = begin == boundaries[sequence], end == boundaries[sequence + 1]
                place = rank, len(found), offset + begin - start
                found.append(Piece(sequence, *place, begin - boundaries[sequence], end - begin, first, final))
            offset += stop - start
        pieces.append(tuple(_numbered(found)))
        for piece in pieces[-1]:
            if not (piece.first and piece.last):
                chains.setdefault(piece.sequence, []).append(piece)
    ordered = tuple(tuple(sorted(chain, key=lambda piece: piece.done)) for _, chain in sorted(chains.items()))
    crossing = [piece for chain in ordered for piece in chain]
    return Partition(
        total,
        joined,
        tuple(pieces),
        ordered,
        most_outgoing=max((1 + piece.outgoing for piece in crossing), default=0),
        most_incoming=max((1 + piece.incoming for piece in crossing), default=0),
        depth=max(map(len, ordered), default=1) - 1,
    )


def _joined(ranges: Sequence[Range]) -> Iterator[Range]:
    """Yield the ranges in ascending order, without empty ones and with adjacent ones merged."""
    begun: Range | None = None
    for start, stop in sorted(owned for owned in ranges if owned[0] < owned[1]):
        if begun is not None and begun[1] == start:
            begun = begun[0], stop
            continue
        if begun is not None:
            yield begun
        begun = start, stop
    if begun is not None:
        yield begun


def _sequences(boundaries: Sequence[int], start: int, stop: int, *, at_end: bool) -> Iterator[int]:
    """Yield the sequences with tokens in a range, and those without tokens that are positioned in it."""
    # The range's first token belongs to the last sequence that begins at or before it, if to any.
    sequence = max(0, bisect_right(boundaries, start) - 1)
    while sequence > 0 and boundaries[sequence - 1] == boundaries[sequence] == start:
        sequence -= 1  # sequences without tokens at the range's start
    for n in range(sequence, len(boundaries) - 1):
        begin, end = boundaries[n], boundaries[n + 1]
        if begin > stop or (begin == stop and not (at_end and begin == end)):
            return
        if (begin < stop and end > start) or (begin == end and begin >= start):
            yield n


def _numbered(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Yield a rank's pieces with `outgoing` and `incoming`, their rows in the send buffers."""
    outgoing = incoming = 0
    for piece in pieces:
        leaves, enters = not piece.last, not piece.first
        yield piece._replace(outgoing=outgoing if leaves else -1, incoming=incoming if enters else -1)
        outgoing, incoming = outgoing + leaves, incoming + enters


def describe_partition(bounds: Sequence[int], ranges: Sequence[Sequence[Range]], *, dense: bool) -> str:
    """Describe a partition for comparison between ranks: its first entries for the reader, and a digest of all."""
    ends = str(bounds[1 : _LISTED + 1])[1:-1] + ", .." * (len(bounds) > _LISTED + 1)
    what = "whole rows" if dense else f"sequences that end at {ends}"
    own = ["+".join(f"{start}-{stop}" for start, stop in some[:_LISTED]) or "nothing" for some in ranges[:_LISTED]]
    shards = ", ".join([*own, *[".."] * (len(ranges) > _LISTED)])
    digest = hashlib.sha256(repr((bounds, ranges, dense)).encode()).hexdigest()[:16]
    return f"{what} in shards {shards} ({digest})"
