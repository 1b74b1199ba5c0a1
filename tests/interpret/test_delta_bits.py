"""Bitwise promises of the kernels of the three delta rules; what they launch, keep, refuse and wait for.

Packed equals separate and dense, strided equals contiguous, recomputed equals kept, and split equals whole. The past
does not depend on the future, and a gradient does not depend on which others are requested.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import UnsupportedError
from wyfold.autograd import delta as pipeline
from wyfold.kernels import table
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import replay_cache

RULES = ("delta_rule", "gated_delta_rule", "kda")
PER_TOKEN = ("q", "k", "v", "g", "beta")
PARAMETERS = ("dA_log", "ddt_bias")
Call = dict[str, Any]


# No gate is a scalar gate left out.
@pytest.fixture(params=[pytest.param("delta_rule", marks=pytest.mark.release_if_interpreted), *RULES[1:]])
def rule(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def op(rule: str):
    return getattr(wyfold, f"chunk_{rule}")


def call(rule: str, shape: Shape, device: torch.device, N: int | None = None, **drawn: Any) -> Call:
    """Arguments on the device of a call with norm, gate, logits and states."""
    drawn = {"gate": "model", "beta": "logits", "state": "normal", "sequences": N} | drawn
    a = inputs.draw("random", rule, shape, **drawn)
    a |= {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "chunk_size": 16, "backend": "triton"}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def incoming(a: Call) -> dict[str, Tensor]:
    return {"o": inputs.incoming(a["v"], 1), "state": inputs.incoming(a["initial_state"], 2)}


def tokens(a: Call, those: slice) -> Call:
    return a | {name: a[name][:, those] for name in PER_TOKEN if name in a}


def same(got: dict[str, Tensor], expected: dict[str, Tensor], *but: str) -> None:
    assert got.keys() == expected.keys()
    for name in set(expected) - set(but):
        assert torch.equal(got[name], expected[name]), name


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_is_separate(dtype: torch.dtype, rule: str, op, device, results):
    """Position, neighbours and rows past the last boundary change no bit; results past the last boundary are zero."""
    lengths = (17, 0, 18, 1)
    T, N = sum(lengths), len(lengths)
    a = call(rule, Shape(1, T + 3, 1, 2, 24, 16), device, N, dtype=dtype)
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


def test_packed_equal_lengths_are_a_batch(rule: str, op, device, results):
    a = call(rule, Shape(2, 18, 1, 2, 8, 16), device)
    fed = incoming(a)
    one = {name: x.flatten(0, 1)[None] if name in PER_TOKEN else x for name, x in a.items()}
    batch = results(op, a, None, fed)
    for dtype in (torch.int32, torch.int64):
        cu = torch.arange(3, dtype=dtype, device=device) * 18
        packed = results(op, one, None, fed | {"o": fed["o"].flatten(0, 1)[None]}, cu_seqlens=cu)
        for name, x in batch.items():
            assert torch.equal(packed[name].view_as(x), x), name


def test_strided_is_contiguous(rule: str, op, device, results):
    a = call(rule, Shape(2, 17, 2, 2, 24, 24), device)
    fed = incoming(a)
    B, T = 2, 17
    strided = dict(a)
    buffer = torch.full((B, T, 5, 3 * 24 + 1), torch.nan, device=device)  # a misaligned projection
    for i, name in enumerate(("q", "k", "v")):
        view = buffer[:, :, : a[name].shape[2], 1 + 24 * i : 1 + 24 * (i + 1)]
        strided[name] = view.copy_(a[name])
    for name in ("g", "beta"):
        if name in a:
            strided[name] = a[name].transpose(0, -1).contiguous().transpose(0, -1)
    for name in ("A_log", "dt_bias"):
        if name in a:
            strided[name] = torch.stack([a[name], a[name]], -1)[..., 1]
    strided["initial_state"] = a["initial_state"].mT.contiguous().mT
    back = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in fed.items()}
    assert not any(strided[name].is_contiguous() for name in ("q", "k", "v", "beta", "initial_state"))
    same(results(op, strided, None, back), results(op, a, None, fed))


def test_expanded_is_repeated(rule: str, op, device, results):
    """Strides of zero in arguments and incoming gradients."""
    a = call(rule, Shape(2, 17, 1, 2, 8, 8), device, gate="weak", beta="sigmoid")
    for name in PER_TOKEN:
        if name in a:
            a[name] = a[name][:1, :, :1].expand_as(a[name])
    fed = {"o": inputs.incoming(a["v"][:1, :1], 1).expand_as(a["v"]), "state": torch.ones_like(a["initial_state"])}
    solid = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in a.items()}
    same(results(op, a, None, fed), results(op, solid, None, {name: x.contiguous() for name, x in fed.items()}))


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_recomputed_equals_kept_and_repeats(packed: bool, rule: str, op, device, results):
    a = call(rule, Shape(1, 24, 1, 2, 24, 8), device, 3 if packed else None)
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 3, 3, 21], device=device)
    fed = incoming(a)
    first = results(op, a, None, fed)
    same(results(op, a, None, fed), first)
    same(results(op, a, None, fed, disable_recompute=True), first)


# The scale 1 / sqrt(128) is no power of two: a state's gradient must not be rounded between calls.
@pytest.mark.parametrize("scale", [128**-0.5, -3.0])
def test_split_equals_whole(scale: float | None, rule: str, op, device, results):
    a = call(rule, Shape(1, 37, 1, 1, 16, 8), device) | {"scale": scale}
    split_is_whole(a, op, results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_split_is_whole_in_16_bits(dtype: torch.dtype, rule: str, op, device, results):
    """In 16 bits the promise holds for scales that are powers of two."""
    a = call(rule, Shape(1, 37, 1, 1, 16, 8), device, dtype=dtype) | {"scale": 0.25}
    split_is_whole(a, op, results)


def split_is_whole(a: Call, op, results) -> None:
    fed = incoming(a)
    whole = results(op, a, None, fed)
    early, late = tokens(a, slice(32)), tokens(a, slice(32, None))
    state = results(op, early, ())["state"]
    second = results(op, late | {"initial_state": state}, None, {"o": fed["o"][:, 32:], "state": fed["state"]})
    first = results(op, early, None, {"o": fed["o"][:, :32], "state": second["dinitial_state"]})
    assert torch.equal(second["state"], whole["state"])
    assert torch.equal(first["dinitial_state"], whole["dinitial_state"])
    for name in ("o", *(f"d{name}" for name in PER_TOKEN if name in a)):
        assert torch.equal(torch.cat([first[name], second[name]], 1), whole[name]), name


def test_the_past_does_not_know_the_future(rule: str, op, device, results):
    a = call(rule, Shape(1, 34, 1, 1, 16, 24), device, gate="weak")
    for t in (1, 16, 23):
        changed = {name: x.clone() if isinstance(x, Tensor) else x for name, x in a.items()}
        for name in PER_TOKEN:
            if name in a:
                changed[name][:, t:] = changed[name][:, t:].flip(1) * 0.5
        fed = {"o": inputs.incoming(a["v"], 1)}
        fed["o"][:, t:] = 0
        plain, other = results(op, a, None, fed), results(op, changed, None, fed)
        for name in ("o", *(f"d{name}" for name in PER_TOKEN if name in a)):
            assert torch.equal(other[name][:, :t], plain[name][:, :t]), (t, name)
        assert torch.equal(other["dinitial_state"], plain["dinitial_state"]), t
        assert not torch.equal(other["o"][:, t:], plain["o"][:, t:])


def test_v_first_states(rule: str, op, device, results):
    a = call(rule, Shape(2, 18, 1, 1, 8, 16), device)
    a |= {"return_intermediate_states": True, "checkpoint_every": 16}
    fed = incoming(a)
    turned = a | {"initial_state": a["initial_state"].mT, "state_v_first": True}
    k_first, v_first = results(op, a, None, fed), results(op, turned, None, fed | {"state": fed["state"].mT})
    for name, x in k_first.items():
        states = name in ("state", "states", "dinitial_state")
        assert torch.equal(v_first[name].mT if states else v_first[name], x), name


PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_each_subset_of_gradients_has_the_bits_of_all(part: int, rule: str, op, device, results):
    """In parts, so that as many processes share the work: each subset compiles other kernels, 20 s on a GPU."""
    a = call(rule, Shape(1, 18, 1, 1, 8, 8), device) | {"chunk_size": 16}
    everything = results(op, a)
    names = [name.removeprefix("d") for name in everything if name.startswith("d")]
    mine = names[part::PARTS]
    for wrt in [(name,) for name in mine] + [tuple(x for x in names if x != name) for name in mine]:
        same(results(op, a, wrt), {name: x for name, x in everything.items() if name[0] != "d" or name[1:] in wrt})


def test_a_gradient_of_the_state_alone(rule: str, op, device, results):
    a = call(rule, Shape(1, 18, 1, 2, 8, 16), device)
    fed = incoming(a)
    got = results(op, a, None, {"state": fed["state"]})
    zero = results(op, a, None, fed | {"o": torch.zeros_like(fed["o"])})
    same(got, zero)
    assert torch.equal(got["dq"], torch.zeros_like(got["dq"])) and got["dk"].any()


def test_states_between_lie_where_the_layout_says(rule: str, op, device, results):
    layout = wyfold.SequenceLayout.from_lengths([33, 5, 0, 32, 16], tokens=90)
    a = call(rule, Shape(1, 90, 1, 1, 8, 8), device, 5)
    options = {"return_intermediate_states": True, "checkpoint_every": 16}
    got = results(op, a, (), cu_seqlens=layout.cu_seqlens.to(device), **options)["states"]
    offsets = layout.checkpoint_offsets(16).tolist()
    for i, (begin, end) in enumerate(itertools.pairwise(layout.cu_seqlens.tolist())):
        assert offsets[i + 1] - offsets[i] == (end - begin) // 16
        for n, row in enumerate(range(offsets[i], offsets[i + 1]), start=1):
            alone = tokens(a, slice(begin, begin + 16 * n)) | {"initial_state": a["initial_state"][i : i + 1]}
            assert torch.equal(got[row], results(op, alone, ())["state"][0]), (i, n)
    assert torch.equal(got[offsets[-1] :], torch.zeros_like(got[offsets[-1] :]))


# --- no tokens -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("B, T", [(0, 5), (2, 0), (0, 0)])
def test_no_tokens(B: int, T: int, rule: str, op, device, results):
    a = call(rule, Shape(B, T, 1, 2, 8, 8), device)
    got = results(op, a, return_intermediate_states=True)
    assert got["o"].shape == (B, T, 2, 8) and got["states"].shape == (B, 0, 2, 8, 8)
    assert torch.equal(got["state"], a["initial_state"])
    assert torch.equal(got["dinitial_state"], inputs.incoming(got["state"], 1))
    assert all(torch.equal(got[name], torch.zeros_like(got[name])) for name in PARAMETERS if name in got)


@pytest.mark.parametrize("borders, T", [([0], 0), ([0], 7), ([0, 0], 0), ([0, 0, 0], 5)])
def test_no_sequence_with_tokens(borders: list[int], T: int, rule: str, op, device, results):
    N = len(borders) - 1
    a = call(rule, Shape(1, T, 1, 2, 8, 8), device, N)
    got = results(op, a, cu_seqlens=torch.tensor(borders, device=device), return_intermediate_states=True)
    assert torch.equal(got["state"], a["initial_state"])
    assert torch.equal(got["dinitial_state"], inputs.incoming(got["state"], 1))
    for name in ("o", *(f"d{name}" for name in PER_TOKEN if name in a), *(name for name in PARAMETERS if name in got)):
        assert torch.equal(got[name], torch.zeros_like(got[name])), name


# --- launches, saved tensors, synchronisation
# --------------------------------------------------------------------------


def kernels_of(run, monkeypatch) -> list[str]:
    """Kernel folders whose launches `run` calls, in order."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            replay_cache, "precompile_kernels", lambda run, device: None
        )  # recording would call them once more
        for stage in ("prepare", "scan", "scan_bwd", "gradients"):
            module = table.kernel_module(stage, "triton")
            launch = getattr(module, stage)

            def watched(*given, stage=stage, launch=launch, **options):
                seen.append(stage)
                return launch(*given, **options)

            patch.setattr(module, stage, watched)
        run()
    return seen


