"""`enter` and `leave`: states copied out of a pool and back, each implementation against PyTorch's indexing."""

import pytest
import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid, chunk_grid

N, HV = 5, 2


def on(device: torch.device, *numbers: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(numbers, device=device, dtype=dtype)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_enter_and_leave(stored: torch.dtype, backend: str, device):
    pool = torch.randn(9, HV, 24, 40).to(device, stored)
    before, rows = pool.clone(), [7, -1, 0, 9, 3]
    given = on(device, 1, 1, 0, 1, 1, dtype=torch.bool)
    slots = Slots(pool, pool, on(device, *rows)[:, None], target=on(device, 1, 2, 0, 4, -1), given=given)
    stage = table.kernel_module("state_pool", backend)
    states = torch.empty(N, HV, 24, 40, device=device)
    stage.enter(pool, slots, states)
    assert torch.equal(states[[0, 4]], pool[[7, 3]].float()) and not states[[1, 2, 3]].any()
    o = torch.ones(N, 3, HV, 8, device=device)
    left = torch.randn_like(states)
    stage.leave(left, slots, pool, ChunkGrid(64, N, 3, N, N), o)
    assert torch.equal(pool[[1, 0]], left[[0, 2]].to(stored))  # row 4 has no target slot
    assert torch.equal(pool[2:], before[2:])
    assert not o[[1, 3]].any() and (o[[0, 2, 4]] == 1).all()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("many", [1, 300], ids=["few", "many"])
def test_intermediate_states(many: int, stored: torch.dtype, backend: str, device):
    """Each used row of a sequence that was not skipped goes to its slot, against indexing by hand.

    Unused rows hold NaN.
    """
    lengths = [130, 0, 64, 63, 200] + [1] * (many - 1) + [64]
    N, T, every, sizes = len(lengths), sum(lengths) + 70, 64, (HV, 24, 40)
    source = list(range(N))
    source[2], source[3], source[-1] = -1, N, N - 2
    pool = torch.randn(N, *sizes).to(device)
    slots = Slots(pool, pool, on(device, *source)[:, None])
    cu = torch.tensor([0, *lengths], device=device).cumsum(0)
    grid = table.kernel_module("chunk_grid", backend).chunk_grid(1, T, 64, cu, every)
    states = torch.full((T // every, *sizes), torch.nan, device=device)
    states[:7] = torch.randn(7, *sizes).to(device)
    kept = torch.randn(9, *sizes).to(device, stored)
    expected = kept.clone()
    # Rows: two of sequence 0, a skipped one, three of sequence 4, and one of the last sequence.
    where = [4, -1, 5, 0, 9, 7, 2, *[8] * (T // every - 7)]
    for row in (0, 3, 5, 6):
        expected[where[row]] = states[row].to(stored)
    table.kernel_module("state_pool", backend).leave_between(states, slots, grid, kept, on(device, *where))
    assert torch.equal(kept, expected)


def test_intermediate_states_of_a_dense_batch(backend: str, device):
    """Two states per row. Without a source, row n enters from slot n, which the last row lacks."""
    pool, kept = torch.randn(2, HV, 8, 8).to(device), torch.randn(6, HV, 8, 8).to(device)
    grid = table.kernel_module("chunk_grid", backend).chunk_grid(3, 130, 64, None, 64)
    states, expected = torch.randn(6, HV, 8, 8).to(device), kept.clone()
    where = on(device, 5, 0, 2, 6, 1, 3, dtype=torch.int64)
    expected[[5, 0, 2]] = states[:3]
    table.kernel_module("state_pool", backend).leave_between(states, Slots(pool, pool), grid, kept, where)
    assert torch.equal(kept, expected)


def test_no_sequence_has_intermediate_states(backend: str, device):
    pool, kept = torch.randn(2, HV, 8, 8).to(device), torch.zeros(2, HV, 8, 8, device=device)
    grid = table.kernel_module("chunk_grid", backend).chunk_grid(1, 64, 64, on(device, 0), 64)
    stage, slots = table.kernel_module("state_pool", backend), Slots(pool, pool, on(device)[:, None])
    stage.leave_between(torch.ones(1, HV, 8, 8, device=device), slots, grid, kept, on(device, 1))
    assert not kept.any()


def test_drafts_and_packed_rows(backend: str, device):
    """A sequence enters from the column of its accepted tokens; only a skipped sequence's own tokens are cleared."""
    pool = torch.randn(9, HV, 8, 8).to(device)
    columns = on(device, *range(8), -1, 8).view(N, 2)
    slots = Slots(pool, pool, columns, accepted=on(device, 0, 1, 2, 7, 1))
    states, o = torch.empty(N, HV, 8, 8, device=device), torch.ones(1, 9, HV, 8, device=device)
    stage = table.kernel_module("state_pool", backend)
    stage.enter(pool, slots, states)
    assert torch.equal(states[:4], pool[[0, 2, 5, 7]]) and not states[4].any()
    grid = chunk_grid(1, 9, 64, on(device, 0, 1, 3, 3, 5, 8))
    before = pool.clone()
    stage.leave(states * 2, slots, pool, grid, o)
    assert torch.equal(pool[[0, 2, 5, 7]], 2 * before[[0, 2, 5, 7]])
    assert (o[:, :5] == 1).all() and not o[:, 5:8].any() and (o[:, 8:] == 1).all()
