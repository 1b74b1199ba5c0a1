"""`low_rank_prepare`: each factor is the product of transitions that the contract says."""

import pytest
import torch
from tests.kernels.low_rank_parts import RULES, C, drawn, tiles, transitions

from wyfold.kernels.low_rank_prepare.eager import fold


@pytest.mark.parametrize("gate", ["weak", "any", "reset one"])
@pytest.mark.parametrize("rule", RULES)
def test_factors_are_products_of_transitions(rule: str, gate: str, float64_bounds):
    a, grid = drawn(rule, gate)
    inputs = tiles(rule, a, grid)
    factors = fold(inputs)
    for tile in range(0, inputs.q.shape[0], 7):
        steps, K = transitions(inputs, tile), inputs.q.shape[-1]
        q, k, b = (x[tile] for x in (inputs.q, inputs.k, inputs.b))
        P, Q, keys, erased = (
            torch.zeros(C, C, dtype=q.dtype),
            torch.empty_like(q),
            torch.empty_like(k),
            b.new_empty(C, K),
        )
        since = torch.eye(K, dtype=q.dtype)
        for r in range(C):
            since = steps[r] @ since
            Q[r] = q[r] @ since
            column, erasing = k[r], b[r]
            P[r, r] = q[r] @ column
            for later in range(r + 1, C):
                column, erasing = steps[later] @ column, steps[later] @ erasing
                P[later, r] = q[later] @ column
            keys[r], erased[r] = column, erasing
        for name, expected in (("Q", Q), ("P", P), ("K", keys), ("E", erased)):
            float64_bounds.output(name, getattr(factors, name)[tile], expected)


@pytest.mark.parametrize("rule", RULES)
def test_kept_factors_are_not_computed_again(rule: str):
    inputs = tiles(rule, *drawn(rule))
    factors = fold(inputs)
    kept = factors._replace(G=None)
    again = fold(inputs, kept)
    assert all(x is y for x, y in zip(again[1:], kept[1:], strict=True))
    assert factors.G is None if inputs.g is None else torch.equal(again.G, factors.G)
    assert [x.shape[-1] for x in factors[1:]] == factors.kept_widths(inputs.q.shape[-1], C)


def test_padding_is_zero():
    inputs = tiles("gdn2", *drawn("gdn2"))
    _, grid = drawn("gdn2")
    padding = grid.padding.repeat_interleave(4, 0)
    assert not any(x[padding].any() for x in (inputs.q, inputs.a, inputs.b, inputs.k, inputs.v, inputs.g))
