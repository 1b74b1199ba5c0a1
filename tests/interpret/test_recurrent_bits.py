"""Bitwise promises of the recurrent kernels; what they launch, keep and wait for."""

import itertools
from typing import Any

import pytest
import torch
from tests.interpret.test_delta_bits import PARAMETERS, PER_TOKEN, call, incoming, same, tokens
from tests.interpret.test_recurrent_ops import short_blocks  # noqa: F401  a fixture
from torch import Tensor

import wyfold
from wyfold import UnsupportedError
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

RULES = ("delta_rule", "gated_delta_rule", "kda")

pytestmark = pytest.mark.usefixtures("short_blocks")


# No gate is a scalar gate left out.
@pytest.fixture(params=[pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), *RULES[1:]])
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def op(rule: str):
    return getattr(wyfold, f"fused_recurrent_{rule}")


def drawn(rule: str, shape: Shape, device: torch.device, N: int | None = None, **more: Any) -> dict[str, Any]:
    a = call(rule, shape, device, N, **more)
    del a["chunk_size"]
    return a


def test_packed_is_separate(rule: str, op, device, results):
    """Position, neighbours and rows past the last boundary change no bit; results past the last boundary are zero."""
    lengths = (5, 0, 3, 1)
    T, N = sum(lengths), len(lengths)
    a = drawn(rule, Shape(1, T + 3, 1, 2, 24, 8), device, N)
    for name in PER_TOKEN:
        if name in a:
            a[name][:, T:] = torch.nan
    fed = incoming(a)
    fed["o"][:, T:] = torch.nan
    borders = [0, *itertools.accumulate(lengths)]
    packed = results(op, a, None, fed, cu_seqlens=torch.tensor(borders, device=device))
    for n, (begin, end) in enumerate(itertools.pairwise(borders)):
        alone = tokens(a, slice(begin, end)) | {"initial_state": a["initial_state"][n : n + 1]}
        expected = results(op, alone, None, {"o": fed["o"][:, begin:end], "state": fed["state"][n : n + 1]})
        for name, x in expected.items():
            if name not in PARAMETERS:
                of_states = name in ("state", "dinitial_state")
                assert torch.equal(packed[name][n : n + 1] if of_states else packed[name][:, begin:end], x), (n, name)
    for name in ("o", *(f"d{name}" for name in PER_TOKEN if name in a)):
        assert torch.equal(packed[name][:, T:], torch.zeros_like(packed[name][:, T:])), name
    assert all(packed[name].isfinite().all() for name in packed)


@pytest.mark.parametrize("scale", [None, 128**-0.5])
def test_split_at_every_token_is_whole(scale: float | None, rule: str, op, device, results):
    a = drawn(rule, Shape(1, 5, 1, 2, 16, 8), device) | {"scale": scale}
    fed = incoming(a)
    whole = results(op, a, None, fed)
    states, outputs = [a["initial_state"]], []
    for t in range(5):
        step = results(op, tokens(a, slice(t, t + 1)) | {"initial_state": states[-1]}, ())
        states.append(step["state"])
        outputs.append(step["o"])
    assert torch.equal(states[-1], whole["state"]) and torch.equal(torch.cat(outputs, 1), whole["o"])
    dS, found = fed["state"], {}
    for t in reversed(range(5)):
        step = results(
            op,
            tokens(a, slice(t, t + 1)) | {"initial_state": states[t]},
            None,
            {"o": fed["o"][:, t : t + 1], "state": dS},
        )
        dS = step["dinitial_state"]
        for name in PER_TOKEN:
            if name in a:
                found[name] = [step[f"d{name}"], *found.get(name, [])]
    assert torch.equal(dS, whole["dinitial_state"])
    for name, pieces in found.items():
        assert torch.equal(torch.cat(pieces, 1), whole[f"d{name}"]), name


def test_strided_is_contiguous(rule: str, op, device, results):
    a = drawn(rule, Shape(2, 3, 1, 1, 24, 16), device)
    fed = incoming(a)
    buffer = torch.full((2, 3, 2, 3 * 24 + 1), torch.nan, device=device)  # a misaligned projection
    strided = dict(a)
    for i, name in enumerate(("q", "k", "v")):
        first, width = 1 + 24 * i, a[name].shape[3]
        strided[name] = buffer[:, :, :1, first : first + width].copy_(a[name])
    for name in ("g", "beta"):
        if name in a:
            strided[name] = a[name].transpose(0, -1).contiguous().transpose(0, -1)
    strided["initial_state"] = a["initial_state"].mT.contiguous().mT
    off = torch.empty(a["initial_state"].numel() + 1, device=device)[1:].view_as(a["initial_state"])
    back = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in fed.items()}
    plain = results(op, a, None, fed)
    same(results(op, strided, None, back), plain)
    same(results(op, a | {"initial_state": off.copy_(a["initial_state"])}, ()), {x: plain[x] for x in ("o", "state")})


