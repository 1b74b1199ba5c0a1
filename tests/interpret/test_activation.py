"""Device activations against float64, near zero and at the limits of their range."""

import pytest
import torch
import torch.nn.functional as F

from wyfold.reference import error
from wyfold.tile.activation import eager

triton = pytest.importorskip("triton", reason="Triton is not installed")
tl = pytest.importorskip("triton.language", reason="Triton is not installed")
tile = pytest.importorskip("wyfold.tile.activation.triton", reason="Triton is not installed")

sigmoid, silu, softplus, exp, log1p = tile.sigmoid, tile.silu, tile.softplus, tile.exp, tile.log1p
sigmoid_bwd, silu_bwd = tile.sigmoid_bwd, tile.silu_bwd
N = 2048

TRUTH = {
    "sigmoid": (eager.sigmoid, torch.sigmoid),
    "softplus": (eager.softplus, lambda x: -F.logsigmoid(-x)),
    "silu": (eager.silu, F.silu),
    "exp": (torch.exp, torch.exp),
}
ADJOINTS = {"sigmoid_bwd": eager.sigmoid_bwd, "silu_bwd": eager.silu_bwd}


@triton.jit
def evaluated(p_x, p_dy, p_y, NAME: tl.constexpr, N: tl.constexpr):
    o = tl.arange(0, N)
    x, dy = tl.load(p_x + o), tl.load(p_dy + o)
    if NAME == "sigmoid":
        y = sigmoid(x)
    elif NAME == "softplus":
        y = softplus(x)
    elif NAME == "silu":
        y = silu(x)
    elif NAME == "exp":
        y = exp(x)
    elif NAME == "log1p":
        y = log1p(x)
    elif NAME == "sigmoid_bwd":
        y = sigmoid_bwd(x, dy)
    else:
        y = silu_bwd(x, dy)
    tl.store(p_y + o, y)


def on_device(name: str, x: torch.Tensor, device: torch.device, dy: torch.Tensor | None = None) -> torch.Tensor:
    x, dy = x.to(device), (x if dy is None else dy).to(device)
    y = torch.empty_like(x)
    evaluated[(1,)](x, dy, y, NAME=name, N=N, enable_fp_fusion=False)
    return y.cpu()


@pytest.mark.parametrize("name", TRUTH)
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_value(name: str, size: float, device: torch.device):
    x, (yardstick, truth) = size * torch.randn(N), TRUTH[name]
    error.require(error.judge(on_device(name, x, device), truth(x.double()), yardstick(x), name=name))


@pytest.mark.parametrize("name", ADJOINTS)
@pytest.mark.parametrize("size", [1e-3, 1.0, 10.0])
def test_adjoint(name: str, size: float, device: torch.device):
    x, dy, adjoint = size * torch.randn(N), torch.randn(N), ADJOINTS[name]
    error.require(
        error.judge(on_device(name, x, device, dy), adjoint(x.double(), dy.double()), adjoint(x, dy), name=name)
    )


@pytest.mark.parametrize("around", [-60.0, -20.0, -7.0])
def test_softplus_is_as_exact_where_it_is_small(around: float, device: torch.device):
    x = around + torch.rand(N)
    got, truth = on_device("softplus", x, device), TRUTH["softplus"][1](x.double())
    error.require(error.judge(got, truth, eager.softplus(x), name="softplus"))


@pytest.mark.parametrize("size", [1e-30, 1e-8, 1e-3, 1.0])
def test_log1p(size: float, device: torch.device):
    x = size * torch.rand(N)
    error.require(error.judge(on_device("log1p", x, device), x.double().log1p(), x.log1p(), name="log1p"))


@pytest.mark.parametrize("name", TRUTH)
def test_limits(name: str, device: torch.device):
    x = torch.zeros(N)
    x[:5] = torch.tensor([-torch.inf, -1e4, 1e4, torch.inf, torch.nan])
    if name == "silu":
        x[0] = 0.0  # -inf * 0 is NaN, here and in PyTorch
    got = on_device(name, x, device)
    assert torch.equal(got.isnan(), x.isnan())
    assert torch.equal(got[~x.isnan()], TRUTH[name][1](x[~x.isnan()]))
