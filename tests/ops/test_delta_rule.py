"""DeltaNet: exact results, reflections, no gate argument; and the catalogue of hard keys for all rules."""

import itertools

import pytest
import torch

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.error import judge, require
from wyfold.reference.shapes import GROUPS, Shape
from wyfold.reference.targets import target

FORMS = {"chunk": wyfold.chunk_delta_rule, "recurrent": wyfold.fused_recurrent_delta_rule}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest):
    return FORMS[request.param]


# --- exactly representable results ----------------------------------------------------------------------------------


def last_written(k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """[HV, K, V] value last written with strength 1 under each one-hot key, found by lookup."""
    group = v.shape[1] // k.shape[1]
    state = torch.zeros(v.shape[1], k.shape[2], v.shape[2], dtype=v.dtype)
    for t in range(v.shape[0]):
        for head in range(v.shape[1]):
            if beta[t, head] == 1:
                state[head, k[t, head // group].argmax()] = v[t, head]
    return state


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_last_value_written_under_each_key_exactly(dtype: torch.dtype, seed: int, form):
    group, K, V = (*GROUPS, 1, 2)[seed], (8, 24, 16, 40, 8, 72, 16)[seed], (24, 8, 16, 8, 40, 8, 136)[seed]
    lengths = [[50], [17, 0, 40], [1, 64, 3], [33, 32], [5, 5, 5, 70], [16], [31, 1]][seed]
    shape = Shape(1, sum(lengths), 2, 2 * group, K, V)
    a = inputs.draw("one-hot", "delta_rule", shape, dtype=dtype, seed=seed)
    a["q"] = inputs.KEYS["one-hot"](tuple(a["q"].shape), torch.Generator().manual_seed(100 + seed)).to(dtype)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    o, state = form(**a, cu_seqlens=cu, output_final_state=True, scale=1.0)
    for i in range(len(lengths)):
        k, v, beta = (a[name][0, cu[i] : cu[i + 1]] for name in ("k", "v", "beta"))
        assert torch.equal(state[i], last_written(k, v, beta).to(state))
        for t in range(0, lengths[i], 7):
            seen = last_written(k[: t + 1], v[: t + 1], beta[: t + 1])
            at = a["q"][0, cu[i] + t].argmax(-1).repeat_interleave(group)
            assert torch.equal(o[0, cu[i] + t], seen[torch.arange(2 * group), at])


def test_strength_zero_writes_nothing(form, results):
    a = inputs.draw("random", "delta_rule", Shape(1, 40, 1, 2, 8, 8), beta="zero", state="normal", dtype=torch.float64)
    got = results(form, a, output_final_state=True)
    assert torch.equal(got["state"], a["initial_state"])
    assert torch.equal(got["dv"], torch.zeros_like(got["dv"]))


def test_two_equal_reflections_cancel(form, float64_bounds):
    """Unit key, strength 2, the same pair twice: S returns to its start."""
    a = inputs.draw("beta 2", "delta_rule", Shape(1, 1, 1, 2, 16, 8), state="normal", dtype=torch.float64)
    twice = {name: x if name == "initial_state" else x.repeat_interleave(2, 1) for name, x in a.items()}
    _, state = form(**twice, output_final_state=True)
    float64_bounds.output("state", state, a["initial_state"])


def test_powers_of_two_pass_through_bit_for_bit(form, results):
    a = inputs.draw("random", "delta_rule", Shape(1, 50, 2, 4, 16, 8), state="normal")
    scaled = a | {"v": a["v"] * 2.0**20, "initial_state": a["initial_state"] * 2.0**20}
    one, other = (results(form, x, (), output_final_state=True) for x in (a, scaled))
    assert all(torch.equal(one[name] * 2.0**20, other[name]) for name in one)


def test_linear_in_values_and_state_together(form, results, float64_bounds):
    one, other = (
        inputs.draw("random", "delta_rule", Shape(1, 50, 1, 2, 8, 8), state="normal", dtype=torch.float64, seed=seed)
        for seed in (0, 1)
    )
    mixed = one | {name: 2 * one[name] - 3 * other[name] for name in ("v", "initial_state")}
    other = one | {name: other[name] for name in ("v", "initial_state")}
    a, b, got = (results(form, x, (), output_final_state=True) for x in (one, other, mixed))
    for name in got:
        float64_bounds.output(name, got[name], 2 * a[name] - 3 * b[name])


def test_a_gate_is_an_unknown_argument(form):
    a = inputs.draw("random", "gated_delta_rule")
    with pytest.raises(TypeError, match="unexpected keyword argument 'g'"):
        form(**a)


# --- hard keys and strengths, for all three rules ---------------------------------------------------------------------

KEYS = ("normal", "positive", "identical", "near-identical", "two clusters", "rank 4", "vocabulary")
BETAS = ("half", ".835", "one", "two")
RULES = {"delta_rule": "zero", "gated_delta_rule": "-1e-3", "kda": "weak"}


def single_target(name: str, beta: str = "") -> float:
    """The float32 target; at strength 2 that of repeated keys, of 2,048 tokens, for 48 (docs/numerics.md)."""
    known = "o" if name in ("o", "state") else "dq"
    bound = target(known, torch.float32)
    return max(bound, target(known, torch.float32, "repeated keys, beta 2") * 48 / 2048) if beta == "two" else bound


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", KEYS)
def test_correlated_keys(keys: str, rule: str, results, float64_bounds):
    """84 combinations, four strengths per batch: within the float64 bounds, and finite and close in float32."""
    shape = Shape(4, 48, 1, 1, 16, 8)
    a = inputs.draw("random", rule, shape, keys=keys, gate=RULES[rule], state="normal")
    a["k"] = a["k"][:1].expand(4, -1, -1, -1)  # the same hard keys, four strengths
    a["beta"] = torch.cat([inputs.BETAS[beta]((1, 48, 1), torch.Generator()) for beta in BETAS]).float()
    wide = {name: x.double() for name, x in a.items()}
    truth = results(getattr(reference, rule), wide, output_final_state=True)
    for form in ("chunk", "fused_recurrent"):
        op = getattr(wyfold, f"{form}_{rule}")
        got, single = (results(op, x, output_final_state=True) for x in (wide, a))
        for name, (b, beta) in itertools.product(truth, enumerate(BETAS)):
            bound = float64_bounds.gradient if name.startswith("d") else float64_bounds.output
            bound(f"{name}, beta {beta}", got[name][b], truth[name][b])
            limit = single_target(name, beta)
            require(judge(single[name][b], truth[name][b], name=f"{name}, beta {beta}", target=limit))


EXTREMES = [
    {"keys": "zero"},
    {"keys": "tiny"},
    {"keys": "tiny", "norm": True},
    {"keys": "huge", "norm": True},
    {"beta": "zero"},
    {"beta": "tiny"},
    {"beta": "mixed"},
    {"beta": "logits"},
    {"keys": "vocabulary", "values": "linear 4096", "beta": "one"},
    {"values": "1e-4"},
    {"values": "1e4"},
    {"values": "1e30"},
    {"values": "6e4", "state": "6e4"},
    {"keys": "orthonormal", "beta": "two"},
]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("case", EXTREMES, ids=str)
def test_extremes(case: dict, rule: str, results, float64_bounds):
    names = dict(case)
    options = {"use_qk_l2norm_in_kernel": names.pop("norm", False), "output_final_state": True}
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, 16, 16), **({"state": "normal"} | names))
    wide = {name: x.double() if isinstance(x, torch.Tensor) else x for name, x in a.items()}
    truth = results(getattr(reference, rule), wide, **options)
    for form in ("chunk", "fused_recurrent"):
        op = getattr(wyfold, f"{form}_{rule}")
        got, single = results(op, wide, **options), results(op, a, **options)
        for name in truth:
            bound = float64_bounds.gradient if name.startswith("d") else float64_bounds.output
            bound(name, got[name], truth[name])
            require(judge(single[name], truth[name], name=name, target=single_target(name)))
