"""`low_rank_gradients`: gradients of a chunk's rows, columns, values and gates, against autograd of its recurrence."""

import pytest
import torch
from tests.kernels.low_rank_parts import RULES, C, drawn, tiles

from wyfold.kernels.low_rank_gradients.eager import gradients
from wyfold.kernels.low_rank_prepare.eager import fold
from wyfold.kernels.records import LowRankBorders


def chunk_by_tokens(q, a, b, k, v, g, before, S):
    """Output and leaving state of a chunk, one row at a time."""
    out = []
    for r in range(q.shape[1]):
        decayed = S if g is None else g[:, r].exp()[..., None] * S
        read = ((S if before else decayed) * a[:, r, :, None]).sum(1)
        S = decayed + b[:, r, :, None] * read[:, None] + k[:, r, :, None] * v[:, r, None]
        out.append((S * q[:, r, :, None]).sum(1))
    return torch.stack(out, 1), S


@pytest.mark.parametrize("gate", ["weak", "any"])
@pytest.mark.parametrize("rule", RULES)
def test_a_chunk(rule: str, gate: str, float64_bounds):
    a, grid = drawn(rule, gate)
    inputs = tiles(rule, a, grid)
    inputs = inputs._replace(**{name: x[:6] for name, x in inputs._asdict().items() if name in ("q", "a", "v")})
    k = inputs.k[:6].clone()
    shared = inputs.b is inputs.k or rule in ("gdn2", "comba")
    b, g = k if shared else inputs.b[:6], None if inputs.g is None else inputs.g[:6]
    inputs = inputs._replace(k=k, b=b, g=g)
    S, dS1, do = (torch.randn(6, *size, dtype=k.dtype) for size in ((8, 16), (8, 16), (C, 16)))
    factors = fold(inputs)
    borders = LowRankBorders(S, dS1, factors.rows @ S, factors.E @ dS1)
    found = gradients(inputs, factors, borders, do)

    leaves = {
        name: x.clone().requires_grad_() for name, x in inputs._asdict().items() if name in "qabkvg" and x is not None
    }
    if shared:
        leaves["b"] = leaves["k"]
    results = chunk_by_tokens(*(leaves.get(name) for name in "qabkvg"), inputs.before, S)
    names = [name for name in leaves if not (shared and name == "b")]
    for name, dx in zip(names, torch.autograd.grad(results, [leaves[name] for name in names], [do, dS1]), strict=True):
        float64_bounds.gradient(f"d{name}", getattr(found, name), dx)
