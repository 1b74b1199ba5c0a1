"""Both forms of TTT-Linear: the token loop and its autograd, bitwise guarantees, errors."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from wyfold import reference
from wyfold.autograd import ttt as pipeline
from wyfold.autograd import ttt_records, workspace
from wyfold.ops.explain import explain
from wyfold.ops.ttt_linear import TTTState, chunk_ttt_linear, fused_chunk_ttt_linear, fused_recurrent_ttt_linear
from wyfold.reference import error, inputs, targets
from wyfold.reference.shapes import EVERY_LENGTH, INVALID_PACKINGS, PACKINGS, Packing, Shape
from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.layout import SequenceLayout

RESULTS = ("o", "state", "state_bias")
GRADIENT_OF = {
    "q": "dq",
    "k": "dk",
    "v": "dv",
    "w": "dw",
    "b": "db",
    "eta": "deta",
    "eta_col": "deta_col",
    "initial_state": "dh0",
    "initial_state_bias": "dc0",
}
PER_TOKEN = ("q", "k", "v", "eta", "eta_col")
FORMS = pytest.mark.parametrize("published", [False, True], ids=["plain", "published"])
RAGGED = Packing((0, 0, 5, 6, 39, 39, 71), 76)


def shape(B: int = 1, T: int = 37, H: int = 1, HV: int = 2, D: int = 8) -> Shape:
    return Shape(B=B, T=T, H=H, HV=HV, K=D, V=D)


def draw(
    size: Shape, *, dtype: torch.dtype = torch.float64, state: str = "normal", published: bool = False, **names: Any
) -> dict[str, Any]:
    """Arguments of a call; published: with a factor for every token and the residual on the query."""
    form = {"eta_col": "signed"} if published else {}
    drawn = inputs.draw(rule="ttt_linear", shape=size, dtype=dtype, state=state, **form, **names)
    return drawn | ({"residual": "q"} if published else {})


def per_token(arguments: dict[str, Any]) -> list[str]:
    return [name for name in PER_TOKEN if name in arguments]


def packed(packing: Packing, D: int = 8, **names: Any) -> tuple[dict[str, Any], Tensor]:
    """Arguments for packed sequences, and their boundaries."""
    size = shape(T=packing.tokens, D=D)
    return draw(size, sequences=len(packing.cu_seqlens) - 1, **names), torch.tensor(packing.cu_seqlens)


def differentiate(
    operator: Callable, arguments: dict[str, Any], like: dict[str, Tensor] | None = None, **options: Any
) -> tuple[dict[str, Tensor], ...]:
    """Results by name, and gradients of all tensors for one incoming gradient per result, rounded like `like`."""
    leaves = {n: x.detach().clone().requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor)}
    found = operator(**(arguments | leaves), output_final_state=True, **options)
    rounded = found if like is None else [like[name] for name in RESULTS]
    into = [inputs.incoming(r, seed).to(x) for seed, (r, x) in enumerate(zip(rounded, found))]
    grads = torch.autograd.grad(found, list(leaves.values()), into, materialize_grads=True)
    return dict(zip(RESULTS, (x.detach() for x in found))), dict(zip(leaves, grads))


def agrees(bounds: Any, arguments: dict[str, Any], backend: str, **options: Any) -> None:
    """Compare operator and token loop in float64: results and all gradients."""
    got, got_grads = differentiate(chunk_ttt_linear, arguments, backend=backend, **options)
    true, true_grads = differentiate(reference.ttt_linear, arguments, **options)
    for name in RESULTS:
        bounds.output(name, got[name], true[name])
    for name, truth in true_grads.items():
        bounds.gradient(GRADIENT_OF[name], got_grads[name], truth)


def same_bits(got: dict[str, Tensor], wanted: dict[str, Tensor], names: tuple[str, ...] | None = None) -> None:
    for name in names or wanted:
        assert torch.equal(got[name], wanted[name]), name


def everything(arguments: dict[str, Any], **options: Any) -> dict[str, Tensor]:
    """Results and gradients in one dict."""
    found, grads = differentiate(chunk_ttt_linear, arguments, **options)
    return found | {GRADIENT_OF[name]: g for name, g in grads.items()}


# --- against the token loop, float64 ---------------------------------------------------------------------------------


EACH_LENGTH = [(T, T % 5 % 2 == 1) for T in EVERY_LENGTH if T <= 34 or T % 16 in (0, 1, 15)]
"""Every length of two mini-batches, and lengths beside a boundary of later ones, in one form or the other."""
EACH_LENGTH += [(T, not published) for T, published in EACH_LENGTH if T % 16 in (0, 1, 15) and T <= 34]


@pytest.mark.parametrize("T, published", EACH_LENGTH)
def test_every_length(T: int, published: bool, backend: str, float64_bounds):
    """Lengths beside a boundary of the first mini-batches in both forms."""
    size = shape(T=T, D=24) if T % 8 == 3 else shape(T=T, HV=1 + T % 2)
    agrees(float64_bounds, draw(size, seed=T, published=published), backend)


@pytest.mark.parametrize("D", [1, 3, 60, 100])
def test_every_width(D: int, backend: str, float64_bounds):
    arguments, cu = packed(Packing((0, 0, 1, 18), 20), D=D, published=D < 8)
    agrees(float64_bounds, arguments, backend, cu_seqlens=cu)


@pytest.mark.parametrize("T", [1, 31, 32, 33, 63, 64, 65, 100])
@pytest.mark.parametrize("C", [pytest.param(32, marks=pytest.mark.release), 64])
@FORMS
def test_other_mini_batches(T: int, C: int, published: bool, backend: str, float64_bounds):
    agrees(float64_bounds, draw(shape(T=T), seed=T, published=published), backend, chunk_size=C)


@FORMS
@pytest.mark.parametrize("packing", PACKINGS)
def test_packed(packing: str, published: bool, backend: str, float64_bounds):
    arguments, cu = packed(PACKINGS[packing], published=published)
    agrees(float64_bounds, arguments, backend, cu_seqlens=cu)


@pytest.mark.parametrize("given", [(), ("initial_state",), ("initial_state_bias",)], ids=["none", "matrix", "bias"])
@pytest.mark.parametrize("packing", [None, RAGGED], ids=["dense", "packed"])
@FORMS
def test_either_state_may_be_missing(
    given: tuple[str, ...], packing: Packing | None, published: bool, backend: str, float64_bounds
):
    form = {"published": published}
    arguments, cu = (draw(shape(B=2), **form), None) if packing is None else packed(packing, **form)
    kept = {n: x for n, x in arguments.items() if not n.startswith("initial") or n in given}
    agrees(float64_bounds, kept, backend, cu_seqlens=cu)


@pytest.mark.parametrize(
    "options",
    [{"scale": 0.3}, {"eps": 0.1}, {"state_v_first": True}, {"disable_recompute": True}, {"batch_invariant": True}],
    ids=lambda options: next(iter(options)),
)
@pytest.mark.parametrize("packing", [None, RAGGED], ids=["dense", "packed"])
def test_options(options: dict[str, Any], packing: Packing | None, backend: str, float64_bounds):
    arguments, cu = (draw(shape(B=2)), None) if packing is None else packed(packing)
    known = {n: x for n, x in options.items() if n not in ("disable_recompute", "batch_invariant")}
    got, got_grads = differentiate(chunk_ttt_linear, arguments, cu_seqlens=cu, backend=backend, **options)
    true, true_grads = differentiate(reference.ttt_linear, arguments, cu_seqlens=cu, **known)
    for name in RESULTS:
        float64_bounds.output(name, got[name], true[name])
    for name, truth in true_grads.items():
        float64_bounds.gradient(GRADIENT_OF[name], got_grads[name], truth)


@FORMS
@pytest.mark.parametrize(("H", "HV"), [(1, 3), (2, 4), (3, 3)])
def test_grouped_value_heads(H: int, HV: int, published: bool, backend: str, float64_bounds):
    agrees(float64_bounds, draw(shape(B=2, T=20, H=H, HV=HV), published=published), backend)


@pytest.mark.parametrize("D", [16, 40, 64, 128])
def test_widths(D: int, backend: str, float64_bounds):
    agrees(float64_bounds, draw(shape(T=19, HV=1, D=D)), backend)


def test_step_sizes_as_a_column_a_row_or_a_number(backend: str, float64_bounds):
    arguments = draw(shape(B=2))
    column = everything(arguments, backend=backend)
    row = everything(arguments | {"eta": arguments["eta"].squeeze(-1)}, backend=backend)
    assert row["deta"].shape == arguments["eta"].shape[:3]
    same_bits(row, column | {"deta": column["deta"].squeeze(-1)})

    number = everything(arguments | {"eta": 0.07}, backend=backend)
    filled = everything(arguments | {"eta": torch.full_like(arguments["eta"], 0.07)}, backend=backend)
    same_bits(number, filled, tuple(number))
    agrees(float64_bounds, arguments | {"eta": 0.07}, backend)


def test_factors_as_a_column_a_row_or_a_number(backend: str):
    """A factor of one equals none; a number equals a column of that number."""
    arguments = draw(shape(B=2), published=True)
    column = everything(arguments, backend=backend)
    row = everything(arguments | {"eta_col": arguments["eta_col"].squeeze(-1)}, backend=backend)
    same_bits(row, column | {"deta_col": column["deta_col"].squeeze(-1)})
    number = everything(arguments | {"eta_col": 0.7}, backend=backend)
    filled = everything(arguments | {"eta_col": torch.full_like(arguments["eta_col"], 0.7)}, backend=backend)
    same_bits(number, filled, tuple(number))
    none = everything(arguments | {"eta_col": None}, backend=backend)
    same_bits(everything(arguments | {"eta_col": 1}, backend=backend), none)
    huge = everything(arguments | {"eta_col": 2**70}, backend=backend)  # an int that no tensor of ints can hold
    same_bits(huge, everything(arguments | {"eta_col": 2.0**70}, backend=backend))


def test_one_factor_for_all_is_a_factor_of_the_step(backend: str, float64_bounds):
    """A factor common to all tokens is equivalent to a factor of the step size."""
    arguments = draw(shape(B=2))
    got = everything(arguments | {"eta_col": 0.7}, backend=backend)
    stepped = everything(arguments | {"eta": 0.7 * arguments["eta"]}, backend=backend)
    for name in RESULTS:
        float64_bounds.output(name, got[name], stepped[name])
    float64_bounds.gradient("deta", got["deta"], 0.7 * stepped["deta"])


def test_a_factor_of_zero_removes_a_token_from_learning(backend: str, float64_bounds):
    """Its key and value have no effect; its output and its step size are unchanged."""
    arguments = draw(shape(B=2), published=True)
    arguments["eta_col"][:, 20] = 0
    leaves = {n: x.requires_grad_() for n, x in arguments.items() if n in ("k", "v", "eta_col")}
    o, S, c = chunk_ttt_linear(**arguments | leaves, output_final_state=True, backend=backend)
    dk, dv, dcol = torch.autograd.grad(o.sum() + S.square().sum() + c.sum(), list(leaves.values()))
    assert not dv[:, 20].any() and not dk[:, 20].any() and dcol[:, 20].all()


@pytest.mark.parametrize("eta", ["zero", "last zero"])
def test_step_sizes_of_zero(eta: str, backend: str, float64_bounds):
    arguments = draw(shape(B=2), eta=eta)
    agrees(float64_bounds, arguments, backend)
    if eta == "zero":
        found = everything(arguments, backend=backend)
        assert torch.equal(found["state"], arguments["initial_state"])
        assert torch.equal(found["state_bias"], arguments["initial_state_bias"])


@pytest.mark.parametrize("keys", ["positive", "identical", "vocabulary", "one-hot", "zero", "tiny"])
def test_correlated_and_vanishing_keys(keys: str, backend: str, float64_bounds):
    agrees(float64_bounds, draw(shape(T=40), keys=keys), backend)


@pytest.mark.parametrize(
    "names",
    [
        {"state": "zero"},  # predictions of variance zero
        {"values": "keys"},  # the loss starts at its minimum
        {"state": "zero", "values": "keys", "keys": "zero"},
        {"eta": "one huge"},
        {"values": "1e4"},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extremes_stay_finite(names: dict[str, str], dtype: torch.dtype, backend: str):
    arguments = draw(shape(), dtype=dtype, **({"state": "normal"} | names))
    for name, x in everything(arguments, backend=backend).items():
        assert x.isfinite().all(), name


# --- other dtypes ----------------------------------------------------------------------------------------------------


def verdicts(arguments: dict[str, Any], backend: str, **options: Any) -> list[error.Verdict]:
    """Judge all results by the float64 loop on the same inputs; 16-bit results by the loop's, rounded once."""
    got = everything(arguments, backend=backend, **options)
    wide = {n: x.double() if isinstance(x, Tensor) else x for n, x in arguments.items()}
    truth, grads = differentiate(reference.ttt_linear, wide, like=got, **options)
    truth |= {GRADIENT_OF[n]: g for n, g in grads.items()}
    return [
        error.judge(
            got[name],
            true,
            None if got[name].dtype == torch.float32 else true.to(got[name].dtype),
            name=name,
            target=targets.target(name, got[name].dtype, "ttt"),
        )
        for name, true in truth.items()
    ]


