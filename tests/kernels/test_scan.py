"""`scan`: states and outputs of a part, and the state leaving each chunk, against the token loop."""

import pytest
import torch

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


def tiles_of(a: dict, grid) -> Inputs:
    q, k, v = (to_chunks(a[name], grid, HV, F64) for name in ("q", "k", "v"))
    g = a.get("g")
    g = None if g is None else to_chunks(g[..., None] if g.ndim == 3 else g, grid, HV, F64)
    return Inputs(q, k, v, to_chunks(a["beta"][..., None], grid, HV, F64), g, None, None)


@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_a_part(rule: str, backend: str, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, T, 2, HV, K, V), state="normal", sequences=4, dtype=F64)
    grid = packed_table(torch.tensor(LENGTHS), C)
    tiles, S0 = tiles_of(a, grid), a["initial_state"]
    factors = table.kernel_module("prepare", backend).fold(tiles)
    o, leaving = torch.empty(1, T, HV, V, dtype=F64), torch.empty(grid.chunks, HV, K, V, dtype=F64)
    before = S0.clone()
    ST = table.kernel_module("scan", backend).scan(tiles, factors, S0, grid, 0.3, o, leaving)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    truth, final = getattr(reference, rule)(**a, scale=0.3, output_final_state=True, cu_seqlens=cu)
    float64_bounds.output("o", o, truth)
    float64_bounds.output("ST", ST, final)
    assert torch.equal(S0, before), "the entering states are the caller's"
    seen = {}
    for chunk, tokens in enumerate(grid.token.tolist()):
        last = max(tokens)
        sequence = int(torch.searchsorted(cu, last, right=True)) - 1
        prefix = {name: x[:, cu[sequence] : last + 1] for name, x in a.items() if name != "initial_state"}
        _, true = getattr(reference, rule)(
            **prefix, initial_state=S0[sequence : sequence + 1], scale=0.3, output_final_state=True
        )
        float64_bounds.output(f"leaving {chunk}", leaving[chunk], true[0])
        seen[sequence] = chunk
    assert set(seen) == {0, 2, 3}
    assert torch.equal(ST[1], S0[1])


def test_only_the_part_is_written(backend: str):
    a = inputs.draw("random", "kda", Shape(1, T, 2, HV, K, V), state="normal", sequences=4, dtype=F64)
    grid = packed_table(torch.tensor(LENGTHS), C)
    tiles = tiles_of(a, grid)
    factors = table.kernel_module("prepare", backend).fold(tiles)
    before = [x.clone() for x in (*tiles[:5], *factors)]
    around = torch.full((1, T + 2, HV, V), 7.0, dtype=F64)
    table.kernel_module("scan", backend).scan(tiles, factors, a["initial_state"], grid, 1.0, around[:, 1:-1])
    assert (around[:, 0] == 7).all() and (around[:, -1] == 7).all()
    assert all(torch.equal(x, y) for x, y in zip(before, (*tiles[:5], *factors)))
