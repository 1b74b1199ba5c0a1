"""Accuracy of TTT-Linear on kernels: outputs, states and every gradient against the float64 token loop.

Every value of every option occurs, in combinations from a fixed draw; lengths lie around mini-batches and segments.
Inputs are surrounded by NaN. Where the arithmetic is float32, its targets decide; a 16-bit result is compared with the
truth rounded once. Where operands are rounded to 16 bits, the yardstick is the error of half an ulp on all inputs; the
targets apply at the widths of models.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold import SequenceLayout, reference
from wyfold.reference import inputs
from wyfold.reference.error import Verdict, half_ulp_away, judge, require, rms
from wyfold.reference.shapes import Shape
from wyfold.reference.targets import target

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
NAMES = ("o", "state", "state_bias")
GRADIENT_OF = {"initial_state": "dh0", "initial_state_bias": "dc0"}
PER_TOKEN = ("deta", "deta_col")
NOT_OF_THE_LOOP = ("disable_recompute",)
OPTIONS = {
    "chunk": (16, 32, 64),
    "lengths": (1, 15, 16, 17, 63, 64, 65, 100, 130, [17, 0, 66, 1], [0, 16, 16, 3], [70], [2, 31, 0], [1] * 5, [0]),
    "spare": (0, 0, 5),
    "batch": (1, 2),
    "heads": ((1, 1), (1, 2), (2, 2), (1, 3), (2, 4)),
    "D": (8, 24, 16, 40),
    "dtype": (FP32, FP32, FP16, BF16),
    "states": ("both", "matrix", "bias", "none", "v first", "in 16 bits"),
    "state dtype": (None, FP32, BF16),
    "eta": ("column", "row", "number"),
    "eta_col": (None, "column", "row", "number"),
    "residual": ("o", "q"),
    "parameters": (None, FP32, BF16),
    "scale": (None, 0.3, -2.0),
    "eps": (1e-6, 1e-2),
    "keep": (False, True),
    "loss": (NAMES, ("o",), ("state",), ("state_bias",)),
}
CASES = 20


def mixed(choices: dict[str, tuple], seed: int) -> list[dict[str, Any]]:
    """Cases in which every value of every option occurs. Each option cycles through its values in its own order."""
    draw = random.Random(seed)
    columns = {name: draw.sample([values[i % len(values)] for i in range(CASES)], CASES)
               for name, values in choices.items()}  # fmt: skip
    return [{name: column[i] for name, column in columns.items()} for i in range(CASES)]


MIXED = mixed(OPTIONS, 0)


def arguments_of(case: dict[str, Any], seed: int) -> dict[str, Any]:
    """Arguments of one case, on the CPU."""
    (H, HV), D, dtype, lengths = case["heads"], case["D"], case["dtype"], case["lengths"]
    packed = isinstance(lengths, list)
    B, T = (1, sum(lengths) + case["spare"]) if packed else (case["batch"], lengths)
    a = inputs.draw(
        rule="ttt_linear",
        shape=Shape(B, T, H, HV, D, D),
        state="normal",
        sequences=len(lengths) if packed else None,
        dtype=dtype,
        seed=seed,
        eta_col="signed",
    )
    if case["eta_col"] is None:
        del a["eta_col"]
    elif case["eta_col"] != "column":
        a["eta_col"] = 1.3 if case["eta_col"] == "number" else a["eta_col"].squeeze(-1)
    for name, unless in (("initial_state", ("bias", "none")), ("initial_state_bias", ("matrix", "none"))):
        if case["states"] in unless:
            del a[name]
        elif case["states"] == "in 16 bits":
            a[name] = a[name].to(FP16)
    if case["states"] == "v first":
        a |= {"state_v_first": True, "initial_state": a["initial_state"].mT.contiguous()}
    if case["parameters"] is not None:
        a |= {name: a[name].to(case["parameters"]) for name in ("w", "b", "eta", "eta_col") if floating(a.get(name))}
    if case["eta"] != "column":
        a["eta"] = 0.07 if case["eta"] == "number" else a["eta"].squeeze(-1)
    if packed:
        a["cu_seqlens"] = SequenceLayout.from_lengths(lengths, tokens=T).cu_seqlens
    a |= {name: case[name] for name in ("residual", "scale", "eps")}
    a |= {"chunk_size": case["chunk"], "state_dtype": case["state dtype"]}
    return a | {"disable_recompute": case["keep"], "output_final_state": True}


def results(op: Callable, a: dict[str, Any], fed: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Results and gradients by name; only results with a gradient in `fed` are differentiated."""
    leaves = {name: x.detach().requires_grad_() for name, x in a.items() if floating(x)}
    found = dict(zip(NAMES, op(**a | leaves, **options), strict=True))
    into = {name: dx.to(found[name].dtype) for name, dx in fed.items() if found[name].requires_grad}
    grads = torch.autograd.grad(
        [found[name] for name in into], list(leaves.values()), list(into.values()), materialize_grads=True
    )
    named = {name: x.detach() for name, x in found.items()}
    return named | {GRADIENT_OF.get(name, f"d{name}"): dx for name, dx in zip(leaves, grads, strict=True)}


