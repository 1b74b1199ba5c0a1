"""`explain` named Gluon kernels where a call launched Triton kernels.

It did so if rows of v began at an odd address, if intermediate states were requested, and in the backward of
`o.sum().backward()`, whose gradient is expanded. `compiles` named the kernel of another gate. No GPU is needed:
launches are recorded instead of executed, as on an H100.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.compile import aot
from torch import Tensor

import wyfold
from wyfold import serving
from wyfold.autograd import kernel_call
from wyfold.ops import serving_call
from wyfold.reference import inputs
from wyfold.reference.shapes import Shape
from wyfold.runtime import kernel_configs, segment_rule
from wyfold.runtime.unsupported import UnsupportedError

Call = dict[str, Any]
RULES = ("delta_rule", "gated_delta_rule", "kda")


def drawn(rule: str, B: int = 1, T: int = 128) -> Call:
    """Arguments with gradients, in 16 bits, of widths that have Gluon kernels on an H100."""
    a = inputs.draw("random", rule, Shape(B, T, 1, 1, 128, 128), dtype=torch.bfloat16)
    for x in a.values():
        x.requires_grad_()
    return a | {"backend": "triton", "chunk_size": 64}


def with_row_stride(x: Tensor, step: int, first: int = 0) -> Tensor:
    """A copy of x with `step` elements from row to row, after `first` elements."""
    memory = x.new_empty(x.shape[:-1].numel() * step + first)
    return memory[first:].view(*x.shape[:-1], step)[..., : x.shape[-1]].copy_(x.detach()).requires_grad_()


def odd_v(rule: str) -> Call:
    a = drawn(rule)
    return a | {"v": with_row_stride(a["v"], 128, first=1)}


def wide_rows(rule: str) -> Call:
    a = drawn(rule)
    return a | {name: with_row_stride(a[name], 129) for name in ("q", "k", "v")}


def part_of_longer_rows(rule: str) -> Call:
    """A copy whose row stride exceeds its row length."""
    a = drawn(rule, B=2, T=192)
    return a | {name: a[name].detach()[:, :128].requires_grad_() for name in ("q", "k", "v", "g", "beta") if name in a}


def states_on_the_way(rule: str) -> Call:
    return drawn(rule) | {"return_intermediate_states": True, "checkpoint_every": 64}


def packed(rule: str) -> Call:
    return odd_v(rule) | {"cu_seqlens": torch.tensor([0, 100, 128])}


def normalised(rule: str) -> Call:
    return drawn(rule) | {"use_qk_l2norm_in_kernel": True}


def kept(rule: str) -> Call:
    return odd_v(rule) | {"disable_recompute": True}


CALLS = (drawn, odd_v, wide_rows, part_of_longer_rows, states_on_the_way, packed, normalised, kept)
GRADIENTS = {
    "expanded": lambda o: torch.ones((), dtype=o.dtype).expand(o.shape),
    "odd": lambda o: o.new_zeros(o.numel() + 1)[1:].view(o.shape),
    "plain": torch.zeros_like,
}


def launches(run: Callable[[], object]) -> list[tuple[str, str]]:
    """(kernel folder and language, kernel) of every launch of `run`, in order."""
    seen: list[tuple[str, str]] = []
    with aot.pretend_gpu("sm_90", lambda kernel, *_, **__: seen.append((aot.kernel_name(kernel), kernel.fn.__name__))):
        run()
    return seen


def named_in(lines: tuple[str, ...]) -> set[str]:
    """`folder.language` of the launches in a plan's lines."""
    return {".".join(line.partition("(wyfold.kernels.")[2].rstrip(")").split(".")[:2]) for line in lines}


def explained(op: Callable[..., Any], a: Call) -> Any:
    """The plan of a call whose kernels are not compiled yet."""
    with aot.pretend_gpu("sm_90", lambda *_, **__: None), pytest.MonkeyPatch.context() as patch:
        names = kernel_configs.compiled
        patch.setattr(kernel_configs, "compiled", lambda *given: {name: {} for name in names(*given)})
        return wyfold.explain(op, **a)


