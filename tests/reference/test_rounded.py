"""The yardstick of 16-bit results: in float64 it equals the token loop, in 16 bits its error is that of rounding."""

import pytest
import torch

from wyfold import reference
from wyfold.reference import error, inputs
from wyfold.reference.error import judge, require
from wyfold.reference.rounded import chunked
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

FORMS = [("delta_rule", False), ("delta_rule", True), ("gated_delta_rule", False), ("gated_delta_rule", True)]
FORMS += [("kda", False), ("kda", True)]
SHAPE = Shape(B=2, T=70, H=1, HV=2, K=16, V=24)
PACKED = Shape(B=1, T=90, H=2, HV=4, K=8, V=16)
DRAWS = {
    "random": {},
    "identical": {"family": "identical"},
    "beta 2": {"family": "beta 2"},
    "model": {"gate": "model"},
    "model bounded": {"gate": "model bounded"},
    "alternating": {"gate": "alternating"},
    "reset all": {"gate": "reset all"},
    "any": {"gate": "any"},
    "logits": {"beta": "logits"},
}


def equal(rule: str, folded: bool, a: dict, results, **options) -> None:
    truth = results(getattr(reference, rule), a)
    got = results(chunked, a, folded=folded, **options)
    assert got.keys() == truth.keys()
    for name, x in truth.items():
        row = {"dinitial_state": "dh0"}.get(name, name)
        require(judge(got[name], x, name=name, target=target(row, torch.float64)))


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("rule, folded", FORMS)
def test_in_float64_it_is_the_token_loop(rule: str, folded: bool, draw: str, results):
    names = dict(DRAWS[draw])
    if rule == "delta_rule":
        names.pop("gate", None)
    if rule == "gated_delta_rule" and names.get("gate") == "model bounded":
        names["gate"] = "model"
    a = inputs.draw(names.pop("family", "random"), rule, SHAPE, state="normal", dtype=torch.float64, **names)
    equal(rule, folded, a | {"output_final_state": True}, results)


@pytest.mark.parametrize("chunk_size", [16, 32, 64])
@pytest.mark.parametrize("rule, folded", FORMS)
def test_packed_with_every_option(rule: str, folded: bool, chunk_size: int, results):
    gate = {} if rule == "delta_rule" else {"gate": "weak"}
    a = inputs.draw("random", rule, PACKED, state="normal", sequences=5, beta="logits", dtype=torch.float64, **gate)
    a |= {"cu_seqlens": torch.tensor([0, 17, 17, 18, 82, 83]), "output_final_state": True, "scale": -0.7}
    a |= {"use_qk_l2norm_in_kernel": True, "allow_neg_eigval": True}
    if rule == "kda":
        a |= {"safe_gate": True, "lower_bound": -0.05}
    equal(rule, folded, a, results, chunk_size=chunk_size)


@pytest.mark.parametrize("dtype, unit", [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-10)])
@pytest.mark.parametrize("rule, folded", FORMS)
def test_16_bit_errors_are_a_few_ulps(rule: str, folded: bool, dtype: torch.dtype, unit: float, results):
    """For results returned in float32, without a final rounding: at least a tenth of an ulp, at most three."""
    gate = {} if rule == "delta_rule" else {"gate": "weak"}
    a = inputs.draw("random", rule, Shape(1, 130, 1, 1, 32, 32), state="normal", dtype=dtype, **gate)
    a["output_final_state"] = True
    truth = results(getattr(reference, rule), {name: x.double() if torch.is_tensor(x) else x for name, x in a.items()})
    got = results(chunked, a, folded=folded)
    for name in ("state", "dinitial_state", "dg"):
        if name in truth:
            assert got[name].dtype == torch.float32
            assert unit / 10 < error.rms(got[name], truth[name]) < 3 * unit, name


def test_float32_is_not_rounded(results):
    a = inputs.draw("random", "kda", Shape(1, 130, 1, 1, 32, 32), state="normal") | {"output_final_state": True}
    wide = {name: x.double() if torch.is_tensor(x) else x for name, x in a.items()}
    truth, got = results(reference.kda, wide), results(chunked, a)
    for name, x in truth.items():
        row = {"dinitial_state": "dh0"}.get(name, name)
        require(judge(got[name], x, name=name, target=target(row, torch.float32)))
