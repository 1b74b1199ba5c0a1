"""`segment_summary`: a segment as an affine map of its entering state, against the token loop."""

import pytest
import torch
from torch import Tensor

from wyfold import reference
from wyfold.kernels import table
from wyfold.kernels.records import Inputs
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import packed_table
from wyfold.tile.index.eager import to_chunks

F64 = torch.float64
LENGTHS = [20, 0, 50, 17]
T, HV, K, V, C = sum(LENGTHS), 4, 8, 16, 16
SCALE = 0.3


@pytest.fixture(params=["delta_rule", "gated_delta_rule", "kda"])
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


def drawn(rule: str) -> tuple[dict, Inputs, object, object]:
    a = inputs.draw("random", rule, Shape(1, T, 2, HV, K, V), state="normal", sequences=4, dtype=F64)
    grid = packed_table(torch.tensor(LENGTHS), C)
    q, k, v = (to_chunks(a[name], grid, HV, F64) for name in ("q", "k", "v"))
    g = a.get("g")
    g = None if g is None else to_chunks(g[..., None] if g.ndim == 3 else g, grid, HV, F64)
    tiles = Inputs(q, k, v, to_chunks(a["beta"][..., None], grid, HV, F64), g, None, None)
    return a, tiles, grid, table.kernel_module("prepare", "eager").fold(tiles)


def loop(rule: str, a: dict, S0: Tensor) -> tuple[Tensor, Tensor]:
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    return getattr(reference, rule)(**a | {"initial_state": S0}, scale=SCALE, output_final_state=True, cu_seqlens=cu)


def test_a_map_stands_for_its_tokens(rule: str, float64_bounds):
    """The leaving state is H from the given state, and M S + H from any other state S."""
    a, tiles, grid, factors = drawn(rule)
    S0, other = a["initial_state"], torch.randn(4, HV, K, V, dtype=F64)
    identity = torch.eye(K, dtype=F64).expand(4, HV, K, K)
    both = table.kernel_module("segment_summary", "eager").segment_summary(
        tiles, factors, torch.cat([S0, identity], -1), grid
    )
    H, M = both.split([V, K], dim=-1)
    float64_bounds.output("H", H, loop(rule, a, S0)[1])
    float64_bounds.output("M", H + M @ (other - S0), loop(rule, a, other)[1])


def test_the_gradient_that_enters(rule: str, float64_bounds):
    """The entering gradient is c with the given leaving gradient; any other one is added through M^T."""
    a, tiles, grid, factors = drawn(rule)
    S0 = a["initial_state"].requires_grad_()
    o, ST = loop(rule, a, S0)
    do, dST, other = torch.randn_like(o), torch.randn_like(ST), torch.randn_like(ST)
    summary_bwd = table.kernel_module("segment_summary", "eager").segment_summary_bwd
    d_out = to_chunks(do, grid, HV, F64) * SCALE
    c = summary_bwd(tiles, factors, d_out, dST, grid)
    float64_bounds.gradient("c", c, torch.autograd.grad([o, ST], S0, [do, dST], retain_graph=True)[0])
    summary = table.kernel_module("segment_summary", "eager").segment_summary
    identity = torch.eye(K, dtype=F64).expand(4, HV, K, K)
    M = summary(tiles, factors, torch.cat([S0.detach(), identity], -1), grid)[..., V:]
    expected = torch.autograd.grad([o, ST], S0, [do, other])[0]
    float64_bounds.gradient("M^T", c + M.mT @ (other - dST), expected)