def test_the_launches_of_each_direction(rule: str, op, device, results, monkeypatch):
    a = call(rule, Shape(1, 5, 1, 1, 8, 8), device)
    forward, back = ["prepare", "scan"], ["scan_bwd", "gradients"]
    assert kernels_of(lambda: results(op, a, ()), monkeypatch) == forward
    assert kernels_of(lambda: results(op, a), monkeypatch) == [*forward, "prepare", *back]
    assert kernels_of(lambda: results(op, a, disable_recompute=True), monkeypatch) == forward + back
    assert kernels_of(lambda: results(op, a, ["initial_state"]), monkeypatch) == [*forward, "prepare", "scan_bwd"]
    plan = wyfold.explain(op, **a)
    assert [x.split(" ")[0] for x in plan.forward] == forward
    assert [x.split(" ")[0] for x in plan.backward] == ["prepare", *back]
    assert plan.backend == "triton" and plan.parts == 1
    assert all(".triton)" in x for x in plan.forward + plan.backward)


def test_without_gradients_same_bits_and_nothing_kept(rule: str, op, device, results, monkeypatch):
    a = call(rule, Shape(1, 20, 1, 2, 8, 8), device)
    kept, forward_op = [], pipeline._forward_op

    def watched(*arguments):
        outputs = forward_op(*arguments)
        kept.append(len(outputs[3]))
        return outputs

    monkeypatch.setattr(pipeline, "_forward_op", watched)
    plain = results(op, a, ("q",))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            o, state = op(**a, disable_recompute=True)
        assert torch.equal(o, plain["o"]) and torch.equal(state, plain["state"])
    results(op, a, ("q",), disable_recompute=True)
    assert kept[:3] == [0, 0, 0] and kept[3] > 0


