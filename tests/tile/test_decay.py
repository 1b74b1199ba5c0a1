"""The gate's tile functions against explicit pairs of tokens, in float64: grams, adjoints, and the gate gradient."""

import pytest
import torch
from torch import Tensor

from wyfold.tile.decay import eager as decay

KINDS = ("none", "scalar", "channel")
SIZES = (16, 32, 64)
GATES = (0.0, 0.1, 5.0, 100.0, torch.inf)
N, K, V = 3, 8, 5


def tiles(kind: str, C: int, strength: float = 1.0) -> tuple[Tensor, Tensor, Tensor | None]:
    """q, k and per-token gates, with the floor of `log_gate`."""
    q, k = torch.randn(2, N, C, K, dtype=torch.float64)
    if kind == "none":
        return q, k, None
    g = -torch.rand(N, C, 1 if kind == "scalar" else K, dtype=torch.float64)
    g = torch.where(torch.rand_like(g) < 0.2, -torch.inf, g) if strength == torch.inf else strength * g
    return q, k, g.clamp(min=decay.log_gate_floor(torch.float64))


def pairwise_grams(q: Tensor, k: Tensor, g: Tensor | None) -> tuple[Tensor, Tensor]:
    """Grams from the sum of the gates after s up to r: one exponential per pair and channel, no prefix sums."""
    C = q.shape[1]
    rows_J, rows_P = [], []
    for r in range(C):
        row_J, row_P = [], []
        for s in range(C):
            if s > r:
                row_J.append(q.new_zeros(N))
                row_P.append(q.new_zeros(N))
                continue
            between = 1.0 if g is None else torch.exp(g[:, s + 1 : r + 1].sum(1))
            row_J.append((k[:, r] * k[:, s] * between).sum(-1) if s < r else q.new_zeros(N))
            row_P.append((q[:, r] * k[:, s] * between).sum(-1))
        rows_J.append(torch.stack(row_J, -1))
        rows_P.append(torch.stack(row_P, -1))
    return torch.stack(rows_J, 1), torch.stack(rows_P, 1)


