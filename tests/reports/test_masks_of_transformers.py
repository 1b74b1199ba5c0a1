"""`generate(cache_implementation="static")` of a left-padded batch failed: padding was read from 2-D masks only.

For a static cache `generate` prepares a dict of masks. Positions of padding were taken for packed documents, and the
call was refused with "use_cache must be False with packed documents" for every model type. Conversely, a 4-D mask, or a
mask in a dict, that lets documents attend to each other was accepted.
"""

from typing import Any

import pytest
import torch
from tests.integrations.hybrids import CACHE, FAMILIES, hybrid
from torch import Tensor

from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
PADDED = torch.ones(2, 9, dtype=torch.int64)
PADDED[1, :4] = 0
LENGTHS = [3, 6]
PACKED = {"position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None]}
STARTS = torch.tensor([0, 1]).repeat_interleave(torch.tensor(LENGTHS))
SEPARATE = 1e-6


@pytest.fixture(scope="module")
def qwen() -> Any:
    return hybrid("qwen3_5")


def error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def additive(allowed: Tensor) -> Tensor:
    return torch.where(allowed, 0.0, torch.finfo(torch.float32).min)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_static_cache_takes_left_padding(family: str, attention: str):
    """The same tokens as each prompt by itself."""
    model = hybrid(family)
    model.set_attn_implementation(attention)
    options = {"max_new_tokens": 5, "do_sample": False, "disable_compile": True}
    with patch(model) as patched:
        alone = [model.generate(prompt, **options)[0, -5:] for prompt in (IDS[:1], IDS[1:, 4:])]
        batch = model.generate(IDS, attention_mask=PADDED, cache_implementation="static", **options)[:, -5:]
    assert torch.equal(batch, torch.stack(alone))
    assert not patched.report.stock


def test_a_prepared_dict_with_padding_on_the_right_is_refused_with_a_cache(qwen: Any):
    from transformers import DynamicCache
    from transformers.masking_utils import create_masks_for_generate

    mask = PADDED.flip(1)
    masks = create_masks_for_generate(qwen.config, qwen.model.embed_tokens(IDS), mask, None)

    with patch(qwen), pytest.raises(ValueError, match="padding on the right"):
        qwen(IDS, attention_mask=masks, **{CACHE: DynamicCache(config=qwen.config)})


def test_padding_on_the_right_is_refused_where_a_cache_is_asked_for(qwen: Any):
    """Only a given cache was looked at, and in pieces only their own masks, so such states took padding in."""
    from transformers import DynamicCache

    mask = torch.tensor([[1, 1, 1, 1, 1, 0, 0, 0, 0]])
    with torch.no_grad(), patch(qwen):
        with pytest.raises(ValueError, match="padding on the left where a cache is filled"):
            qwen(IDS[:1], attention_mask=mask, use_cache=True)
        cache = DynamicCache(config=qwen.config)
        qwen(IDS[:1, :5], attention_mask=mask[:, :5], use_cache=True, **{CACHE: cache})
        with pytest.raises(ValueError, match="padding on the left where a cache is filled"):
            qwen(IDS[:1, 5:], attention_mask=mask, use_cache=True, **{CACHE: cache})
        alone = qwen(IDS[:1, :5], use_cache=False).logits
        for unasked in ({}, {"use_cache": False}):
            assert error(qwen(IDS[:1], attention_mask=mask, **unasked).logits[:, :5], alone) < SEPARATE


@pytest.mark.parametrize("form", [lambda m: m, lambda m: {"full_attention": m, "linear_attention": None}])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_four_dimensions_have_to_keep_documents_apart(qwen: Any, form: Any, dtype: torch.dtype):
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    masks = {True: (causal & (STARTS[:, None] == STARTS))[None, None], False: causal[None, None]}
    if dtype is not torch.bool:
        masks = {apart: additive(mask) for apart, mask in masks.items()}
    with torch.no_grad(), patch(qwen):
        alone = torch.cat([qwen(part).logits for part in IDS[:1].split(LENGTHS, 1)], 1)
        assert error(qwen(IDS[:1], attention_mask=form(masks[True]), **PACKED).logits, alone) < SEPARATE
        with pytest.raises(ValueError, match=r"attention_mask must keep packed documents apart, .*leave it out"):
            qwen(IDS[:1], attention_mask=form(masks[False]), **PACKED)


def test_a_dict_without_masks_is_rebuilt_for_packed_documents(qwen: Any):
    """None means causal attention over the whole row, and so does a mask of ones."""
    with torch.no_grad(), patch(qwen):
        alone = torch.cat([qwen(part).logits for part in IDS[:1].split(LENGTHS, 1)], 1)
        for linear in (None, torch.ones(1, 9, dtype=torch.int64)):
            masks = {"full_attention": None, "linear_attention": linear}
            assert error(qwen(IDS[:1], attention_mask=masks, **PACKED).logits, alone) < SEPARATE


def test_a_dict_with_padding_is_refused_for_packed_documents(qwen: Any):
    masks = {"full_attention": None, "linear_attention": PADDED[1:]}
    with patch(qwen), pytest.raises(ValueError, match="attention_mask must be None or all ones"):
        qwen(IDS[:1], attention_mask=masks, cu_seq_lens_q=torch.tensor([0, 6, 9], dtype=torch.int32))


def test_masks_with_unreadable_contents_are_refused_for_packed_documents(qwen: Any):
    from torch.nn.attention.flex_attention import create_block_mask

    block = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 9, 9, device="cpu")
    long = torch.ones(1, 1, 9, 12, dtype=torch.bool)
    with patch(qwen):
        for mask, message in {
            "BlockMask": (block, r"must be None, \[B, T\] or \[B, 1, T, T\] .* got BlockMask"),
            "long": (long, r"must be \[B, 1, T, T\] = \[1, 1, 9, 9\] .* got \[1, 1, 9, 12\]"),
            "3-D": (long[0], r"got \[1, 9, 12\]"),
        }.values():
            with pytest.raises(ValueError, match=message):
                qwen(IDS[:1], attention_mask=mask, **PACKED)


def test_ambiguous_positions_without_a_mask_are_refused_with_advice(qwen: Any):
    """Such positions are the same for padding and for documents."""
    positions = (PADDED.cumsum(1) - 1).clamp(min=0)
    with patch(qwen), pytest.raises(ValueError, match=r"read from position_ids; .*beside padding, give attention_mask"):
        qwen(IDS, position_ids=positions, use_cache=True)
