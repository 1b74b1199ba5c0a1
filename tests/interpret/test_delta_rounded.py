"""16-bit kernels lose no more than the emulation of their rounding sites.

The truth is the float64 token loop. The yardstick is `reference.rounded`, which rounds at the same places as the
kernels. The two differ only in the order of sums, so their errors agree within the rules of `error.judge`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge, require, rms
from wyfold.reference.rounded import chunked
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

RULES = ("delta_rule", "gated_delta_rule", "kda")
PER_TOKEN = ("dbeta", "dg")
SHAPE = Shape(1, 100, 1, 2, 32, 32)
FAMILIES = ("random", "uniform+", "identical", "beta 2", "converged")
GATES = ("-20", "-1e3", "spiky", "alternating", "model")
FEW = 64  # elements: the error of so few varies by chance, so only the target applies


def verdicts(rule: str, a: dict[str, Any], device: torch.device, results, folded: bool | None = None) -> list[Verdict]:
    """Verdicts on every result of a call; `folded` selects the form of the yardstick."""
    a |= {"output_final_state": True}
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in a.items()}
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    truth = results(getattr(reference, rule), wide, None, {name: x.double() for name, x in fed.items()})
    yardstick = results(chunked, a, None, fed, folded=folded)
    there = {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}
    options = {"backend": "triton", "chunk_size": 64}
    arrows = {name: x.to(device) for name, x in fed.items()}
    got = results(getattr(wyfold, f"chunk_{rule}"), there, None, arrows, **options)
    return [
        judge(got[name].cpu(), x, name=name, target=target(name, torch.bfloat16))
        if x.numel() < FEW
        else judge(got[name].cpu(), x, yardstick[name], name=name, per_token=name in PER_TOKEN and x.ndim == 3)
        for name, x in truth.items()
    ]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", [pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), *RULES[1:]])
def test_families(rule: str, family: str, device, results):
    a = inputs.draw(family, rule, SHAPE, state="normal", dtype=torch.bfloat16)
    require(*verdicts(rule, a, device, results))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("rule", RULES[1:])
def test_gates(rule: str, gate: str, device, results):
    a = inputs.draw("random", rule, SHAPE, gate=gate, state="normal", dtype=torch.bfloat16)
    require(*verdicts(rule, a, device, results))


@pytest.mark.parametrize("family", ["random", "identical"])
@pytest.mark.parametrize("rule", RULES[:2])
def test_the_form_other_than_the_default(rule: str, family: str, device, results, monkeypatch):
    monkeypatch.setattr(table.kernel_module("prepare", "triton"), "reads_folded", lambda g: True)
    a = inputs.draw(family, rule, SHAPE, state="normal", dtype=torch.bfloat16)
    require(*verdicts(rule, a, device, results, folded=True))


def test_the_forms_differ_where_keys_repeat(device, results):
    """Shows that the test above would detect the wrong form."""
    a = inputs.draw("identical", "gated_delta_rule", Shape(1, 128, 1, 2, 32, 32), dtype=torch.bfloat16)
    wide = {name: x.double() for name, x in a.items()}
    truth = results(reference.gated_delta_rule, wide, (), output_final_state=True)["state"]
    A, E = (results(chunked, a, (), folded=folded, output_final_state=True)["state"] for folded in (False, True))
    assert rms(A, truth) > 3 * rms(E, truth)