@pytest.mark.parametrize("packing", [None, RAGGED], ids=["dense", "packed"])
@pytest.mark.parametrize("C", [16, 64])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.release)]
)
@FORMS
def test_narrow_dtypes_lose_only_the_rounding_of_the_result(
    dtype: torch.dtype, packing: Packing | None, C: int, published: bool, backend: str
):
    """16-bit arguments are computed in float32: the truth, rounded once, is the yardstick."""
    arguments, cu = (draw(shape(B=2, T=100, D=24), dtype=dtype, published=published), None)
    if packing is not None:
        arguments, cu = packed(packing, dtype=dtype, published=published)
    found = verdicts(arguments, backend, chunk_size=C, cu_seqlens=cu)
    assert {v.name: v.dtype for v in found}["dq"] == dtype and {v.name: v.dtype for v in found}["dh0"] == torch.float32
    error.require(*found)


def test_autocast_narrows_q_k_and_v_alone(backend: str):
    arguments = draw(shape(B=2), dtype=torch.float32)
    narrow = arguments | {n: arguments[n].bfloat16() for n in ("q", "k", "v")}
    wanted = everything(narrow, backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        got = everything(arguments, backend=backend)
    assert got["o"].dtype == torch.bfloat16 and got["dq"].dtype == torch.float32
    same_bits(got, wanted | {name: wanted[name].float() for name in ("dq", "dk", "dv")})


@pytest.mark.parametrize("op", [chunk_ttt_linear, fused_recurrent_ttt_linear])
@pytest.mark.parametrize("name", ["q", "k", "v", "w", "b", "eta"])
def test_required_arguments_are_named_when_none(op, name: str):
    q = torch.randn(1, 4, 2, 8)
    arguments = {"q": q, "k": q, "v": q, "w": torch.ones(2, 8), "b": torch.zeros(2, 8), "eta": 0.1}
    with pytest.raises(TypeError, match=f"^{op.__name__}: {name} must be a .*, got NoneType$"):
        op(**arguments | {name: None})


@pytest.mark.parametrize("name", ["w", "b", "eta", "eta_col", "initial_state", "initial_state_bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_vary_independently(name: str, dtype: torch.dtype, backend: str):
    """A narrower argument gives the bits of its widened copy, and the copy's gradient rounded once."""
    arguments = draw(shape(), dtype=torch.float32, published=True)
    narrow = arguments | {name: arguments[name].to(dtype)}
    got, wide = (everything(a, backend=backend) for a in (narrow, narrow | {name: narrow[name].float()}))
    assert got[GRADIENT_OF[name]].dtype == dtype
    same_bits(got, wide | {GRADIENT_OF[name]: wide[GRADIENT_OF[name]].to(dtype)})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_are_stored_in_the_requested_dtype(dtype: torch.dtype, backend: str):
    arguments = draw(shape(B=2), dtype=torch.float32)
    got, wide = (everything(arguments, backend=backend, state_dtype=d) for d in (dtype, None))
    assert wide["state"].dtype == torch.float32
    same_bits(got, {name: wide[name].to(dtype) for name in ("state", "state_bias")} | {"o": wide["o"]})


# --- bitwise guarantees------------------------------------------------------------------------------------------------

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])


def one_sequence(arguments: dict[str, Any], n: int, rows: slice) -> dict[str, Any]:
    """Arguments of sequence n of a packed call, alone."""
    alone = {name: x[:, rows] for name, x in arguments.items() if name in PER_TOKEN}
    states = {name: x[n : n + 1] for name, x in arguments.items() if name.startswith("initial")}
    return arguments | alone | states


@DTYPES
@FORMS
def test_packed_equals_separate_calls(dtype: torch.dtype, published: bool, threads: int, backend: str):
    arguments, cu = packed(RAGGED, D=24, dtype=dtype, published=published)
    form = {"residual": arguments.pop("residual", "o"), "output_final_state": True, "backend": backend}
    leaves = {n: x.requires_grad_() for n, x in arguments.items()}
    results = chunk_ttt_linear(**leaves, **form, cu_seqlens=cu)
    into = [inputs.incoming(x, seed) for seed, x in enumerate(results)]
    wanted = {n: x for n, x in leaves.items() if n not in ("w", "b")}
    grads = dict(zip(wanted, torch.autograd.grad(results, list(wanted.values()), into)))
    for n, (start, stop) in enumerate(zip(cu.tolist(), cu[1:].tolist())):
        rows, own = slice(start, stop), slice(n, n + 1)
        alone = {name: x.detach().requires_grad_() for name, x in one_sequence(leaves, n, rows).items()}
        o, S, c = chunk_ttt_linear(**alone, **form)
        assert torch.equal(o, results[0][:, rows])
        assert torch.equal(S, results[1][own])
        assert torch.equal(c, results[2][own])
        mine = [into[0][:, rows], into[1][own], into[2][own]]
        for name, d in zip(wanted, torch.autograd.grad((o, S, c), [alone[name] for name in wanted], mine)):
            assert torch.equal(d, grads[name][:, rows] if name in PER_TOKEN else grads[name][own]), name


def test_a_batch_row_equals_a_separate_call(backend: str):
    arguments = draw(shape(B=3, T=37, D=24), dtype=torch.float32)
    whole = chunk_ttt_linear(**arguments, output_final_state=True, backend=backend)
    for n in range(3):
        row = {name: x if name in ("w", "b") else x[n : n + 1] for name, x in arguments.items()}
        alone = chunk_ttt_linear(**row, output_final_state=True, backend=backend)
        assert all(torch.equal(a, b[n : n + 1]) for a, b in zip(alone, whole))


@DTYPES
@FORMS
@pytest.mark.parametrize("cut", [16, 48, 64])
def test_a_call_split_between_mini_batches_equals_one_call(cut: int, published: bool, dtype: torch.dtype, backend: str):
    arguments = draw(shape(B=2, T=70, D=24), dtype=dtype, published=published)
    form = {"residual": arguments.pop("residual", "o"), "output_final_state": True, "backend": backend}
    leaves = {n: x.requires_grad_() for n, x in arguments.items()}
    wanted = [leaves[n] for n in (*per_token(leaves), "initial_state", "initial_state_bias")]
    whole = chunk_ttt_linear(**leaves, **form)
    parts, states = [], {n: leaves[n] for n in ("initial_state", "initial_state_bias")}
    for rows in (slice(0, cut), slice(cut, None)):
        o, *left = chunk_ttt_linear(**(rows_of(leaves, rows) | states), **form)
        states = dict(zip(states, left))
        parts.append(o)
    resumed = (torch.cat(parts, 1), *left)
    assert all(torch.equal(a, b) for a, b in zip(resumed, whole))
    into = [inputs.incoming(x) for x in whole]
    got, truth = (torch.autograd.grad(found, wanted, into) for found in (resumed, whole))
    assert all(torch.equal(a, b) for a, b in zip(got, truth))


@FORMS
@pytest.mark.parametrize("cuts", [[0, 32, 70], [0, 16, 16, 64, 70]], ids=["two", "four, one empty"])
def test_states_passed_between_shards(cuts: list[int], published: bool, backend: str):
    """As ranks do: pass states forward, and their gradients backward, as plain tensors."""
    arguments = draw(shape(B=2, T=70, D=24), dtype=torch.float32, published=published)
    wanted = everything(arguments, backend=backend)
    o, S, c = (inputs.incoming(wanted[name], seed) for seed, name in enumerate(RESULTS))
    states = {n: arguments[n] for n in ("initial_state", "initial_state_bias")}
    shards = []
    for start, stop in pairwise(cuts):
        shard = rows_of(arguments, slice(start, stop)) | states
        leaves = {n: x.detach().clone().requires_grad_() for n, x in shard.items() if isinstance(x, Tensor)}
        found = chunk_ttt_linear(**shard | leaves, output_final_state=True, backend=backend)
        shards.append((leaves, found, o[:, start:stop]))
        states = {n: x.detach() for n, x in zip(states, found[1:])}
    assert torch.equal(states["initial_state"], wanted["state"])
    assert torch.equal(states["initial_state_bias"], wanted["state_bias"])
    found, back = {name: [] for name in per_token(arguments)}, (S, c)
    for leaves, results, into in reversed(shards):
        grads = dict(zip(leaves, torch.autograd.grad(results, list(leaves.values()), [into, *back])))
        back = grads["initial_state"], grads["initial_state_bias"]
        for name, pieces in found.items():
            pieces.insert(0, grads[name])
    for name, pieces in found.items():
        assert torch.equal(torch.cat(pieces, 1), wanted[GRADIENT_OF[name]]), name
    assert torch.equal(back[0], wanted["dh0"]) and torch.equal(back[1], wanted["dc0"])


@pytest.mark.parametrize("columns", [1, 2, 3])
@pytest.mark.parametrize("packing", [None, RAGGED], ids=["dense", "packed"])
@pytest.mark.parametrize("keep", [False, True], ids=["rebuild", "keep"])
def test_parts_change_no_bit(
    columns: int, packing: Packing | None, keep: bool, backend: str, float64_bounds, monkeypatch
):
    """Only w and b, summed over parts, may round differently."""
    form = {"published": columns != 2}
    arguments, cu = (draw(shape(B=2, T=70), **form), None) if packing is None else packed(packing, **form)
    options = {"cu_seqlens": cu, "disable_recompute": keep, "backend": backend}
    whole = everything(arguments, **options)
    monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 0)
    monkeypatch.setattr(workspace, "MIN_COLUMNS", columns)
    cut = everything(arguments, **options)
    summed = ("dw", "db")
    same_bits(cut, whole, tuple(name for name in whole if name not in summed))
    for name in summed:
        float64_bounds.gradient(name, cut[name], whole[name])


