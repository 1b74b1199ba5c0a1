"""KDA: the gate per channel, its bounds, and equality with GDN for equal channels."""

import itertools

import pytest
import torch

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

FORMS = {"chunk": wyfold.chunk_kda, "recurrent": wyfold.fused_recurrent_kda}
F64 = torch.float64


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest):
    return FORMS[request.param]


def agree(float64_bounds, got, truth):
    for name in truth:
        (float64_bounds.gradient if name.startswith("d") else float64_bounds.output)(name, got[name], truth[name])


def test_equal_channels_are_gdn(form, results, float64_bounds):
    scalar = inputs.draw("random", "gated_delta_rule", Shape(2, 50, 1, 2, 8, 16), state="normal", dtype=F64)
    channels = scalar | {"g": scalar["g"][..., None].expand(-1, -1, -1, 8)}
    twin = wyfold.chunk_gdn if form is wyfold.chunk_kda else wyfold.fused_recurrent_gdn
    truth = results(twin, scalar, output_final_state=True)
    got = results(form, channels, output_final_state=True)
    agree(float64_bounds, got | {"dg": got["dg"].sum(-1)}, truth)


GIVEN = ("weak", "bound reached", "any", "reset one")
IN_KERNEL = ("model", "model bounded")


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("safe", [None, -5.0, -0.5], ids=["any", "safe", "safe to -0.5"])
@pytest.mark.parametrize("gate", GIVEN + IN_KERNEL)
def test_safe_gate_with_gate_in_kernel_with_packing(
    gate: str, safe: float | None, packed: bool, results, float64_bounds
):
    shape, layout = Shape(2, 45, 1, 2, 8, 8), None
    if packed:
        layout = SequenceLayout.from_lengths([33, 0, 1, 48], tokens=90)
        shape = Shape(1, 90, 1, 2, 8, 8)
    a = inputs.draw("random", "kda", shape, gate=gate, state="normal", sequences=4 if packed else None, dtype=F64)
    a |= {"output_final_state": True, "cu_seqlens": layout}
    if gate in IN_KERNEL:
        a["g"] = 4 * a["g"]  # far enough out to reach the bounds
    if safe is not None:
        a["safe_gate"] = True
        if safe != -5.0 or gate == "model bounded":
            a["lower_bound"] = safe
    truth, found = results(reference.kda, a), {name: results(form, a) for name, form in FORMS.items()}
    for got in found.values():
        agree(float64_bounds, got, truth)
    if packed:
        a |= {name: a[name].masked_fill(torch.arange(90).view(1, 90, *[1] * (a[name].ndim - 2)) >= 82, torch.nan)
              for name in ("q", "k", "v", "g", "beta")}  # fmt: skip
        for name, form in FORMS.items():
            again = results(form, a)
            assert all(torch.equal(again[x], y) for x, y in found[name].items())
            agree(float64_bounds, again, truth)


@pytest.mark.parametrize("bound", [-1e-3, -1.0, -5.0, -5.5, -20.0])
def test_the_bounded_gate(bound: float, form, results, float64_bounds):
    for A_log, dt_bias in itertools.product((True, False), repeat=2):
        a = inputs.draw("random", "kda", Shape(1, 40, 1, 2, 8, 8), gate="model bounded", dtype=F64)
        a |= {"lower_bound": bound, "g": 10 * a["g"]}
        for name, wanted in (("A_log", A_log), ("dt_bias", dt_bias)):
            if not wanted:
                del a[name]
        agree(float64_bounds, results(form, a), results(reference.kda, a))


def test_clamped_gates_have_no_gradient_and_the_bound_has_one(form, results):
    a = inputs.draw("random", "kda", Shape(1, 40, 1, 1, 8, 8), gate="bound reached", dtype=F64)
    a["g"][:, 10:20] = -7.0
    got = results(form, a, ["g"], safe_gate=True)["dg"]
    assert torch.equal(got[:, 10:20], torch.zeros_like(got[:, 10:20]))
    assert (got[:, 20:30][a["g"][:, 20:30] == -5.0] != 0).all()


def test_a_clamped_gate_equals_the_bound_bit_for_bit(form, results):
    a = inputs.draw("random", "kda", Shape(1, 40, 1, 1, 8, 8), gate="any")
    for bound in (-5.0, -1.0):
        raised = a | {"g": a["g"].clamp(min=bound)}
        safe = results(form, a, (), safe_gate=True, lower_bound=bound, output_final_state=True)
        plain = results(form, raised, (), output_final_state=True)
        assert all(torch.equal(safe[name], plain[name]) for name in plain)


@pytest.mark.parametrize("flat", [False, True])
def test_a_bias_of_either_shape(flat: bool, form, results):
    a = inputs.draw("random", "kda", Shape(1, 20, 1, 3, 8, 8), gate="model")
    bias = a["dt_bias"].flatten() if flat else a["dt_bias"].view(3, 8)
    got, plain = results(form, a | {"dt_bias": bias}), results(form, a)
    assert got["ddt_bias"].shape == bias.shape
    assert torch.equal(got["ddt_bias"].flatten(), plain["ddt_bias"].flatten()) and torch.equal(got["o"], plain["o"])


def test_one_dead_channel_leaves_the_others_alone(form, results):
    """A channel reset at every token holds only the current token's write; the others keep their bits."""
    a = inputs.draw("random", "kda", Shape(1, 40, 1, 1, 8, 8), state="normal", dtype=F64)
    a["k"][..., 0] = 0
    dead = a | {"g": a["g"].clone()}
    dead["g"][..., 0] = -torch.inf
    alive, got = (results(form, x, (), output_final_state=True)["state"] for x in (a, dead))
    assert torch.equal(got[..., 1:, :], alive[..., 1:, :])
    assert torch.equal(got[..., 0, :], torch.zeros_like(got[..., 0, :]))