def compare(rule: str, a: Call, gradient: Callable[[Tensor], Tensor]) -> None:
    op, outputs, rows, usual = getattr(wyfold, f"chunk_{rule}"), [], set(), kernel_configs.row

    def row(architecture: str, kernel: str, key: str) -> str:
        rows.add((kernel.partition(".")[0], usual(architecture, kernel, key)))
        return usual(architecture, kernel, key)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_configs, "row", row)
        forward = launches(lambda: outputs.append(op(**a)[0]))
        back = launches(lambda: torch.autograd.backward(outputs[0], gradient(outputs[0])))
    plan = explained(op, a)
    assert rows == {(stage, row) for stage, _, row in plan.rows}
    for found, said in ((forward, plan.forward), (back, plan.backward)):
        assert {stage for stage, _ in found} == named_in(said)
    assert {kernel for _, kernel in forward + back} == set(plan.compiles)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("rule", RULES)
def test_layouts_of_the_arguments(rule: str, call: Callable[[str], Call]):
    compare(rule, call(rule), GRADIENTS["plain"])


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("rule", RULES)
def test_layouts_of_the_gradient(rule: str, gradient: str):
    compare(rule, drawn(rule), GRADIENTS[gradient])


@pytest.mark.parametrize("gradient", GRADIENTS)
@pytest.mark.parametrize("rule", RULES)
def test_in_segments(rule: str, gradient: str):
    """With segment summaries in both directions."""
    a = drawn(rule, T=256)
    with segment_rule.forced(4):
        compare(rule, a | {"v": with_row_stride(a["v"], 128, first=1)}, GRADIENTS[gradient])


def test_explain_names_what_is_copied_first():
    with aot.pretend_gpu("sm_90", lambda *_, **__: None):
        assert wyfold.explain(wyfold.chunk_gated_delta_rule, **odd_v("gated_delta_rule")).copies == ("v",)
        assert wyfold.explain(wyfold.chunk_gated_delta_rule, **drawn("gated_delta_rule")).copies == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_other_dtypes(rule: str, dtype: torch.dtype):
    a = {name: x.detach().to(dtype).requires_grad_() if isinstance(x, Tensor) else x for name, x in drawn(rule).items()}
    compare(rule, a | {"v": with_row_stride(a["v"], 128, first=1)}, GRADIENTS["expanded"])


@pytest.mark.parametrize("rule", ["kda", "gla"])
def test_keys_of_256_channels(rule: str):
    """GLA reads fewer factors, so that a third stage fits beside the tiles, which KDA has no memory for."""
    a = inputs.draw("random", rule, Shape(1, 128, 1, 1, 256, 512), dtype=torch.bfloat16)
    for x in a.values():
        x.requires_grad_()
    a |= {"backend": "triton", "chunk_size": 32}
    compare(rule, a, GRADIENTS["plain"])
    rows = {stage: row for stage, _, row in explained(getattr(wyfold, f"chunk_{rule}"), a).rows}
    assert rows["scan"] == rows["scan_bwd"] == f"bf16 BK256 C32 channel{' additive' if rule == 'gla' else ''}"