def test_keeping_every_state_changes_no_bit(backend: str):
    arguments = draw(shape(B=2, T=100), dtype=torch.float32)
    kept, rebuilt = (everything(arguments, disable_recompute=keep, backend=backend) for keep in (True, False))
    same_bits(kept, rebuilt)


def strided(x: Tensor) -> Tensor:
    """A copy of x with tokens innermost, in every second element of a buffer."""
    buffer = torch.full((*x.shape[:1], *x.shape[2:], 2 * x.shape[1]), torch.nan, dtype=x.dtype)
    view = buffer[..., ::2].movedim(-1, 1)
    return view.copy_(x).detach()


def test_strides_change_no_bit(backend: str):
    arguments = draw(shape(B=2, T=40), dtype=torch.float32)
    wanted = everything(arguments, backend=backend)
    leaves = {n: (strided(x) if x.ndim == 4 else x).requires_grad_() for n, x in arguments.items()}
    found = chunk_ttt_linear(**leaves, output_final_state=True, backend=backend)
    into = [strided(inputs.incoming(x, seed)) for seed, x in enumerate(found)]
    grads = torch.autograd.grad(found, list(leaves.values()), into)
    same_bits(dict(zip(RESULTS, found)) | dict(zip(map(GRADIENT_OF.get, leaves), grads)), wanted)


