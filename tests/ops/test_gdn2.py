"""GDN-2: KDA inside it, its gate in the operator, and gates that are left out."""

import pytest
import torch
from tests.ops.low_rank_calls import agree

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

F64 = torch.float64
FORMS = {"chunk": wyfold.chunk_gdn2, "recurrent": wyfold.fused_recurrent_gdn2}


@pytest.mark.parametrize("form", FORMS)
def test_one_strength_for_both_gates_is_kda(form: str, results, float64_bounds):
    a = inputs.draw("random", "kda", Shape(2, 50, 1, 2, 8, 16), gate="weak", state="normal", dtype=F64)
    twin = wyfold.chunk_kda if form == "chunk" else wyfold.fused_recurrent_kda
    truth = results(twin, a, output_final_state=True)
    beta = a.pop("beta")[..., None]
    a |= {"b": beta.expand(-1, -1, -1, 8).contiguous(), "w": beta.expand(-1, -1, -1, 16).contiguous()}
    got = results(FORMS[form], a, output_final_state=True)
    dbeta = got.pop("db").sum(-1) + got.pop("dw").sum(-1)
    agree(float64_bounds, got | {"dbeta": dbeta}, truth)


@pytest.mark.parametrize("gate", ["model", "model bounded"])
@pytest.mark.parametrize("form", FORMS)
def test_gate_and_norm_in_the_operator(form: str, gate: str, results, float64_bounds):
    a = inputs.draw("random", "gdn2", Shape(1, 45, 1, 2, 8, 8), gate=gate, state="normal", dtype=F64)
    a |= {"use_qk_l2norm_in_kernel": True, "output_final_state": True, "q": 3 * a["q"], "k": 2 * a["k"]}
    agree(float64_bounds, results(FORMS[form], a), results(reference.gdn2, a))
    a |= {"safe_gate": True, "lower_bound": -0.5} if gate == "model" else {}
    if gate == "model":  # the activation with a bound is another one
        agree(float64_bounds, results(FORMS[form], a), results(reference.gdn2, a))


@pytest.mark.parametrize("left_out", ["b", "w", "g"])
@pytest.mark.parametrize("form", FORMS)
def test_a_gate_that_is_left_out_is_one(form: str, left_out: str, results, float64_bounds):
    a = inputs.draw("random", "gdn2", Shape(1, 40, 2, 2, 8, 8), gate="weak", dtype=F64)
    one = torch.zeros_like(a["g"]) if left_out == "g" else torch.ones_like(a[left_out])
    without = {name: x for name, x in a.items() if name != left_out}
    got, truth = (results(FORMS[form], x) for x in (without, a | {left_out: one}))
    agree(float64_bounds, got, {name: truth[name] for name in got})