def test_inputs_are_never_written(rule: str, op, device, results):
    a = call(rule, Shape(1, 20, 1, 2, 8, 8), device)
    before = {name: x.clone() for name, x in a.items() if isinstance(x, Tensor)}
    results(op, a)
    assert all(torch.equal(a[name], x) for name, x in before.items())


def test_the_host_does_not_wait(rule: str, op, device, results):
    """On a GPU, PyTorch's sync debug mode raises if the host waits; elsewhere nothing can be waited for."""
    if device.type != "cuda":
        pytest.skip(f"tensors are on {device.type}")
    a = call(rule, Shape(1, 200, 1, 2, 16, 16), device, 3)
    a |= {"cu_seqlens": torch.tensor([0, 70, 70, 190], device=device), "return_intermediate_states": True}
    a = {name: x.requires_grad_() if torch.is_tensor(x) and x.is_floating_point() else x for name, x in a.items()}
    for _ in range(2):  # the first round loads kernels and may wait
        o, state, _ = op(**a)
        arrows = [torch.ones_like(o), torch.ones_like(state)]
        torch.autograd.backward([o, state], arrows)
        torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.fixture(autouse=True)
def reset_sync_debug_mode() -> Iterator[None]:
    yield
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("borders", [[1, 5, 9], [0, 5, 3, 9], [0, 5, 10]])
def test_illegal_boundaries(borders: list[int], rule: str, op, device, results):
    """Refused where they can be read. On a GPU, outside `checked`, they are clamped to legal values."""
    N = len(borders) - 1
    a = call(rule, Shape(1, 9, 1, 2, 8, 8), device, N) | {"cu_seqlens": torch.tensor(borders, device=device)}
    with wyfold.checked(), pytest.raises(ValueError, match=f"chunk_{rule}: cu_seqlens must"):
        op(**a)
    if device.type == "cuda":
        assert all(x.isfinite().all() for x in results(op, a).values())


def test_float64_is_refused(rule: str, op, device):
    a = call(rule, Shape(1, 5, 1, 2, 8, 8), device, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match='does not compute in float64; backend="eager" does'):
        op(**a)
