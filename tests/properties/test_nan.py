"""A NaN or infinity stays in its sequence and head group, and on one side of its token in time.

From an input it may reach outputs of the same and later chunks; token by token, those of the same and later tokens.
From an incoming gradient it may reach gradients of the same and earlier chunks. All other bits are unchanged.
"""

import math

import pytest
import torch

import wyfold
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
WHERE = [(rule, name) for rule in RULES for name in ("q", "k", "v", "beta", "g") if (rule, name) != ("delta_rule", "g")]
LENGTHS = [33, 50, 17]
BAD_SEQUENCE, BAD_TOKEN, BAD_KEY_HEAD = 1, 20, 1
C = 16
BEGIN = LENGTHS[0]
CHUNK = slice(BEGIN + BAD_TOKEN // C * C, BEGIN + BAD_TOKEN // C * C + C)


def call(rule: str, dtype: torch.dtype = torch.float32):
    shape = Shape(1, sum(LENGTHS), 2, 4, 8, 16)
    a = inputs.draw("random", rule, shape, state="normal", sequences=3, dtype=dtype)
    fed = {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}
    options = {"cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0), "output_final_state": True}
    return a, fed, options


def heads_of(name: str, x: torch.Tensor, key_head: int) -> torch.Tensor:
    """The part of a tensor that belongs to one key head and its value heads."""
    axis = 1 if name in ("initial_state", "state", "dinitial_state") else 2
    first, count = (key_head, 1) if name in ("q", "k", "dq", "dk") else (2 * key_head, 2)
    return x.narrow(axis, first, count)


def assert_contained(clean: dict, got: dict, tokens: dict[str, slice], states: bool) -> None:
    """Require equal bits where the bad number may not reach: other heads, other sequences, and `tokens[name]`."""
    per_sequence = ("state", "initial_state", "dinitial_state")
    for name, x in clean.items():
        assert torch.equal(heads_of(name, got[name], 0), heads_of(name, x, 0)), f"{name}: another head group"
        mine, theirs = heads_of(name, got[name], BAD_KEY_HEAD), heads_of(name, x, BAD_KEY_HEAD)
        if name in per_sequence:
            for n in (0, 2):
                assert torch.equal(mine[n], theirs[n]), f"{name}: another sequence"
            if not states and name == "state":
                assert torch.equal(mine, theirs), name
            continue
        end = BEGIN + LENGTHS[1]
        assert torch.equal(mine[:, :BEGIN], theirs[:, :BEGIN]), f"{name}: an earlier sequence"
        assert torch.equal(mine[:, end:], theirs[:, end:]), f"{name}: a later sequence"
        safe = tokens.get(name)
        if safe is not None:
            assert torch.equal(mine[:, safe], theirs[:, safe]), f"{name}: the wrong side of time"


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule, where", WHERE)
def test_in_an_input(rule: str, form: str, where: str, bad: float, results):
    a, fed, options = call(rule)
    op = getattr(wyfold, f"{form}_{rule}")
    clean = results(op, a, None, fed, **options)
    poisoned = a | {where: a[where].clone()}
    heads_of(where, poisoned[where], BAD_KEY_HEAD)[:, BEGIN + BAD_TOKEN, 0] = bad
    got = results(op, poisoned, None, fed, **options)
    before = slice(BEGIN, CHUNK.start)
    # It reaches gradients of earlier tokens through the backward, but not outputs of earlier chunks.
    assert_contained(clean, got, {"o": before}, states=True)
    hit = heads_of("o", got["o"], BAD_KEY_HEAD)[:, BEGIN + BAD_TOKEN]
    assert not hit.isfinite().all(), "a bad number must not vanish either"
    if where == "q":
        assert torch.equal(got["state"], clean["state"]) or form == "chunk"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_in_an_initial_state(rule: str, form: str, results):
    a, fed, options = call(rule)
    op = getattr(wyfold, f"{form}_{rule}")
    clean = results(op, a, None, fed, **options)
    a["initial_state"] = a["initial_state"].clone()
    heads_of("initial_state", a["initial_state"], BAD_KEY_HEAD)[BAD_SEQUENCE, 0, 3] = math.nan
    assert_contained(clean, results(op, a, None, fed, **options), {}, states=True)


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_in_an_incoming_gradient(rule: str, form: str, bad: float, results):
    a, fed, options = call(rule)
    op = getattr(wyfold, f"{form}_{rule}")
    clean = results(op, a, None, fed, **options)
    poisoned = fed | {"o": fed["o"].clone()}
    heads_of("o", poisoned["o"], BAD_KEY_HEAD)[:, BEGIN + BAD_TOKEN, 0] = bad
    got = results(op, a, None, poisoned, **options)
    after = slice(CHUNK.stop, BEGIN + LENGTHS[1])
    every = slice(BEGIN, BEGIN + LENGTHS[1])
    assert_contained(
        clean, got, {"o": every} | {f"d{name}": after for name in ("q", "k", "v", "g", "beta")}, states=False
    )
    assert not got["dv"].isfinite().all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES)
def test_in_the_gradient_of_a_state(rule: str, form: str, results):
    a, fed, options = call(rule)
    op = getattr(wyfold, f"{form}_{rule}")
    clean = results(op, a, None, fed, **options)
    poisoned = fed | {"state": fed["state"].clone()}
    heads_of("state", poisoned["state"], BAD_KEY_HEAD)[BAD_SEQUENCE, 1] = math.nan
    got = results(op, a, None, poisoned, **options)
    assert_contained(clean, got, {}, states=False)
    assert torch.equal(got["o"], clean["o"]) and torch.equal(got["dq"], clean["dq"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rule", RULES[1:])
def test_an_overflowing_gate_changes_no_neighbour(rule: str, form: str, results):
    """g > 0 is outside the contract: its own results may overflow, no one else's change."""
    a, fed, options = call(rule)
    op = getattr(wyfold, f"{form}_{rule}")
    clean = results(op, a, None, fed, **options)
    a["g"] = a["g"].clone()
    heads_of("g", a["g"], BAD_KEY_HEAD)[:, BEGIN : BEGIN + LENGTHS[1]] = 50.0
    got = results(op, a, None, fed, **options)
    assert_contained(clean, got, {}, states=True)
    assert not got["o"].isfinite().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("rule, where", WHERE)
def test_token_by_token_no_earlier_output_sees_it(rule: str, where: str, bad: float):
    a, _, options = call(rule)
    op = getattr(wyfold, f"fused_recurrent_{rule}")
    clean, _ = op(**a, **options)
    a[where] = a[where].clone()
    heads_of(where, a[where], BAD_KEY_HEAD)[:, BEGIN + BAD_TOKEN, 0] = bad
    got, _ = op(**a, **options)
    assert torch.equal(got[:, : BEGIN + BAD_TOKEN], clean[:, : BEGIN + BAD_TOKEN])
    assert not got[:, BEGIN + BAD_TOKEN].isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_a_finite_key_whose_products_overflow_stays_in_its_chunk_and_later_ones(rule: str, results):
    a, fed, options = call(rule)
    op = getattr(wyfold, f"chunk_{rule}")
    clean = results(op, a, (), fed, **options)
    a["k"] = a["k"].clone()
    a["k"][:, BEGIN + BAD_TOKEN, BAD_KEY_HEAD] = 1e30
    got = results(op, a, (), fed, **options)
    assert_contained(clean, got, {"o": slice(BEGIN, CHUNK.start)}, states=True)
    assert not got["o"].isfinite().all()


@pytest.mark.parametrize("form", ["chunk_ttt_linear", "fused_recurrent_ttt_linear"])
@pytest.mark.parametrize("where", ["q", "k", "v", "eta"])
def test_in_an_input_of_ttt_linear(form: str, where: str):
    T, H, D = sum(LENGTHS), 2, 8
    a = {name: torch.randn(1, T, H, D) for name in "qkv"} | {"eta": 0.1 * torch.rand(1, T, H)}
    fixed = {"w": torch.ones(H, D), "b": torch.zeros(H, D), "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}
    clean = getattr(wyfold, form)(**a, **fixed)[0]
    a[where][:, BEGIN + BAD_TOKEN, 1] = math.nan
    got = getattr(wyfold, form)(**a, **fixed)[0]
    end = BEGIN + LENGTHS[1]
    assert torch.equal(got[:, :, 0], clean[:, :, 0]), "another head"
    assert torch.equal(got[:, end:], clean[:, end:]), "a later sequence"
    assert torch.equal(got[:, : CHUNK.start], clean[:, : CHUNK.start]), "an earlier mini-batch or sequence"
    assert not got[:, BEGIN + BAD_TOKEN].isfinite().all()


def test_in_an_input_of_the_convolution():
    x, weight, cu = torch.randn(1, sum(LENGTHS), 3), torch.randn(3, 4), torch.tensor([0, *LENGTHS]).cumsum(0)
    clean, _ = wyfold.causal_conv1d(x, weight, cu_seqlens=cu)
    x[:, BEGIN + BAD_TOKEN, 1] = math.nan
    got, _ = wyfold.causal_conv1d(x, weight, cu_seqlens=cu)
    hit = slice(BEGIN + BAD_TOKEN, BEGIN + BAD_TOKEN + 4)
    assert got[:, hit, 1].isnan().all()
    got[:, hit, 1] = clean[:, hit, 1]
    assert torch.equal(got, clean)
