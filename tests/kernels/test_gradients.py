"""`gradients`: every gradient of a chunk from its borders, compared with autograd of the chunk's formulas."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.records import ChunkBorders, Inputs
from wyfold.tile.decay import eager as decay
from wyfold.tile.inverse.eager import inverse

F64 = torch.float64
N, K, V = 3, 8, 6


def chunk(q, k, v, beta, g, S):
    """o / scale and the leaving state in differentiable operations; grams as in `tests/tile/test_decay.py`."""
    C = q.shape[1]
    G = None if g is None else g.cumsum(1)
    dec = torch.ones(N, C, C, 1, dtype=F64) if G is None else torch.exp((G[:, :, None] - G[:, None]).clamp(max=0))
    dec = dec.expand(-1, -1, -1, K)
    J = torch.einsum("nrc,nsc,nrsc->nrs", k, k, dec).tril(-1)
    P = torch.einsum("nrc,nsc,nrsc->nrs", q, k, dec).tril()
    start = 1.0 if G is None else torch.exp(G)
    end = 1.0 if G is None else torch.exp(G[:, -1:] - G)
    across = 1.0 if G is None else torch.exp(G[:, -1:]).mT
    A = torch.linalg.inv(torch.eye(C, dtype=F64) + beta * J)
    written = A @ (beta * (v - (k * start) @ S))
    return (q * start) @ S + P @ written, across * S + (k * end).mT @ written


@pytest.mark.parametrize("strength", ["usual", "zero", "tiny", "some zero"])
@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize("kind", ["none", "scalar", "channel"])
def test_a_chunk(kind: str, C: int, strength: str, backend: str, float64_bounds):
    q, k = torch.randn(2, N, C, K, dtype=F64)
    k = torch.nn.functional.normalize(k, dim=-1)
    v, S = torch.randn(N, C, V, dtype=F64), torch.randn(N, K, V, dtype=F64)
    beta = torch.rand(N, C, 1, dtype=F64)
    beta = {"usual": beta, "zero": 0 * beta, "tiny": 2.0**-61 * beta, "some zero": beta * (beta > 0.5)}[strength]
    g = None if kind == "none" else -0.3 * torch.rand(N, C, 1 if kind == "scalar" else K, dtype=F64)
    do, dS1 = torch.randn(N, C, V, dtype=F64), torch.randn(N, K, V, dtype=F64)

    leaves = [x.clone().requires_grad_() for x in (q, k, v, beta, *([] if g is None else [g]))]
    out, S1 = chunk(*leaves[:4], leaves[4] if g is not None else None, S)
    truth = torch.autograd.grad((do * out).sum() + (dS1 * S1).sum(), leaves)

    tiles = Inputs(q, k, v, beta, g, None, None)
    factors = table.kernel_module("prepare", backend).fold(tiles)
    assert torch.equal(factors.A, inverse(beta * factors.J))
    R = v - decay.from_start(k, factors.G) @ S
    X = factors.F.mT @ do + factors.E @ dS1
    found = table.kernel_module("gradients", backend).gradients(tiles, factors, ChunkBorders(S, dS1, R, X), do)
    for name, x, true in zip(("q", "k", "v", "beta", "g"), found, truth):
        float64_bounds.gradient(name, x, true)
    assert (found.g is None) == (g is None)
