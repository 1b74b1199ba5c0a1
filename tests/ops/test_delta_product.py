"""Gated DeltaProduct against the token loop, and refusals. Its promises: tests/properties/test_family.py."""

import math
from typing import Any

import pytest
import torch

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

F64 = torch.float64
FORMS = {"chunk": wyfold.chunk_gated_delta_product, "recurrent": wyfold.fused_recurrent_gated_delta_product}
KINDS = ("scalar", "channel", "none")
GATES = ("zero", "-1e-3", "-1", "-88", "reset one", "reset all", "alternating")
OF_TOKENS, OF_UPDATES = ("q", "g"), ("k", "v", "beta")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest):
    return FORMS[request.param]


def drawn(kind: str, shape: Shape, n: int, gate: str = "weak", **more: Any) -> dict[str, Any]:
    """Arguments with n updates of a token: k, v and beta of n T tokens, q and g of the first T of them."""
    rule = {"channel": "kda", "scalar": "gated_delta_rule", "none": "delta_rule"}[kind]
    longer = Shape(shape.B, n * shape.T, shape.H, shape.HV, shape.K, shape.V)
    a = inputs.draw("random", rule, longer, gate=gate, state="normal", **{"dtype": F64, "beta": "mixed"} | more)
    cut = {name: a[name][:, : shape.T].contiguous() for name in OF_TOKENS if name in a}
    return a | cut | {"num_householder": n, "output_final_state": True}


def tokens(a: dict[str, Any], begin: int, end: int) -> dict[str, Any]:
    """The arguments restricted to some tokens."""
    n = a["num_householder"]
    rows = {name: slice(begin, end) for name in OF_TOKENS} | {name: slice(n * begin, n * end) for name in OF_UPDATES}
    return {name: x[:, rows[name]] if name in rows else x for name, x in a.items()}


def agree(float64_bounds, got: dict, truth: dict) -> None:
    assert got.keys() == truth.keys()
    for name, x in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)


@pytest.mark.parametrize("kind", KINDS)
def test_every_length(kind: str, results, float64_bounds):
    for T in range(1 + KINDS.index(kind), 131, 8):
        a = drawn(kind, Shape(1, T, 1, 2, 8, 16), 1 + T % 3, seed=T)
        truth = results(reference.gated_delta_product, a)
        for form in FORMS.values():
            agree(float64_bounds, results(form, a), truth)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_gates_packed_with_empty_and_short_sequences(kind: str, gate: str, results, float64_bounds):
    a = drawn(kind, Shape(1, 45, 2, 4, 16, 8), 3, gate, sequences=4)
    a |= {"cu_seqlens": torch.tensor([0, 17, 17, 18, 42]), "use_qk_l2norm_in_kernel": True}
    truth = results(reference.gated_delta_product, a)
    for form in FORMS.values():
        agree(float64_bounds, results(form, a), truth)


def test_one_update_is_the_gated_delta_rule_bit_for_bit(results):
    a = drawn("scalar", Shape(2, 40, 1, 2, 16, 8), 1, dtype=torch.float32)
    got = results(wyfold.chunk_gated_delta_product, a)
    del a["num_householder"]
    truth = results(wyfold.chunk_gated_delta_rule, a)
    assert all(torch.equal(got[name], x) for name, x in truth.items())


def test_options_of_the_chunk_form(results, float64_bounds):
    """V-first states, states on the way, logits, kept factors; and boundaries in each of their forms."""
    a = drawn("scalar", Shape(1, 100, 1, 2, 8, 24), 2, beta="logits", sequences=2)
    a |= {"state_v_first": True, "initial_state": a["initial_state"].mT.contiguous(), "scale": 0.3}
    a |= {"allow_neg_eigval": True, "return_intermediate_states": True, "checkpoint_every": 32}
    cu = torch.tensor([0, 70, 98])
    truth = results(reference.gated_delta_product, a, cu_seqlens=cu)
    got = results(wyfold.chunk_gated_delta_product, a, cu_seqlens=cu, chunk_size=32)
    agree(float64_bounds, got, truth)
    layout = SequenceLayout(cu, tokens=100)
    for other in (
        {"cu_seqlens": layout},
        {"cu_seqlens": cu.int(), "cu_seqlens_cpu": cu.int(), "disable_recompute": True},
    ):
        again = results(wyfold.chunk_gated_delta_product, a, chunk_size=32, **other)
        assert all(torch.equal(again[name], x) for name, x in got.items())


def test_segments(results, float64_bounds):
    a = drawn("scalar", Shape(1, 100, 1, 2, 8, 16), 2)
    with segment_rule.forced(3):
        assert wyfold.explain(wyfold.chunk_gated_delta_product, **a, chunk_size=16).segments > 1
        got = results(wyfold.chunk_gated_delta_product, a, chunk_size=16)
    agree(float64_bounds, got, results(reference.gated_delta_product, a))


def test_reflections_make_a_rotation(float64_bounds):
    """Two updates of beta 2 rotate the state; after twelve rotations by 30 degrees it is the initial one."""
    keys = torch.zeros(2, 8, dtype=F64)
    keys[0, 0], keys[1, 0], keys[1, 1] = 1, math.cos(math.pi / 12), math.sin(math.pi / 12)
    start = torch.randn(1, 1, 8, 8, dtype=F64)
    k = keys.repeat(12, 1).view(1, 24, 1, 8)
    q, beta = torch.zeros(1, 12, 1, 8, dtype=F64), torch.full((1, 24, 1), 2.0, dtype=F64)
    given = {"initial_state": start, "output_final_state": True}
    _, end = wyfold.chunk_gated_delta_product(q, k, 0 * k, None, beta, 2, **given)
    float64_bounds.output("state", end, start)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_householder": 0}, "num_householder must be at least 1, got 0"),
        ({"num_householder": 3}, r"k must be \[B, TN, H, K\] = \[1, 30, 2, 8\], got \[1, 20, 2, 8\]"),
        ({"beta": torch.zeros(1, 10, 2)}, r"beta must be \[B, TN, HV\] = \[1, 20, 2\], got \[1, 10, 2\]"),
        ({"g": torch.zeros(1, 20, 2)}, r"g must be \[B, T, HV\] = \[1, 10, 2\], got \[1, 20, 2\]"),
        ({"cu_seqlens": torch.tensor([0, 11])}, "cu_seqlens must end at most at T = 10, got 11"),
        ({"cu_seqlens": torch.tensor([1, 5])}, "cu_seqlens must begin with 0, got 1"),
    ],
)
def test_refusals(change: dict, message: str, form):
    k = torch.zeros(1, 20, 2, 8)
    a = {"q": k[:, :10], "k": k, "v": k, "beta": k[..., 0], "num_householder": 2}
    with pytest.raises(ValueError, match=f"^{form.__name__}: {message}"):
        form(**a | change)
    with pytest.raises(TypeError, match=f"^{form.__name__}: num_householder must be an int, got str"):
        form(**a | {"num_householder": "2"})
    with pytest.raises(TypeError, match=f"^{form.__name__}: return_intermediate_states must be True or False"):
        form(**a, return_intermediate_states=torch.ones(2))


def test_spacing_of_states_that_is_no_multiple_of_the_chunk():
    """The message named the updates between states, 20, and not what was given."""
    k = torch.zeros(1, 20, 2, 8)
    with pytest.raises(
        ValueError, match="checkpoint_every must be a multiple of chunk_size = 16, got 10 times 2 updates"
    ):
        wyfold.chunk_gated_delta_product(
            k[:, :10], k, k, num_householder=2, chunk_size=16, return_intermediate_states=True, checkpoint_every=10
        )
