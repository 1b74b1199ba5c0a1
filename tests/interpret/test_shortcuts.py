"""What the interpreter's shortcuts leave to Triton."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")


@triton.jit
def tiles(p_out, ROWS: tl.constexpr):
    tl.store(p_out, tl.sum(tl.sum(tl.zeros((4, 2), tl.float32) + tl.zeros((ROWS, 1), tl.float32), 0), 0))


def test_tiles_that_do_not_fit_are_told(device, interpreter):
    out = torch.ones(1, device=device)
    tiles[(1,)](out, ROWS=4)
    assert out.item() == 0
    with pytest.raises(Exception, match="incompatible dimensions"):
        tiles[(1,)](out, ROWS=8)
