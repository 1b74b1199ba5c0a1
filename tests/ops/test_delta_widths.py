"""Widths that kernels lack: K and V that are no multiple of 8, and wide V."""

from typing import Any

import pytest
import torch
from tests.compile import aot
from tests.ops.low_rank_calls import OPERATORS, agree
from torch import Tensor
from torch.nn.functional import pad

import wyfold
from wyfold import reference
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.ops import delta_plan
from wyfold.ops.delta_widths import fitted
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

RULES = ("delta_rule", "gated_delta_rule", "kda")
FORMS = ("chunk", "fused_recurrent")
BOUNDARIES = torch.tensor([0, 0, 1, 30, 43])


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


def operator(form: str, rule: str) -> Any:
    return getattr(wyfold, f"{form}_{rule}")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("K", "V"), [(60, 60), (100, 36), (3, 1), (12, 300), (8, 512)])
def test_any_width_against_float64(form: str, rule: str, K: int, V: int, results, float64_bounds):
    """Outputs, states and every gradient, packed, with grouped heads and all that can be done in the kernel."""
    gate = {"gate": None if rule == "delta_rule" else "model", "beta": "logits", "state": "normal"}
    a = inputs.draw("random", rule, Shape(1, 43, 1, 2, K, V), sequences=4, dtype=torch.float64, **gate)
    options = {"cu_seqlens": BOUNDARIES, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    truth = results(getattr(reference, rule), a, **options)
    found = results(operator(form, rule), a, **options)
    assert found.keys() == truth.keys()
    for name, x in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, found[name], x)


@pytest.mark.parametrize("name", ["chunk_dplr_delta_rule", "fused_recurrent_gdn2", "chunk_comba", "chunk_gla"])
def test_other_rules_take_any_width_too(name: str, results, float64_bounds):
    op, loop, drawn = OPERATORS.get(name, (wyfold.chunk_gla, reference.gla, "gla"))
    a = inputs.draw("random", drawn, Shape(1, 20, 1, 2, 12, 260), state="normal", dtype=torch.float64)
    agree(float64_bounds, results(op, a, output_final_state=True), results(loop, a, output_final_state=True))


def padded(a: dict[str, Any], K: int, V: int, v_first: bool) -> dict[str, Any]:
    """The arguments with zeros after their K channels of keys and V channels of values, up to a multiple of 8."""
    keys, values = -K % 8, -V % 8
    state = (0, keys, 0, values) if v_first else (0, values, 0, keys)
    own = {"initial_state": state} | dict.fromkeys(("q", "k", "a", "b", "p", "gk"), (0, keys))
    own |= dict.fromkeys(("v", "w"), (0, values)) | ({"g": (0, keys)} if "g" in a and a["g"].ndim == 4 else {})
    return a | {name: pad(a[name], by) for name, by in own.items() if name in a}


@pytest.mark.parametrize(
    ("rule", "K", "V", "v_first"),
    [
        ("gated_delta_rule", 60, 60, False),
        ("gated_delta_rule", 100, 20, True),
        ("kda", 60, 60, True),
        pytest.param("kda", 100, 20, False, marks=pytest.mark.release_if_interpreted),
        *(
            pytest.param(rule, K, V, v_first, marks=pytest.mark.release_if_interpreted)
            for rule, K, V, v_first in (
                ("gla", 60, 100, False),
                ("dplr_delta_rule", 60, 100, True),
                ("gdn2", 100, 60, False),
                ("comba", 60, 20, True),
            )
        ),
    ],
)
def test_padding_inside_has_the_bits_of_padding_by_hand(rule: str, K: int, V: int, v_first: bool, device, backend: str):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 2, K, V), state="normal")
    a["initial_state"] = a["initial_state"].mT.contiguous() if v_first else a["initial_state"]
    a = {name: x.to(device) for name, x in a.items()}
    options = {"output_final_state": True, "state_v_first": v_first, "scale": 0.3, "backend": backend}
    options |= {"return_intermediate_states": True, "checkpoint_every": 32, "chunk_size": 32}
    op = operator("chunk", rule)
    found = op(**a, **options)
    expected = op(**padded(a, K, V, v_first), **options)
    states = (slice(V), slice(K)) if v_first else (slice(K), slice(V))
    assert torch.equal(found[0], expected[0][..., :V])
    for x, y in zip(found[1:], expected[1:], strict=True):
        assert x.is_contiguous() and torch.equal(x, y[(..., *states)])
    found, expected = (gradients(op, b, found[0], options) for b in (a, padded(a, K, V, v_first)))
    for name, x in found.items():
        assert torch.equal(x, expected[name][tuple(map(slice, x.shape))]), name


