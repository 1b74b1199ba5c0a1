"""Which tokens each rank owns, and where sequences cross from one rank to another: decided on the host, alike on all.

A rank owns ranges of the global buffer. What it holds of one sequence together is a **piece**. A sequence of more than
one piece is a **chain**: state enters its first piece as the caller gives it, every other piece from the piece before,
and the gradients of states go back the same way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

Range = tuple[int, int]
LAYOUTS = ("contiguous", "zigzag", "fragments")


@dataclass(frozen=True)
class Piece:
    """A run of one sequence's tokens that one rank holds together.

    Attributes:
        sequence: Its number in the global boundaries.
        rank: Its owner.
        number: Place among the owner's pieces.
        offset: Place of its first token among the owner's tokens.
        done: Tokens of the sequence before it.
        length: Its tokens.
        first, last: Whether the sequence begins, and ends, in it.
        leaving: Place among the owner's pieces whose sequences go on elsewhere; -1 if it is the last of its sequence.
        entering: Place among the owner's pieces whose sequences began elsewhere; -1 if it is the first.
    """

    sequence: int
    rank: int
    number: int
    offset: int
    done: int
    length: int
    first: bool
    last: bool
    leaving: int = -1
    entering: int = -1


class Handover(NamedTuple):
    """State on its way from a piece to the one behind it."""

    source: Piece
    target: Piece


@dataclass(frozen=True)
class Partition:
    """The cut of one global buffer.

    Attributes:
        total: Tokens of the buffer.
        ranges: Of each rank, what it owns, ascending and not adjacent.
        pieces: Of each rank, its pieces in the order of its tokens.
        chains: Pieces of every sequence that has more than one, in the sequence's order.
        most_leaving: Most pieces of a rank whose sequences go on elsewhere: room that every rank sends forward.
        most_entering: Most pieces of a rank whose sequences began elsewhere: room that every rank sends backward.
        depth: Most pieces of a sequence before its last: hand-overs, where they take place one after another.
    """

    total: int
    ranges: tuple[tuple[Range, ...], ...]
    pieces: tuple[tuple[Piece, ...], ...]
    chains: tuple[tuple[Piece, ...], ...]
    most_leaving: int
    most_entering: int
    depth: int

    def tokens(self, rank: int) -> int:
        """How many a rank owns."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def handovers(self, depth: int) -> list[Handover]:
        """Hand-overs from the pieces of a depth, 0 being a sequence's first, to the pieces behind them."""
        return [Handover(*chain[depth : depth + 2]) for chain in self.chains if len(chain) > depth + 1]

    def wave(self, rank: int, depth: int) -> list[Piece]:
        """A rank's pieces of a depth, in the order of its tokens."""
        found = [chain[depth] for chain in self.chains if len(chain) > depth and chain[depth].rank == rank]
        if depth == 0:
            found += [piece for piece in self.pieces[rank] if piece.first and piece.last]
        return sorted(found, key=lambda piece: piece.number)


def owned_ranges(layout: str, total: int, world: int) -> list[list[Range]]:
    """Ranges of every rank under a named layout.

    contiguous: rank r owns the r-th of `world` parts; zigzag: the r-th and the r-th from the end of 2 * `world` parts.
    Part i of n is tokens floor(i total / n) to floor((i + 1) total / n) - 1.
    """

    def part(i: int, n: int) -> Range:
        return i * total // n, (i + 1) * total // n

    if layout == "contiguous":
        return [[part(r, world)] for r in range(world)]
    return [[part(r, 2 * world), part(2 * world - 1 - r, 2 * world)] for r in range(world)]


def partition_sequences(boundaries: Sequence[int], total: int, ranges: Sequence[Sequence[Range]]) -> Partition:
    """Pieces and chains of a packed buffer.

    A sequence without tokens belongs to who owns the token at its place, or, at the buffer's end, the last token; to
    rank 0 if there are no tokens at all.

    Args:
        boundaries: Global, from 0 to at most `total`.
        total: Tokens of the buffer.
        ranges: Of every rank; together every token once.
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
        most_leaving=max((1 + piece.leaving for piece in crossing), default=0),
        most_entering=max((1 + piece.entering for piece in crossing), default=0),
        depth=max(map(len, ordered), default=1) - 1,
    )


def _joined(ranges: Sequence[Range]) -> Iterator[Range]:
    """Ranges in ascending order without the empty ones, neighbours as one."""
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
    """Sequences with tokens in a range, and those without tokens that lie there."""
    # The last sequence that begins at or before the range's first token has it, if anyone does.
    sequence = max(0, bisect_right(boundaries, start) - 1)
    while sequence > 0 and boundaries[sequence - 1] == boundaries[sequence] == start:
        sequence -= 1  # sequences without tokens right there
    for n in range(sequence, len(boundaries) - 1):
        begin, end = boundaries[n], boundaries[n + 1]
        if begin > stop or (begin == stop and not (at_end and begin == end)):
            return
        if (begin < stop and end > start) or (begin == end and begin >= start):
            yield n


def _numbered(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces of a rank with their places in what is sent."""
    leaving = entering = 0
    for piece in pieces:
        goes, came = not piece.last, not piece.first
        yield replace(piece, leaving=leaving if goes else -1, entering=entering if came else -1)
        leaving, entering = leaving + goes, entering + came
