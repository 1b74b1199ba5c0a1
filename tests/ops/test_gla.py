"""GLA against the token loop, and refusals. Its promises bit for bit: tests/properties/test_family.py."""

from typing import Any

import pytest
import torch

import wyfold
from wyfold import reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import segment_rule

F64 = torch.float64
FORMS = {"chunk": wyfold.chunk_gla, "recurrent": wyfold.fused_recurrent_gla}
KINDS = ("channel", "scalar", "none")
GATES = ("zero", "-1e-3", "-1", "-88", "reset one", "reset all", "alternating", "any")
PER_TOKEN = ("q", "k", "v", "g", "gv")


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest):
    return FORMS[request.param]


def drawn(kind: str, shape: Shape, gate: str = "weak", **more: Any) -> dict[str, Any]:
    """Arguments with keys of any length, and a gate of a kind."""
    rule = {"channel": "gla", "scalar": "gated_delta_rule", "none": "delta_rule"}[kind]
    a = inputs.draw("random", rule, shape, gate=gate, state="normal", **{"dtype": F64} | more)
    a.pop("beta", None)
    a["k"] = 5 * a["k"]
    return a | {"output_final_state": True}


def agree(float64_bounds, got: dict, truth: dict) -> None:
    assert got.keys() == truth.keys()
    for name, x in truth.items():
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], x)


@pytest.fixture(scope="module", params=KINDS)
def every_length(request: pytest.FixtureRequest, results) -> tuple[torch.Tensor, dict, dict, dict]:
    """Lengths, arguments, incoming gradients and truth; sequence b of the batch ends after lengths[b] tokens.

    One token loop covers all lengths: a token with zero key, value and decay leaves the state unchanged.
    """
    lengths = torch.arange(1 + KINDS.index(request.param), 131, 3)
    N, longest = len(lengths), int(lengths[-1])
    a = drawn(request.param, Shape(N, longest, 1, 2, 8, 16))
    past = torch.arange(longest) >= lengths[:, None]
    for name in set(PER_TOKEN) & set(a):
        a[name][past] = 0
    fed = {"o": inputs.incoming(a["v"], 1).masked_fill(past[..., None, None], 0)}
    fed["state"] = inputs.incoming(a["initial_state"], 2)
    return lengths, a, fed, results(reference.gla, a, None, fed)


def test_every_length(form, every_length, results, float64_bounds):
    lengths, a, fed, truth = every_length

    def alone(found: dict, b: int, T: int) -> dict:
        """The part of sequence b, without the tokens after its end."""
        of_states = ("state", "initial_state", "dinitial_state")
        rows = {name: x[b : b + 1] for name, x in found.items() if isinstance(x, torch.Tensor)}
        return found | {name: x if name in of_states else x[:, :T] for name, x in rows.items()}

    for b, T in enumerate(lengths.tolist()):
        got = results(form, alone(a, b, T), None, alone(fed, b, T))
        agree(float64_bounds, got, alone(truth, b, T))


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("kind", KINDS[:2])
def test_gates_packed_with_empty_and_short_sequences(kind: str, gate: str, results, float64_bounds):
    cu = torch.tensor([0, 33, 33, 34, 82])
    a = drawn(kind, Shape(1, 90, 2, 4, 16, 8), gate, sequences=4) | {"cu_seqlens": cu}
    truth = results(reference.gla, a)
    for form in FORMS.values():
        agree(float64_bounds, results(form, a), truth)


@pytest.mark.parametrize("size", [16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_chunk_sizes_layouts_states_and_kept_factors(kind: str, size: int, results, float64_bounds):
    a = drawn(kind, Shape(2, 150, 1, 2, 8, 24)) | {"scale": 0.3, "state_v_first": True}
    a["initial_state"] = a["initial_state"].mT.contiguous()
    every = {"return_intermediate_states": True, "checkpoint_every": 64}
    truth = results(reference.gla, a, **every)
    got = results(wyfold.chunk_gla, a, chunk_size=size, **every)
    agree(float64_bounds, got, truth)
    kept = results(wyfold.chunk_gla, a, chunk_size=size, disable_recompute=True, **every)
    assert all(torch.equal(kept[name], x) for name, x in got.items())


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_segments(packed: bool, results, float64_bounds):
    a = drawn("channel", Shape(1, 200, 1, 2, 8, 16), "any", sequences=3 if packed else None)
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 150, 150, 190])
    with segment_rule.forced(3):
        assert wyfold.explain(wyfold.chunk_gla, **a, chunk_size=16).segments > 1
        got = results(wyfold.chunk_gla, a, chunk_size=16)
    agree(float64_bounds, got, results(reference.gla, a))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("v_first", [False, True])
def test_decays_of_value_channels(kind: str, v_first: bool, results, float64_bounds):
    a = drawn(kind, Shape(1, 20, 1, 2, 16, 8), sequences=3) | {"cu_seqlens": torch.tensor([0, 7, 7, 18])}
    a["gv"] = inputs.draw("random", "gla", Shape(1, 20, 1, 2, 8, 8), gate="any", dtype=F64, seed=1)["g"]
    if v_first:
        a |= {"state_v_first": True, "initial_state": a["initial_state"].mT.contiguous()}
    every = {"return_intermediate_states": True, "checkpoint_every": 5}
    agree(float64_bounds, results(wyfold.fused_recurrent_gla, a, **every), results(reference.gla, a, **every))


