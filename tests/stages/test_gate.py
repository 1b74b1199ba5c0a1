"""The `gate` launches: each row of the table against the eager one in float64, and sums that span blocks."""

import pytest
import torch

from wyfold.reference import error
from wyfold.stages import table
from wyfold.stages.gate import GateGradients
from wyfold.tile.rows.eager import BLOCK

KINDS = [("softplus", 0.0), ("bounded", -5.0), ("bounded", -50.0)]


def run(backend: str, activation: str, bound: float, *tensors: torch.Tensor) -> list[torch.Tensor]:
    x, A_log, dt_bias, dg = tensors
    g, dx = torch.empty_like(x), torch.empty_like(x)
    dA_log, ddt_bias = torch.zeros_like(A_log), A_log.new_zeros(x.shape[1:])
    stage = table.launches("gate", backend)
    stage.gate(x, A_log, dt_bias, activation, bound, g)
    stage.gate_bwd(x, A_log, dt_bias, activation, bound, dg, GateGradients(dx, dA_log, ddt_bias))
    return [g, dx, dA_log, ddt_bias]


@pytest.mark.parametrize(("activation", "bound"), KINDS)
@pytest.mark.parametrize("channels", [1, 24])
@pytest.mark.parametrize("tokens", [1, 50, BLOCK // 48 + 1])
def test_gate(tokens: int, channels: int, activation: str, bound: float, backend: str):
    x, dg = (3 * torch.randn(tokens, 2, channels) for _ in range(2))
    tensors = (x, torch.randn(2), torch.randn(2 * channels), dg)
    truth = run("eager", activation, bound, *(t.double() for t in tensors))
    results = zip(("g", "dx", "dA_log", "ddt_bias"), run(backend, activation, bound, *tensors), truth)
    yardstick = run("eager", activation, bound, *tensors)
    error.require(*(error.judge(got, t, yard, name=name) for (name, got, t), yard in zip(results, yardstick)))


@pytest.mark.parametrize("scale", [1.0, 2.0, 0.0])
def test_beta_sigmoid(scale: float, backend: str):
    x, d = 5 * torch.randn(300, 4), torch.randn(300, 4)

    def run_beta(name: str, x: torch.Tensor, d: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        beta, dx = torch.empty_like(x), torch.empty_like(x)
        stage = table.launches("gate", name)
        stage.beta_sigmoid(x, scale, beta)
        stage.beta_sigmoid_bwd(x, scale, d, dx)
        return beta, dx

    results = zip(("beta", "dx"), run_beta(backend, x, d), run_beta("eager", x.double(), d.double()))
    yardstick = run_beta("eager", x, d)
    error.require(*(error.judge(got, t, yard, name=name) for (name, got, t), yard in zip(results, yardstick)))
