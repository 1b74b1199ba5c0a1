"""`low_rank_recurrent` and its adjoint: a part of packed sequences, against the token loop and the chunk stages."""

import pytest
import torch
from tests.kernels.low_rank_parts import F64, HV, RULES, T, V, drawn, tiles, truth

from wyfold.kernels.low_rank_gradients.eager import gradients
from wyfold.kernels.low_rank_prepare.eager import fold
from wyfold.kernels.low_rank_recurrent.eager import recurrent, recurrent_bwd
from wyfold.kernels.low_rank_scan_bwd.eager import scan_bwd


@pytest.mark.parametrize("rule", RULES)
def test_a_part(rule: str, float64_bounds):
    a, grid = drawn(rule)
    inputs, S0 = tiles(rule, a, grid), a["initial_state"]
    o = torch.empty(1, T, HV, V, dtype=F64)
    ST = recurrent(inputs, S0, grid, 0.3, o)
    expected, final = truth(rule, a)
    float64_bounds.output("o", o, expected)
    float64_bounds.output("ST", ST, final)


@pytest.mark.parametrize("rule", RULES)
def test_gradients_are_those_of_the_chunk_form(rule: str, float64_bounds):
    a, grid = drawn(rule)
    inputs, S0 = tiles(rule, a, grid), a["initial_state"]
    padding = grid.padding.repeat_interleave(HV, 0)[..., None]
    do = torch.randn_like(inputs.v).masked_fill(padding, 0)
    dST = torch.randn_like(S0)
    factors = fold(inputs)
    borders, dS0 = scan_bwd(inputs, factors, do, S0, dST, grid)
    by_chunk = gradients(inputs, factors, borders, do)
    by_token, dS0_by_token = recurrent_bwd(inputs, do, S0, dST, grid)
    float64_bounds.gradient("dS0", dS0_by_token, dS0)
    for name in by_chunk._fields:
        chunk, token = getattr(by_chunk, name), getattr(by_token, name)
        assert (chunk is None) == (token is None)
        if chunk is not None and token is not None:  # rows without a token have no gradient that is used
            float64_bounds.gradient(f"d{name}", token.masked_fill(padding, 0), chunk.masked_fill(padding, 0))
