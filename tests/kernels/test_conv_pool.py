"""The `conv_pool` launch: outputs of `conv` after a slot's inputs, and the slot updated for the next tokens."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.records import Slots

D = 40


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("transposed", [False, True], ids=["channels first", "inputs first"])
def test_any_entry_of_a_slot(W: int, transposed: bool, backend: str, device: torch.device):
    """Two sequences of three tokens in the same row, with earlier inputs at different entries of their slots."""
    S, T, accepted = W + 1, 3, torch.tensor([1, 3], dtype=torch.int32)
    pool, x = torch.randn(4, D, S), torch.randn(1, 2 * T, D)
    weight, bias = torch.randn(D, W), torch.randn(D)
    before = torch.stack([pool[3, :, : W - 1], pool[1, :, 2 : W + 1]])
    expected = pool.clone()
    for n, slot in enumerate((3, 1)):
        expected[slot] = torch.cat([before[n, :, 1:], x[0, n * T : (n + 1) * T].T], 1)[:, :S]
    there = pool.to(device)
    there = there.mT.contiguous().mT if transposed else there
    plain, y = torch.empty(2 * T, D, device=device), torch.empty(1, 2 * T, D, device=device)
    cu = torch.tensor([0, T, 2 * T], device=device)
    slots = Slots(there, there, torch.tensor([[3], [1]], device=device), accepted=accepted.to(device))
    grid = table.kernel_module("chunk_grid", backend).chunk_grid(1, 2 * T, 64, cu)
    filter_of = x.to(device), weight.to(device), bias.to(device)
    table.kernel_module("conv_pool", backend).update(*filter_of, there, slots, grid, True, y)
    borders = cu.cpu() if backend == "eager" else cu
    table.kernel_module("conv", backend).conv(
        filter_of[0][0], *filter_of[1:], None, before.to(device), borders, True, plain, None
    )  # fmt: skip
    assert torch.equal(y[0], plain) and torch.equal(there.cpu(), expected)
