"""Comba: Gated DeltaNet inside it, and the norm of all three keys."""

import pytest
import torch
from tests.ops.low_rank_calls import agree

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

F64 = torch.float64
FORMS = {"chunk": wyfold.chunk_comba, "recurrent": wyfold.fused_recurrent_comba}


@pytest.mark.parametrize("form", FORMS)
def test_reading_along_the_decayed_k_is_gdn(form: str, results, float64_bounds):
    a = inputs.draw("random", "gated_delta_rule", Shape(2, 50, 2, 2, 8, 16), gate="weak", state="normal", dtype=F64)
    twin = wyfold.chunk_gdn if form == "chunk" else wyfold.fused_recurrent_gdn

    def decayed(q, k, v, g, beta, **rest):
        return FORMS[form](q, k, v, g.exp()[..., None] * k, g, beta, **rest)

    agree(float64_bounds, results(decayed, a), results(twin, a))


@pytest.mark.parametrize("left_out", [None, "p", "g", "beta"])
@pytest.mark.parametrize("form", FORMS)
def test_norm_and_arguments_left_out(form: str, left_out: str | None, results, float64_bounds):
    a = inputs.draw("random", "comba", Shape(1, 45, 2, 4, 8, 8), gate="weak", state="normal", dtype=F64)
    a |= {"use_qk_l2norm_in_kernel": True, "q": 3 * a["q"], "k": 2 * a["k"], "p": 5 * a["p"]}
    a = {name: x for name, x in a.items() if name != left_out}
    agree(float64_bounds, results(FORMS[form], a), results(reference.comba, a))


@pytest.mark.parametrize("form", FORMS)
def test_the_output_correction_is_a_query(form: str, results, float64_bounds):
    """The paper reads with q - d k, which the caller computes; its gradient reaches k twice."""
    a = inputs.draw("random", "comba", Shape(1, 30, 1, 1, 8, 8), gate="weak", dtype=F64)

    def corrected(op):
        return lambda q, k, **rest: op(q - 0.3 * k, k, **rest)

    agree(float64_bounds, results(corrected(FORMS[form]), a), results(corrected(reference.comba), a))
