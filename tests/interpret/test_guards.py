"""Guarded tensors: a kernel that reads outside one gets NaN, and a write outside one is detected."""

from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")

SIZE = 16


@triton.jit
def shifted(p_x, p_out, by, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)
    tl.store(p_out + o, tl.load(p_x + o + by))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_read_outside_gives_nan(dtype: torch.dtype, guarded: Callable, device: torch.device):
    x = torch.randn(SIZE, dtype=dtype).to(device)
    for by in (-SIZE, 0, SIZE):
        out = torch.empty(SIZE, dtype=dtype, device=device)
        shifted[(1,)](guarded(x), out, by, SIZE=SIZE)
        assert torch.equal(out, x) if by == 0 else out.isnan().all()


def test_a_write_outside_is_detected(guarded: Callable, device: torch.device):
    x = torch.ones(SIZE, device=device)
    for by in (-1, 0, 1):
        guards = type(guarded.__self__)()
        inside = guards.between(torch.zeros(SIZE, device=device))
        shifted[(1,)](x, inside.as_strided((1,), (1,), inside.storage_offset() + by), 0, SIZE=SIZE)
        if by:
            with pytest.raises(AssertionError, match="outside a tensor"):
                guards.check()
        else:
            guards.check()
