"""Activations against PyTorch's in float64; bits depend on the number alone."""

import pytest
import torch
import torch.nn.functional as F

from wyfold.tile.activation.eager import sigmoid, sigmoid_bwd, silu, silu_bwd, softplus

TRUTH = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "softplus": (softplus, lambda x: -F.logsigmoid(-x)),
    "silu": (silu, F.silu),
}
ADJOINTS = {"sigmoid": (sigmoid_bwd, torch.sigmoid), "silu": (silu_bwd, F.silu)}


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("size", [1e-8, 1.0, 50.0, 700.0])
def test_value(name: str, size: float, float64_bounds):
    ours, truth = TRUTH[name]
    for x in (size * torch.randn(1000, dtype=torch.float64), torch.tensor([-size, 0.0, size], dtype=torch.float64)):
        float64_bounds.output(name, ours(x), truth(x))


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits(name: str, dtype: torch.dtype):
    ours, truth = TRUTH[name]
    x = torch.tensor([-torch.inf, -1e4, 0.0, 1e4, torch.inf, torch.nan], dtype=dtype)
    if name == "silu":
        x = x[1:]  # -inf * 0 is NaN, here and in PyTorch
    got = ours(x)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()], truth(x[~x.isnan()]))


@pytest.mark.parametrize("name", ADJOINTS)
def test_adjoint(name: str, float64_bounds):
    ours, forward = ADJOINTS[name]
    for size in (1e-3, 1.0, 30.0):
        x = (size * torch.randn(1000, dtype=torch.float64)).requires_grad_()
        dy = torch.randn_like(x)
        (dx,) = torch.autograd.grad(forward(x), x, dy)
        float64_bounds.gradient(name, ours(x.detach(), dy), dx)


@pytest.mark.parametrize("name", [*TRUTH, "sigmoid_bwd", "silu_bwd"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_position(name: str, dtype: torch.dtype, threads: int):
    x = 5 * torch.randn(70_001, dtype=dtype)
    dy = torch.randn(70_001, dtype=dtype)
    adjoint = {"sigmoid_bwd": sigmoid_bwd, "silu_bwd": silu_bwd}.get(name)
    run = (lambda place: adjoint(x[place], dy[place])) if adjoint else (lambda place: TRUTH[name][0](x[place]))
    whole = run(slice(None))
    for start in (0, 1, 3, 17, 33_000, 69_000):
        for length in (1, 2, 5, 7, 8, 9, 15, 17, 31, 63, 65, 1000):
            assert torch.equal(run(slice(start, start + length)), whole[start : start + length])
