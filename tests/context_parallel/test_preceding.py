"""Rows before a rank's pieces: all that precede them in their sequences, up to a count, and no other row is sent."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.context_parallel.test_partition import cuts

from wyfold.context_parallel.partition import partition_sequences
from wyfold.context_parallel.preceding import Source, preceding_routes


@given(cuts(), st.sampled_from([None, 0, 1, 3, 30]))
def test_received_rows_are_the_preceding_tokens(given_cut, count):
    boundaries, total, ranges = given_cut
    partition = partition_sequences(boundaries, total, ranges)
    held = [[token for start, stop in own for token in range(start, stop)] for own in partition.ranges]
    routes = [preceding_routes(partition, rank, count) for rank in range(len(held))]
    assert len({(own.sent, own.most) for own in routes}) == 1, "ranks must agree on what is sent"
    sent = [[row for start, stop in own for row in range(start, stop)] for own in routes[0].sent]
    assert routes[0].most == max(map(len, sent))
    needed: list[set[int]] = [set() for _ in held]
    for rank, own in enumerate(routes):
        for piece, sources in zip(partition.pieces[rank], own.pieces, strict=True):
            begin = boundaries[piece.sequence]
            first = 0 if count is None else max(0, piece.done - count)
            received = []
            for source in sources:
                rows = range(source.start, source.stop)
                received += [held[source.rank][row] for row in rows]
                if source.rank != rank:
                    place = own.place(source)
                    assert sent[source.rank][place : place + len(rows)] == list(rows)
                    needed[source.rank] |= {*rows}
            assert received == [*range(begin + first, begin + piece.done)]
    assert [sorted(rows) for rows in needed] == sent


def test_a_row_that_is_not_sent_has_no_place():
    partition = partition_sequences([0, 8], 8, [[(0, 4)], [(4, 8)]])
    routes = preceding_routes(partition, 1, 2)
    assert routes.place(Source(0, 2, 4)) == 0
    with pytest.raises(ValueError, match=r"^rank 0 does not send its row 1$"):
        routes.place(Source(0, 1, 4))
