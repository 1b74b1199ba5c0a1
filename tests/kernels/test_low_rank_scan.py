"""`low_rank_scan`: states and outputs of a part, and the state leaving each chunk, against the token loop."""

import pytest
import torch
from tests.kernels.low_rank_parts import F64, HV, LENGTHS, RULES, K, T, V, drawn, tiles, truth

from wyfold import reference
from wyfold.kernels.low_rank_prepare.eager import fold
from wyfold.kernels.low_rank_scan.eager import scan


@pytest.mark.parametrize("rule", RULES)
def test_a_part(rule: str, float64_bounds):
    a, grid = drawn(rule)
    inputs, S0 = tiles(rule, a, grid), a["initial_state"]
    o, leaving = torch.empty(1, T, HV, V, dtype=F64), torch.empty(grid.chunks, HV, K, V, dtype=F64)
    before = S0.clone()
    ST = scan(inputs, fold(inputs), S0, grid, 0.3, o, leaving)
    expected, final = truth(rule, a)
    float64_bounds.output("o", o, expected)
    float64_bounds.output("ST", ST, final)
    assert torch.equal(S0, before), "the entering states are the caller's"
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    for chunk, tokens in enumerate(grid.token.tolist()):
        last = max(tokens)
        n = int(torch.searchsorted(cu, last, right=True)) - 1
        prefix = {name: x[:, cu[n] : last + 1] for name, x in a.items() if name != "initial_state"}
        _, state = getattr(reference, rule)(**prefix, initial_state=S0[n : n + 1], output_final_state=True)
        float64_bounds.output(f"leaving {chunk}", leaving[chunk], state[0])
