"""`low_rank_scan_bwd`: states at the borders of chunks, and the gradient of the entering states."""

import pytest
import torch
from tests.kernels.low_rank_parts import RULES, V, drawn, tiles, truth

from wyfold.kernels.low_rank_prepare.eager import fold
from wyfold.kernels.low_rank_scan_bwd.eager import scan_bwd
from wyfold.reference.inputs import incoming
from wyfold.tile.index.eager import to_chunks


@pytest.mark.parametrize("rule", RULES)
def test_a_part(rule: str, float64_bounds):
    a, grid = drawn(rule)
    a["initial_state"].requires_grad_()
    o, final = truth(rule, a)
    do, dST = incoming(o.detach(), 1), incoming(final.detach(), 2)
    (expected,) = torch.autograd.grad([o, final], [a["initial_state"]], [do, dST])
    with torch.no_grad():
        inputs, S0 = tiles(rule, a, grid), a["initial_state"].detach()
        factors = fold(inputs)
        tiles_of_do = 0.3 * to_chunks(do, grid, o.shape[2], o.dtype)
        borders, dS0 = scan_bwd(inputs, factors, tiles_of_do, S0, dST, grid)
    float64_bounds.gradient("dS0", dS0, expected)
    first = borders.S[: 3 * o.shape[2]].unflatten(0, (3, -1))  # the first column: sequences with tokens, longest first
    assert torch.equal(first, S0[[2, 0, 3]])
    assert torch.equal(borders.U, torch.bmm(factors.rows, borders.S))
    assert torch.equal(borders.Z, torch.bmm(factors.E, borders.dS))
    assert borders.Z.shape[-1] == V and torch.equal(dS0[1], dST[1])
