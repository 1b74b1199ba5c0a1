"""Operands that the interpreter's shortcuts leave to Triton, and equality of all results with Triton's."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")


@triton.jit
def tiles(p_out, ROWS: tl.constexpr):
    tl.store(p_out, tl.sum(tl.sum(tl.zeros((4, 2), tl.float32) + tl.zeros((ROWS, 1), tl.float32), 0), 0))


def test_tiles_that_do_not_fit_are_refused(device, interpreter):
    out = torch.ones(1, device=device)
    tiles[(1,)](out, ROWS=4)
    assert out.item() == 0
    with pytest.raises(Exception, match="incompatible dimensions"):
        tiles[(1,)](out, ROWS=8)


@triton.jit
def operators(p_out, p_in, a, half, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """Tiles, columns, numbers and pointers, of one type, of two, and of types that Triton itself promotes."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, 8)
    x = tl.load(p_in + rows[:, None] * 8 + columns[None, :])
    y = tl.load(p_in + rows.to(tl.int64) * 8)[:, None]
    near = x.to(half)
    far = rows[:, None].to(tl.int64) * 2**20 + columns
    for n in tl.static_range(13):
        if n == 0:
            z = x + y
        elif n == 1:
            z = y - x
        elif n == 2:
            z = 3 - x * 0.1
        elif n == 3:
            z = (near * 3 + near) - x
        elif n == 4:
            z = near * 0.1 + 1e-3 * near
        elif n == 5:
            z = tl.where(x < y, x, -0.0) * tl.where(rows[:, None] > 3, x, y)
        elif n == 6:
            z = tl.where(x <= 0, -0.0, near) * y + tl.where(a > 2, x, y)
        elif n == 7:
            z = (far * a - 7 >= 2**21) * x
        elif n == 8:
            z = (x == y) + (near != 0.1) + (columns[None, :] < WIDE) * y
        elif n == 9:
            z = rows[:, None] * x + a * columns
        elif n == 10:
            z = 1 / (x + 2.5) + a * near + tl.where(near < 2049, x, 1.0)
        elif n == 11:
            z = (far + 2**31) * 1.0 + (rows * 2**30 + rows * 2**30)[:, None]
        else:
            z = x * n + (y + a) * (-1e-40)
        tl.store(p_out + n * ROWS * 8 + rows[:, None] * 8 + columns, z)


@pytest.mark.parametrize("half", [tl.float16, tl.bfloat16], ids=str)
def test_shortcuts_give_the_results_of_triton(half, device, interpreter, monkeypatch):
    from tests import triton_shortcuts

    x = torch.randn(16, 8, device=device)
    x[3] = x[5, 0] = 0
    x[4, 0] = 2048
    out, expected = torch.full((2, 13, 16, 8), torch.nan, device=device)
    operators[(1,)](out, x, 3, half, 16, 5)
    monkeypatch.setattr(triton_shortcuts, "OPERATORS", {})
    monkeypatch.setattr(triton_shortcuts, "select", None)
    operators[(1,)](expected, x, 3, half, 16, 5)
    assert expected.isfinite().all() and torch.equal(out.view(torch.int32), expected.view(torch.int32))


def test_additions_are_recognised():
    from tests import triton_shortcuts

    assert triton_shortcuts.is_addition(lambda a, b, x, y: (a + x, b + y))
    assert not triton_shortcuts.is_addition(lambda a, b, x, y: (a + x, y + b))
    assert not triton_shortcuts.is_addition(lambda a, b, x, y: (a + b, x + y))
    assert not triton_shortcuts.is_addition(lambda a, x: (a - x,))
