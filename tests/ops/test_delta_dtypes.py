"""Mixed dtypes with float64 for the delta rules: q sets the arithmetic, a gradient has its argument's dtype.

Both cases: gate, write strength and gate parameters wider than the tokens, and narrower than float64 tokens.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

F64 = torch.float64
NARROWER = (torch.float32, torch.bfloat16, torch.float16)
RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
CONTROLS = ("g", "beta", "A_log", "dt_bias")
CASES = [
    (rule, gate, name)
    for rule in RULES
    for gate in (("weak", "model") if rule != "delta_rule" else ("none",))
    for name in (*CONTROLS, "all")
    if name in ("all", "beta") or (name == "g" and gate != "none") or gate == "model"
]


def draw(rule: str, gate: str, dtype: torch.dtype) -> dict[str, Any]:
    drawn = inputs.draw(
        "random", rule, Shape(2, 40, 1, 2, 16, 8), gate=None if gate == "none" else gate, state="normal", dtype=dtype
    )
    return drawn | {"output_final_state": True}


def stored_in(a: dict[str, Any], dtype: torch.dtype, *names: str) -> dict[str, Any]:
    return a | {name: a[name].to(dtype) for name in names if name in a}


def in_float64(a: dict[str, Any]) -> dict[str, Any]:
    return {name: x.double() if isinstance(x, Tensor) else x for name, x in a.items()}


def judged(name: str, got: Tensor, truth: Tensor) -> Verdict:
    """Judge 16 bits by the truth rounded once; float32, and float64 gradients of float32 arithmetic, by the target."""
    if got.dtype in (torch.bfloat16, torch.float16):
        return judge(got, truth, truth.to(got.dtype), name=name, per_token=got.ndim == 3)
    row = {"dinitial_state": "dh0"}.get(name, name)
    return judge(got, truth, name=name, target=target(row, torch.float32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", NARROWER, ids=str)
@pytest.mark.parametrize(("rule", "gate", "wide"), CASES)
def test_controls_wider_than_the_tokens(rule: str, gate: str, wide: str, dtype: torch.dtype, form: str, results):
    a = stored_in(draw(rule, gate, dtype), F64, *(CONTROLS if wide == "all" else (wide,)))
    got = results(getattr(wyfold, f"{form}_{rule}"), a)
    fed = {name: inputs.incoming(got[name], seed).double() for seed, name in enumerate(("o", "state"))}
    truth = results(getattr(reference, rule), in_float64(a), None, fed)
    assert got["o"].dtype == dtype and got["state"].dtype == torch.float32
    assert all(x.dtype == a[name[1:]].dtype for name, x in got.items() if name.startswith("d"))
    require(*(judged(name, got[name], x) for name, x in truth.items()))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", NARROWER, ids=str)
@pytest.mark.parametrize(("rule", "gate", "narrow"), CASES)
def test_controls_narrower_than_float64_tokens(
    rule: str, gate: str, narrow: str, dtype: torch.dtype, form: str, results, float64_bounds
):
    names = (*CONTROLS, "initial_state") if narrow == "all" else (narrow,)
    a = stored_in(draw(rule, gate, F64), dtype, *names)
    got = results(getattr(wyfold, f"{form}_{rule}"), a)
    truth = results(getattr(reference, rule), in_float64(a))
    assert got["o"].dtype == got["state"].dtype == F64
    for name, x in truth.items():
        stored = a[name[1:]].dtype if name.startswith("d") else F64
        assert got[name].dtype == stored, name
        if stored == F64:
            (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)
        else:
            require(judge(got[name], x, x.to(stored), name=name, per_token=x.ndim == 3))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_a_state_wider_than_the_arithmetic_is_refused(rule: str, form: str):
    a = draw(rule, "none" if rule == "delta_rule" else "weak", torch.float32)
    operator = getattr(wyfold, f"{form}_{rule}")
    with pytest.raises(ValueError, match=rf"^{form}_{rule}: initial_state must be .*, got float64"):
        operator(**stored_in(a, F64, "initial_state"))
    with pytest.raises(ValueError, match=rf"^{form}_{rule}: state_dtype must be .*float64"):
        operator(**a, state_dtype=F64)
