"""`SequenceLayout`: every way to give boundaries agrees, and illegal ones are refused."""

import pickle
import warnings

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from hypothesis import strategies as st

import wyfold
from wyfold import SequenceLayout
from wyfold.reference.shapes import INVALID_PACKINGS, PACKINGS

lengths_ = st.lists(st.integers(0, 9), max_size=8)


def by_hand(lengths: list[int], tokens: int) -> tuple[list[int], list[int], list[int]]:
    """Reference: boundaries, the sequence of each token, and its position there."""
    bounds, ids, positions = [0], [], []
    for n, length in enumerate(lengths):
        bounds.append(bounds[-1] + length)
        ids += [n] * length
        positions += range(length)
    spare = [-1] * (tokens - bounds[-1])
    return bounds, ids + spare, positions + spare


@given(lengths_, st.integers(0, 5), st.sampled_from([torch.int32, torch.int64]))
def test_properties_of_a_layout(lengths: list[int], spare: int, dtype: torch.dtype):
    tokens = sum(lengths) + spare
    bounds, ids, positions = by_hand(lengths, tokens)
    layout = SequenceLayout(torch.tensor(bounds, dtype=dtype), tokens)
    assert layout.cu_seqlens.tolist() == bounds and layout.lengths.tolist() == lengths
    assert layout.sequence_ids.tolist() == ids and layout.positions.tolist() == positions
    assert layout.max_seqs == len(lengths) and layout.tokens == tokens and layout.device.type == "cpu"
    layout.check()
    for n in (1, 2, 5):
        rows = [0]
        for length in lengths:
            rows.append(rows[-1] + length // n)
        assert layout.checkpoint_offsets(n).tolist() == rows


@given(lengths_.map(lambda lengths: [n for n in lengths if n]), st.integers(0, 4))
def test_the_ways_to_make_one_agree(lengths: list[int], more: int):
    tokens = sum(lengths)
    bounds, ids, positions = by_hand(lengths, tokens)
    ways = [
        SequenceLayout.from_lengths(lengths),
        SequenceLayout.from_position_ids(torch.tensor(positions, dtype=torch.int64)),
        SequenceLayout.from_position_ids(torch.tensor([positions], dtype=torch.int32)),
        SequenceLayout.from_seq_idx(torch.tensor(ids, dtype=torch.int64)),
        SequenceLayout.from_seq_idx(7 - torch.tensor([ids], dtype=torch.int32) % 2),
    ]
    for layout in ways:
        assert layout.cu_seqlens.tolist() == bounds and layout.tokens == tokens
    N = len(lengths) + more
    for layout in (
        SequenceLayout(torch.tensor(bounds), tokens, max_seqs=N),
        SequenceLayout.from_position_ids(torch.tensor(positions, dtype=torch.int64), max_seqs=N),
        SequenceLayout.from_seq_idx(torch.tensor(ids, dtype=torch.int64), max_seqs=N),
    ):
        assert layout.cu_seqlens.tolist() == bounds + bounds[-1:] * more


def test_spare_tokens_have_negative_sequence_numbers():
    layout = SequenceLayout.from_seq_idx(torch.tensor([0, 0, 3, 3, 3, -1, -1]))
    assert layout.cu_seqlens.tolist() == [0, 2, 5] and layout.tokens == 7
    fixed = SequenceLayout.from_seq_idx(torch.tensor([0, 0, 3, 3, 3, -1, -1]), max_seqs=4)
    assert fixed.cu_seqlens.tolist() == [0, 2, 5, 5, 5]


@pytest.mark.parametrize("name", PACKINGS)
def test_legal_boundaries_are_accepted(name: str):
    packing = PACKINGS[name]
    layout = SequenceLayout(torch.tensor(packing.cu_seqlens), packing.tokens)
    assert layout.lengths.tolist() == packing.lengths()


@pytest.mark.parametrize("name", INVALID_PACKINGS)
def test_illegal_boundaries_are_refused(name: str):
    packing = INVALID_PACKINGS[name]
    with pytest.raises(ValueError, match="SequenceLayout: cu_seqlens must "):
        SequenceLayout(torch.tensor(packing.cu_seqlens), packing.tokens)


def test_other_illegal_arguments():
    cu = torch.tensor([0, 2, 5])
    for bad, error, words in (
        (lambda: SequenceLayout([0, 2, 5], 5), TypeError, "cu_seqlens must be a torch.Tensor, got list"),
        (lambda: SequenceLayout(cu, 5.0), TypeError, "tokens must be an int, got float"),
        (lambda: SequenceLayout(cu, -1), ValueError, "tokens must be at least 0, got -1"),
        (lambda: SequenceLayout(cu, 5, max_seqs=1), ValueError, "max_seqs must be at least .* sequences, 2, got 1"),
        (lambda: SequenceLayout.from_lengths([3, -1]), ValueError, "lengths must be at least 0, got -1"),
        (lambda: SequenceLayout.from_lengths(torch.tensor([3])), TypeError, "lengths must be a list .* got Tensor"),
        (lambda: SequenceLayout.from_mask(torch.ones(1, 2).bool()).pack([1]), TypeError, "x must be a torch.Tensor"),
        (lambda: SequenceLayout.from_lengths([3.0]), TypeError, "lengths must be an int, got float"),
        (lambda: SequenceLayout.from_lengths([3, 4], tokens=6), ValueError, "end at most at T = 6, got 7"),
        (lambda: SequenceLayout.from_position_ids(torch.ones(2, 3).int()), ValueError, "position_ids must .* integer"),
        (lambda: SequenceLayout.from_position_ids(torch.zeros(3)), ValueError, "position_ids must .* integer"),
        (lambda: SequenceLayout.from_seq_idx([0, 1]), TypeError, "seq_idx must be a torch.Tensor, got list"),
        (lambda: SequenceLayout.from_mask(torch.zeros(2, 3)), ValueError, r"mask must be \[B, T\] bool or integer"),
        (lambda: SequenceLayout.from_mask(torch.zeros(3).bool()), ValueError, r"mask must be \[B, T\]"),
        (lambda: SequenceLayout(cu, 5).checkpoint_offsets(0), ValueError, "n must be at least 1, got 0"),
        (lambda: SequenceLayout(cu, 5).update_(torch.tensor([0, 1, 2, 3])), ValueError, "at most 2 sequences, got 3"),
        (lambda: SequenceLayout(cu, 5).update_(torch.tensor([0, 6])), ValueError, "end at most at T = 5, got 6"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^SequenceLayout[^:]*: .*{words}"):
            bad()


@pytest.mark.parametrize("ids", [[1, 2, 0, 1], [3, 0, 1]], ids=str)
def test_positions_must_begin_with_a_start(ids: list[int]):
    """Tokens before the first start would belong to no sequence and be read by the first."""
    with pytest.raises(ValueError, match=f"position_ids must begin with 0, got {ids[0]}"):
        SequenceLayout.from_position_ids(torch.tensor(ids))


@pytest.mark.parametrize("max_seqs", [0, 1, 2])
def test_a_capacity_too_small_merges_no_documents(max_seqs: int):
    words = f"^SequenceLayout: max_seqs must be at least the number of sequences, 3, got {max_seqs}$"
    with pytest.raises(ValueError, match=words):
        SequenceLayout.from_position_ids(torch.tensor([0, 1, 0, 1, 0]), max_seqs=max_seqs)
    with pytest.raises(ValueError, match=words):
        SequenceLayout.from_seq_idx(torch.tensor([4, 4, 5, 7, 7, -1]), max_seqs=max_seqs)


@pytest.mark.parametrize("ids", [[-1, 0, 0], [0, -1, 1]], ids=str)
def test_spare_tokens_come_last(ids: list[int]):
    with pytest.raises(ValueError, match="seq_idx must "):
        SequenceLayout.from_seq_idx(torch.tensor(ids))


def test_contents_on_another_device_are_read_only_when_asked():
    layout = SequenceLayout(torch.zeros(3, dtype=torch.int64, device="meta"), 5)
    assert layout.device.type == "meta" and layout.max_seqs == 2


def test_update_in_place():
    layout = SequenceLayout(torch.tensor([0, 2, 5]), 6, max_seqs=4)
    storage = layout.cu_seqlens.data_ptr()
    assert layout.update_(torch.tensor([0, 1, 3, 4, 6])) is layout
    assert layout.cu_seqlens.tolist() == [0, 1, 3, 4, 6]
    layout.update_(torch.tensor([0, 6], dtype=torch.int32))
    assert layout.cu_seqlens.tolist() == [0, 6, 6, 6, 6]
    assert layout.cu_seqlens.data_ptr() == storage
    layout.cu_seqlens[1] = 7
    with pytest.raises(ValueError, match="must "):
        layout.check()


@pytest.mark.parametrize("max_seqs", [None, 4])
def test_a_layout_does_not_share_what_it_was_given(max_seqs: int | None):
    cu = torch.tensor([0, 2, 5])
    layout = SequenceLayout(cu, 6, max_seqs=max_seqs)
    layout.update_(torch.tensor([0, 1]))
    assert cu.tolist() == [0, 2, 5]


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=4))
def test_packing_a_padded_batch_and_back(rows: list[list[bool]]):
    mask = torch.tensor(rows)
    layout = SequenceLayout.from_mask(mask)
    x = torch.arange(mask.numel() * 2.0).view(*mask.shape, 2).requires_grad_()
    packed = layout.pack(x)
    real = int(mask.sum())
    assert packed.shape == (1, mask.numel(), 2) and layout.tokens == mask.numel()
    assert layout.lengths.tolist() == mask.sum(1).tolist()
    assert torch.equal(packed[0, :real], x[mask]) and not packed[0, real:].any()
    assert torch.equal(layout.unpack(packed), torch.where(mask[..., None], x, 0))
    (dx,) = torch.autograd.grad(layout.unpack(packed * 3).sum(), x)
    assert torch.equal(dx, torch.where(mask[..., None], 3.0, 0.0).expand_as(x))


def test_padding_is_not_read():
    mask = torch.tensor([[False, True, True], [True, False, False]])
    layout = SequenceLayout.from_mask(mask)
    x = torch.ones(2, 3, 1).masked_fill(~mask[..., None], torch.nan)
    packed = layout.pack(x)
    assert packed.isfinite().all()
    packed[:, 3:] = torch.nan
    assert layout.unpack(packed).isfinite().all()
    with pytest.raises(ValueError, match=r"x must begin with \[2, 3\], got \[3, 2, 1\]"):
        layout.pack(torch.zeros(3, 2, 1))
    with pytest.raises(ValueError, match=r"x must begin with \[1, 6\], got \[1, 5\]"):
        layout.unpack(torch.zeros(1, 5))


def test_a_padded_batch_runs_as_its_sequences():
    mask = torch.tensor([[False, True, True, True, True], [True, True, False, False, False]])
    layout = SequenceLayout.from_mask(mask)
    x = torch.randn(2, 5, 1, 8)
    o, _ = wyfold.chunk_delta_rule(*[layout.pack(x)] * 3, cu_seqlens=layout, use_qk_l2norm_in_kernel=True)
    padded = layout.unpack(o)
    for b in range(2):
        alone = x[b][mask[b]][None]
        assert torch.equal(
            padded[b][mask[b]], wyfold.chunk_delta_rule(alone, alone, alone, use_qk_l2norm_in_kernel=True)[0][0]
        )
    assert not padded[~mask].any()


def test_a_layout_is_a_pytree():
    layout = SequenceLayout(torch.tensor([0, 2, 5]), 6)
    leaves, spec = pytree.tree_flatten({"x": [layout]})
    assert len(leaves) == 1 and leaves[0] is layout.cu_seqlens
    again = pytree.tree_unflatten(leaves, spec)["x"][0]
    assert type(again) is SequenceLayout and again.tokens == 6 and again.cu_seqlens is layout.cu_seqlens
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        copied = pickle.loads(pickle.dumps(layout))
    assert copied.tokens == 6 and torch.equal(copied.cu_seqlens, layout.cu_seqlens)
    assert repr(layout) == "SequenceLayout(max_seqs=2, tokens=6, device='cpu')"


def test_the_layout_of_a_padded_batch_is_a_pytree_too():
    layout = SequenceLayout.from_mask(torch.tensor([[True, True, False], [False, True, True]]))
    leaves, spec = pytree.tree_flatten(layout)
    assert len(leaves) == 2 and leaves[0] is layout.cu_seqlens and leaves[1] is layout.mask
    again, x = pytree.tree_unflatten(leaves, spec), torch.randn(2, 3, 4)
    assert again.tokens == 6 and torch.equal(again.pack(x), layout.pack(x))


def test_a_layout_from_a_mask_takes_no_boundaries():
    """They would not change the mask, which `pack` and `unpack` use."""
    mask = torch.tensor([[True, True, False], [False, True, True]])
    layout, x = SequenceLayout.from_mask(mask), torch.randn(2, 3, 4)
    before = layout.pack(x)
    again = pytree.tree_unflatten(*pytree.tree_flatten(layout))
    for refusing in (layout, again):
        with pytest.raises(ValueError, match=r"^SequenceLayout.update_: cu_seqlens must .* make a new layout"):
            refusing.update_(torch.tensor([0, 1, 6]))
        assert refusing.cu_seqlens.tolist() == [0, 2, 4]
        assert torch.equal(refusing.pack(x), before)
        assert torch.equal(refusing.unpack(before), torch.where(mask[..., None], x, 0))


def test_equal_layouts_give_equal_bits_however_they_were_made():
    q = torch.randn(1, 9, 1, 8)
    makers = (
        SequenceLayout(torch.tensor([0, 4, 9]), 9),
        SequenceLayout(torch.tensor([0, 4, 9], dtype=torch.int32), 9),
        SequenceLayout.from_lengths([4, 5]),
        SequenceLayout.from_seq_idx(torch.tensor([0] * 4 + [1] * 5), max_seqs=6),
        torch.tensor([0, 4, 9]),
    )
    first, *others = (wyfold.chunk_delta_rule(q, q, q, cu_seqlens=made)[0] for made in makers)
    assert all(torch.equal(other, first) for other in others)
