"""Steps of the state: folded, plain and textbook forms, affine summaries, segment folds both ways, and adjoints."""

import pytest
import torch
from torch import Tensor

from wyfold.tile.decay import eager as decay
from wyfold.tile.inverse.eager import inverse
from wyfold.tile.state.eager import advance_, read, residual, retreat_

KINDS = ("none", "scalar", "channel")
N, K, V = 2, 8, 6


class Chunk:
    """Random inputs of one chunk with unit keys, and the factors of every form."""

    def __init__(self, kind: str, C: int):
        self.q, k = torch.randn(2, N, C, K, dtype=torch.float64)
        self.k = torch.nn.functional.normalize(k, dim=-1)
        self.v = torch.randn(N, C, V, dtype=torch.float64)
        self.beta = 2 * torch.rand(N, C, 1, dtype=torch.float64)
        g = None if kind == "none" else -0.2 * torch.rand(N, C, 1 if kind == "scalar" else K, dtype=torch.float64)
        self.G = decay.running_sum(g)
        self.J, self.P = decay.decayed_grams(self.q, self.k, self.G)
        self.A = inverse(self.beta * self.J)
        self.k_in, self.q_in = decay.from_start(self.k, self.G), decay.from_start(self.q, self.G)
        self.k_out, self.across = decay.to_end(self.k, self.G), decay.across(self.G)
        self.E, self.F = self.A.mT @ self.k_out, self.P @ self.A

    def decayed(self, S: Tensor) -> Tensor:
        return S.clone() if self.across is None else self.across * S

    def folded(self, S: Tensor, v: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """o / scale and the leaving state, by the tile functions."""
        v = self.v if v is None else v
        y = self.beta * residual(S, self.k_in, v)
        out, S = torch.empty_like(v), S.clone()
        read(S, self.q_in, self.F, y, out)
        advance_(S, self.across, self.E, y)
        return out, S


@pytest.fixture(params=[(kind, C) for kind in KINDS for C in (16, 32, 64)], ids=str)
def chunk(request: pytest.FixtureRequest) -> Chunk:
    return Chunk(*request.param)


@pytest.fixture
def S0() -> Tensor:
    return torch.randn(N, K, V, dtype=torch.float64)


def test_folded_is_plain_is_textbook(chunk: Chunk, S0: Tensor, float64_bounds):
    o, S1 = chunk.folded(S0)
    written = chunk.A @ (chunk.beta * residual(S0, chunk.k_in, chunk.v))
    U, W = chunk.A @ (chunk.beta * chunk.v), chunk.A @ (chunk.beta * chunk.k_in)
    for N_ in (written, U - W @ S0):
        float64_bounds.output("o", o, chunk.q_in @ S0 + chunk.P @ N_)
        float64_bounds.output("S", S1, chunk.decayed(S0) + chunk.k_out.mT @ N_)


def test_the_affine_summary(chunk: Chunk, S0: Tensor, float64_bounds):
    """S1 = M S0 + H.

    [H | M] is the same step on K more value columns, with v = 0 there, from [0 | I].
    """
    eye = torch.eye(K, dtype=torch.float64).expand(N, K, K)
    M = chunk.decayed(eye) - chunk.E.mT @ (chunk.beta * chunk.k_in)
    H = chunk.E.mT @ (chunk.beta * chunk.v)
    _, S1 = chunk.folded(S0)
    float64_bounds.output("M S0 + H", M @ S0 + H, S1)
    wide = torch.cat([chunk.v, torch.zeros(N, chunk.v.shape[1], K, dtype=torch.float64)], -1)
    _, summary = chunk.folded(torch.cat([torch.zeros_like(S0), eye], -1), wide)
    float64_bounds.output("H", summary[..., :V], H)
    float64_bounds.output("M", summary[..., V:], M)
    assert (torch.linalg.matrix_norm(M, ord=2) <= 1 + 1e-12).all()  # a contraction, strength up to 2


def test_segments_fold_forward_and_back(S0: Tensor, float64_bounds):
    """(M, H) after (M', H') is (M M', M H' + H); the reverse scan's matrix is the transpose of the forward's."""
    first, second = Chunk("channel", 16), Chunk("channel", 32)
    eye = torch.eye(K, dtype=torch.float64).expand(N, K, K)
    maps = []
    for chunk in (first, second):
        _, H = chunk.folded(torch.zeros_like(S0))
        _, M = chunk.folded(eye, torch.zeros(N, chunk.v.shape[1], K, dtype=torch.float64))
        maps.append((M, H))
        dM = eye.clone()
        dR = chunk.beta * (chunk.E @ dM)
        retreat_(dM, chunk.across, chunk.q_in, chunk.k_in, torch.zeros(N, chunk.v.shape[1], K, dtype=torch.float64), dR)
        float64_bounds.output("M^T", dM, M.mT)
    (M1, H1), (M2, H2) = maps
    _, S1 = first.folded(S0)
    _, S2 = second.folded(S1)
    float64_bounds.output("S2", M2 @ M1 @ S0 + (M2 @ H1 + H2), S2)


def test_the_adjoint_of_a_chunk(chunk: Chunk, S0: Tensor, float64_bounds):
    """X = F^T do + E dS1, dS0 by `retreat_`, dL = -stril(X N^T) = A^T dA A^T, and three forms of dbeta."""
    do, dS1 = torch.randn_like(chunk.v), torch.randn_like(S0)
    leaves = [x.detach().requires_grad_() for x in (S0, chunk.v, chunk.beta, chunk.J)]
    S, v, beta, J = leaves
    A = torch.linalg.inv(torch.eye(J.shape[-1], dtype=torch.float64) + beta * J)
    A.retain_grad()
    y = beta * (v - chunk.k_in @ S)
    written = A @ y
    loss = (do * (chunk.q_in @ S + chunk.P @ written)).sum()
    loss = loss + (dS1 * (chunk.decayed(S) + chunk.k_out.mT @ written)).sum()
    loss.backward()

    X = chunk.F.mT @ do + chunk.E @ dS1
    R = residual(S0, chunk.k_in, chunk.v)
    Y = chunk.beta * R
    written = chunk.A @ Y
    dR, dS0 = chunk.beta * X, dS1.clone()
    retreat_(dS0, chunk.across, chunk.q_in, chunk.k_in, do, dR)
    float64_bounds.gradient("dS0", dS0, S.grad)
    float64_bounds.gradient("dv", dR, v.grad)
    dL = -(X @ written.mT).tril(-1)
    sandwich = -(chunk.A.mT @ A.grad @ chunk.A.mT).tril(-1)
    float64_bounds.gradient("dL", dL, sandwich)
    float64_bounds.gradient("dJ", chunk.beta * dL, J.grad.tril(-1))
    forms = (
        (X * R).sum(-1, keepdim=True) + (dL * chunk.J).sum(-1, keepdim=True),
        (X * (R - chunk.J @ written)).sum(-1, keepdim=True),
        (X * written).sum(-1, keepdim=True) / chunk.beta,
    )
    for form in forms:
        float64_bounds.gradient("dbeta", form, beta.grad)


@pytest.mark.parametrize("C", [16, 32, 64])
def test_the_gate_free_solve(C: int, float64_bounds):
    """A0 * dec = A: with a scalar gate the solve needs no exponential, for beta |k|^2 <= 2 without the gate."""
    chunk = Chunk("scalar", C)
    free = inverse((chunk.beta * (chunk.k @ chunk.k.mT)).tril(-1))
    dec = torch.exp((chunk.G - chunk.G.mT).clamp(max=0)).tril()
    float64_bounds.output("A", free * dec, chunk.A)


def test_steps_in_place_touch_their_state_alone(S0: Tensor):
    chunk = Chunk("channel", 16)
    before = {name: x.clone() for name, x in vars(chunk).items()}
    S = S0.clone()
    y = residual(S, chunk.k_in, chunk.v)
    advance_(S, chunk.across, chunk.E, y)
    retreat_(S, chunk.across, chunk.q_in, chunk.k_in, chunk.v, y)
    assert all(torch.equal(x, getattr(chunk, name)) for name, x in before.items())
