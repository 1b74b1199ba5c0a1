"""`recurrent` and its adjoint, compared with the token loop and its autograd, on tiles."""

import pytest
import torch

from wyfold import reference
from wyfold.kernels import table
from wyfold.kernels.records import Inputs
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime.chunk_layout import packed_table
from wyfold.tile.index.eager import from_chunks, to_chunks

F64 = torch.float64
LENGTHS = [20, 0, 35, 1]
T, HV, K, V = sum(LENGTHS), 2, 8, 16


@pytest.mark.parametrize("C", [1, 16, 64])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
def test_forward_and_backward(rule: str, C: int, backend: str, results, float64_bounds):
    """The chunk size only sets the distance of kept states; results do not depend on it."""
    a = inputs.draw("random", rule, Shape(1, T, HV, HV, K, V), state="normal", sequences=4, dtype=F64)
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    fed = {"o": torch.randn_like(a["v"]), "state": torch.randn_like(a["initial_state"])}
    truth = results(getattr(reference, rule), a, None, fed, scale=0.5, cu_seqlens=cu, output_final_state=True)

    def run(chunk_size: int) -> dict[str, torch.Tensor]:
        grid = packed_table(torch.tensor(LENGTHS), chunk_size)
        g = a.get("g")
        wide = {name: a[name] for name in ("q", "k", "v")} | {"beta": a["beta"][..., None]}
        wide |= {} if g is None else {"g": g[..., None] if g.ndim == 3 else g}
        tiles = {name: to_chunks(x, grid, HV, F64) for name, x in wide.items()}
        record = Inputs(**tiles, **({} if g is not None else {"g": None}), rq=None, rk=None)
        stage, S0 = table.kernel_module("recurrent", backend), a["initial_state"]
        o = torch.empty(1, T, HV, V, dtype=F64)
        ST = stage.recurrent(record, S0, grid, 0.5, o)
        do = to_chunks(0.5 * fed["o"], grid, HV, F64)
        found, dS0 = stage.recurrent_bwd(record, do, S0, fed["state"], grid)
        got = {"o": o, "state": ST, "dinitial_state": dS0}
        for name in wide:
            got[f"d{name}"] = torch.empty_like(wide[name])
            from_chunks(getattr(found, name), grid, got[f"d{name}"])
            got[f"d{name}"] = got[f"d{name}"].view_as(a[name])
        return got

    got, other = run(C), run(32)
    for name, true in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], true)
        assert torch.equal(got[name], other[name]), name
