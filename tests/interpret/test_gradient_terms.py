"""The sums over chunks of what `gradients` finds for a gate's parameters."""

import pytest
import torch

terms = pytest.importorskip("wyfold.kernels.gradients.triton.terms", reason="Triton is not installed")


def whole_numbers(*shape: int, device: torch.device) -> torch.Tensor:
    """Terms whose sums are exact in float32, in any order."""
    return torch.randint(-9, 10, shape, device=device).float()


@pytest.mark.parametrize("chunks", [1, 300])
@pytest.mark.parametrize("shape, per", [((3,), 1), ((3,), 2), ((5, 24), 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_of_all_chunks_are_added(chunks: int, shape: tuple[int, ...], per: int, dtype: torch.dtype, device):
    given = whole_numbers(chunks, *shape, per, device=device)
    total = torch.full(shape, torch.nan, device=device, dtype=dtype)
    terms.sum_over_chunks(given, total)
    assert torch.equal(total, given.sum((0, -1)).to(dtype))


def test_sums_with_other_strides_and_no_sums(device):
    given, total = whole_numbers(70, 3, 4, device=device), torch.zeros(4, 3, device=device).T
    terms.sum_over_chunks(given, total)
    assert torch.equal(total, given.sum(0))
    terms.sum_over_chunks(None, total)
    terms.sum_over_chunks(given, None)
