"""The inner model's steps against their formulas, and adjoints against autograd of the steps, in float64."""

import pytest
import torch

from wyfold.reference import error
from wyfold.tile.inner import eager as inner

EPS = 1e-6
n, C, D = 3, 16, 24


def draw(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def test_normalised_rows_have_mean_0_and_variance_1(float64_bounds):
    x, r = inner.normalise(z := draw(n, C, D), EPS)
    variance = z.var(-1, correction=0, keepdim=True)
    float64_bounds.output("r", r, (variance + EPS) ** -0.5)
    float64_bounds.output("x", x, (z - z.mean(-1, keepdim=True)) * r)


def test_variance_takes_two_passes():
    """Mean of squares minus square of mean would lose every digit of a variance of 1e-4 beside a mean of 100."""
    z = 100 + 1e-2 * draw(n, C, D, dtype=torch.float32)
    x, _ = inner.normalise(z.clone(), EPS)
    truth, _ = inner.normalise(z.double(), EPS)
    # The mean of 100 is rounded to an ulp of 100; deviations of 1e-2 can have this error.
    bound = 2 * error.ulp(100.0, torch.float32) / 1e-2
    error.require(error.judge(x, truth, name="x", target=bound))


def test_normalise_bwd(float64_bounds):
    z = draw(n, C, D).requires_grad_()
    x, r = torch.nn.functional.layer_norm(z, (D,), eps=EPS), inner.normalise(z.detach(), EPS)[1]
    d = draw(n, C, D)
    (truth,) = torch.autograd.grad(x, z, d)
    float64_bounds.gradient("dz", inner.normalise_bwd(x.detach(), r, d), truth)


def loss_gradients(S, c, k, t, w):
    """Gradients of 1/2 |w x + t - k_free|^2 in x and in z, by autograd; t holds u - v + k."""
    z = (torch.bmm(k, S) + c).detach().requires_grad_()
    x = torch.nn.functional.layer_norm(z, (D,), eps=EPS)
    loss = 0.5 * (w * x + t).square().sum()
    return torch.autograd.grad(loss, (x, z))


def test_inner_gradient_is_the_gradient_of_the_inner_loss(float64_bounds):
    S, c, k, t, w = draw(n, D, D), draw(n, 1, D), draw(n, C, D), draw(n, C, D), draw(n, 1, D)
    found = inner.inner_gradient(S, c, k, t, w, EPS)
    Y, N = loss_gradients(S, c, k, t, w)
    float64_bounds.gradient("Y", found.Y, Y)
    float64_bounds.gradient("N", found.N, N)


@pytest.mark.parametrize("valid", [1, 15])
def test_idle_rows_take_no_step(valid: int):
    S, c, k, t, w = draw(n, D, D), draw(n, 1, D), draw(n, C, D), draw(n, C, D), draw(n, 1, D)
    k[:, valid:] = 0
    whole = inner.inner_gradient(S, c, k, t, w, EPS)
    idle = (torch.arange(C) >= valid)[None, :, None].expand(n, C, 1)
    found = inner.inner_gradient(S, c, k, t, w, EPS, idle)
    assert whole.N[:, valid:].abs().min() > 0  # an idle row predicts c and would learn
    assert not found.N[:, valid:].any()
    assert torch.equal(found.N[:, :valid], whole.N[:, :valid])


def test_inner_gradient_bwd(float64_bounds):
    w, dN = draw(n, 1, D), draw(n, C, D)
    z, t = draw(n, C, D).requires_grad_(), draw(n, C, D).requires_grad_()
    x = torch.nn.functional.layer_norm(z, (D,), eps=EPS)
    y = w * (w * x + t)
    r = (z.var(-1, correction=0, keepdim=True) + EPS) ** -0.5
    N = r * (y - y.mean(-1, keepdim=True) - x * (x * y).mean(-1, keepdim=True))
    dz, dt = torch.autograd.grad(N, (z, t), dN)

    identity, nothing = torch.eye(D, dtype=torch.float64).expand(n, D, D), torch.zeros(n, 1, D, dtype=torch.float64)
    found = inner.inner_gradient(identity, nothing, z.detach(), t.detach(), w, EPS)
    dY, dZ = inner.inner_gradient_bwd(found, w, dN)
    float64_bounds.gradient("dZ", dZ, dz)
    float64_bounds.gradient("w dY", w * dY, dt)


def test_a_row_reads_the_state_that_its_own_step_size_leads_to(float64_bounds):
    """Row r of `read` is q_r S_r + c_r with S_r and c_r formed, in `step_`, from the rows up to r."""
    S, c, q, k, N, e = draw(n, D, D), draw(n, 1, D), draw(n, C, D), draw(n, C, D), draw(n, C, D), draw(n, C, 1)
    O = inner.read(S, c, q, e, torch.bmm(inner.attention(q, k), N))
    for r in (0, 7, C - 1):
        S_r, c_r = S.clone(), c.clone()
        inner.step_(S_r, c_r, k[:, : r + 1], N[:, : r + 1], e[:, r : r + 1])
        float64_bounds.output(f"row {r}", O[:, r : r + 1], torch.baddbmm(c_r, q[:, r : r + 1], S_r))


@pytest.mark.parametrize("on_q", [False, True])
def test_residual_norm_and_its_adjoint(on_q: bool, float64_bounds):
    """Residual on the inner model's output, or on the raw query, whose gradient through it is dout."""
    O, w, u, dout = (
        draw(n, C, D).requires_grad_(),
        draw(n, 1, D).requires_grad_(),
        draw(n, 1, D).requires_grad_(),
        draw(n, C, D),
    )
    raw = draw(n, C, D) if on_q else None
    out = (O if raw is None else raw) + w * torch.nn.functional.layer_norm(O, (D,), eps=EPS) + u
    dO_truth, dw_truth = torch.autograd.grad(out, (O, w), dout)
    found = inner.residual_norm(*(x.detach() for x in (O, w, u)), EPS, raw)
    dO, X = inner.residual_norm_bwd(O.detach(), w.detach(), EPS, dout, on_q)
    float64_bounds.output("out", found, out.detach())
    float64_bounds.gradient("dO", dO, dO_truth)
    float64_bounds.gradient("dw", (dout * X).sum(1, keepdim=True), dw_truth)


def test_step_bwd(float64_bounds):
    """Gradient of the state through O = q S + c, Z = k S + c, and the unchanged state."""
    S, c = draw(n, D, D).requires_grad_(), draw(n, 1, D).requires_grad_()
    q, k, dO, dZ, dS, dc = (
        draw(n, C, D),
        draw(n, C, D),
        draw(n, C, D),
        draw(n, C, D),
        draw(n, D, D),
        draw(n, 1, D),
    )
    outputs = (torch.bmm(q, S) + c, torch.bmm(k, S) + c, S.clone(), c.clone())
    dS_truth, dc_truth = torch.autograd.grad(outputs, (S, c), (dO, dZ, dS.clone(), dc.clone()))
    inner.step_bwd_(dS, dc, q, k, dO, dZ)
    float64_bounds.gradient("dS", dS, dS_truth)
    float64_bounds.gradient("dc", dc, dc_truth)