def test_an_expanded_argument_is_its_copy(backend: str):
    arguments = draw(shape(B=2, T=40), dtype=torch.float32)
    one = arguments | {n: arguments[n][:1] for n in ("q", "eta", "initial_state")}
    expanded = {n: one[n].expand_as(arguments[n]) for n in ("q", "eta", "initial_state")}
    copied = {n: x.contiguous() for n, x in expanded.items()}
    got, wanted = (
        chunk_ttt_linear(**(arguments | x), output_final_state=True, backend=backend) for x in (expanded, copied)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("operator", [chunk_ttt_linear, fused_recurrent_ttt_linear])
def test_without_gradients_same_bits_and_nothing_saved(
    context: Callable, operator: Callable, backend: str, monkeypatch
):
    arguments = draw(shape(B=2, T=70), dtype=torch.float32, state="none")
    kept = []

    def spied(*given: Any, run: Callable = pipeline._forward_op) -> tuple[Tensor, ...]:
        found = run(*given)
        kept.append(sum(x.numel() for x in found[ttt_records.RESULTS]))
        return found

    monkeypatch.setattr(pipeline, "_forward_op", spied)
    leaves = {n: x.requires_grad_() for n, x in arguments.items()}
    o, *_ = operator(**leaves, backend=backend)
    with context():
        quiet, *_ = operator(**leaves, backend=backend)
    assert torch.equal(quiet, o) and not quiet.requires_grad
    assert kept[0] > 0 and kept[1] == 0


def test_causality(backend: str):
    arguments = draw(shape(T=40), dtype=torch.float32, published=True)
    o, _, _ = chunk_ttt_linear(**arguments, backend=backend)
    for t in (1, 15, 16, 20, 39):
        later = {n: torch.cat([arguments[n][:, :t], -3 * arguments[n][:, t:]], 1) for n in per_token(arguments)}
        changed, _, _ = chunk_ttt_linear(**(arguments | later), backend=backend)
        short, _, _ = chunk_ttt_linear(**rows_of(arguments, slice(t)), backend=backend)
        assert torch.equal(changed[:, :t], o[:, :t])
        assert torch.equal(short, o[:, :t])


def test_rows_past_the_last_boundary_are_never_read(backend: str):
    arguments, cu = packed(RAGGED, dtype=torch.float32, published=True)
    end = int(cu[-1])
    clean = everything(arguments, cu_seqlens=cu, backend=backend)
    for name in PER_TOKEN:
        arguments[name][:, end:] = torch.nan
    leaves = {n: x.requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor)}
    results = chunk_ttt_linear(**arguments | leaves, cu_seqlens=cu, output_final_state=True, backend=backend)
    into = [inputs.incoming(x, seed) for seed, x in enumerate(results)]
    into[0][:, end:] = torch.nan
    found = dict(zip(RESULTS, results))
    found |= dict(zip(map(GRADIENT_OF.get, leaves), torch.autograd.grad(results, list(leaves.values()), into)))
    same_bits(found, clean)
    for name in ("o", *(GRADIENT_OF[n] for n in PER_TOKEN)):
        assert not found[name][:, end:].any(), name


@pytest.mark.parametrize("where", [*PER_TOKEN, "initial_state", "initial_state_bias"])
def test_a_nan_sequence_affects_no_other(where: str, backend: str):
    arguments, cu = packed(RAGGED, dtype=torch.float32, published=True)
    clean = everything(arguments, cu_seqlens=cu, backend=backend)
    broken, start, stop = 4 - 1, 6, 39  # the sequence with the most mini-batches
    if where in PER_TOKEN:
        arguments[where][:, start + 20] = torch.nan
    else:
        arguments[where][broken] = torch.inf
    found = everything(arguments, cu_seqlens=cu, backend=backend)
    tokens = torch.tensor([not start <= t < stop for t in range(RAGGED.tokens)])
    sequences = torch.arange(len(cu) - 1) != broken
    assert not found["o"][:, start:stop].isfinite().all()
    for name in ("o", "dq", "dk", "dv", "deta", "deta_col"):
        assert torch.equal(found[name][:, tokens], clean[name][:, tokens]), name
    for name in ("state", "state_bias", "dh0", "dc0"):
        assert torch.equal(found[name][sequences], clean[name][sequences]), name


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_layout_is_its_boundaries(dtype: torch.dtype, backend: str):
    arguments, cu = packed(RAGGED, dtype=torch.float32)
    wanted = everything(arguments, cu_seqlens=cu, backend=backend)
    same_bits(everything(arguments, cu_seqlens=cu.to(dtype), backend=backend), wanted)
    layout = SequenceLayout(cu.to(dtype), RAGGED.tokens)
    same_bits(everything(arguments, cu_seqlens=layout, backend=backend), wanted)


