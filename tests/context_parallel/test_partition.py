"""Partition of a buffer over ranks: every token once, pieces within boundaries, chains in sequence order."""

from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from wyfold.context_parallel.partition import LAYOUTS, Partition, owned_ranges, partition_sequences


@st.composite
def cuts(draw: st.DrawFn) -> tuple[list[int], int, list[list[tuple[int, int]]]]:
    """Draw boundaries, the number of tokens, and the ranges of every rank."""
    boundaries = [0, *accumulate(draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 9]), max_size=6)))]
    total, world = boundaries[-1] + draw(st.sampled_from([0, 0, 3])), draw(st.integers(1, 5))
    layout = draw(st.sampled_from(LAYOUTS))
    if layout != "fragments":
        return boundaries, total, owned_ranges(layout, total, world)
    borders = [0, *sorted(draw(st.lists(st.integers(0, total), max_size=6))), total]
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(world)]
    for span in pairwise(borders):
        ranges[draw(st.integers(0, world - 1))].append(span)
    return boundaries, total, ranges


@given(cuts())
def test_every_token_lies_in_one_piece(given_cut: tuple[list[int], int, list[list[tuple[int, int]]]]):
    boundaries, total, ranges = given_cut
    partition = partition_sequences(boundaries, total, ranges)
    held: list[list[int]] = [[] for _ in boundaries[1:]]
    for rank, pieces in enumerate(partition.pieces):
        tokens = [token for start, stop in partition.ranges[rank] for token in range(start, stop)]
        assert len(tokens) == partition.tokens(rank)
        end = 0
        for number, piece in enumerate(pieces):
            begin, length = boundaries[piece.sequence], boundaries[piece.sequence + 1] - boundaries[piece.sequence]
            assert (piece.rank, piece.number, piece.offset) == (rank, number, end)
            end += piece.length
            assert tokens[piece.offset : end] == list(range(begin + piece.done, begin + piece.done + piece.length))
            assert (piece.first, piece.last) == (piece.done == 0, piece.done + piece.length == length)
            held[piece.sequence].append(piece.length)
        assert all(token >= boundaries[-1] for token in tokens[end:])
    assert [sum(lengths) for lengths in held] == [end - begin for begin, end in pairwise(boundaries)]
    assert all(held), "a sequence that nobody holds"
    assert sorted(chain[0].sequence for chain in partition.chains) == [n for n, own in enumerate(held) if len(own) > 1]
    check_chains(partition)


def check_chains(partition: Partition) -> None:
    """Check that the pieces of a chain are adjacent, and that each has its own row in its rank's send buffer."""
    for chain in partition.chains:
        assert chain[0].first and chain[-1].last
        for before, piece in pairwise(chain):
            assert piece.done == before.done + before.length and before.length > 0
    crossing = [piece for chain in partition.chains for piece in chain]
    for which, most in (("outgoing", partition.most_outgoing), ("incoming", partition.most_incoming)):
        places = [(piece.rank, getattr(piece, which)) for piece in crossing if getattr(piece, which) >= 0]
        assert len(set(places)) == len(places)
        assert max((1 + place for _, place in places), default=0) == most
    for depth in range(partition.depth + 1):
        waves = [piece for rank in range(len(partition.pieces)) for piece in partition.wave(rank, depth)]
        assert {handover.source for handover in partition.handovers(depth)} <= set(waves)


def test_named_layouts():
    assert owned_ranges("contiguous", 10, 4) == [[(0, 2)], [(2, 5)], [(5, 7)], [(7, 10)]]
    assert owned_ranges("zigzag", 8, 2) == [[(0, 2), (6, 8)], [(2, 4), (4, 6)]]
    partition = partition_sequences([0, 3, 8], 8, owned_ranges("zigzag", 8, 2))
    assert partition.ranges == (((0, 2), (6, 8)), ((2, 6),))
    assert [(p.sequence, p.done, p.length) for p in partition.pieces[1]] == [(0, 2, 1), (1, 0, 3)]
