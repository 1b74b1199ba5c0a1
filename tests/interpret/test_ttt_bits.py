"""Bitwise promises of TTT-Linear's kernels, and the calls they refuse.

Packed equals separate and dense, strided equals contiguous, recomputed equals kept, and split equals whole. The past
does not depend on the future. Outputs and gradients of a split call equal those of the whole if the cut is between
segments of 64 tokens; states do if it is between mini-batches.
"""

import itertools
from typing import Any

import pytest
import torch
from tests.interpret.test_ttt_ops import NAMES, results
from torch import Tensor

import wyfold
from wyfold import UnsupportedError
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape

PER_TOKEN = ("q", "k", "v", "eta", "eta_col")
GRADIENTS = ("dq", "dk", "dv", "deta", "deta_col")
PUBLISHED = {"eta_col": "signed", "residual": "q"}
PARAMETERS = ("dw", "db")
STATES = ("initial_state", "initial_state_bias")
Call = dict[str, Any]


def call(
    shape: Shape, device: torch.device, N: int | None = None, C: int = 16, residual: str = "o", **drawn: Any
) -> Call:
    a = inputs.draw(rule="ttt_linear", shape=shape, sequences=N, **{"state": "normal", "dtype": torch.float32} | drawn)
    a |= {"output_final_state": True, "chunk_size": C, "residual": residual, "backend": "triton"}
    return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in a.items()}


def incoming(a: Call) -> dict[str, Tensor]:
    like = (a["v"], a["initial_state"], a["initial_state_bias"])
    return {name: inputs.incoming(x, i) for i, (name, x) in enumerate(zip(NAMES, like, strict=True))}


