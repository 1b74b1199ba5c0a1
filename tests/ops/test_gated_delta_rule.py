"""GDN: extreme gates, the gate in the kernel, and equality with DeltaNet for a zero gate."""

import pytest
import torch

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

FORMS = ("chunk", "fused_recurrent")
RULES = ("gated_delta_rule", "kda")
F64 = torch.float64


def operator(rule: str, form: str):
    return getattr(wyfold, f"{form}_{rule}")


def agree(float64_bounds, got, truth):
    for name in truth:
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], truth[name])


def test_the_short_names_are_the_same_functions():
    assert wyfold.chunk_gdn is wyfold.chunk_gated_delta_rule
    assert wyfold.fused_recurrent_gdn is wyfold.fused_recurrent_gated_delta_rule


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_a_gate_of_zero_is_deltanet(rule: str, form: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(2, 40, 1, 2, 8, 16), gate="zero", state="normal", dtype=F64)
    a["output_final_state"] = True
    plain = {name: x for name, x in a.items() if name != "g"}
    truth = results(operator("delta_rule", form), plain)
    agree(float64_bounds, results(operator(rule, form), a), truth)
    agree(float64_bounds, results(operator(rule, form), plain), truth)


# --- every gate is legal ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", inputs.GATES)
def test_every_gate(gate: str, rule: str, results, float64_bounds):
    a = inputs.draw("random", rule, Shape(1, 70, 1, 2, 8, 8), gate=gate, state="normal")
    a["output_final_state"] = True
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    truth = results(getattr(reference, rule), wide)
    for form in FORMS:
        agree(float64_bounds, results(operator(rule, form), wide), truth)
        single = results(operator(rule, form), a)
        for name in truth:
            known = "o" if name in ("o", "state") else "dg"
            bound = target(known, torch.float32, f"gate {gate}")
            require(judge(single[name], truth[name], name=name, target=bound, per_token=single[name].ndim == 3))


@pytest.mark.parametrize("gate", ("-5", "-20", "-88", "-1e3"))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_the_gradient_of_a_strong_gate_is_relatively_accurate(form: str, rule: str, gate: str, results):
    """After a strong gate the true dg is tiny; signed sums would leave the rounding errors of large terms."""
    a = inputs.draw("random", rule, Shape(1, 64, 1, 1, 16, 16), gate=gate, keys="normal")
    truth = results(getattr(reference, rule), {name: x.double() for name, x in a.items()}, ["g"])["dg"]
    got = results(operator(rule, form), a, ["g"])["dg"]
    seen = truth.abs() > torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
    assert bool(seen.any()) == (gate in ("-5", "-20"))
    require(judge(got.where(seen, 0), truth.where(seen, 0), name="dg", target=target("dg", torch.float32)))
    assert (got[~seen].abs() <= torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps).all()


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("at", [0, 1, 15, 16, 20, 31, 39])
def test_a_reset_forgets_and_has_no_gradient(at: int, rule: str, form: str, dtype: torch.dtype, results):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, 8, 8), state="normal", dtype=dtype)
    a["g"][:, at] = -torch.inf
    got = results(operator(rule, form), a, output_final_state=True)
    assert torch.equal(got["dg"][:, at], torch.zeros_like(got["dg"][:, at]))
    assert all(x.isfinite().all() for x in got.values())
    # Nothing before the reset affects anything after: other values and states before it, the same bits after it.
    other = dict(a)
    for name in ("v", "q", "k"):
        other[name] = torch.cat([a[name][:, :at].flip(1) * 3, a[name][:, at:]], 1)
    other["initial_state"] = -a["initial_state"]
    again = results(operator(rule, form), other, output_final_state=True)
    assert torch.equal(again["o"][:, at:], got["o"][:, at:])
    assert torch.equal(again["state"], got["state"])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", FORMS)
def test_extreme_gate_logits(form: str, rule: str, results, float64_bounds):
    """Gate logits of +-50 and beyond in the kernel: finite, accurate, and without gradient where the gate is flat."""
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, 8, 8), gate="model", state="normal", dtype=F64)
    a["g"] = 50 * a["g"].sign() * (1 + a["g"].abs())
    a["output_final_state"] = True
    agree(float64_bounds, results(operator(rule, form), a), results(getattr(reference, rule), a))
    single = {name: x.float() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    assert all(x.isfinite().all() for x in results(operator(rule, form), single).values())


# --- the gate in the kernel ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(3,), (1, 3), (1, 1, 3, 1)], ids=str)
def test_a_rate_of_any_shape(shape: tuple[int, ...], form: str, results):
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 20, 1, 3, 8, 8), gate="model")
    plain = results(operator("gated_delta_rule", form), a)
    shaped = results(operator("gated_delta_rule", form), a | {"A_log": a["A_log"].view(shape)})
    assert shaped["dA_log"].shape == shape
    assert torch.equal(shaped["dA_log"].flatten(), plain["dA_log"]) and torch.equal(shaped["o"], plain["o"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_parameter_gradients_sum_over_batch_and_tokens(rule: str, form: str, results, float64_bounds):
    """Including sums over several parts, and sequences with padding, which must not contribute."""
    a = inputs.draw("random", rule, Shape(3, 37, 1, 2, 8, 8), gate="model", dtype=F64)
    whole = results(operator(rule, form), a)
    one_by_one = []
    for b in range(3):
        row = {name: x[b : b + 1] if name in ("q", "k", "v", "g", "beta") else x for name, x in a.items()}
        fed = {"o": inputs.incoming(whole["o"])[b : b + 1]}
        one_by_one.append(results(operator(rule, form), row, None, fed))
    for name in ("dA_log", "ddt_bias"):
        float64_bounds.gradient(name, whole[name], sum(found[name] for found in one_by_one))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_absolute_error_of_parameter_and_state_gradients_in_float32(rule: str, form: str, results):
    for seed in range(3):
        a = inputs.draw("random", rule, Shape(1, 100, 1, 2, 16, 16), gate="model", state="normal", seed=seed)
        wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
        truth = results(getattr(reference, rule), wide, output_final_state=True)
        got = results(operator(rule, form), a, output_final_state=True)
        for name, row in (("dinitial_state", "dh0"), ("dA_log", "dA_log"), ("ddt_bias", "ddt_bias")):
            require(judge(got[name], truth[name], name=row, target=target(row, torch.float32)))