@pytest.mark.parametrize("V", [264, 296, 512])
def test_wide_values(V: int, form, results, float64_bounds):
    a = drawn("channel", Shape(1, 35, 1, 2, 8, V))
    agree(float64_bounds, results(form, a), results(reference.gla, a))


def test_lightning_is_a_constant_gate(results, float64_bounds):
    a = drawn("none", Shape(2, 50, 4, 4, 8, 8))
    slopes = -8 / 4 * (1 - 3 / 12) * torch.arange(4, dtype=F64)
    a["g"] = slopes.expand(2, 50, 4)
    got, truth = (results(op, a, ["q", "k", "v"]) for op in (wyfold.chunk_gla, reference.gla))
    agree(float64_bounds, got, truth)


def test_a_16_bit_gate_is_summed_in_float32(form):
    """The gate's dtype decides its input values only: the same values in float32 give the same bits."""
    a = drawn("channel", Shape(1, 70, 1, 2, 16, 16), dtype=torch.float32)
    low = a["g"].bfloat16()
    (o, S), (wide, W) = (form(**a | {"g": g}) for g in (low, low.float()))
    assert torch.equal(o, wide) and torch.equal(S, W)


def test_equal_channels_are_simple_gla(form, results, float64_bounds):
    a = drawn("scalar", Shape(2, 50, 1, 2, 8, 16))
    channels = a | {"g": a["g"][..., None].expand(-1, -1, -1, 8)}
    got = results(form, channels)
    agree(float64_bounds, got | {"dg": got["dg"].sum(-1)}, results(form, a))


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, message",
    [
        ({"g": (1, 20, 2, 16)}, r"g must be \[B, T, HV, K\]"),
        ({"g": (1, 20)}, r"g must have 4 dimensions, \[B, T, HV, K\]"),
        ({"v": (1, 20, 2, 520)}, "v must have width V from 1 to 512, got 520"),
        ({"initial_state": (1, 2, 16, 8)}, r"initial_state must be \[N, HV, K, V\]"),
        ({"v": (1, 20, 2, 264), "initial_state": (1, 2, 8, 256)}, r"initial_state must be \[N, HV, K, V\]"),
    ],
)
def test_wrong_shapes(change: dict, message: str, form):
    a = {name: torch.zeros(1, 20, 2, 8) for name in "qkvg"}
    for name, size in change.items():
        a[name] = torch.zeros(size)
    with pytest.raises(ValueError, match=f"^{form.__name__}: {message}"):
        form(**a)


def test_wrong_decays_of_values():
    a = {name: torch.zeros(1, 20, 2, 8) for name in "qkvg"}
    with pytest.raises(ValueError, match=r"^fused_recurrent_gla: gv must be \[B, T, HV, V\]"):
        wyfold.fused_recurrent_gla(**a, gv=torch.zeros(1, 20, 2, 16))
    with pytest.raises(ValueError, match=r"^fused_recurrent_gla: gv must be float"):
        wyfold.fused_recurrent_gla(**a, gv=torch.zeros(1, 20, 2, 8, dtype=torch.int64))
    with wyfold.checked(), pytest.raises(ValueError, match=r"^chunk_gla: g must be <= 0"):
        wyfold.chunk_gla(**a | {"g": torch.ones(1, 20, 2, 8)})


def test_each_gate_is_checked_by_itself():
    a = {name: torch.zeros(1, 20, 2, 8) for name in "qkvg"}
    with wyfold.checked(), pytest.raises(ValueError, match=r"^fused_recurrent_gla: gv must be <= 0"):
        wyfold.fused_recurrent_gla(**a | {"g": torch.full((1, 20, 2, 8), -5.0)}, gv=torch.ones(1, 20, 2, 8))
    unused = torch.zeros(1, 20, 2, 8)
    unused[:, 12:] = 1
    with wyfold.checked():
        wyfold.fused_recurrent_gla(**a, gv=unused, cu_seqlens=torch.tensor([0, 5, 12]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"v": (1, 20, 3, 8), "gv": (1, 20, 3, 8)},
            "v must have a multiple of the 2 heads of q and k, got 3 value heads",
        ),
        (
            {"initial_state": (2, 2, 8, 8)},
            r"initial_state must be \[N, HV, K, V\] = \[1, 2, 8, 8\], got \[2, 2, 8, 8\]",
        ),
    ],
)
def test_heads_and_states_are_checked_before_values_are_divided(change: dict, message: str):
    sizes = {"q": (1, 20, 2, 8), "k": (1, 20, 2, 8), "v": (1, 20, 2, 8), "gv": (1, 20, 2, 8)} | change
    with pytest.raises(ValueError, match=f"^fused_recurrent_gla: {message}"):
        wyfold.fused_recurrent_gla(**{name: torch.zeros(size) for name, size in sizes.items()})
