"""The `gate` launches: each implementation against eager in float64, and sums that span blocks."""

import math

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.gate import GateGradients
from wyfold.reference import error
from wyfold.tile.rows.eager import BLOCK

KINDS = [("softplus", 0.0), ("bounded", -5.0), ("bounded", -50.0)]


def run(backend: str, activation: str, bound: float, *tensors: torch.Tensor) -> list[torch.Tensor]:
    x, A_log, dt_bias, dg = tensors
    g, dx = torch.empty_like(x), torch.empty_like(x)
    dA_log, ddt_bias = torch.zeros_like(A_log), A_log.new_zeros(x.shape[1:])
    stage = table.kernel_module("gate", backend)
    stage.gate(x, A_log, dt_bias, activation, bound, g)
    stage.gate_bwd(x, A_log, dt_bias, activation, bound, dg, GateGradients(dx, dA_log, ddt_bias))
    return [t.cpu() for t in (g, dx, dA_log, ddt_bias)]


@pytest.mark.parametrize(("activation", "bound"), KINDS)
@pytest.mark.parametrize("channels", [1, 24])
@pytest.mark.parametrize("tokens", [50, BLOCK // 192 + 1])
def test_gate(tokens: int, channels: int, activation: str, bound: float, backend: str, device: torch.device):
    # Enough heads for two error measures to agree, each over all 192 numbers: a single one is a sum
    # over tokens, which may nearly cancel.
    heads = 192 // channels
    x, dg = (3 * torch.randn(tokens, heads, channels) for _ in range(2))
    tensors = (x, torch.randn(heads), torch.randn(heads * channels), dg)
    got = run(backend, activation, bound, *(t.to(device) for t in tensors))
    truth = run("eager", activation, bound, *(t.double() for t in tensors))
    yardstick = run("eager", activation, bound, *tensors)
    got, truth, yardstick = ([*x[:3], x[3].flatten()] for x in (got, truth, yardstick))
    results = zip(("g", "dx", "dA_log", "ddt_bias"), got, truth)
    error.require(*(error.judge(got, t, yard, name=name) for (name, got, t), yard in zip(results, yardstick)))


def test_slow_gates(backend: str, device: torch.device):
    """Initial gates of layers: u is about -7, where a gate is as small as its exponential."""
    x, A_log = torch.randn(300, 4, 1) - 7, torch.randn(4)
    bias, dg = torch.zeros(4), torch.randn(300, 4, 1)
    got = run(backend, "softplus", 0.0, *(t.to(device) for t in (x, A_log, bias, dg)))
    truth = run("eager", "softplus", 0.0, *(t.double() for t in (x, A_log, bias, dg)))
    yardstick = run("eager", "softplus", 0.0, x, A_log, bias, dg)
    error.require(error.judge(got[0], truth[0], yardstick[0], name="g"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs(dtype: torch.dtype, backend: str, device: torch.device):
    x, dg = (3 * torch.randn(60, 2, 24).to(dtype) for _ in range(2))
    tensors = (x, torch.randn(2), torch.randn(48), dg)

    def forward(name: str, *tensors: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensors[0], dtype=torch.promote_types(tensors[0].dtype, torch.float32))
        table.kernel_module("gate", name).gate(*tensors[:3], "softplus", 0.0, out)
        return out.cpu()

    got, wide = tuple(t.to(device) for t in tensors), tuple(t.double() for t in tensors)
    error.require(
        error.judge(forward(backend, *got), forward("eager", *wide), forward("eager", *tensors), name="g"),
        error.judge(
            *(run(n, "softplus", 0.0, *t)[1] for n, t in ((backend, got), ("eager", wide), ("eager", tensors))),
            name="dx",
        ),
    )


@pytest.mark.parametrize(("activation", "bound"), KINDS)
def test_absent_parameters_and_gradients(activation: str, bound: float, backend: str, device: torch.device):
    x, dg = torch.randn(9, 2, 24, device=device), torch.randn(9, 2, 24, device=device)
    zeros, stage = torch.zeros(2, device=device), table.kernel_module("gate", backend)
    given = run(backend, activation, bound, x, zeros, torch.zeros(48, device=device), dg)
    g, dx = torch.empty_like(x), torch.empty_like(x)
    stage.gate(x, None, None, activation, bound, g)
    stage.gate_bwd(x, None, None, activation, bound, dg, GateGradients(dx, None, None))
    assert torch.equal(g.cpu(), given[0])
    assert torch.equal(dx.cpu(), given[1])
    dA_log, ddt_bias = torch.full((2,), 5.0, device=device), torch.full((2, 24), 6.0, device=device)
    stage.gate_bwd(x, zeros, None, activation, bound, dg, GateGradients(None, dA_log, None))
    stage.gate_bwd(x, None, zeros.repeat(24), activation, bound, dg, GateGradients(None, None, ddt_bias))
    assert torch.equal(dA_log.cpu(), given[2])
    assert torch.equal(ddt_bias.cpu(), given[3])
    stage.gate_bwd(x[:0], zeros, zeros.repeat(24), activation, bound, dg[:0], GateGradients(None, dA_log, ddt_bias))
    assert not dA_log.any() and not ddt_bias.any()


def test_limits(backend: str, device: torch.device):
    """No clamping. A reset's gradient is zero and makes no parameter's gradient infinite. NaN stays NaN."""
    x = torch.tensor([-torch.inf, -1e4, 1e4, torch.inf, torch.nan], device=device)[:, None, None]
    A_log, bias, stage = (
        torch.zeros(1, device=device),
        torch.zeros(1, device=device),
        table.kernel_module("gate", backend),
    )
    g = torch.empty_like(x)
    stage.gate(x, A_log, bias, "softplus", 0.0, g)
    assert g.flatten().tolist()[:4] == [0.0, 0.0, -1e4, -math.inf]
    assert g.isnan().flatten().tolist() == [False] * 4 + [True]
    stage.gate(x, A_log, bias, "bounded", -5.0, g)
    assert g.flatten().tolist()[:4] == [0.0, 0.0, -5.0, -5.0]
    reset = torch.full((3, 1, 1), torch.inf, device=device)
    out = GateGradients(torch.empty_like(reset), torch.zeros(1, device=device), torch.zeros(1, 1, device=device))
    for activation, bound in KINDS:
        stage.gate_bwd(reset, A_log, bias, activation, bound, torch.zeros_like(reset), out)
        assert all(torch.equal(d, torch.zeros_like(d)) for d in out if d is not None)


@pytest.mark.parametrize("channels", [1, 24])
def test_any_strides(channels: int, backend: str, device: torch.device):
    """Strided tensors give the same bits as contiguous ones, and numbers between elements are untouched."""
    x, dg = (torch.randn(9, 4, channels, device=device) for _ in range(2))
    A_log, dt_bias = torch.randn(4, device=device), torch.randn(4 * channels, device=device)
    plain = run(backend, "softplus", 0.0, x, A_log, dt_bias, dg)
    apart = (
        torch.cat([x, x], 2)[:, :, :channels],
        torch.stack([A_log, A_log], 1)[:, 0],
        torch.stack([dt_bias, dt_bias], 1)[:, 0],
        dg.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    )
    for one, other in zip(plain, run(backend, "softplus", 0.0, *apart), strict=True):
        assert torch.equal(one, other)
    room = torch.full((9, 4, channels + 1), torch.nan, device=device)
    table.kernel_module("gate", backend).gate(*apart[:3], "softplus", 0.0, room[:, :, 1:])
    assert torch.equal(room[:, :, 1:].cpu(), plain[0])
    assert room[:, :, 0].isnan().all()


def run_beta(name: str, scale: float, x: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    beta, dx = torch.empty_like(x), torch.empty_like(x)
    stage = table.kernel_module("gate", name)
    stage.beta_sigmoid(x, scale, beta)
    stage.beta_sigmoid_bwd(x, scale, d, dx)
    return beta.cpu(), dx.cpu()


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_beta_sigmoid(dtype: torch.dtype, scale: float, backend: str, device: torch.device):
    x, d = (5 * torch.randn(300, 4)).to(dtype), torch.randn(300, 4).to(dtype)
    got = run_beta(backend, scale, x.to(device), d.to(device))
    results = zip(("beta", "dx"), got, run_beta("eager", scale, x.double(), d.double()))
    yardstick = run_beta("eager", scale, x, d)
    error.require(*(error.judge(got, t, yard, name=name) for (name, got, t), yard in zip(results, yardstick)))


def test_beta_with_any_strides_and_empty(backend: str, device: torch.device):
    x, d = torch.randn(30, 4, device=device), torch.randn(30, 4, device=device)
    apart = torch.stack([x, x], 2)[:, :, 0], d.t().contiguous().t()
    for one, other in zip(run_beta(backend, 2.0, x, d), run_beta(backend, 2.0, *apart), strict=True):
        assert torch.equal(one, other)
    assert run_beta(backend, 2.0, x[:0], d[:0])[0].shape == (0, 4)
    empty = torch.empty(0, 4, 1, device=device)
    assert run(backend, "softplus", 0.0, empty, x[0], x[0], empty)[2].count_nonzero() == 0
