"""The `chunk_grid` launch against PyTorch operators on the same boundaries, legal or not."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.runtime import chunk_layout

LEGAL = {
    "ragged, spare rows": (0, 17, 17, 82, 83, 147),
    "around the chunk": (0, 63, 127, 192, 193),
    "more than a step holds": tuple(range(0, 3 * 150, 3)),
    "empty ones at the end": (0, 5, 5, 5, 5),
    "no token": (0, 0),
    "no sequence": (0,),
}
ILLEGAL = ((3, 5, 9), (0, 7, 2, 9), (0, 5, 99), (-4, 2, 9), (9, 9, 0), (0, 90, *range(100)))


def agree(cu: torch.Tensor, tokens: int, C: int, every: int = 0) -> None:
    truth = chunk_layout.chunk_grid(1, tokens, C, cu.cpu(), every)
    found = table.kernel_module("chunk_grid", "triton").chunk_grid(1, tokens, C, cu, every)
    assert (found.first_state is None) == (truth.first_state is None) == (not every)
    for name in ("cu", "first", "sequence", *(["first_state"] if every else [])):
        assert torch.equal(getattr(found, name).cpu(), getattr(truth, name)), name
        assert getattr(found, name).dtype == torch.int64
    assert (found.chunks, found.sequences, found.tokens) == (truth.chunks, truth.sequences, truth.tokens)


@pytest.mark.parametrize("packing", LEGAL)
@pytest.mark.parametrize("C", (16, 64))
@pytest.mark.parametrize("spare", (0, 13, 500))
@pytest.mark.parametrize("dtype", (torch.int32, torch.int64), ids=str)
def test_legal_boundaries(packing: str, C: int, spare: int, dtype: torch.dtype, device: torch.device):
    agree(torch.tensor(LEGAL[packing], dtype=dtype, device=device), LEGAL[packing][-1] + spare, C)


@pytest.mark.parametrize("packing", LEGAL)
@pytest.mark.parametrize("every", (1, 3, 64))
def test_rows_of_intermediate_states(packing: str, every: int, device: torch.device):
    agree(torch.tensor(LEGAL[packing], device=device), LEGAL[packing][-1] + 13, 64, every)


@pytest.mark.parametrize("borders", ILLEGAL, ids=str)
def test_illegal_boundaries(borders: tuple[int, ...], device: torch.device):
    """Boundaries are not checked on the device, so kernels clamp them and stay inside the buffer."""
    agree(torch.tensor(borders, device=device), 9, 4 * 16)
    agree(torch.tensor(borders, device=device), 9, 4 * 16, every=2)


def test_strided_boundaries(device: torch.device):
    cu = torch.tensor([0, 100, 20, 100, 50, 100], device=device)[::2]
    agree(cu, 60, 16)


@pytest.mark.parametrize("name", ("eager", "triton"))
def test_a_dense_grid_launches_no_kernel(name: str):
    grid = table.kernel_module("chunk_grid", name).chunk_grid(3, 33, 16, None)
    assert grid == chunk_layout.chunk_grid(3, 33, 16, None)