def run(a: Call, fed: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    return results(wyfold.chunk_ttt_linear, a | options, fed)


def tokens(a: Call, those: slice) -> Call:
    return a | {name: a[name][:, those] for name in per_token(a)}


def per_token(a: Call) -> list[str]:
    return [name for name in PER_TOKEN if name in a]


def same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert torch.equal(got[name], x), name


@pytest.mark.parametrize(
    ("dtype", "C"),
    [
        (torch.float32, 16),
        pytest.param(torch.bfloat16, 16, marks=pytest.mark.release_if_interpreted),
        pytest.param(torch.float32, 64, marks=pytest.mark.release_if_interpreted),
        (torch.bfloat16, 64),
    ],
    ids=str,
)
def test_packed_is_separate(dtype: torch.dtype, C: int, device):
    """Position, neighbours and rows past the last boundary change no bit; results past the last boundary are zero."""
    lengths = (17, 0, 70, 1)
    T, N = sum(lengths), len(lengths)
    a = call(Shape(1, T + 3, 1, 2, 24, 24), device, N, C, dtype=dtype, **(PUBLISHED if C == 16 else {}))
    for name in per_token(a):
        a[name][:, T:] = torch.nan
    fed = incoming(a)
    fed["o"][:, T:] = torch.nan
    borders = [0, *itertools.accumulate(lengths)]
    packed = run(a, fed, cu_seqlens=torch.tensor(borders, device=device))
    for n, (begin, end) in enumerate(itertools.pairwise(borders)):
        alone = tokens(a, slice(begin, end)) | {name: a[name][n : n + 1] for name in STATES}
        back = {"o": fed["o"][:, begin:end]} | {name: fed[name][n : n + 1] for name in NAMES[1:]}
        for name, x in run(alone, back).items():
            if name not in PARAMETERS:
                mine = packed[name][:, begin:end] if name in ("o", *GRADIENTS) else packed[name][n : n + 1]
                assert torch.equal(mine, x), (n, name)
    for name in {"o", *GRADIENTS} & packed.keys():
        assert torch.equal(packed[name][:, T:], torch.zeros_like(packed[name][:, T:])), name
    assert all(x.isfinite().all() for x in packed.values())
    assert torch.equal(packed["state"][1], a["initial_state"][1])
    assert torch.equal(packed["state_bias"][1], a["initial_state_bias"][1])


def test_packed_equal_lengths_are_a_batch(device):
    a = call(Shape(2, 18, 1, 2, 8, 8), device)
    fed = incoming(a)
    one = {name: x.flatten(0, 1)[None] if name in PER_TOKEN else x for name, x in a.items()}
    batch = run(a, fed)
    for dtype in (torch.int32, torch.int64):
        cu = torch.arange(3, dtype=dtype, device=device) * 18
        packed = run(one, fed | {"o": fed["o"].flatten(0, 1)[None]}, cu_seqlens=cu)
        for name, x in batch.items():
            assert torch.equal(packed[name].view_as(x), x), name


def test_strided_is_contiguous(device):
    a = call(Shape(2, 17, 2, 2, 24, 24), device, **PUBLISHED)
    fed = incoming(a)
    strided = dict(a)
    buffer = torch.full((2, 17, 5, 3 * 24 + 1), torch.nan, device=device)  # a misaligned projection
    for i, name in enumerate(("q", "k", "v")):
        strided[name] = buffer[:, :, : a[name].shape[2], 1 + 24 * i : 1 + 24 * (i + 1)].copy_(a[name])
    for name in ("eta", "eta_col"):
        strided[name] = a[name].transpose(0, 2).contiguous().transpose(0, 2)
    strided["initial_state"] = a["initial_state"].mT.contiguous().mT
    for name in ("w", "b", "initial_state_bias"):
        strided[name] = torch.stack([a[name], a[name]], -1)[..., 1]
    back = {name: x.transpose(0, -1).contiguous().transpose(0, -1) for name, x in fed.items()}
    assert not any(strided[name].is_contiguous() for name in ("q", "k", "v", "w", "b", "eta", "eta_col", *STATES))
    same(run(strided, back), run(a, fed))


def test_expanded_is_repeated(device):
    """Strides of zero in arguments and incoming gradients."""
    a = call(Shape(2, 17, 1, 2, 8, 8), device, **PUBLISHED)
    a |= {name: a[name][:1, :, :1].expand_as(a[name]) for name in per_token(a)}
    fed = incoming(a)
    fed = {name: x[:1, :1].expand_as(x) for name, x in fed.items()}
    solid = {name: x.contiguous() if isinstance(x, Tensor) else x for name, x in a.items()}
    same(run(a, fed), run(solid, {name: x.contiguous() for name, x in fed.items()}))


def test_a_scalar_step_equals_a_column(device):
    a = call(Shape(1, 37, 1, 2, 8, 8), device)
    fed = incoming(a)
    filled = run(a | {"eta": torch.full_like(a["eta"], 0.07)}, fed)
    del filled["deta"]
    same(run(a | {"eta": 0.07}, fed), filled)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_recomputed_equals_kept_and_repeats(packed: bool, device):
    a = call(Shape(1, 84, 1, 2, 24, 24), device, 3 if packed else None, **(PUBLISHED if packed else {}))
    if packed:
        a["cu_seqlens"] = torch.tensor([0, 3, 3, 81], device=device)
    fed = incoming(a)
    first = run(a, fed)
    same(run(a, fed), first)
    same(run(a, fed, disable_recompute=True), first)


@pytest.mark.parametrize("cut", [16, 48, 64])
@pytest.mark.parametrize("scale", [pytest.param(None, marks=pytest.mark.release_if_interpreted), 128**-0.5])
def test_split_equals_whole(scale: float | None, cut: int, device):
    a = call(Shape(1, 101, 1, 2, 16, 16), device, **(PUBLISHED if cut != 48 else {})) | {"scale": scale}
    fed = incoming(a)
    whole = run(a, fed)
    early, late = tokens(a, slice(cut)), tokens(a, slice(cut, None))
    states = dict(zip(STATES, wyfold.chunk_ttt_linear(**early)[1:], strict=True))
    second = run(late | states, fed | {"o": fed["o"][:, cut:]})
    back = {"o": fed["o"][:, :cut], "state": second["dh0"], "state_bias": second["dc0"]}
    first = run(early, back)
    for name in ("state", "state_bias"):
        assert torch.equal(second[name], whole[name]), name
    if cut % 64 == 0:
        for name in ("dh0", "dc0"):
            assert torch.equal(first[name], whole[name]), name
        for name in ("o", *(name for name in GRADIENTS if name in whole)):
            assert torch.equal(torch.cat([first[name], second[name]], 1), whole[name]), name


def test_the_past_does_not_know_the_future(device):
    a = call(Shape(1, 84, 1, 1, 16, 16), device, **PUBLISHED)
    for t in (1, 16, 23, 70):
        changed = {name: x.clone() if isinstance(x, Tensor) else x for name, x in a.items()}
        for name in per_token(a):
            changed[name][:, t:] = changed[name][:, t:].flip(1) * 0.5
        fed = {"o": incoming(a)["o"]}
        fed["o"][:, t:] = 0
        plain, other = run(a, fed), run(changed, fed)
        for name in ("o", *GRADIENTS):
            assert torch.equal(other[name][:, :t], plain[name][:, :t]), (t, name)
        assert torch.equal(other["dh0"], plain["dh0"]) and torch.equal(other["dc0"], plain["dc0"])
        assert not torch.equal(other["o"][:, t:], plain["o"][:, t:])


def test_v_first_states(device):
    a = call(Shape(2, 18, 1, 1, 8, 8), device)
    fed = incoming(a)
    turned = a | {"initial_state": a["initial_state"].mT, "state_v_first": True}
    k_first, v_first = run(a, fed), run(turned, fed | {"state": fed["state"].mT})
    for name, x in k_first.items():
        assert torch.equal(v_first[name].mT if name in ("state", "dh0") else v_first[name], x), name


def test_a_missing_state_is_zero(device):
    a = call(Shape(2, 18, 1, 2, 8, 8), device)
    fed = incoming(a)
    for missing in (STATES[:1], STATES[1:], STATES):
        zero = a | {name: torch.zeros_like(a[name]) for name in missing}
        without = {name: x for name, x in a.items() if name not in missing}
        expected = run(zero, fed)
        got = run(without, fed)
        same(got, {name: x for name, x in expected.items() if name in got})


def test_step_sizes_of_zero_keep_the_state(device):
    a = call(Shape(2, 37, 1, 2, 8, 8), device, eta="zero")
    o, S, c = wyfold.chunk_ttt_linear(**a)
    assert torch.equal(S, a["initial_state"]) and torch.equal(c, a["initial_state_bias"]) and o.any()


def test_no_tokens(device):
    a = call(Shape(2, 0, 1, 2, 8, 8), device)
    fed = incoming(a)
    found = run(a, fed)
    assert torch.equal(found["state"], a["initial_state"]) and torch.equal(found["state_bias"], a["initial_state_bias"])
    assert torch.equal(found["dh0"], fed["state"]) and torch.equal(found["dc0"], fed["state_bias"])
    assert not found["dw"].any() and not found["db"].any()


def test_unsupported_calls_are_refused(device):
    a = call(Shape(1, 4, 1, 1, 8, 8), device)
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in a.items()}
    with pytest.raises(UnsupportedError, match="does not compute in float64"):
        wyfold.chunk_ttt_linear(**wide)
    token = {name: a[name] for name in ("q", "k", "v", "w", "b", "eta", "backend")}
    with pytest.raises(UnsupportedError, match="has no kernel for this operator"):
        wyfold.fused_recurrent_ttt_linear(**token)