def gradients(op: Any, a: dict[str, Any], like: Tensor, options: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of all tensors by an output gradient that is drawn for `like` and has zeros after it."""
    leaves = {name: x.clone().requires_grad_() for name, x in a.items()}
    o = op(**leaves, **options)[0]
    do = inputs.incoming(like, 0)
    torch.autograd.backward([o], [pad(do, (0, o.shape[-1] - do.shape[-1]))])
    return {name: x.grad for name, x in leaves.items()}


@pytest.mark.parametrize("rule", RULES[1:])
def test_a_wide_value_head_has_the_bits_of_its_halves(rule: str, device, backend):
    a = inputs.draw("random", rule, Shape(1, 40, 1, 1, 16, 512), state="normal")
    a = {name: x.to(device) for name, x in a.items()}
    op, options = operator("chunk", rule), {"output_final_state": True, "backend": backend}
    o, state = op(**a, **options)
    for half in (slice(256), slice(256, 512)):
        b = a | {"v": a["v"][..., half], "initial_state": a["initial_state"][..., half]}
        half_o, half_state = op(**b, **options)
        assert torch.equal(o[..., half], half_o) and torch.equal(state[..., half], half_state)


@pytest.mark.parametrize("v_first", [False, True])
def test_heads_computed_as_narrower_ones(rule: str, v_first: bool, results, float64_bounds, monkeypatch):
    """K 12 and V 40 as heads of 16: outputs, states and every gradient, packed, with grouped heads."""
    monkeypatch.setattr(delta_plan, "best_head_width", lambda *_: 16)
    gate = {"gate": None if rule == "delta_rule" else "model", "beta": "logits", "state": "normal"}
    a = inputs.draw("random", rule, Shape(1, 43, 1, 2, 12, 40), sequences=4, dtype=torch.float64, **gate)
    options = {"cu_seqlens": BOUNDARIES, "use_qk_l2norm_in_kernel": True, "output_final_state": True}
    if v_first:
        a, options = a | {"initial_state": a["initial_state"].mT}, options | {"state_v_first": True}
    truth = results(getattr(reference, rule), a, **options)
    found = results(operator("chunk", rule), a, **options)
    for name, x in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, found[name], x)
    q, v = torch.zeros(1, 5, 1, 12), torch.zeros(1, 5, 1, 40)
    assert "K 12 as 16, V 40 as 3 x 16" in str(wyfold.explain(wyfold.chunk_delta_rule, q, q, v))


@pytest.mark.parametrize(
    ("K", "V", "heads", "words"),
    [
        (128, 256, 8, "V 256 as 2 x 128"),
        (128, 256, 9, ""),
        (96, 192, 9, "K 96 as 128"),
        (100, 130, 9, "K 100 as 128, V 130 as 1 x 192"),
        (128, 300, 9, "V 300 as 3 x 128"),
    ],
)
@pytest.mark.parametrize("T", [64, 8192])
def test_wide_values_stay_whole_where_sequences_are_never_cut(K: int, V: int, heads: int, words: str, T: int):
    """The number of heads decides, for every length and batch: bits do not depend on those."""
    q, k = (torch.zeros(1, T, heads, K, dtype=torch.bfloat16).requires_grad_() for _ in range(2))
    v, g = torch.zeros(1, T, heads, V, dtype=torch.bfloat16), torch.zeros(1, T, heads)
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        text = str(wyfold.explain(wyfold.chunk_gated_delta_rule, q, k, v, g, g, backend="triton", chunk_size=64))
        with segment_rule.forced(4):
            cut = str(wyfold.explain(wyfold.chunk_gated_delta_rule, q, k, v, g, g, backend="triton", chunk_size=64))
    assert (f"widths       {words}\n" in text) if words else "widths" not in text
    assert text.count("(gluon)") == (5 if "segments" not in text else 9)
    assert f"V {V} as {-(-V // 128)} x 128" in cut, "segments need heads of 128"


def test_only_what_lacks_its_width_is_copied():
    q, k, v = torch.zeros(1, 5, 1, 64), torch.zeros(1, 5, 1, 64), torch.zeros(1, 5, 1, 512)
    t = DeltaTensors(q, k, v, torch.zeros(1, 5, 1, 64), *[None] * 9)
    found, _ = fitted(t, "keys", v_first=False)
    assert found.q is q and found.k is k and found.v.data_ptr() == v.data_ptr()


def test_explain_says_which_widths_the_kernels_get():
    q, v = torch.zeros(1, 5, 1, 60), torch.zeros(1, 5, 1, 300)
    text = str(wyfold.explain(wyfold.chunk_delta_rule, q, q, v))
    assert "K 60 as 64, V 300 as 1 x 304" in text
    whole = torch.zeros(1, 5, 1, 64)
    assert "widths" not in str(wyfold.explain(wyfold.chunk_delta_rule, whole, whole, whole))


@pytest.mark.parametrize(("K", "V", "message"), [
    (257, 8, "q and k must have width K from 1 to 256, got 257"),
    (8, 513, "v must have width V from 1 to 512, got 513"),
    (0, 8, "q and k must have width K from 1 to 256, got 0"),
])  # fmt: skip
def test_wider_heads_are_refused(K: int, V: int, message: str):
    q, v = torch.zeros(1, 5, 1, K), torch.zeros(1, 5, 1, V)
    with pytest.raises(ValueError, match=f"^chunk_delta_rule: {message}$"):
        wyfold.chunk_delta_rule(q, q, v)


def test_a_compiled_call_pads_too():
    q, v = torch.randn(1, 9, 1, 12, requires_grad=True), torch.randn(1, 9, 1, 20)
    call = lambda q: wyfold.chunk_delta_rule(q, q, v)[0]
    expected = call(q)
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(q)
    assert torch.equal(found, expected)
    assert torch.equal(*(torch.autograd.grad(o.sum(), q)[0] for o in (found, expected)))
