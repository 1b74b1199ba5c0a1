"""The chunk grid: every token once, columns of sequences that still run, padding only at a sequence's end."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from wyfold.runtime.chunks import ChunkTable, dense_table, packed_table

sizes = st.sampled_from([1, 4, 16])


def grid(lengths: list[int], C: int) -> list[list[int]]:
    """By hand: the tokens of each chunk, column by column, longest sequences first, ties in order."""
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    chunks = [[list(range(s + at, s + min(at + C, n))) for at in range(0, n, C)] for s, n in zip(starts, lengths)]
    order = sorted(range(len(lengths)), key=lambda n: -len(chunks[n]))
    longest = max((len(c) for c in chunks), default=0)
    return [chunks[n][j] for j in range(longest) for n in order if j < len(chunks[n])]


def tokens_of(table: ChunkTable) -> list[list[int]]:
    if table.token is not None:
        return [[t for t in chunk if t >= 0] for chunk in table.token.tolist()]
    C = table.chunk_size
    return [
        [row * table.tokens + t for t in range(j * C, min(table.tokens, (j + 1) * C))]
        for j in range(len(table.columns))
        for row in range(table.sequences)
    ]


@given(st.lists(st.integers(0, 70), min_size=1, max_size=7), sizes)
def test_packed(lengths: list[int], C: int):
    table = packed_table(torch.tensor(lengths), C)
    expected = grid(lengths, C)
    assert tokens_of(table) == expected
    assert table.chunks == len(expected) and table.sequences == len(lengths) and table.tokens == sum(lengths)
    assert table.valid.tolist() == [len(chunk) for chunk in expected]
    assert list(table.columns) == sorted(table.columns, reverse=True)
    assert list(table.starts) == [sum(table.columns[:j]) for j in range(len(table.columns))]
    if table.padding is not None:
        assert table.padding.tolist() == [[row >= len(chunk) for row in range(C)] for chunk in expected]
    else:
        assert all(len(chunk) == C for chunk in expected)
    if table.slot is not None:
        flat = table.token.flatten()
        assert torch.equal(flat[table.slot], torch.arange(sum(lengths)))
        padded = torch.ones_like(flat, dtype=torch.bool)
        padded[table.slot] = False
        assert (flat[padded] == -1).all()


@given(st.integers(0, 4), st.integers(0, 70), sizes)
def test_dense(rows: int, tokens: int, C: int):
    table = dense_table(rows, tokens, C)
    assert table.alike and table.columns == (rows,) * -(-tokens // C)
    assert tokens_of(table) == grid([tokens] * rows, C)
    assert table.valid.tolist() == [len(chunk) for chunk in grid([tokens] * rows, C)]
    assert (table.padding is None) == (tokens % C == 0)


def test_ties_keep_the_order_of_the_buffer():
    """Sequences of as many chunks run in the buffer's order: the sort is stable."""
    table = packed_table(torch.tensor([3, 20, 16, 1, 17]), 16)
    assert table.order.tolist() == [1, 4, 0, 2, 3]


def test_one_sequence_is_dense():
    table = packed_table(torch.tensor([33]), 16)
    assert table.alike and table.columns == (1, 1, 1) and table.tokens == 33
