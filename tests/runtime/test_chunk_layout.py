"""Chunk tables and grids: every token is in one chunk, columns hold unfinished sequences, padding is at the ends."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from wyfold.runtime.chunk_layout import (
    WITHOUT_TABLES,
    ChunkTable,
    chunk_grid,
    dense_table,
    packed_table,
    without_tables,
)

sizes = st.sampled_from([1, 4, 16])


def grid(lengths: list[int], C: int) -> list[list[int]]:
    """Reference: the tokens of each chunk, column by column, longest sequences first, ties in order."""
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
    assert table.uniform and table.columns == (rows,) * -(-tokens // C)
    assert tokens_of(table) == grid([tokens] * rows, C)
    assert table.valid.tolist() == [len(chunk) for chunk in grid([tokens] * rows, C)]
    assert (table.padding is None) == (tokens % C == 0)


def test_ties_keep_the_order_of_the_buffer():
    """Sequences with equally many chunks keep the buffer's order: the sort is stable."""
    table = packed_table(torch.tensor([3, 20, 16, 1, 17]), 16)
    assert table.order.tolist() == [1, 4, 0, 2, 3]


def test_one_sequence_is_dense():
    table = packed_table(torch.tensor([33]), 16)
    assert table.uniform and table.columns == (1, 1, 1) and table.tokens == 33


# --- the grid of a whole call ----------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 70), max_size=7), st.integers(0, 40), sizes, st.sampled_from([torch.int32, torch.int64]))
def test_a_packed_grid(lengths: list[int], spare: int, C: int, dtype: torch.dtype):
    """Chunks by sequence, then those of the tokens past the last boundary, then empty ones."""
    T, N = sum(lengths) + spare, len(lengths)
    grid = chunk_grid(1, T, C, torch.tensor([0, *lengths]).cumsum(0).to(dtype))
    spans = []
    for chunk, n in enumerate(grid.sequence.tolist()):
        begin = int(grid.cu[n]) + (chunk - int(grid.first[n])) * C
        spans.append((n, range(begin, min(begin + C, int(grid.cu[n + 1])))))
    assert len(spans) == grid.chunks and grid.sequences == N
    assert [t for _, span in spans for t in span] == list(range(T))
    held = [[t for of, span in spans if of == n for t in span] for n in range(N + 1)]
    assert [len(tokens) for tokens in held] == [*lengths, spare]
    assert all(span for n, span in spans if n < N)


@given(st.lists(st.integers(0, 70), min_size=1, max_size=7), st.integers(0, 9), st.integers(1, 40))
def test_rows_of_intermediate_states(lengths: list[int], spare: int, every: int):
    grid = chunk_grid(1, sum(lengths) + spare, 16, torch.tensor([0, *lengths]).cumsum(0), every)
    first = grid.first_states(torch.device("cpu")).tolist()
    assert first == [sum(x // every for x in lengths[:n]) for n in range(len(lengths) + 1)]
    dense = chunk_grid(3, lengths[0], 16, None, every)
    assert dense.first_states(torch.device("cpu")).tolist() == [n * (lengths[0] // every) for n in range(3)]


def test_illegal_boundaries_make_a_legal_grid():
    """For unchecked boundaries, no chunk leaves the buffer, and every token is in one chunk."""
    for borders in ([3, 5, 9], [0, 7, 2, 9], [0, 5, 99], [-4, 2, 9], [9, 9, 0]):
        grid = chunk_grid(1, 9, 4, torch.tensor(borders))
        assert grid.cu[0] == 0 and grid.cu[-1] == 9 and (grid.cu.diff() >= 0).all(), borders
        assert int(grid.first[-1]) <= grid.chunks - (9 - int(grid.cu[-2]) + 3) // 4, borders


def test_a_dense_grid_needs_no_device():
    grid = chunk_grid(3, 33, 16, None)
    assert (grid.chunks, grid.per_sequence, grid.sequences) == (9, 3, 3) and grid.cu is None


def test_gluon_kernels_of_a_dense_batch_need_no_tables():
    stages, gluon = (
        ("segment_grid", "prepare", "segment_summary", "segment_fold", "scan"),
        dict.fromkeys(WITHOUT_TABLES, "gluon"),
    )
    assert without_tables(stages, gluon) == stages[1:]
    assert without_tables(("chunk_grid", *stages), gluon) == ("chunk_grid", *stages)
    assert without_tables(stages, gluon | {"scan": "triton"}) == stages
