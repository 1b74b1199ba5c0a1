"""A TTT-Linear call continued from a state was documented to have the bits of one call at every token.

The bits are equal if the cut is between mini-batches. Inside one, outputs and states are correct with other last bits.
The promises of the delta rules' kernels are tested in `tests/interpret/test_delta_bits.py`.
"""

import pytest
import torch

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

TOKENS = ("q", "k", "v", "eta")


def ttt_arguments() -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 40, 2, 16, dtype=torch.float64, generator=drawn)
    return {"q": q, "k": k, "v": v, "eta": torch.rand(1, 40, 2, 1, dtype=torch.float64, generator=drawn)}


def ttt(arguments: dict[str, torch.Tensor], state: wyfold.TTTState | None, rows: slice):
    w, b = torch.ones(2, 16, dtype=torch.float64), torch.zeros(2, 16, dtype=torch.float64)
    cut = {name: x[:, rows] for name, x in arguments.items()}
    return wyfold.fused_recurrent_ttt_linear(**cut, w=w, b=b, state=state, output_final_state=True, scale=0.3)


@pytest.mark.parametrize("cut", range(1, 40))
def test_ttt_continues_from_any_token(cut: int, float64_bounds):
    arguments = ttt_arguments()
    whole, last = ttt(arguments, None, slice(None))
    early, state = ttt(arguments, None, slice(cut))
    late, end = ttt(arguments, state, slice(cut, None))
    float64_bounds.output("o", torch.cat([early, late], 1), whole)
    float64_bounds.output("state", end.state, last.state)
    if cut % 16 == 0:
        assert torch.equal(torch.cat([early, late], 1), whole)
        assert all(torch.equal(x, y) for x, y in zip(end, last, strict=True))


@pytest.mark.parametrize("scale", [None, 128**-0.5, -3.0])
@pytest.mark.parametrize("rule", ["delta_rule", "gated_delta_rule", "kda"])
@pytest.mark.parametrize("form", ["chunk", "fused_recurrent"])
def test_gradients_cross_a_cut_whatever_the_scale(form: str, rule: str, scale: float | None, results):
    """On the eager backend, with the state's gradient passed on by hand, as in truncated training over long
    sequences.
    """
    op = getattr(wyfold, f"{form}_{rule}")
    a = inputs.draw("random", rule, Shape(1, 48, 1, 2, 8, 16), gate="weak", state="normal") | {
        "scale": scale,
        "output_final_state": True,
    }
    per_token = [name for name in ("q", "k", "v", "g", "beta") if name in a]
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    early, late = ({**a, **{name: a[name][:, rows] for name in per_token}} for rows in (slice(32), slice(32, None)))
    whole = results(op, a, None, fed)
    late["initial_state"] = results(op, early, ())["state"]
    second = results(op, late, None, {"o": fed["o"][:, 32:], "state": fed["state"]})
    first = results(op, early, None, {"o": fed["o"][:, :32], "state": second["dinitial_state"]})
    assert torch.equal(first["dinitial_state"], whole["dinitial_state"])
    for name in per_token:
        assert torch.equal(torch.cat([first[f"d{name}"], second[f"d{name}"]], 1), whole[f"d{name}"]), name
