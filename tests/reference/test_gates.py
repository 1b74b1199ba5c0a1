"""Gates of the reference: formulas, gradients, and extreme inputs."""

import math

import pytest
import torch
from torch.autograd import grad, gradcheck

from wyfold.reference import beta_sigmoid, gdn_gate, kda_gate
from wyfold.reference.error import judge, require
from wyfold.reference.gates import FLOOR, floored, raise_to
from wyfold.reference.targets import target

HV, K = 2, 3


def parameters(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(HV, dtype=dtype), torch.randn(HV, K, dtype=dtype)


def test_softplus_is_exact_where_torchs_is_linear():
    """log(1 + e^x) to full float64 accuracy, from far below zero to far above."""
    x = torch.linspace(-40, 60, 1001, dtype=torch.float64)
    truth = torch.tensor([max(v, 0.0) + math.log1p(math.exp(-abs(v))) for v in x.tolist()], dtype=torch.float64)
    for got, exact in zip(-gdn_gate(x[:, None]), truth):
        require(judge(got, exact[None], name="softplus", target=target("o", torch.float64)))


def test_both_gates_by_their_formulas():
    A_log, dt_bias = parameters()
    g = torch.randn(2, 5, HV, K, dtype=torch.float64)
    softplus = -A_log.exp()[:, None] * torch.log1p(torch.exp(g + dt_bias))
    bounded = -4 * torch.sigmoid(A_log.exp()[:, None] * (g + dt_bias))
    bound = target("o", torch.float64)
    for bias in (dt_bias, dt_bias.reshape(-1)):
        for rate in (A_log, A_log.reshape(1, 1, HV, 1)):
            require(judge(kda_gate(g, rate, bias), softplus, name="softplus", target=bound))
            require(judge(kda_gate(g, rate, bias, -4.0), bounded, name="bounded", target=bound))
    scalar = gdn_gate(g[..., 0], A_log, dt_bias[:, 0])
    require(judge(scalar, softplus[..., 0], name="scalar", target=bound))
    assert torch.equal(kda_gate(g), kda_gate(g, torch.zeros(HV, dtype=torch.float64), torch.zeros(HV, K)))


def test_gradients_are_the_slopes():
    A_log, dt_bias = (x.requires_grad_() for x in parameters())
    g = torch.randn(2, HV, K, dtype=torch.float64, requires_grad=True)
    assert gradcheck(kda_gate, (g, A_log, dt_bias))
    assert gradcheck(lambda g, a, b: kda_gate(g, a, b, -5.0), (g, A_log, dt_bias))
    assert gradcheck(lambda g, a, b: gdn_gate(g[..., 0], a, b[:, 0]), (g, A_log, dt_bias))
    assert gradcheck(lambda g: beta_sigmoid(g, 2.0), (g,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_floor_has_exp_zero_and_larger_values_are_unchanged(dtype):
    g = torch.tensor([0.0, -1.0, -88.0, FLOOR[dtype], -1e6, -math.inf], dtype=dtype, requires_grad=True)
    assert torch.equal(floored(g)[:4], g[:4])
    decay = floored(g).exp()
    assert not decay[3:].any() and decay[:3].all()
    (d,) = grad(decay.sum(), g)
    assert not d[3:].any() and d[:3].all()


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("end", [-math.inf, -50.0, 50.0, 1e6, math.inf])
def test_saturated_gates_have_finite_gradients(end, lower_bound):
    A_log, dt_bias = (x.requires_grad_() for x in parameters(torch.float32))
    g = torch.full((1, HV, K), end, requires_grad=True)
    decay = floored(kda_gate(g, A_log, dt_bias, lower_bound)).exp()
    assert decay.isfinite().all()
    for d in grad(decay.sum(), (g, A_log, dt_bias)):
        assert d.isfinite().all()


def test_the_bound_has_a_gradient_and_clamped_values_have_none():
    g = torch.tensor([-4.0, -5.0, -5.5, -math.inf], requires_grad=True)
    raised = raise_to(g, -5.0)
    assert raised.tolist() == [-4.0, -5.0, -5.0, -5.0]
    assert grad(raised.sum(), g)[0].tolist() == [1.0, 1.0, 0.0, 0.0]
