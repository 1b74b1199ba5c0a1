"""`scan_bwd`: states entering each chunk and gradients of the states leaving it, against autograd over a chain of
chunks."""

import pytest
import torch

from wyfold.kernels import table
from wyfold.kernels.records import Inputs
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import dense_table
from wyfold.tile.index.eager import to_chunks

F64 = torch.float64
T, HV, K, V, C = 60, 2, 8, 16, 16


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_borders(rule: str, backend: str, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, T, HV, HV, K, V), state="normal", dtype=F64)
    grid = dense_table(1, T, C)
    q, k, v = (to_chunks(a[name], grid, HV, F64) for name in ("q", "k", "v"))
    g = a.get("g")
    g = None if g is None else to_chunks(g[..., None] if g.ndim == 3 else g, grid, HV, F64)
    tiles = Inputs(q, k, v, to_chunks(a["beta"][..., None], grid, HV, F64), g, None, None)
    factors = table.kernel_module("prepare", backend).fold(tiles)
    do, dST = to_chunks(torch.randn(1, T, HV, V, dtype=F64), grid, HV, F64), torch.randn(1, HV, K, V, dtype=F64)
    borders, dS0 = table.kernel_module("scan_bwd", backend).scan_bwd(tiles, factors, do, a["initial_state"], dST, grid)

    # The chain, chunk by chunk, in plain operations. An added zero per chunk receives the gradient of y.
    S = a["initial_state"][0].clone().requires_grad_()
    first, entering, leaving, zeros, residuals, loss = S, [], [], [], [], 0
    for c in range(len(grid.columns)):
        rows = slice(c * HV, (c + 1) * HV)
        G = None if factors.G is None else factors.G[rows]
        start = 1.0 if G is None else torch.exp(G)
        across = 1.0 if G is None else torch.exp(G[:, -1:]).mT
        entering.append(S)
        residuals.append(v[rows] - (k[rows] * start) @ S)
        zeros.append(torch.zeros_like(v[rows]).requires_grad_())
        y = tiles.beta[rows] * residuals[-1] + zeros[-1]
        loss = loss + (do[rows] * ((q[rows] * start) @ S + factors.F[rows] @ y)).sum()
        S = across * S + factors.E[rows].mT @ y
        S.retain_grad()
        leaving.append(S)
    loss = loss + (dST[0] * S).sum()
    loss.backward()
    float64_bounds.output("S", borders.S, torch.cat(entering).detach())
    float64_bounds.output("R", borders.R, torch.cat(residuals).detach())
    float64_bounds.gradient("dS", borders.dS, torch.cat([x.grad for x in leaving]))
    float64_bounds.gradient("X", borders.X, torch.cat([x.grad for x in zeros]))
    float64_bounds.gradient("dS0", dS0[0], first.grad)


def test_inputs_are_unchanged(backend: str):
    a = inputs.draw("random", "kda", Shape(2, T, HV, HV, K, V), state="normal", dtype=F64)
    grid = dense_table(2, T, C)
    q, k, v, g = (to_chunks(a[name], grid, HV, F64) for name in ("q", "k", "v", "g"))
    tiles = Inputs(q, k, v, to_chunks(a["beta"][..., None], grid, HV, F64), g, None, None)
    factors = table.kernel_module("prepare", backend).fold(tiles)
    S0, dST, do = a["initial_state"], torch.randn(2, HV, K, V, dtype=F64), torch.randn_like(v)
    before = [x.clone() for x in (S0, dST, do, *tiles[:5], *factors)]
    table.kernel_module("scan_bwd", backend).scan_bwd(tiles, factors, do, S0, dST, grid)
    assert all(torch.equal(x, y) for x, y in zip(before, (S0, dST, do, *tiles[:5], *factors)))
