"""Norms of rows against autograd; bits depend on the row alone."""

import pytest
import torch

from wyfold.tile.norm.eager import l2norm, l2norm_bwd, rms_norm, rms_norm_bwd

NORMS = {
    "l2": (l2norm, l2norm_bwd, lambda x, eps: x / (x.square().sum(-1, keepdim=True) + eps).sqrt()),
    "rms": (rms_norm, rms_norm_bwd, lambda x, eps: x / (x.square().mean(-1, keepdim=True) + eps).sqrt()),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("width", [2, 5, 64, 129])
def test_value_and_adjoint(name: str, size: float, width: int, float64_bounds):
    forward, backward, truth = NORMS[name]
    x = (size * torch.randn(7, width, dtype=torch.float64)).requires_grad_()
    dy = torch.randn_like(x)
    expected = truth(x, 1e-6)
    y, r = forward(x.detach(), 1e-6)
    float64_bounds.output(name, y, expected.detach())
    (dx,) = torch.autograd.grad(expected, x, dy)
    float64_bounds.gradient(f"d{name}", backward(y, r, dy), dx)


@pytest.mark.parametrize("name", NORMS)
def test_zero_row_stays_zero_with_a_finite_gradient(name: str):
    forward, backward, _ = NORMS[name]
    y, r = forward(torch.zeros(2, 8), 1e-6)
    assert torch.equal(y, torch.zeros(2, 8))
    assert backward(y, r, torch.ones(2, 8)).isfinite().all()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("width", [8, 24, 100, 128, 1000])
def test_a_row_does_not_depend_on_the_rows_around_it(name: str, width: int, threads: int):
    forward, backward, _ = NORMS[name]
    x, dy = torch.randn(700, width), torch.randn(700, width)
    y, r = forward(x, 1e-6)
    dx = backward(y, r, dy)
    for rows in (slice(0, 1), slice(3, 5), slice(17, 86), slice(699, 700)):
        y_alone, r_alone = forward(x[rows].clone(), 1e-6)
        assert torch.equal(y_alone, y[rows])
        assert torch.equal(backward(y_alone, r_alone, dy[rows].clone()), dx[rows])