def test_v_first_states_are_transposed_states(backend: str):
    arguments = draw(shape(B=2), dtype=torch.float32)
    first = arguments | {"initial_state": arguments["initial_state"].mT.contiguous()}
    wanted = chunk_ttt_linear(**arguments, output_final_state=True, backend=backend)
    got = chunk_ttt_linear(**first, output_final_state=True, state_v_first=True, backend=backend)
    assert torch.equal(got[0], wanted[0]) and torch.equal(got[1], wanted[1].mT) and torch.equal(got[2], wanted[2])


@pytest.mark.parametrize(("B", "T"), [(2, 0), (0, 5)])
def test_empty_calls(B: int, T: int, backend: str):
    arguments = draw(shape(B=B, T=T), dtype=torch.float32)
    found = everything(arguments, backend=backend)
    assert torch.equal(found["state"], arguments["initial_state"])
    assert torch.equal(found["dh0"], inputs.incoming(found["state"], 1))
    assert not found["dw"].any() and not found["db"].any()
    state = standing(arguments["initial_state"], arguments["initial_state_bias"], torch.full((B,), 5))
    o, left = fused_recurrent_ttt_linear(
        **without_states(arguments), state=state, output_final_state=True, backend=backend
    )
    assert o.shape == found["o"].shape
    if T == 0:
        assert all(map(torch.equal, left, state))


@pytest.mark.parametrize("operator", [chunk_ttt_linear, fused_recurrent_ttt_linear])
def test_a_plan_needs_no_values(operator: Callable):
    arguments = {n: x.to("meta") for n, x in draw(shape(B=3, T=5000, D=64), state="none").items()}
    plan = explain(operator, **arguments)
    assert plan.backend == "eager" and plan.chunk_size == 16 and plan.parts > 1
    stage = "ttt_open" if operator is fused_recurrent_ttt_linear else "ttt"
    assert plan.forward == plan.backward == (f"{stage} (wyfold.kernels.ttt.eager)",)


def test_fused_is_an_alias():
    assert fused_chunk_ttt_linear is chunk_ttt_linear


def test_states_are_returned_on_request_only(backend: str):
    arguments = draw(shape(), dtype=torch.float32)
    assert chunk_ttt_linear(**arguments, backend=backend)[1:] == (None, None)
    del arguments["initial_state"], arguments["initial_state_bias"]
    assert fused_recurrent_ttt_linear(**arguments, backend=backend)[1] is None


@pytest.mark.parametrize("wanted", [*GRADIENT_OF])
def test_a_gradient_does_not_depend_on_which_others_are_wanted(wanted: str, backend: str):
    arguments = draw(shape(), dtype=torch.float32, published=True)
    all_of_them = everything(arguments, backend=backend)[GRADIENT_OF[wanted]]
    leaf = arguments[wanted].clone().requires_grad_()
    found = chunk_ttt_linear(**(arguments | {wanted: leaf}), output_final_state=True, backend=backend)
    into = [inputs.incoming(x, seed) for seed, x in enumerate(found)]
    assert torch.equal(torch.autograd.grad(found, leaf, into)[0], all_of_them)


@pytest.mark.parametrize("used", range(3), ids=RESULTS)
def test_a_loss_on_one_result_alone(used: int, backend: str, float64_bounds):
    arguments = draw(shape(B=2))
    leaves = {n: x.requires_grad_() for n, x in arguments.items()}
    into = None
    grads = []
    for operator, options in ((chunk_ttt_linear, {"backend": backend}), (reference.ttt_linear, {})):
        result = operator(**leaves, output_final_state=True, **options)[used]
        into = inputs.incoming(result)
        grads.append(torch.autograd.grad(result, list(leaves.values()), into, materialize_grads=True))
    for name, got, truth in zip(leaves, *grads):
        float64_bounds.gradient(GRADIENT_OF[name], got, truth)


# --- the recurrent form ----------------------------------------------------------------------------------------------


def standing(S: Tensor, c: Tensor, position: Tensor | None = None) -> TTTState:
    """A state at the start of a mini-batch, unless gradient sums and a position are given."""
    zeros = torch.zeros(S.shape[0], dtype=torch.int32)
    return TTTState(S, c, torch.zeros_like(S), torch.zeros_like(c), zeros if position is None else position)


def without_states(arguments: dict[str, Any]) -> dict[str, Any]:
    return {n: x for n, x in arguments.items() if not n.startswith("initial")}


def rows_of(arguments: dict[str, Any], rows: slice) -> dict[str, Any]:
    return arguments | {n: arguments[n][:, rows] for n in per_token(arguments)}


def resumed(
    arguments: dict[str, Any], state: TTTState | None, cuts: list[int], **options: Any
) -> tuple[Tensor, TTTState]:
    """One call per piece between cuts, with the state passed on."""
    T, outputs = arguments["q"].shape[1], []
    for start, stop in zip([0, *cuts], [*cuts, T]):
        piece = rows_of(arguments, slice(start, stop))
        o, state = fused_recurrent_ttt_linear(**piece, state=state, output_final_state=True, **options)
        outputs.append(o)
    return torch.cat(outputs, 1), state


@FORMS
@pytest.mark.parametrize("C", [16, 32])
def test_recurrent_equals_chunk_for_every_split(C: int, published: bool, backend: str, float64_bounds):
    arguments = draw(shape(B=2, T=43), published=published)
    start = standing(arguments["initial_state"], arguments["initial_state_bias"])
    truth, _, _ = reference.ttt_linear(**arguments, chunk_size=C)
    for cut in range(44):
        o, state = resumed(without_states(arguments), start, [cut], chunk_size=C, backend=backend)
        float64_bounds.output(f"cut at {cut}", o, truth)
        assert state.position.tolist() == [43 % C] * 2
    o, _ = resumed(without_states(arguments), start, list(range(1, 43)), chunk_size=C, backend=backend)
    float64_bounds.output("token by token", o, truth)


@FORMS
def test_recurrent_in_one_call_has_the_bits_of_the_chunk_form(published: bool, backend: str):
    arguments = without_states(draw(shape(B=2, T=43), dtype=torch.float32, published=published))
    o, _ = fused_recurrent_ttt_linear(**arguments, backend=backend)
    assert torch.equal(o, chunk_ttt_linear(**arguments, backend=backend)[0])


@FORMS
def test_the_chunk_form_continues_after_a_closed_mini_batch(published: bool, backend: str, float64_bounds):
    arguments = draw(shape(B=2, T=48), published=published)
    start = standing(arguments["initial_state"], arguments["initial_state_bias"])
    _, state = resumed(without_states(arguments), start, [5, 21], backend=backend)
    _, S, c = reference.ttt_linear(**arguments, output_final_state=True)
    assert state.position.tolist() == [0, 0]
    assert not state.grad.any() and not state.bias_grad.any()
    float64_bounds.output("state", state.state, S)
    float64_bounds.output("bias", state.bias, c)


