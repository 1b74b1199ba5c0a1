"""The gradient of a saturated gate lost its digits on the CPU: 1 - sigmoid(x) cancels for large x.

At x = 17 no digit was left in float32. The gradient of A_log of a bounded KDA gate with saturated inputs only had an
error of 2e-4, and that of a write strength's logit up to 100 %.
"""

import pytest
import torch

import wyfold

UNIT = 2.0**-24  # float32


def sigmoid_slope(x: torch.Tensor) -> torch.Tensor:
    """Derivative of the sigmoid in float64 as a product of two separately computed factors."""
    x = x.double()
    return torch.sigmoid(x) * torch.sigmoid(-x)


@pytest.fixture
def saturated() -> torch.Tensor:
    """Pre-activations of both signs, up to 40."""
    return torch.cat([torch.linspace(-40.0, 40.0, 160), torch.tensor([17.5, -17.5, 0.0, 25.0])])


def assert_within(got: torch.Tensor, expected: torch.Tensor, ulps: float) -> None:
    """Require each element within a number of units of roundoff, relative to itself."""
    error = ((got.double() - expected).abs() / expected.abs()).max().item()
    assert error <= ulps * UNIT, f"off by {error:.2e}, allowed {ulps * UNIT:.2e}"


def test_write_strength(saturated: torch.Tensor, backend: str, device: torch.device):
    x = saturated.to(device).requires_grad_()
    (dx,) = torch.autograd.grad(wyfold.fused_beta_sigmoid(x, 2.0, backend=backend).sum(), x)
    assert_within(dx.cpu(), 2 * sigmoid_slope(saturated), 64)


def test_bounded_gate(saturated: torch.Tensor, backend: str, device: torch.device):
    g = saturated.view(-1, 1, 1).expand(-1, 1, 8).contiguous().to(device).requires_grad_()
    A_log = torch.zeros(1, device=device, requires_grad=True)
    decay = wyfold.fused_kda_gate(g, A_log, lower_bound=-4.0, backend=backend)
    dg, _ = torch.autograd.grad(decay.sum(), (g, A_log))
    assert_within(dg[:, 0, 0].cpu(), -4 * sigmoid_slope(saturated), 64)


def test_rate_when_all_gates_are_saturated(backend: str, device: torch.device):
    x = torch.linspace(8.0, 20.0, 96)
    g, A_log = x.view(-1, 1, 1).expand(-1, 1, 8).to(device), torch.zeros(1, device=device, requires_grad=True)
    decay = wyfold.fused_kda_gate(g, A_log, lower_bound=-4.0, backend=backend)
    (dA_log,) = torch.autograd.grad(decay.sum(), A_log)
    expected = -4 * (x.double() * sigmoid_slope(x)).sum() * 8
    assert_within(dA_log.cpu(), expected, 64)


def test_output_gate(saturated: torch.Tensor, backend: str, device: torch.device):
    g = saturated[:, None].to(device).requires_grad_()
    x = torch.ones_like(saturated)[:, None].to(device)
    y = wyfold.rms_norm_gated(x, g, torch.ones(1, device=device), activation="sigmoid", eps=1e-12, backend=backend)
    (dg,) = torch.autograd.grad(y.sum(), g)
    assert_within(dg[:, 0].cpu(), sigmoid_slope(saturated), 64)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_logit_inside_an_operator(form: str, backend: str, device: torch.device):
    """One token from an empty state: o = beta v where q = k is a unit vector."""
    K, logit = 8, 17.5
    q = torch.nn.functional.one_hot(torch.tensor(0), K).float().view(1, 1, 1, K).to(device)
    v, beta = torch.ones(1, 1, 1, K, device=device), torch.full((1, 1, 1), logit, device=device, requires_grad=True)
    call = getattr(wyfold, f"{form}_delta_rule")
    o, _ = call(q, q, v, beta, scale=1.0, use_beta_sigmoid_in_kernel=True, backend=backend)
    (dbeta,) = torch.autograd.grad(o.sum(), beta)
    assert_within(dbeta.flatten().cpu(), K * sigmoid_slope(torch.tensor([logit])), 64)


@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_bounded_gate_inside_an_operator(form: str, backend: str, device: torch.device):
    """One token from a state, nothing written: o = exp(g) S^T k."""
    K, logit = 8, 17.5
    q = torch.nn.functional.one_hot(torch.tensor(0), K).float().view(1, 1, 1, K).to(device)
    v, beta = torch.ones(1, 1, 1, K, device=device), torch.zeros(1, 1, 1, device=device)
    S, A_log = torch.eye(K, device=device).view(1, 1, K, K), torch.zeros(1, device=device, requires_grad=True)
    g = torch.full((1, 1, 1, K), logit, device=device)
    gate = {"A_log": A_log, "use_gate_in_kernel": True, "lower_bound": -1.0}
    o, _ = getattr(wyfold, f"{form}_kda")(q, q, v, g, beta, scale=1.0, initial_state=S, **gate, backend=backend)
    (dA_log,) = torch.autograd.grad(o.sum(), A_log)
    x = torch.tensor([logit])
    assert_within(dA_log.cpu(), -torch.exp(-torch.sigmoid(x.double())) * logit * sigmoid_slope(x), 64)