def test_each_subset_of_gradients_has_the_bits_of_all(rule: str, op, device, results):
    a = drawn(rule, Shape(1, 3, 1, 1, 8, 8), device)
    everything = results(op, a)
    for name in [name.removeprefix("d") for name in everything if name.startswith("d")]:
        same(results(op, a, (name,)), {x: everything[x] for x in ("o", "state", f"d{name}")})


def test_states_between(rule: str, op, device, results):
    layout = wyfold.SequenceLayout.from_lengths([7, 2, 0, 3], tokens=14)
    a = drawn(rule, Shape(1, 14, 1, 1, 8, 8), device, 4)
    options = {"return_intermediate_states": True, "checkpoint_every": 3}
    got = results(op, a, (), cu_seqlens=layout.cu_seqlens.to(device), **options)["states"]
    offsets = layout.checkpoint_offsets(3).tolist()
    for i, begin in enumerate(layout.cu_seqlens.tolist()[:-1]):
        for n, row in enumerate(range(offsets[i], offsets[i + 1]), start=1):
            alone = tokens(a, slice(begin, begin + 3 * n)) | {"initial_state": a["initial_state"][i : i + 1]}
            assert torch.equal(got[row], results(op, alone, ())["state"][0]), (i, n)
    assert torch.equal(got[offsets[-1] :], torch.zeros_like(got[offsets[-1] :]))


@pytest.mark.parametrize("B, T", [(0, 5), (2, 0)])
def test_no_tokens(B: int, T: int, rule: str, op, device, results):
    a = drawn(rule, Shape(B, T, 1, 2, 8, 8), device)
    got = results(op, a, return_intermediate_states=True)
    assert got["o"].shape == (B, T, 2, 8) and got["states"].shape == (B, 0, 2, 8, 8)
    assert torch.equal(got["state"], a["initial_state"])
    assert torch.equal(got["dinitial_state"], inputs.incoming(got["state"], 1))
    assert all(torch.equal(got[name], torch.zeros_like(got[name])) for name in PARAMETERS if name in got)


def test_the_launches_of_each_direction(rule: str, op, device):
    """Norm, gate and write strength are computed inside the recurrent kernel, without a launch before it."""
    plan = wyfold.explain(op, **drawn(rule, Shape(1, 5, 1, 1, 8, 8), device))
    assert plan.forward == plan.backward == ("recurrent (wyfold.kernels.recurrent.triton)",)
    assert [launch.key.split()[-1] for launch in plan.rows[1:]] == ["bwd", "gather"]


def test_inputs_are_never_written(rule: str, op, device, results):
    a = drawn(rule, Shape(1, 5, 1, 2, 8, 8), device)
    before = {name: x.clone() for name, x in a.items() if isinstance(x, Tensor)}
    results(op, a)
    assert all(torch.equal(a[name], x) for name, x in before.items())


def test_float64_is_refused(rule: str, op, device):
    with pytest.raises(UnsupportedError, match='does not compute in float64; backend="eager" does'):
        op(**drawn(rule, Shape(1, 5, 1, 2, 8, 8), device, dtype=torch.float64))


def test_the_host_does_not_wait(rule: str, op, device):
    """On a GPU, PyTorch's sync debug mode raises if the host waits; elsewhere nothing can be waited for."""
    if device.type != "cuda":
        pytest.skip(f"tensors are on {device.type}")
    a = drawn(rule, Shape(1, 20, 1, 2, 16, 16), device, 3)
    a["cu_seqlens"] = torch.tensor([0, 7, 7, 19], device=device)
    a = {name: x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in a.items()}
    try:
        for _ in range(2):  # the first round loads kernels and may wait
            torch.autograd.backward(op(**a), [torch.ones_like(a["v"]), torch.ones_like(a["initial_state"])])
            torch.cuda.set_sync_debug_mode("error")
    finally:
        torch.cuda.set_sync_debug_mode("default")
