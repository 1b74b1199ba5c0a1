"""Packed documents with images: positions of shape [3, B, T] (time, height, width) were overwritten or not read.

With `cu_seq_lens_q` text positions took their place, which gave image tokens other angles. Without, documents
that begin again in them leaked into each other.
"""

from typing import Any

import pytest
import torch
from tests.integrations.hybrids import hybrid
from torch import Tensor

from wyfold.integrations.transformers import patch

pytest.importorskip("transformers", reason="transformers is not installed")

IDS = torch.randint(64, (1, 23), generator=torch.Generator().manual_seed(1))
LENGTHS = [11, 12]
CU = torch.tensor([0, 11, 23], dtype=torch.int32)
SEPARATE = 1e-6


def picture(before: int, height: int, width: int, after: int) -> Tensor:
    """[3, 1, T] positions of text, an image and text, as `get_rope_index` counts them."""
    text = torch.arange(before).expand(3, -1)
    rows, columns = torch.arange(height).repeat_interleave(width), torch.arange(width).repeat(height)
    image = before + torch.stack([torch.zeros_like(rows), rows, columns])
    rest = before + max(height, width) + torch.arange(after).expand(3, -1)
    return torch.cat([text, image, rest], 1)[:, None]


DOCUMENTS = [picture(2, 2, 3, 3), picture(0, 3, 3, 3)]


def error(logits: Tensor, expected: Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe"])
def model(request: pytest.FixtureRequest) -> Any:
    return hybrid(request.param)


@pytest.fixture(scope="module")
def apart(model: Any) -> Tensor:
    parts = zip(IDS.split(LENGTHS, 1), DOCUMENTS)
    with torch.no_grad():
        return torch.cat([model(ids, position_ids=at, use_cache=False).logits for ids, at in parts], 1)


@pytest.mark.parametrize("offset", [0, 20], ids=["begin again", "go on"])
def test_documents_with_boundaries_keep_their_image_positions(model: Any, apart: Tensor, offset: int):
    """Rotations are relative, so a document may begin at any position."""
    positions = torch.cat([DOCUMENTS[0], DOCUMENTS[1] + offset], 2)
    with torch.no_grad(), patch(model):
        assert error(model(IDS, position_ids=positions, cu_seq_lens_q=CU).logits, apart) < SEPARATE


def test_documents_are_separated_where_image_positions_begin_again(model: Any, apart: Tensor):
    packed = {"position_ids": torch.cat(DOCUMENTS, 2)}
    with torch.no_grad(), patch(model):
        assert error(model(IDS, **packed).logits, apart) < SEPARATE
        with pytest.raises(ValueError, match="use_cache must be False with packed documents"):
            model(IDS, use_cache=True, **packed)
        text = torch.cat([torch.arange(n) for n in LENGTHS])[None, None]
        four = torch.cat([text, packed["position_ids"]])
        assert error(model(IDS, position_ids=four).logits, apart) < SEPARATE


def test_a_row_of_one_document_is_unchanged(model: Any, apart: Tensor):
    """With an image first, and behind padding whose positions are zeros or ones."""
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.int64), IDS[:, 11:]], 1)
    mask = torch.tensor([[0] * 4 + [1] * 12])
    with torch.no_grad(), patch(model) as patched:
        out = model(IDS[:, 11:], position_ids=DOCUMENTS[1], use_cache=True)
        assert error(out.logits, apart[:, 11:]) < SEPARATE
        for value in (0, 1):
            positions = torch.cat([torch.full((3, 1, 4), value), DOCUMENTS[1]], 2)
            logits = model(padded, attention_mask=mask, position_ids=positions, use_cache=True).logits
            assert error(logits[:, 4:], apart[:, 11:]) < SEPARATE
    assert patched.report.served