@pytest.mark.parametrize("chunk_size", [32, 64])
@pytest.mark.parametrize("rule", ["dplr_delta_rule", "gdn2"])
def test_kernels_of_low_rank_rules(rule: str, chunk_size: int):
    """`compiles` named both kernels of `low_rank_prepare` in Gluon, of which a call launches one."""
    a = inputs.draw("random", rule, Shape(1, 128, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    for x in a.values():
        x.requires_grad_()
    a |= {"backend": "triton", "chunk_size": chunk_size}
    op = getattr(wyfold, f"chunk_{rule}")
    found = launches(lambda: op(**a)[0].float().sum().backward())
    assert {kernel for _, kernel in found} == set(explained(op, a).compiles)


def test_low_rank_rules_in_segments():
    """`segment_fold` was named in Gluon, but launched in Triton."""
    a = inputs.draw("random", "dplr_delta_rule", Shape(1, 256, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    for x in a.values():
        x.requires_grad_()
    a |= {"backend": "triton", "chunk_size": 32}
    with segment_rule.forced(4):
        found = launches(lambda: wyfold.chunk_dplr_delta_rule(**a)[0].float().sum().backward())
        plan = explained(wyfold.chunk_dplr_delta_rule, a)
    assert plan.segments == 4
    assert {stage for stage, _ in found} == named_in(plan.forward + plan.backward)


@pytest.mark.parametrize("asked", ["out", "out in float32", "states on the way"])
def test_prefill_of_gdn2(asked: str, monkeypatch: pytest.MonkeyPatch):
    """The scan in Gluon has outputs of the dtype of v alone, but was launched for others.

    It has no states on the way. There `explain` named it, and the call launched Triton's.
    """
    monkeypatch.setattr(serving_call, "best_chunk_size", lambda *_, **__: 64)  # as on a GPU
    a: Call = inputs.draw("random", "gdn2", Shape(1, 128, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    a |= {"beta": None, "pool": torch.zeros(3, 1, 128, 128), "state_indices": torch.tensor([1]), "rule": "gdn2"}
    a |= {"state_v_first": False, "backend": "triton"}
    if asked == "states on the way":
        a |= {"checkpoint_every": 64, "checkpoint_pool": torch.zeros(3, 1, 128, 128)}
        a |= {"checkpoint_indices": torch.tensor([[0, 2]])}
    else:
        a |= {"out": torch.empty_like(a["v"], dtype=torch.float32 if "float32" in asked else None)}
    launched = {kernel for _, kernel in launches(lambda: serving.prefill(**a))}
    scan = "gluon" if asked == "out" else "triton"
    assert f"low_rank_scan.{scan}" in named_in(explained(serving.prefill, a).forward)
    assert ("wyfold_scan_gluon" in launched) == (scan == "gluon")
    assert ("wyfold_low_rank_scan_triton" in launched) == (scan == "triton")


@pytest.mark.parametrize("rule", RULES[1:])
@pytest.mark.parametrize("kind", ["dense", "two streams", "packed", "out in float32"])
def test_prefill_in_segments(rule: str, kind: str, monkeypatch: pytest.MonkeyPatch):
    """Of a dense batch no table is made, and on one stream the summaries copy the states that enter."""
    monkeypatch.setattr(serving_call, "best_chunk_size", lambda *_, **__: 64)  # as on a GPU
    a = inputs.draw("random", rule, Shape(1, 256, 1, 1, 128, 128), gate="weak", dtype=torch.bfloat16)
    a |= {"pool": torch.zeros(3, 1, 128, 128), "state_indices": torch.tensor([1]), "state_v_first": True}
    a |= {"use_qk_l2norm_in_kernel": True, "backend": "triton"}
    if kind == "two streams":
        monkeypatch.setattr(kernel_call, "LONG", {"scalar": 1, "channel": 1})
    elif kind == "packed":
        a |= {"cu_seqlens": torch.tensor([0, 256])}
    elif kind == "out in float32":
        a |= {"out": torch.empty(1, 256, 1, 128)}
    with segment_rule.forced(4):
        plan = explained(serving.prefill, a)
        found = launches(lambda: serving.prefill(**a))
    assert named_in(plan.forward) == {name for name, _ in found} and plan.segments == 4
    pool, grid = "state_pool.triton", "segment_grid.triton"
    between = {"dense": set(), "two streams": {pool}}.get(kind, {pool, grid})
    assert {pool, grid} & {name for name, _ in found} == between
    assert ("state_pool" in {row.stage for row in plan.rows}) == (pool in between)


@pytest.mark.parametrize("run", [serving.prefill, partial(wyfold.explain, serving.prefill)], ids=["call", "explain"])
def test_prefill_in_float64_is_refused(run: Callable[..., Any]):
    """`explain` of a prompt in segments raised KeyError, because float64 has no launch keys."""
    a = inputs.draw("random", "gated_delta_rule", Shape(1, 256, 1, 1, 16, 16), dtype=torch.float64)
    a |= {"pool": torch.zeros(3, 1, 16, 16).double(), "state_indices": torch.tensor([1]), "state_v_first": True}
    with segment_rule.forced(4), pytest.raises(UnsupportedError, match=r"float64|need a CUDA GPU"):
        run(**a, backend="triton")