@pytest.mark.parametrize("strength", GATES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_grams_and_their_adjoint(kind: str, strength: float, float64_bounds):
    """Halving equals explicit pairs, and the adjoint with its interval gate gradient equals autograd of the pairs."""
    C = 16
    q, k, g = tiles(kind, C, strength)
    leaves = [x.requires_grad_() for x in (q, k, g) if x is not None]
    truth = pairwise_grams(q, k, g)
    G = None if g is None else decay.running_sum(g.detach())
    J, P = decay.decayed_grams(q.detach(), k.detach(), G)
    for name, x, true in zip("JP", (J, P), truth):
        # The pairs sum the gates in between; the tiles subtract prefix sums, whose error the tolerance covers.
        float64_bounds.within(name, x, true.detach(), 1e-12 * (1 + strength if strength < torch.inf else 746))
        assert not x.triu(1).any()
    assert not J.diagonal(dim1=1, dim2=2).any()
    dJ, dP = torch.randn_like(J).tril(-1), torch.randn_like(P).tril()
    wanted = torch.autograd.grad(truth, leaves, (dJ, dP))
    got = decay.decayed_grams_bwd(q.detach(), k.detach(), G, J, P, dJ, dP)
    for name, x, true in zip(("dq", "dk", "dg"), got, wanted):
        float64_bounds.gradient(name, x, true)
    assert (got[2] is None) == (kind == "none")


@pytest.mark.parametrize("C", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size(kind: str, C: int, float64_bounds):
    q, k, g = tiles(kind, C, 0.3)
    truth = pairwise_grams(q, k, g)
    for name, x, true in zip("JP", decay.decayed_grams(q, k, decay.running_sum(g)), truth):
        float64_bounds.output(name, x, true)


@pytest.mark.parametrize("C", SIZES)
def test_equal_channels_are_a_scalar(C: int, float64_bounds):
    q, k, g = tiles("scalar", C, 2.0)
    G = decay.running_sum(g)
    wide = G.expand(-1, -1, K).contiguous()
    for x, y in zip(decay.decayed_grams(q, k, G), decay.decayed_grams(q, k, wide)):
        float64_bounds.output("gram", y, x)
    J, P = decay.decayed_grams(q, k, G)
    dJ, dP = torch.randn_like(J).tril(-1), torch.randn_like(P).tril()
    one, other = (decay.decayed_grams_bwd(q, k, x, J, P, dJ, dP) for x in (G, wide))
    float64_bounds.gradient("dg", other[2].sum(-1, keepdim=True), one[2])


@pytest.mark.parametrize("strength", [5.0, 20.0, 100.0])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_no_exponent_is_positive_and_none_overflows_in_float32(kind: str, strength: float):
    """Nor in the adjoint, where zero times an overflow would be NaN."""
    q, k, g = (x.float() for x in tiles(kind, 64, 1.0))
    G = decay.running_sum(torch.full_like(g, -min(strength, 104.0)))
    J, P = decay.decayed_grams(q, k, G)
    adjoint = decay.decayed_grams_bwd(q, k, G, J, P, torch.ones_like(J).tril(-1), torch.ones_like(P).tril())
    assert all(x.isfinite().all() for x in (J, P, *adjoint))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_row_of_a_gram_does_not_know_what_comes_after(kind: str):
    """Anchors precede every row, so later gates change no bit of it."""
    q, k, g = (x.float() for x in tiles(kind, 64, 3.0))
    truth = decay.decayed_grams(q, k, decay.running_sum(g))
    for at in (1, 7, 8, 16, 33, 63):
        later = torch.cat([g[:, :at], g[:, at:] * 2], 1)
        for x, y in zip(truth, decay.decayed_grams(q, k, decay.running_sum(later))):
            assert torch.equal(x[:, :at], y[:, :at])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_the_interval_form_is_the_signed_form(kind: str, float64_bounds):
    """Signed form: dG of every factor exp(+-G), and dg as its reverse running sum."""
    q, k, g = tiles(kind, 32, 0.2)
    S, dS = torch.randn(2, N, K, V, dtype=torch.float64)
    G = decay.running_sum(g)
    J, P = decay.decayed_grams(q, k, G)
    dJ, dP = torch.randn_like(J).tril(-1), torch.randn_like(P).tril()
    do, dR, written = torch.randn(3, N, 32, V, dtype=torch.float64)
    read = decay.from_start(do @ S.mT, G)
    lost = -decay.from_start(dR @ S.mT, G)
    kept = decay.to_end(written @ dS.mT, G)
    _, _, pairs = decay.decayed_grams_bwd(q, k, G, J, P, dJ, dP)
    carried = (decay.across(G) * (S * dS)).sum(-1)
    interval = decay.gate_gradient(q * read + k * lost, k * kept, carried, G, pairs)

    factors = [x.detach().requires_grad_() for x in (q, k, G)]
    Q, Kk, Gg = factors
    J_, P_ = pairwise_of_prefixes(Q, Kk, Gg)
    loss = (dJ * J_).sum() + (dP * P_).sum() + (do * (decay.from_start(Q, Gg) @ S)).sum()
    loss = loss - (dR * (decay.from_start(Kk, Gg) @ S)).sum() + (dS * (decay.to_end(Kk, Gg).mT @ written)).sum()
    loss = loss + (dS * (decay.across(Gg) * S)).sum()
    (dG,) = torch.autograd.grad(loss, Gg)
    float64_bounds.gradient("dg", interval, dG.flip(1).cumsum(1).flip(1))


def pairwise_of_prefixes(q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    dec = torch.exp((G[:, :, None] - G[:, None]).clamp(max=0))
    full = dec.expand(-1, -1, -1, K)
    J = torch.einsum("nrc,nsc,nrsc->nrs", k, k, full).tril(-1)
    return J, torch.einsum("nrc,nsc,nrsc->nrs", q, k, full).tril()


def test_decays_of_a_chunk_compose():
    """`from_start`, `to_end` and `across` equal their formulas; without a gate they are identities or None."""
    x = torch.ones(N, 16, K, dtype=torch.float64)
    for kind in KINDS[1:]:
        _, _, g = tiles(kind, 16, 0.5)
        G = decay.running_sum(g)
        assert torch.equal(decay.from_start(x, G), x * torch.exp(g.cumsum(1)))
        assert torch.equal(decay.to_end(x, G)[:, -1], x[:, -1])
        assert decay.across(G).shape == (N, G.shape[-1], 1)
        assert torch.equal(decay.across(G)[..., 0], torch.exp(G[:, -1]))
    assert decay.from_start(x, None) is x and decay.to_end(x, None) is x
    assert decay.across(None) is decay.running_sum(None) is decay.token_decay(None) is None


# --- activations -----------------------------------------------------------------------------------------------------


def activated(x: Tensor, A_log, dt_bias, activation: str, bound: float, clamp: float) -> Tensor:
    """Log gate by its formulas, differentiable."""
    u = x if dt_bias is None else x + dt_bias.view(x.shape[1], 1, -1)
    rate = 1.0 if A_log is None else torch.exp(A_log).view(-1, 1, 1)
    if activation == "softplus":
        x = -rate * torch.nn.functional.softplus(u, threshold=1e9)
    elif activation == "bounded":
        x = bound * torch.sigmoid(rate * u)
    return x.clamp(min=clamp or -746.0)


@pytest.mark.parametrize("clamp", [0.0, -0.7])
@pytest.mark.parametrize("parameters", ["both", "A_log", "dt_bias", "none"])
@pytest.mark.parametrize("activation", ["given", "softplus", "bounded"])
@pytest.mark.parametrize("W", [1, K])
def test_activations_and_their_adjoint(W: int, activation: str, parameters: str, clamp: float, float64_bounds):
    x = torch.randn(4, 3, 16, W, dtype=torch.float64, requires_grad=True)
    A_log = torch.randn(3, dtype=torch.float64, requires_grad=True) if parameters in ("both", "A_log") else None
    dt_bias = torch.randn(3 * W, dtype=torch.float64, requires_grad=True) if parameters in ("both", "dt_bias") else None
    bound = -5.0 if activation == "bounded" else 0.0
    truth = activated(x, A_log, dt_bias, activation, bound, clamp)
    with torch.no_grad():
        got = decay.log_gate(x, A_log, dt_bias, activation, bound, clamp)
    float64_bounds.output("g", got, truth.detach())
    dg = torch.randn_like(truth)
    leaves = [leaf for leaf in (x, A_log, dt_bias) if leaf is not None]
    wanted = torch.autograd.grad(truth, leaves, dg, allow_unused=True)
    with torch.no_grad():
        dx, dA_log, ddt_bias = decay.log_gate_bwd(x, dg, A_log, dt_bias, activation, bound, clamp)
    float64_bounds.gradient("dx", dx, wanted[0])
    if activation != "given":
        for y, true in zip([y for y in (dA_log, ddt_bias) if y is not None], wanted[1:], strict=True):
            float64_bounds.gradient("parameter", y.flatten(), true)
    for y, given in ((dA_log, A_log), (ddt_bias, dt_bias)):
        assert (y is None) == (given is None or activation == "given")


@pytest.mark.parametrize("dtype, floor", [(torch.float32, -104.0), (torch.float64, -746.0)], ids=str)
def test_the_floor_is_where_the_exponential_is_zero(dtype: torch.dtype, floor: float):
    assert decay.log_gate_floor(dtype) == floor
    lanes = torch.full((37,), floor, dtype=dtype)  # vector lanes and the rest run other code
    assert not torch.exp(lanes).any()
    x = torch.tensor([-torch.inf, -1e6, floor, -1.0, 0.0], dtype=dtype).view(1, 1, -1, 1)
    g = decay.log_gate(x, None, None, "given", 0.0, 0.0).flatten()
    assert g.tolist() == [floor, floor, floor, -1.0, 0.0]