def verdicts(a: dict[str, Any], loss: tuple[str, ...], device, guarded, *, bound: bool = False) -> list[Verdict]:
    """Verdicts on every result of the kernels; shapes and dtypes must be those of the eager backend."""
    drawn = dict(zip(NAMES, wyfold.chunk_ttt_linear(**a, backend="eager"), strict=True))
    fed = {name: inputs.incoming(drawn[name], i) for i, name in enumerate(loss)}
    eager = results(wyfold.chunk_ttt_linear, a, fed, backend="eager")
    there = {name: guarded(x.to(device)) if floating(x) else moved(x, device) for name, x in a.items()}
    got = results(wyfold.chunk_ttt_linear, there, {n: x.to(device) for n, x in fed.items()}, backend="triton")

    def loop(wide: Callable[[Tensor, int], Tensor]) -> dict[str, Tensor]:
        """The token loop in float64; `wide` maps a tensor and its number to the float64 input."""
        meant = {name: x for name, x in a.items() if name not in (*NOT_OF_THE_LOOP, "state_dtype")}
        numbered = {name: wide(x, i) if floating(x) else x for i, (name, x) in enumerate(meant.items())}
        back = {name: wide(x, -i) for i, (name, x) in enumerate(fed.items(), start=1)}
        return results(reference.ttt_linear, numbered, back)

    truth = loop(lambda x, i: x.double())
    assert got.keys() == eager.keys() == truth.keys()
    for name, x in eager.items():
        assert (got[name].dtype, got[name].shape) == (x.dtype, x.shape), name
    dtype = a["q"].dtype
    if dtype == FP32 or (dtype == FP16 and device.type == "cpu"):
        return [_of_float32(name, got[name].cpu(), x) for name, x in truth.items()]
    got, truth = of_tokens(got), of_tokens(truth)
    away = [of_tokens(loop(lambda x, i, seed=seed: half_ulp_away(x.to(dtype), 100 * seed + i))) for seed in range(1, 4)]
    return [
        judge(
            got[name].cpu(),
            x,
            max((m[name] for m in away), key=lambda y, x=x: rms(y, x)).to(got[name].dtype),
            name=name,
            per_token=name in PER_TOKEN,
            target=target(name, dtype, "ttt") if bound else None,
        )
        for name, x in truth.items()
    ]


def _of_float32(name: str, got: Tensor, truth: Tensor) -> Verdict:
    if got.dtype != FP32:
        return judge(got, truth, truth.to(got.dtype), name=name)
    return judge(got, truth, name=name, target=target(name, FP32, "ttt"))


