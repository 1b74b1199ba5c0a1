"""Tokens to tiles and back: every token once, padding zero, any strides, heads of a group summed in order."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wyfold.runtime.chunk_layout import dense_table, packed_table
from wyfold.tile.index.eager import from_chunks, ranked, sum_groups, to_chunks, unranked, wide

lengths_ = st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any)


def table_of(lengths: list[int]):
    """A packed table of these lengths, and [B, T] of its tokens."""
    return packed_table(torch.tensor(lengths), 16), (1, sum(lengths))


@given(lengths_, st.sampled_from([(1, 1), (2, 2), (2, 6)]), st.integers(1, 3))
def test_there_and_back_packed(lengths: list[int], heads, W: int):
    table, lead = table_of(lengths)
    H, HV = heads
    x = torch.randn(*lead, H, W).bfloat16()
    tiles = to_chunks(x, table, HV, torch.float32)
    assert tiles.shape == (table.chunks * HV, 16, W) and tiles.is_contiguous() and tiles.dtype == torch.float32
    by_chunk = tiles.unflatten(0, (table.chunks, HV))
    if table.token is not None:
        for chunk, tokens in enumerate(table.token.tolist()):
            for row, token in enumerate(tokens):
                for head in range(HV):
                    expected = torch.zeros(W) if token < 0 else x[0, token, head // (HV // H)].float()
                    assert torch.equal(by_chunk[chunk, head, row], expected)
    out = torch.full((*lead, HV, W), torch.nan)
    from_chunks(tiles, table, out)
    assert torch.equal(out, x.float().repeat_interleave(HV // H, 2))


@given(st.integers(1, 3), st.integers(1, 50), st.sampled_from([(1, 1), (2, 4)]))
def test_there_and_back_dense(B: int, T: int, heads):
    table = dense_table(B, T, 16)
    H, HV = heads
    x = torch.randn(B, T, H, 3, dtype=torch.float64)
    tiles = to_chunks(x, table, HV, torch.float64).unflatten(0, (len(table.columns), B, HV))
    for b in range(B):
        for j in range(len(table.columns)):
            rows = x[b, 16 * j : 16 * j + 16]
            for head in range(HV):
                assert torch.equal(tiles[j, b, head, : len(rows)], rows[:, head // (HV // H)])
                assert not tiles[j, b, head, len(rows) :].any()
    out = torch.full((B, T, HV, 3), torch.nan, dtype=torch.float32)
    from_chunks(tiles.flatten(0, 2), table, out)
    assert torch.equal(out, x.float().repeat_interleave(HV // H, 2))


def test_any_strides_in_and_out():
    x = torch.randn(2, 5, 40, 3).permute(0, 2, 3, 1)[..., ::2]  # [2, 40, 3, 3]
    for table, tokens in ((dense_table(2, 40, 16), x), (table_of([33, 7])[0], x[:1])):
        tiles = to_chunks(tokens, table, 3, torch.float32)
        assert torch.equal(tiles, to_chunks(tokens.contiguous(), table, 3, torch.float32))
        backing = torch.full((3, *tokens.shape[:2], 3, 2), torch.nan)
        out = backing.permute(1, 2, 3, 0, 4)[..., 0]
        from_chunks(tiles, table, out)
        assert torch.equal(out, tokens) and backing[..., 1].isnan().all()


def test_rounding_happens_once_on_the_way_out():
    table = dense_table(1, 20, 16)
    tiles = torch.randn(2, 16, 3)
    out = torch.empty(1, 20, 1, 3, dtype=torch.bfloat16)
    from_chunks(tiles, table, out)
    assert torch.equal(out[0, :, 0], tiles.flatten(0, 1)[:20].bfloat16())


@pytest.mark.parametrize("H, HV", [(1, 1), (2, 6), (1, 8)])
def test_groups_are_added_in_their_order(H: int, HV: int):
    tiles = torch.randn(5 * HV, 16, 3)
    total = sum_groups(tiles, H, HV)
    for chunk in range(5):
        for h in range(H):
            members = tiles[chunk * HV :][h * HV // H : (h + 1) * HV // H]
            expected = members[0]
            for member in members[1:]:
                expected = expected + member
            assert torch.equal(total[chunk * H + h], expected)


@given(lengths_)
def test_states_by_rank_and_back(lengths: list[int]):
    table, _ = table_of(lengths)
    states = torch.randn(len(lengths), 2, 3, 4)
    by_rank = ranked(states, table)
    order = range(len(lengths)) if table.order is None else table.order.tolist()
    for rank, sequence in enumerate(order):
        assert torch.equal(by_rank[2 * rank : 2 * rank + 2], states[sequence])
    assert torch.equal(unranked(by_rank, table), states)
    by_rank.zero_()
    assert states.any()  # a copy


def test_arithmetic_is_float32_or_wider():
    assert wide(torch.bfloat16) == wide(torch.float16) == wide(torch.float32) == torch.float32
    assert wide(torch.float64) == torch.float64
