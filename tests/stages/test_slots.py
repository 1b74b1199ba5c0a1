"""`enter` and `leave`: states out of a pool and back, each row of the table against PyTorch's own indexing."""

import pytest
import torch
from torch import Tensor

from wyfold.runtime.chunks import ChunkGrid, chunk_grid
from wyfold.stages import table
from wyfold.stages.records import Slots

N, HV = 5, 2


def on(device: torch.device, *numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_there_and_back(stored: torch.dtype, backend: str, device):
    pool = torch.randn(9, HV, 24, 40).to(device, stored)
    before, rows = pool.clone(), [7, -1, 0, 9, 3]
    given = on(device, 1, 1, 0, 1, 1, dtype=torch.bool)
    slots = Slots(pool, pool, on(device, *rows)[:, None], target=on(device, 1, 2, 0, 4, -1), given=given)
    stage = table.launches("slots", backend)
    states = torch.empty(N, HV, 24, 40, device=device)
    stage.enter(pool, slots, states)
    assert torch.equal(states[[0, 4]], pool[[7, 3]].float()) and not states[[1, 2, 3]].any()
    o = torch.ones(N, 3, HV, 8, device=device)
    left = torch.randn_like(states)
    stage.leave(left, slots, pool, ChunkGrid(64, N, 3, N, N), o)
    assert torch.equal(pool[[1, 0]], left[[0, 2]].to(stored))  # row 4 goes nowhere
    assert torch.equal(pool[2:], before[2:])
    assert not o[[1, 3]].any() and (o[[0, 2, 4]] == 1).all()


def test_drafts_and_packed_rows(backend: str, device):
    """A sequence enters from the column its accepted tokens say; what is cleared are a skipped one's own tokens."""
    pool = torch.randn(9, HV, 8, 8).to(device)
    columns = on(device, *range(8), -1, 8).view(N, 2)
    slots = Slots(pool, pool, columns, accepted=on(device, 0, 1, 2, 7, 1))
    states, o = torch.empty(N, HV, 8, 8, device=device), torch.ones(1, 9, HV, 8, device=device)
    stage = table.launches("slots", backend)
    stage.enter(pool, slots, states)
    assert torch.equal(states[:4], pool[[0, 2, 5, 7]]) and not states[4].any()
    grid = chunk_grid(1, 9, 64, on(device, 0, 1, 3, 3, 5, 8))
    before = pool.clone()
    stage.leave(states * 2, slots, pool, grid, o)
    assert torch.equal(pool[[0, 2, 5, 7]], 2 * before[[0, 2, 5, 7]])
    assert (o[:, :5] == 1).all() and not o[:, 5:8].any() and (o[:, 8:] == 1).all()