def of_tokens(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Results with one number per token, as [B, T, HV]."""
    return {name: x.squeeze(-1) if name in PER_TOKEN and x.ndim == 4 else x for name, x in found.items()}


def floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def moved(x: Any, device: torch.device) -> Any:
    return x.to(device) if isinstance(x, Tensor) else x


@pytest.mark.parametrize("number", range(CASES))
def test_every_option(number: int, device, guarded):
    case = MIXED[number]
    require(*verdicts(arguments_of(case, number), case["loss"], device, guarded))


def test_every_value_occurs(device):
    for name, values in OPTIONS.items():
        assert {repr(case[name]) for case in MIXED} == set(map(repr, values)), name


WIDE = [
    pytest.param(
        dtype,
        D,
        C,
        (i + j) % 2 == 1,
        id=f"{dtype}-{D}-{C}-{'packed' if (i + j) % 2 else 'dense'}",
        marks=[pytest.mark.release_if_interpreted] if dtype == BF16 and C == 64 else [],
    )
    for i, dtype in enumerate((BF16, FP32))
    for j, (D, C) in enumerate(((64, 16), (128, 16), (64, 64)))
]
"""Each width and mini-batch in both dtypes, dense in one and packed in the other."""


@pytest.mark.parametrize("dtype, D, C, packed", WIDE)
def test_as_wide_as_a_model(dtype: torch.dtype, D: int, C: int, packed: bool, device, guarded):
    """Packed calls include the step factors and residual of published layers."""
    a = inputs.draw(
        rule="ttt_linear",
        shape=Shape(1, 150, 1, 1 if D == 128 else 2, D, D),
        state="normal",
        sequences=2 if packed else None,
        dtype=dtype,
        eta_col="uniform" if packed else None,
    )
    a |= {"output_final_state": True, "chunk_size": C}
    if packed:
        a |= {"cu_seqlens": torch.tensor([0, 33, 147]), "residual": "q"}
    require(*verdicts(a, NAMES, device, guarded, bound=C == 16))  # the case that the targets are meant for


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_a_width_that_half_a_tile_does_not_divide(dtype: torch.dtype, device, guarded):
    """The replay processes keys in halves of a tile, and the second half is mostly padding."""
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 20, 1, 1, 72, 72), state="normal", dtype=dtype)
    require(*verdicts(a | {"output_final_state": True}, NAMES, device, guarded))


@pytest.mark.parametrize("D, dtype", [(1, FP32), (60, FP16), (61, FP32), (100, BF16)], ids=str)
def test_any_width(D: int, dtype: torch.dtype, device, guarded):
    """Norms divide by the true width, and NaN beside the rows of the arguments reaches nothing."""
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 70, 1, 2, D, D), state="normal", sequences=3, dtype=dtype)
    a |= {"output_final_state": True, "cu_seqlens": torch.tensor([0, 17, 17, 66]), "residual": "q"}
    require(*verdicts(a, NAMES, device, guarded))


@pytest.mark.parametrize("T", range(1, 131, 8))
def test_lengths(T: int, device, guarded):
    """Even lengths use the options of published layers."""
    form = {"eta_col": "signed"} if T % 2 == 0 else {}
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, T, 1, 1, 8, 8), state="normal", dtype=FP32, seed=T, **form)
    a |= {"output_final_state": True, "residual": "q" if form else "o"}
    require(*verdicts(a, NAMES, device, guarded))


@pytest.mark.parametrize("keys", ["positive", "identical", "vocabulary", "one-hot", "zero", "tiny"])
def test_correlated_and_vanishing_keys(keys: str, device, guarded):
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 70, 1, 2, 8, 8), state="normal", dtype=FP32, keys=keys)
    require(*verdicts(a | {"output_final_state": True}, NAMES, device, guarded))


@pytest.mark.parametrize("shift", [100.0])
def test_a_mean_far_from_zero(shift: float, device, guarded):
    """The variance of predictions and readouts whose mean is a hundred times their standard deviation."""
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 70, 1, 2, 24, 24), state="normal", dtype=FP32)
    a["initial_state_bias"] += shift
    require(*verdicts(a | {"output_final_state": True}, NAMES, device, guarded))


@pytest.mark.parametrize(
    "names",
    [
        {"state": "zero"},  # predictions of variance zero
        {"values": "keys"},  # the loss starts at its minimum
        {"state": "zero", "values": "keys", "keys": "zero"},
        {"eta": "one huge"},
        {"eta": "last zero"},
        {"values": "1e4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_extremes_stay_finite(names: dict[str, str], dtype: torch.dtype, device):
    a = inputs.draw(rule="ttt_linear", shape=Shape(1, 37, 1, 2, 8, 8), dtype=dtype, **({"state": "normal"} | names))
    a = {name: moved(x, device) for name, x in a.items()} | {"output_final_state": True, "backend": "triton"}
    outputs = dict(zip(NAMES, wyfold.chunk_ttt_linear(**a), strict=True))
    fed = {name: inputs.incoming(x, i) for i, (name, x) in enumerate(outputs.items())}
    for name, x in results(wyfold.chunk_ttt_linear, a, fed).items():
        assert x.isfinite().all(), name