def open_loop(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor,
    state: TTTState,
    chunk_size: int,
    eta_col: Tensor | None = None,
    residual: str = "o",
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The recurrence from an open mini-batch, token by token, with a separate position for each row."""
    D = q.shape[-1]
    rows = []
    for n, position in enumerate(state.position.tolist()):
        S0, c0, G, a = (x[n] for x in state[:4])  # [HV, D, D], [HV, 1, D]
        outputs = []
        for t in range(q.shape[1]):
            q_t, k_t, v_t = (x[n, t].repeat_interleave(len(w) // x.shape[2], 0)[:, None] for x in (q, k, v))
            z = k_t @ S0 + c0
            x = torch.nn.functional.layer_norm(z, (D,), eps=eps)
            y = w[:, None] * (w[:, None] * x + b[:, None] - (v_t - k_t))
            r = (z.var(-1, correction=0, keepdim=True) + eps) ** -0.5
            n_t = r / D * (D * y - y.sum(-1, keepdim=True) - x * (y * x).sum(-1, keepdim=True))
            n_t = n_t if eta_col is None else n_t * eta_col[n, t, :, :, None]
            G, a, position = G + k_t.mT @ n_t, a + n_t, position + 1
            S, c = S0 - eta[n, t, :, :, None] * G, c0 - eta[n, t, :, :, None] * a
            h = D**-0.5 * q_t @ S + c
            base = h if residual == "o" else q_t
            outputs.append(base + w[:, None] * torch.nn.functional.layer_norm(h, (D,), eps=eps) + b[:, None])
            if position == chunk_size:
                S0, c0, G, a, position = S, c, torch.zeros_like(G), torch.zeros_like(a), 0
        rows.append((torch.stack(outputs).squeeze(2), S0, c0, G, a))
    return tuple(torch.stack(column) for column in zip(*rows))


@pytest.mark.parametrize("T", [1, 2, 13, 14, 20, 40])
@pytest.mark.parametrize("columns", [8, 1], ids=["one part", "parts"])
@FORMS
def test_recurrent_gradients_from_open_mini_batches(
    T: int, columns: int, published: bool, backend: str, float64_bounds, monkeypatch
):
    """All results are differentiable, TTTState included, in this call's arguments; the given state is a constant."""
    if columns == 1:
        monkeypatch.setattr(workspace, "WORKSPACE_BYTES", 0)
        monkeypatch.setattr(workspace, "MIN_COLUMNS", columns)
    arguments = draw(shape(B=3, T=T), published=published)
    form = {"residual": arguments.pop("residual", "o")}
    state = standing(arguments["initial_state"], arguments["initial_state_bias"], torch.tensor([3, 0, 15]))
    state = state._replace(grad=torch.randn_like(state.grad), bias_grad=torch.randn_like(state.bias_grad))
    for x in (state.grad, state.bias_grad):
        x[1] = 0
    leaves = {n: x.requires_grad_() for n, x in without_states(arguments).items()}

    o, final = fused_recurrent_ttt_linear(**leaves, **form, state=state, output_final_state=True, backend=backend)
    truths = open_loop(**leaves, **form, state=state, chunk_size=16)
    assert final.position.tolist() == [(p + T) % 16 for p in (3, 0, 15)]
    for name, got, truth in zip(("o", *TTTState._fields), (o, *final), truths):
        float64_bounds.output(name, got, truth)
    into = [inputs.incoming(x, seed) for seed, x in enumerate(truths)]
    wanted = list(leaves.values())
    grads, true_grads = (torch.autograd.grad(x, wanted, into) for x in ((o, *final[:4]), truths))
    for name, got, truth in zip(leaves, grads, true_grads):
        float64_bounds.gradient(GRADIENT_OF[name], got, truth)


def test_a_given_ttt_state_is_a_constant(backend: str):
    arguments = draw(shape(), dtype=torch.float32)
    state = standing(arguments["initial_state"].requires_grad_(), arguments["initial_state_bias"])
    o, final = fused_recurrent_ttt_linear(
        **without_states(arguments), state=state, output_final_state=True, backend=backend
    )
    assert not o.requires_grad and not any(x.requires_grad for x in final)


@FORMS
def test_recurrent_packed_at_different_positions(published: bool, backend: str):
    """Bits of the sequences alone, gradients too; an empty sequence's state is unchanged, also an open one."""
    arguments, cu = packed(RAGGED, dtype=torch.float32, published=published)
    form = {"residual": arguments.pop("residual", "o"), "output_final_state": True, "backend": backend}
    N = len(cu) - 1
    state = standing(arguments["initial_state"], arguments["initial_state_bias"], torch.tensor([9, 0, 15, 4, 7, 11]))
    state = state._replace(grad=torch.randn_like(state.grad), bias_grad=torch.randn_like(state.bias_grad))
    leaves = {n: x.requires_grad_() for n, x in without_states(arguments).items()}
    o, final = fused_recurrent_ttt_linear(**leaves, **form, state=state, cu_seqlens=cu)
    into = inputs.incoming(o)
    grads = torch.autograd.grad(o, [leaves[n] for n in per_token(leaves)], into)
    for n, (start, stop) in enumerate(zip(cu.tolist(), cu[1:].tolist())):
        rows = slice(start, stop)
        own = TTTState(*(x[n : n + 1] for x in state))
        alone = {name: x.detach().requires_grad_() for name, x in rows_of(leaves, rows).items()}
        mine, left = fused_recurrent_ttt_linear(**alone, **form, state=own)
        assert torch.equal(mine, o[:, rows])
        assert all(torch.equal(a, b[n : n + 1]) for a, b in zip(left, final)), n
        if start == stop:
            assert all(torch.equal(a, b) for a, b in zip(left, own)), n
        found = torch.autograd.grad(mine, [alone[name] for name in per_token(alone)], into[:, rows])
        assert all(torch.equal(a, b[:, rows]) for a, b in zip(found, grads)), n
    assert N == 6 and not o[:, int(cu[-1]) :].any()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_position_keeps_its_dtype(dtype: torch.dtype, backend: str):
    arguments = draw(shape(T=5), dtype=torch.float32)
    position = torch.tensor([14], dtype=dtype)
    state = standing(arguments["initial_state"], arguments["initial_state_bias"], position)
    _, final = fused_recurrent_ttt_linear(
        **without_states(arguments), state=state, output_final_state=True, backend=backend
    )
    assert final.position.dtype == dtype and final.position.tolist() == [3]


# --- bad input -------------------------------------------------------------------------------------------------------


def bad(change: Callable[[dict[str, Any]], dict[str, Any]], error_type: type[Exception], message: str) -> tuple:
    return change, error_type, message


BAD = {
    "q no tensor": bad(lambda a: {"q": [1.0]}, TypeError, "q must be a torch.Tensor, got list"),
    "q rank": bad(lambda a: {"q": a["q"][0]}, ValueError, r"q must have 4 dimensions, \[B, T, H, K\]"),
    "k heads": bad(lambda a: {"k": a["k"][:, :, :1]}, ValueError, r"k must be \[B, T, H, K\] = \[1, 9, 2, 8\]"),
    "k tokens": bad(lambda a: {"k": a["k"][:, 1:]}, ValueError, "k must be"),
    "v heads": bad(lambda a: {"v": a["v"][:, :, :3], "w": a["w"][:3], "b": a["b"][:3], "eta": 0.1}, ValueError,
                   "v must have a multiple of the 2 heads of q and k, got 3"),
    "v width": bad(lambda a: {n: torch.ones(*a[n].shape[:-1], 16) for n in "vwb"}, ValueError,
                   "v must have the width of q and k, V = K = 8, got 16"),
    "w shape": bad(lambda a: {"w": a["w"][0]}, ValueError, r"w must have 2 dimensions, \[HV, V\] = \[4, 8\]"),
    "b heads": bad(lambda a: {"b": a["b"][:2]}, ValueError, "b must be"),
    "eta rank": bad(lambda a: {"eta": a["eta"][0, :, :, 0]}, ValueError, "eta must have 4 dimensions, "),
    "eta width": bad(lambda a: {"eta": a["eta"].expand(1, 9, 4, 8)}, ValueError, "eta must be"),
    "eta heads": bad(lambda a: {"eta": a["eta"][:, :, :2]}, ValueError, "eta must be"),
    "eta text": bad(lambda a: {"eta": "0.1"}, TypeError, "eta must be a number, got str"),
    "eta nan": bad(lambda a: {"eta": float("nan")}, ValueError, "eta must be finite"),
    "eta_col rank": bad(lambda a: {"eta_col": a["eta"][0, :, :, 0]}, ValueError, "eta_col must have 4 dimensions, "),
    "eta_col heads": bad(lambda a: {"eta_col": a["eta"][:, :, :2]}, ValueError, "eta_col must be"),
    "eta_col integer": bad(lambda a: {"eta_col": a["eta"].int()}, ValueError, "eta_col must be float32"),
    "eta_col text": bad(lambda a: {"eta_col": "1"}, TypeError, "eta_col must be a number, got str"),
    "eta_col infinite": bad(lambda a: {"eta_col": float("inf")}, ValueError, "eta_col must be finite"),
    "residual": bad(lambda a: {"residual": "v"}, ValueError, "residual must be one of 'o', 'q', got 'v'"),
    "residual missing": bad(lambda a: {"residual": None}, ValueError, "residual must be one of"),
    "eta missing": bad(lambda a: {"eta": None}, TypeError, "eta must be a number, got NoneType"),
    "q integer": bad(lambda a: {n: a[n].int() for n in "qkv"}, ValueError, "q must be float32"),
    "dtypes differ": bad(lambda a: {"k": a["k"].double()}, ValueError, "k must have the dtype of q"),
    "w integer": bad(lambda a: {"w": a["w"].int()}, ValueError, "w must be float32"),
    "device": bad(lambda a: {"k": a["k"].to("meta")}, ValueError, "k must have the device of q"),
    "chunk_size": bad(lambda a: {"chunk_size": 24}, ValueError, "chunk_size must be one of 16, 32, 64, got 24"),
    "chunk_size bool": bad(lambda a: {"chunk_size": True}, ValueError, "chunk_size must be one of"),
    "eps zero": bad(lambda a: {"eps": 0.0}, ValueError, "eps must be above 0, got 0.0"),
    "eps text": bad(lambda a: {"eps": "small"}, TypeError, "eps must be a number"),
    "scale": bad(lambda a: {"scale": "auto"}, TypeError, "scale must be a number, got str"),
    "scale inf": bad(lambda a: {"scale": float("inf")}, ValueError, "scale must be finite"),
    "flag": bad(lambda a: {"output_final_state": 1}, TypeError, "output_final_state must be True or False, got 1"),
    "backend": bad(lambda a: {"backend": "cuda"}, ValueError, "backend must be one of"),
    "backend triton": bad(lambda a: {"backend": "triton"}, UnsupportedError, "triton"),
    "batch and packing": bad(
        lambda a: {n: a[n].expand(2, *a[n].shape[1:]) for n in per_token(a)} | {"cu_seqlens": torch.tensor([0, 9])},
        ValueError,
        "cu_seqlens must come with a batch of B = 1, got B = 2",
    ),
    "boundaries no tensor": bad(lambda a: {"cu_seqlens": [0, 9]}, TypeError, "cu_seqlens must be a torch.Tensor"),
    "boundaries rank": bad(lambda a: {"cu_seqlens": torch.tensor([[0, 9]])}, ValueError, "cu_seqlens must be"),
    "layout of another length": bad(lambda a: {"cu_seqlens": SequenceLayout(torch.tensor([0, 8]), 8)}, ValueError,
                                    "cu_seqlens must be a layout of T = 9 tokens, got 8"),
}  # fmt: skip
CHUNK_ONLY = {
    "state shape": bad(lambda a: {"initial_state": torch.zeros(1, 4, 8, 16)}, ValueError,
                       r"initial_state must be \[N, HV, K, V\] = \[1, 4, 8, 8\]"),
    "state count": bad(lambda a: {"initial_state": torch.zeros(2, 4, 8, 8)}, ValueError, "initial_state must be"),
    "state dtype": bad(lambda a: {"initial_state": torch.zeros(1, 4, 8, 8).double()}, ValueError,
                       "initial_state must be float32, bfloat16 or float16, got float64"),
    "bias shape": bad(lambda a: {"initial_state_bias": torch.zeros(1, 4, 8)}, ValueError,
                      r"initial_state_bias must have 4 dimensions, \[N, HV, 1, V\]"),
    "bias no tensor": bad(lambda a: {"initial_state_bias": 0.0}, TypeError, "initial_state_bias must be a torch"),
    "state_dtype": bad(lambda a: {"state_dtype": torch.int8}, ValueError, "state_dtype must be"),
    "state_dtype too wide": bad(lambda a: {"state_dtype": torch.float64}, ValueError, "state_dtype must be"),
    "state_dtype text": bad(lambda a: {"state_dtype": "float32"}, TypeError, "state_dtype must be"),
    "flag v-first": bad(lambda a: {"state_v_first": None}, TypeError, "state_v_first must be True or False"),
    "flag recompute": bad(lambda a: {"disable_recompute": "no"}, TypeError, "disable_recompute must be True or False"),
    "flag invariant": bad(lambda a: {"batch_invariant": 0}, TypeError, "batch_invariant must be True or False"),
}  # fmt: skip


def state_with(**fields: Any) -> Callable:
    zeros = standing(torch.zeros(1, 4, 8, 8), torch.zeros(1, 4, 1, 8))
    return lambda a: {"state": zeros._replace(**fields)}


RECURRENT_ONLY = {
    "state tuple": bad(lambda a: {"state": (1, 2, 3, 4, 5)}, TypeError, "state must be a TTTState or None, got tuple"),
    "state shape": bad(state_with(state=torch.zeros(1, 4, 8, 16)), ValueError, "state.state must be"),
    "bias shape": bad(state_with(bias=torch.zeros(1, 4, 8)), ValueError, "state.bias must have 4 dimensions"),
    "sums count": bad(state_with(grad=torch.zeros(2, 4, 8, 8)), ValueError, "state.grad must be"),
    "sums missing": bad(state_with(bias_grad=None), TypeError, "state.bias_grad must be a torch.Tensor"),
    "position shape": bad(state_with(position=torch.tensor(0)), ValueError, "state.position must be"),
    "position dtype": bad(state_with(position=torch.zeros(1)), ValueError, "state.position must be"),
    "position too large": bad(state_with(position=torch.tensor([16])), ValueError, "state.position must be from 0 to"),
    "position negative": bad(state_with(position=torch.tensor([-1])), ValueError, "state.position must be from 0 to"),
}
REFUSED = [
    pytest.param(operator, *case, id=f"{form}-{name}")
    for form, operator, table in (
        ("chunk", chunk_ttt_linear, BAD | CHUNK_ONLY),
        ("recurrent", fused_recurrent_ttt_linear, BAD | RECURRENT_ONLY),
    )
    for name, case in table.items()
]


@pytest.mark.parametrize(("operator", "change", "error_type", "message"), REFUSED)
def test_bad_input_is_refused(operator: Callable, change: Callable, error_type: type[Exception], message: str):
    arguments = draw(shape(T=9, H=2, HV=4), dtype=torch.float32, state="none")
    with pytest.raises(error_type, match=rf"^{operator.__name__}: .*{message}"):
        operator(**(arguments | change(arguments)))


@pytest.mark.parametrize("operator", [chunk_ttt_linear, fused_recurrent_ttt_linear])
@pytest.mark.parametrize("name", INVALID_PACKINGS)
def test_invalid_boundaries_are_refused(operator: Callable, name: str):
    arguments = draw(shape(T=9), dtype=torch.float32, state="none")
    with pytest.raises(ValueError, match=rf"^{operator.__name__}: cu_seqlens must"):
        operator(**arguments, cu_seqlens=torch.tensor(INVALID_PACKINGS[name].cu_seqlens))


@pytest.mark.parametrize("D", [0, 129])
def test_unsupported_widths_are_refused(D: int):
    with pytest.raises(ValueError, match=rf"^chunk_ttt_linear: q and k must have width K from 1 to 128, got {D}$"):
        chunk_ttt_linear(**draw(shape(T=2, D=D), dtype=torch.float32, state="none"))


@pytest.mark.parametrize("keyword", ["head_first", "eta_row", "output_state"])
@pytest.mark.parametrize("operator", [chunk_ttt_linear, fused_recurrent_ttt_linear])
def test_unknown_keywords_are_refused(operator: Callable, keyword: str):
    with pytest.raises(TypeError, match=keyword):
        operator(**draw(shape(), dtype=torch.float32, state="none"), **{keyword: None})


def test_a_second_gradient_is_refused(backend: str):
    leaves = {n: x.requires_grad_() for n, x in draw(shape()).items()}
    o, _, _ = chunk_ttt_linear(**leaves, backend=backend)
    (dq,) = torch.autograd.grad(o.square().sum(), leaves["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once differentiable"):
        dq.sum().backward()


# --- registration and compilers --------------------------------------------------------------------------------------


def registered_call(form: str) -> tuple[Any, ...]:
    """Arguments of `wyfold::ttt_fwd`."""
    recurrent, is_packed = form.startswith("recurrent"), form.endswith("packed")
    if is_packed:
        arguments, cu = packed(RAGGED, dtype=torch.float32, published=True)
    else:
        arguments, cu = draw(shape(B=2), dtype=torch.float32), None
    S, c = arguments["initial_state"], arguments["initial_state_bias"]
    state = standing(S, c, torch.arange(len(S)) + 3) if recurrent else (S, c, None, None, None)
    options = pipeline.TTTOptions(
        operator="chunk_ttt_linear",
        recurrent=recurrent,
        residual=arguments.pop("residual", "o"),
        scale=0.3,
        eps=1e-6,
        chunk_size=16,
        state_v_first=False,
        state_dtype=torch.float32 if recurrent else torch.bfloat16,
        final_state=True,
        save=True,
        keep_states=form == "chunk packed",
        backend="eager",
    )
    tokens = (arguments.get(name) for name in ttt_records.TTTTensors._fields[:7])
    return (*tokens, *state, cu, *options)


@pytest.mark.parametrize(
    "form",
    [
        pytest.param("chunk dense", marks=pytest.mark.release),
        "chunk packed",
        pytest.param("recurrent packed", marks=pytest.mark.release),
    ],
)
def test_opcheck(form: str):
    given = registered_call(form)
    torch.library.opcheck(torch.ops.wyfold.ttt_fwd.default, given)
    found = torch.ops.wyfold.ttt_fwd(*given)
    result, saved = found[: ttt_records.RESULTS], found[ttt_records.RESULTS]
    into = [inputs.incoming(x, seed) for seed, x in enumerate(result[:-1])]
    if not form.startswith("recurrent"):
        into[3:] = [None, None]
    tensors, scalars = given[: ttt_records.TENSORS], given[ttt_records.TENSORS :]
    torch.library.opcheck(torch.ops.wyfold.ttt_bwd.default, (*tensors, saved, *into, *scalars))


def step(operator: Callable, arguments: dict[str, Any], **options: Any) -> list[Tensor]:
    """All results of one training step."""
    leaves = {n: x.clone().requires_grad_() for n, x in arguments.items() if isinstance(x, Tensor)}
    o, *states = operator(**arguments | leaves, **options)
    flat = [x for state in states if state is not None for x in (state if isinstance(state, tuple) else (state,))]
    loss = o.square().sum() + sum(x.sin().sum() for x in flat if x.is_floating_point())
    return [x.detach() for x in (o, *flat, *torch.autograd.grad(loss, list(leaves.values())))]


# PyTorch's tracer instantiates autograd.Function, which it deprecates.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("operator", "is_packed"),
    [
        pytest.param(chunk_ttt_linear, False, id="chunk-dense", marks=pytest.mark.release),
        pytest.param(chunk_ttt_linear, True, id="chunk-packed"),
        pytest.param(fused_recurrent_ttt_linear, False, id="recurrent-dense"),
        pytest.param(fused_recurrent_ttt_linear, True, id="recurrent-packed", marks=pytest.mark.release),
    ],
)
def test_compiles_whole_and_once_for_all_lengths(operator: Callable, is_packed: bool, backend: str):
    """Forward and backward in one graph with the same bits; a second length recompiles once, a third never.

    Only the packed case returns states, because compiled backwards get zeros for results without elements.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(operator, backend=counter, fullgraph=True)
    for T in (37, 70, 53):
        arguments = draw(shape(B=1 if is_packed else 2, T=T), dtype=torch.float32, state="none", published=is_packed)
        cu = torch.tensor([0, 5, 5, T - 3]) if is_packed else None
        options = {"output_final_state": is_packed, "cu_seqlens": cu, "backend": backend}
        wanted, got = (step(form, arguments, **options) for form in (operator, compiled))
        assert len(got) == len(wanted) and all(map(torch.equal, got, wanted))
    assert counter.frame_count <= 2
