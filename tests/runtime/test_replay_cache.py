"""Replay cache: a replayed call makes the launches of an ordinary one on its own tensors, or is not replayed."""

import contextlib
import ctypes
import gc
import importlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import wyfold
from wyfold import SequenceLayout, serving
from wyfold.autograd import delta_chunk
from wyfold.autograd.head_parts import HeadPart
from wyfold.layers import GatedDeltaNet, KimiDeltaAttention
from wyfold.runtime import check, kernel_configs, kernel_launch, recorded_launch, recorder, replay_cache
from wyfold.runtime.recording import _FAST_EMPTY, Allocate, Operation
from wyfold.runtime.replay_cache import PublicOperator, Recording, planned

triton = pytest.importorskip("triton")

from tests.compile.aot import pretend_gpu  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter")

B, T, H, HV, D, N = 1, 128, 2, 4, 64, 3

# --- a fake GPU that logs launches -----------------------------------------------------------------------------------

TMA_DTYPE_DEVICE_TO_HOST = {0: 0}


def make_tensordesc_arg(x: Any, layout: Any) -> list[Any]:
    """Stand-in for the function of this name in the module of Triton's launcher."""
    return [encoded(x.base.data_ptr(), 0, 0, 0, layout["block_size"], x.shape, x.strides, 0), *x.shape, *x.strides]


def encoded(address: int, *rest: Any) -> tuple[Any, ...]:
    return "box", address, *map(str, rest)


def alignment(arguments: tuple[Any, ...]) -> str:
    """For each tensor of a launch, 1 if Triton compiles the kernel for an address that is a multiple of 16, else 0."""
    found = ""
    for x in arguments:
        if isinstance(x, tuple):
            found += alignment(x)
        elif isinstance(x, torch.Tensor):
            found += str(int(x.data_ptr() % 16 == 0))
    return found


class LoggedLauncher:
    """Launcher of a compiled kernel on the fake GPU: appends each launch to `lines`.

    A line has the kernel's name, the alignment of the addresses that it was compiled for, and the launch's numbers.
    """

    def __init__(self, lines: list[tuple[Any, ...]], name: str, boxes: int, aligned: str):
        layout = {"swizzle": 0, "elem_size": 0, "elem_type": 0, "block_size": 0, "fp4_padded": False}
        launcher, tensordesc_meta = (lambda *x: lines.append((name, aligned, *x))), [layout] * boxes

        def inner(*arguments: Any) -> None:
            launcher(*arguments, *tensordesc_meta)

        self.launch = inner if boxes else launcher

    def __call__(self, programs: int, _: int, __: int, stream: int, *arguments: Any) -> None:
        self.launch(programs, stream, *arguments)


@pytest.fixture
def lines() -> Iterator[list[tuple[Any, ...]]]:
    """Log of the launches of compiled kernels, in order. Tensors are on the CPU."""
    found: list[tuple[Any, ...]] = []

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
        boxes = sum(hasattr(x, "block_shape") for x in arguments)
        return SimpleNamespace(
            run=LoggedLauncher(found, self.__name__, boxes, alignment(arguments)),
            function=self.__name__,
            packed_metadata=(),
        )

    with (
        pretend_gpu("sm_90", lambda *_, **__: None),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(driver.active, "utils", SimpleNamespace(fill_tma_descriptor=encoded), create=True),
        mock.patch.object(driver.active, "get_current_device", lambda: 0),
        mock.patch.object(kernel_configs, "processors", lambda device: 132),
        mock.patch.object(check, "readable", lambda x: False),
        mock.patch.object(replay_cache, "DEVICES", frozenset(("cpu",))),
        mock.patch.dict(kernel_launch._launches, clear=True),
        mock.patch.dict(replay_cache._entries, clear=True),
        mock.patch.dict(replay_cache._alike, clear=True),
    ):
        yield found


@contextlib.contextmanager
def without_replay() -> Iterator[None]:
    with mock.patch.object(replay_cache, "DEVICES", frozenset()):
        yield


Made = tuple[Callable[..., Any], dict[str, Any]]


def tokens(rule: str, B: int = B, T: int = T) -> dict[str, Any]:
    gate = {"gdn": (B, T, HV), "kda": (B, T, HV, D)}.get(rule)
    q, k, v = (torch.randn(B, T, heads, D, dtype=torch.bfloat16) for heads in (H, H, HV))
    return {"q": q, "k": k, "v": v, "g": None if gate is None else -torch.rand(gate), "beta": torch.rand(B, T, HV)}


def chunked(rule: str, **options: Any) -> Made:
    call = {"delta": wyfold.chunk_delta_rule, "gdn": wyfold.chunk_gdn, "kda": wyfold.chunk_kda}[rule]
    given = {**tokens(rule), **options, "backend": "triton"}
    if rule == "delta":
        del given["g"]
    return call, given


def recurrent(rule: str) -> Made:
    call, given = chunked(rule, initial_state=torch.randn(B, HV, D, D), output_final_state=True)
    return getattr(wyfold, call.__name__.replace("chunk", "fused_recurrent")), given


def pooled(**more: Any) -> dict[str, Any]:
    index = torch.arange(N, dtype=torch.int32)
    return {
        "pool": torch.randn(9, HV, D, D),
        "state_indices": index,
        "state_v_first": True,
        **more,
        "backend": "triton",
    }


def decoded(rule: str, *, swapped: bool = False, out: bool = False, **options: Any) -> Made:
    given = tokens(rule, *((1, N) if swapped else (N, 1)))
    return serving.decode, {**given, **pooled(**options), "out": torch.empty_like(given["v"]) if out else None}


def verified(rule: str) -> Made:
    slots = pooled(state_indices=torch.arange(9).view(N, 3), num_accepted_tokens=torch.ones(N, dtype=torch.int64))
    return serving.verify, {**tokens(rule, N, 3), **slots}


def prefilled(rule: str, **options: Any) -> Made:
    given = {**tokens(rule), **pooled(cu_seqlens=layout()), **options}
    if given["cu_seqlens"] is None:
        given["state_indices"] = given["state_indices"][:B]
    return serving.prefill, given


def between(*rows: int) -> dict[str, Any]:
    """Options that store states after every 64 tokens, in a separate pool."""
    where = torch.arange(B * (T // 64)).view(rows)
    return {"checkpoint_every": 64, "checkpoint_pool": torch.randn(9, HV, D, D), "checkpoint_indices": where}


def decoded_packed(rule: str) -> Made:
    raw = torch.randn(N, HV, *([D] if rule == "kda" else []))
    given = {"mixed_qkv": torch.randn(N, (2 * H + HV) * D), "raw_g": raw, "raw_beta": torch.randn(N, HV)}
    gate = {"A_log": torch.randn(HV), "dt_bias": torch.randn(raw.shape[1:])}
    return serving.decode_packed, {**given, **gate, **pooled(), "heads": (H, HV), "dims": (D, D)}


def inner(**options: Any) -> Made:
    """A call of TTT-Linear over whole sequences."""
    q, k, v = (torch.randn(B, T, heads, D, dtype=torch.bfloat16) for heads in (HV, HV, HV))
    given = {"q": q, "k": k, "v": v, "w": torch.randn(HV, D), "b": torch.randn(HV, D), "eta": torch.rand(B, T, HV, 1)}
    return wyfold.chunk_ttt_linear, {**given, **options, "backend": "triton"}


def inner_decoded(*, swapped: bool = False, out: bool = False, **options: Any) -> Made:
    q, k, v = torch.randn(3, *((1, N) if swapped else (N, 1)), HV, D).unbind()
    S, c = torch.randn(2, 9, HV, D, D), torch.randn(2, 9, HV, 1, D)
    pool = wyfold.TTTState(S[0], c[0], S[1], c[1], torch.zeros(9, dtype=torch.int32))
    given = {"q": q, "k": k, "v": v, "w": torch.randn(HV, D), "b": torch.randn(HV, D), "eta": torch.rand(*v.shape[:3])}
    slots = {"pool": pool, "state_indices": torch.arange(N), "out": torch.empty_like(v) if out else None}
    return serving.ttt_decode, {**given, **slots, **options, "backend": "triton"}


def inverted(**options: Any) -> Made:
    return wyfold.solve_tril, {"A": torch.randn(B, T, HV, 64).tril(-1), **options, "backend": "triton"}


def grams(**options: Any) -> Made:
    given = {"k": torch.randn(B, T, H, D, dtype=torch.bfloat16), "beta": torch.rand(B, T, HV)}
    return wyfold.chunk_scaled_dot_kkt, {**given, **options, "backend": "triton"}


def gated(rule: str, **options: Any) -> Made:
    call, shape = {"gdn": (wyfold.fused_gdn_gate, (HV,)), "kda": (wyfold.fused_kda_gate, (HV, D))}[rule]
    given = {"g": torch.randn(B, T, *shape), "A_log": torch.randn(HV), "dt_bias": torch.randn(shape)}
    return call, {**given, **options, "backend": "triton"}


def strengths(**options: Any) -> Made:
    return wyfold.fused_beta_sigmoid, {"x": torch.randn(B, T, HV, dtype=torch.bfloat16), **options, "backend": "triton"}


def layout() -> SequenceLayout:
    return SequenceLayout(torch.tensor([0, 40, 41, T]), T)


def convolved(**options: Any) -> Made:
    x, weight = torch.randn(B, T, 64), torch.randn(64, 4)
    return wyfold.causal_conv1d, {"x": x, "weight": weight, "activation": "silu", "backend": "triton", **options}


def conv_updated() -> Made:
    given = {"x": torch.randn(N, 64), "pool": torch.randn(9, 64, 3), "weight": torch.randn(64, 4)}
    return serving.conv1d_update, {**given, "state_indices": torch.arange(N), "backend": "triton"}


def normed(**options: Any) -> Made:
    x, g = torch.randn(2, B, T, HV, D)
    return wyfold.rms_norm_gated, {"x": x, "g": g, "weight": torch.randn(D), "backend": "triton", **options}


KINDS: dict[str, Callable[[], Made]] = {
    "chunk delta": lambda: chunked("delta"),
    "chunk gdn": lambda: chunked("gdn", output_final_state=True, use_qk_l2norm_in_kernel=True),
    "chunk gdn, packed": lambda: chunked("gdn", cu_seqlens=layout(), output_final_state=True),
    "chunk gdn, boundaries": lambda: chunked("gdn", cu_seqlens=torch.tensor([0, 40, T], dtype=torch.int32)),
    "chunk gdn, packed, states between": lambda: chunked(
        "gdn", cu_seqlens=layout(), return_intermediate_states=True, checkpoint_every=64
    ),
    "chunk kda": lambda: chunked("kda", initial_state=torch.randn(B, HV, D, D)),
    "chunk kda, gate inside": lambda: chunked("kda", use_gate_in_kernel=True, A_log=torch.randn(HV)),
    "chunk gdn, rows apart": lambda: chunked("gdn", q=torch.randn(B, T, H, 2 * D, dtype=torch.bfloat16)[..., ::2]),
    "chunk gdn, no tokens": lambda: chunked("gdn", **tokens("gdn", T=0)),
    "recurrent gdn": lambda: recurrent("gdn"),
    "decode delta": lambda: decoded("delta"),
    "decode gdn": lambda: decoded("gdn", out=True),
    "decode kda, swapped": lambda: decoded("kda", swapped=True),
    "decode gdn, swapped, out": lambda: decoded("gdn", swapped=True, out=True),
    "decode gdn, flags": lambda: decoded("gdn", has_initial_state=torch.ones(N, dtype=torch.bool)),
    "verify gdn": lambda: verified("gdn"),
    "prefill kda": lambda: prefilled("kda"),
    "prefill kda, states between": lambda: prefilled("kda", **between(T // 64)),
    "prefill gdn, dense": lambda: prefilled("gdn", cu_seqlens=None),
    "prefill gdn, elsewhere": lambda: prefilled(
        "gdn", has_initial_state=torch.ones(N, dtype=torch.bool), output_state_indices=torch.arange(N) + 4
    ),
    "prefill gdn, in order": lambda: prefilled("gdn", state_indices=None),
    "prefill gdn, dense, states between": lambda: prefilled("gdn", cu_seqlens=None, **between(B, T // 64)),
    "decode_packed gdn": lambda: decoded_packed("gdn"),
    "decode_packed kda": lambda: decoded_packed("kda"),
    "conv": convolved,
    "conv, packed": lambda: convolved(cu_seqlens=layout(), output_final_state=True),
    "conv1d_update": conv_updated,
    "rms_norm_gated": normed,
    "l2norm": lambda: (wyfold.l2norm, {"x": torch.randn(3, 64), "backend": "triton"}),
    "ttt": inner,
    "ttt, steps as numbers": lambda: inner(eta=0.1, eta_col=2, residual="q"),
    "ttt, packed": lambda: inner(cu_seqlens=layout(), initial_state=torch.randn(N, HV, D, D), output_final_state=True),
    "ttt_decode": inner_decoded,
    "ttt_decode, swapped": lambda: inner_decoded(swapped=True, eta=0.1),
    "ttt_decode, swapped, out": lambda: inner_decoded(swapped=True, out=True),
    "solve_tril": inverted,
    "solve_tril, packed": lambda: inverted(cu_seqlens=layout(), output_dtype=torch.bfloat16),
    "chunk_scaled_dot_kkt": grams,
    "chunk_scaled_dot_kkt, packed": lambda: grams(g=-torch.rand(B, T, HV), cu_seqlens=layout()),
    "chunk_scaled_dot_kkt, copied rows": lambda: grams(g=-torch.rand(B, T, HV, D + 1)[..., :D]),
    "fused_gdn_gate": lambda: gated("gdn"),
    "fused_kda_gate": lambda: gated("kda", lower_bound=-5.0),
    "fused_beta_sigmoid": strengths,
}
# Without tokens nothing is launched.
LAUNCHED = [kind for kind in KINDS if kind != "chunk gdn, no tokens"]


def tensors_of(result: Any) -> list[torch.Tensor]:
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def observe(made: Made, lines: list[tuple[Any, ...]]) -> tuple[Any, list[tuple[Any, ...]], dict[str, torch.Tensor]]:
    """Make a call, and return its result, its launches, and all its tensors by name."""
    lines.clear()
    call, given = made
    result = call(**given)
    named = {**given, **{f"result {n}": x for n, x in enumerate(tensors_of(result))}}
    if isinstance(given.get("cu_seqlens"), SequenceLayout):
        named["cu_seqlens"] = given["cu_seqlens"].cu_seqlens
    if isinstance(given.get("pool"), wyfold.TTTState):
        named |= {f"pool.{name}": x for name, x in given["pool"]._asdict().items()}
    return result, lines.copy(), {name: x for name, x in named.items() if isinstance(x, torch.Tensor)}


def place(address: Any, tensors: dict[str, torch.Tensor]) -> tuple[str, int] | None:
    """Name of the tensor that an address points into, and the offset in bytes from its first element."""
    if isinstance(address, int):
        for name, x in tensors.items():
            span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride()))
            if 0 <= address - x.data_ptr() < span * x.itemsize:
                return name, address - x.data_ptr()
    return None


NUMBERS = 2**20
"""Bound between numbers and addresses: sizes and strides here are smaller, addresses larger on any heap."""


def alike(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]], *tensors: dict[str, torch.Tensor]) -> bool:
    """Whether launches differ in addresses only, and equal addresses refer to the same memory in both calls."""
    there: dict[int, int] = {}
    back: dict[int, int] = {}

    def same(x: Any, y: Any) -> bool:
        if isinstance(x, tuple) and x[:1] == ("box",) and isinstance(y, tuple):
            return same(x[1], y[1]) and x[2:] == y[2:]
        if isinstance(x, tuple) and isinstance(y, tuple):
            return len(x) == len(y) and all(itertools.starmap(same, zip(x, y, strict=True)))
        places = place(x, tensors[0]), place(y, tensors[1])
        if any(places):
            return places[0] == places[1]
        if type(x) is int and type(y) is int and min(x, y) > NUMBERS:
            return there.setdefault(x, y) == y and back.setdefault(y, x) == x
        return type(x) is type(y) and x == y

    return len(one) == len(other) and all(
        len(a) == len(b) and all(itertools.starmap(same, zip(a, b, strict=True))) for a, b in zip(one, other)
    )


def first_recording() -> Recording | str | None:
    """Recording of the first kind of call that was made, or why there is none."""
    return next(iter(replay_cache._entries.values())).recording


def recordings() -> list[Recording | str]:
    """All recordings, and the reasons why there is none."""
    return [entry.recording for entry in replay_cache._entries.values() if entry.recording]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", LAUNCHED)
def test_a_replayed_call_makes_the_launches_of_the_first(kind: str, mode: Any, lines: list[tuple[Any, ...]]):
    """Also with gradients on, if no argument requires one."""
    with mode():
        with without_replay():
            observe(KINDS[kind](), lines)  # compiles
            first = KINDS[kind]()
            wanted, launches, tensors = observe(first, lines)
        for _ in range(2):
            _, recorded, others = observe(KINDS[kind](), lines)
            assert alike(launches, recorded, tensors, others)
        recording = first_recording()
        assert isinstance(recording, Recording), recording
        with (
            mock.patch.object(kernel_configs, "tuned", None),
            mock.patch.object(check, "shapes", None),
        ):  # a replay plans nothing
            for _ in range(2):
                result, again, others = observe(KINDS[kind](), lines)
                assert again and alike(launches, again, tensors, others)
    assert type(result) is type(wanted)
    for got, expected in zip(tensors_of(result), tensors_of(wanted), strict=True):
        assert got.shape == expected.shape and got.stride() == expected.stride() and got.dtype == expected.dtype
        assert got.is_inference() == expected.is_inference() and not got.requires_grad


PREFILL = {
    "prefill kda": "chunk_grid prepare scan",
    "prefill kda, states between": "chunk_grid prepare scan state_pool_between",
    "prefill gdn, dense": "prepare scan",
    "prefill gdn, dense, states between": "prepare scan state_pool_between",
}


@pytest.mark.parametrize("kind", PREFILL)
def test_what_a_prefill_launches(kind: str, lines: list[tuple[Any, ...]]):
    """The launches of the chunk form. States are copied only where intermediate ones are stored."""
    launches = PREFILL[kind].split()
    make_replayed(KINDS[kind](), lines)
    with torch.no_grad():
        _, found, _ = observe(KINDS[kind](), lines)
    assert [line[0] for line in found] == [f"wyfold_{name}_triton" for name in launches]


WITH_GRAD: dict[str, Callable[[], Made]] = {
    "chunk delta": lambda: chunked("delta", use_qk_l2norm_in_kernel=True),
    "chunk gdn": lambda: chunked("gdn", initial_state=torch.randn(B, HV, D, D), output_final_state=True),
    "chunk gdn, packed": lambda: chunked("gdn", cu_seqlens=layout()),
    "chunk kda": lambda: chunked("kda", disable_recompute=True),
    "chunk kda, gate inside": lambda: chunked(
        "kda", use_gate_in_kernel=True, A_log=torch.randn(HV), dt_bias=torch.randn(HV, D, dtype=torch.bfloat16)
    ),
    "recurrent gdn": lambda: recurrent("gdn"),
    "recurrent gdn, packed": lambda: (recurrent("gdn")[0], chunked("gdn", cu_seqlens=layout())[1]),
    "conv": lambda: convolved(bias=torch.randn(64)),
    "rms_norm_gated": normed,
    "l2norm": KINDS["l2norm"],
    "ttt": lambda: inner(eta_col=torch.rand(B, T, HV, 1)),
    "ttt, packed": KINDS["ttt, packed"],
    "ttt, groups": lambda: inner(q=torch.randn(B, T, H, D, dtype=torch.bfloat16), k=inner()[1]["q"][:, :, :H]),
    "fused_gdn_gate": lambda: gated("gdn", A_log=torch.randn(HV, 1, dtype=torch.bfloat16)),
    "fused_kda_gate": lambda: gated("kda", dt_bias=torch.randn(HV * D)),
    "fused_beta_sigmoid": strengths,
}


def grad_of(made: Made, lines: list[tuple[Any, ...]]) -> tuple[list[torch.Tensor], Any, dict[str, torch.Tensor]]:
    """Differentiate a call: gradients of its floating arguments, launches of both directions, and all tensors."""
    given = made[1]
    leaves = {n: x.requires_grad_() for n, x in given.items() if isinstance(x, torch.Tensor) and x.is_floating_point()}
    results, _, tensors = observe(made, lines)
    found = [x for x in tensors_of(results) if x.requires_grad]
    incoming = [torch.ones_like(x) for x in found]
    gradients = torch.autograd.grad(found, list(leaves.values()), incoming)
    named = {f"d{name}": dx for name, dx in zip(leaves, gradients)}
    return list(gradients), lines.copy(), tensors | named | {f"incoming {n}": x for n, x in enumerate(incoming)}


@pytest.fixture
def memory_once() -> Iterator[None]:
    """Keep all memory alive, so that an address identifies one tensor for the whole test."""
    kept: list[torch.Tensor] = []

    def keeping(made: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def keep(*arguments: Any, **options: Any) -> torch.Tensor:
            kept.append(made(*arguments, **options))
            return kept[-1]

        return keep

    def replay(step: Operation, stream: Any, tensors: list[Any], addresses: list[int]) -> None:
        usual(step, stream, tensors, addresses)
        kept.extend(x for x in tensors if x is not None)

    usual = Operation.replay
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.dict(_FAST_EMPTY, clear=True))
        made = (torch, ["empty_strided", "eye", "cat"]), (torch.Tensor, ["new_empty", "new_zeros", "clone"])
        for where, names in made:
            for name in names:
                patches.enter_context(mock.patch.object(where, name, keeping(getattr(where, name))))
        patches.enter_context(mock.patch.object(Operation, "replay", replay))
        yield


@pytest.mark.parametrize("kind", WITH_GRAD)
def test_both_directions_of_a_differentiated_call(kind: str, lines: list[tuple[Any, ...]], memory_once: None):
    with without_replay():
        for _ in range(2):
            wanted, launches, tensors = grad_of(WITH_GRAD[kind](), lines)
    for _ in range(4):
        got, again, others = grad_of(WITH_GRAD[kind](), lines)
        assert alike(launches, again, tensors, others)
    assert [(x.shape, x.stride(), x.dtype) for x in got] == [(x.shape, x.stride(), x.dtype) for x in wanted]
    assert [type(recording) for recording in recordings()] == [Recording, Recording]


@pytest.mark.parametrize("rule", ["gdn", "kda"])
def test_a_backward_in_parts_of_heads(
    rule: str, lines: list[tuple[Any, ...]], memory_once: None, monkeypatch: pytest.MonkeyPatch
):
    """One key head after the other: prepare, scan_bwd and gradients for each, on views of the same tensors."""
    made = lambda: chunked(rule, initial_state=torch.randn(B, HV, D, D), use_qk_l2norm_in_kernel=True)
    parts = [HeadPart(slice(i, i + 1), slice(i * HV // H, (i + 1) * HV // H)) for i in range(H)]
    monkeypatch.setattr(delta_chunk, "head_parts", lambda *_: parts)
    monkeypatch.setattr(delta_chunk.KernelCall, "splits_heads", True)
    with without_replay():
        for _ in range(2):
            wanted, launches, tensors = grad_of(made(), lines)
    kernels = "prepare", "scan", *("prepare", "scan_bwd", "gradients") * H
    assert [launch[0] for launch in launches] == [f"wyfold_{name}_triton" for name in kernels]
    for _ in range(4):
        got, again, others = grad_of(made(), lines)
        assert alike(launches, again, tensors, others)
    assert [(x.shape, x.stride(), x.dtype) for x in got] == [(x.shape, x.stride(), x.dtype) for x in wanted]
    assert [type(recording) for recording in recordings()] == [Recording, Recording]


def layered(kind: type[torch.nn.Module], **options: Any) -> Made:
    """A call of a layer as a function of its input and parameters, in their order."""
    layer = kind(16, H, H if kind is KimiDeltaAttention else HV, D, backend="triton")
    given = {name.replace(".", "_"): x.detach().clone() for name, x in layer.named_parameters()}
    given = {name: x if "A_log" in name or "dt_bias" in name else x.bfloat16() for name, x in given.items()}

    def call(cu_seqlens: SequenceLayout | None, **tensors: torch.Tensor) -> torch.Tensor:
        x, *parameters = tensors.values()
        for (name, _), parameter in zip([*layer.named_parameters()], parameters, strict=True):
            owner, _, of = name.rpartition(".")
            layer.get_submodule(owner)._parameters[of] = parameter
        return layer(x, layout=cu_seqlens)

    return call, {"cu_seqlens": None, **options, "x": torch.randn(B, T, 16, dtype=torch.bfloat16), **given}


LAYERS: dict[str, Callable[[], Made]] = {
    "gdn": lambda: layered(GatedDeltaNet),
    "gdn, packed": lambda: layered(GatedDeltaNet, cu_seqlens=layout()),
    "kda": lambda: layered(KimiDeltaAttention),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_both_directions_of_a_layer(kind: str, lines: list[tuple[Any, ...]], memory_once: None):
    """A layer is one call in each direction. The first call compiles, and replays launch what the second does."""
    for _ in range(2):
        wanted, launches, tensors = grad_of(LAYERS[kind](), lines)
    for _ in range(3):
        got, again, others = grad_of(LAYERS[kind](), lines)
        assert alike(launches, again, tensors, others)
    assert [(x.shape, x.stride(), x.dtype) for x in got] == [(x.shape, x.stride(), x.dtype) for x in wanted]
    assert [type(recording) for recording in recordings()] == [Recording, Recording]


def test_gradients_of_some_arguments(lines: list[tuple[Any, ...]]):
    """The set of requested gradients is part of the key of a backward."""
    for names in ("q", "kv", "g", "qkv"):
        for _ in range(4):
            call, given = chunked("gdn")
            leaves = [given[name].requires_grad_() for name in names]
            found = torch.autograd.grad(call(**given)[0].sum(), leaves)
            assert [x.shape for x in found] == [x.shape for x in leaves]


def leaked(transform: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    """A tensor equal to x that a transform of torch.func made, which has ended since."""
    kept: list[torch.Tensor] = []

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept.append(x.clone())
        return x.sum()

    transform(keep)(x)
    return kept[0]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize])
def test_a_tensor_of_a_transform_that_has_ended(transform: Any, lines: list[tuple[Any, ...]]):
    """It is no plain tensor, so PyTorch's whole `apply` has to see it."""
    for number in range(4):
        call, given = normed(weight=torch.randn(D, requires_grad=True))
        for x in (given["x"], leaked(transform, given["x"])):
            lines.clear()
            y = call(**{**given, "x": x})
            (dweight,) = torch.autograd.grad(y, given["weight"], torch.ones_like(y))
            assert dweight.shape == (D,) and (len(lines) == 2 or number == 0)
            assert all(sum(type(x) is int and x > NUMBERS for x in line) == 4 for line in lines[:1])  # addresses


def test_a_second_derivative_is_refused(lines: list[tuple[Any, ...]]):
    for _ in range(4):
        call, given = chunked("gdn")
        q = given["q"].requires_grad_()
        (dq,) = torch.autograd.grad(call(**given)[0].sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="once differentiable"):
            dq.sum().backward()


def test_a_call_without_launches_is_not_recorded(lines: list[tuple[Any, ...]]):
    call, given = KINDS["chunk gdn, no tokens"]()
    results = [call(**given)[0].shape for _ in range(4)]
    assert len(set(results)) == 1 and first_recording() == "no kernel is launched"


def test_out_is_returned_itself(lines: list[tuple[Any, ...]]):
    for kind in ("decode gdn", "decode gdn, swapped, out", "ttt_decode, swapped, out"):
        for _ in range(4):
            call, given = KINDS[kind]()
            assert call(**given) is given["out"]


# --- what the key has to cover ---------------------------------------------------------------------------------------


def make_replayed(made: Made, lines: list[tuple[Any, ...]]) -> None:
    """Make such calls until they are replayed."""
    call, given = made
    with torch.no_grad():
        for _ in range(3):
            call(**given)
    lines.clear()


CHANGES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "tokens": lambda a: tokens("gdn", T=64),
    "strides": lambda a: {"q": a["q"].transpose(1, 2).contiguous().transpose(1, 2)},
    "address": lambda a: {"beta": torch.rand(B * T * HV + 1)[1:].view(B, T, HV)},
    "dtype": lambda a: {"beta": a["beta"].bfloat16()},
    "no tensor": lambda a: {"beta": None},
    "one more tensor": lambda a: {"initial_state": torch.zeros(B, HV, D, D)},
    "boundaries": lambda a: {"cu_seqlens": torch.tensor([0, T])},
    "number": lambda a: {"scale": 0.5},
    "flag": lambda a: {"output_final_state": True},
    "chunk": lambda a: {"chunk_size": 32},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_with_another_argument_is_not_replayed(change: str, lines: list[tuple[Any, ...]]):
    call, given = chunked("gdn")
    make_replayed((call, given), lines)
    other = call, {**given, **CHANGES[change](given)}
    with torch.no_grad(), without_replay():
        observe(other, lines)
        _, launches, tensors = observe(other, lines)
    with torch.no_grad():
        for _ in range(3):
            _, found, others = observe(other, lines)
            assert alike(launches, found, tensors, others)


def states(slots: int = 9, *, heads: int = HV, width: int = D) -> torch.Tensor:
    return torch.randn(slots, heads, width, width).bfloat16()


def misaligned(shape: torch.Size) -> torch.Tensor:
    """A pool of bfloat16 whose address is 8 more than a multiple of 16."""
    return torch.zeros(shape.numel() + 8, dtype=torch.bfloat16)[4:-4].view(shape)


MOVED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "pool": lambda a: {"pool": a["pool"].clone()},
    "slots": lambda a: {"state_indices": a["state_indices"].flip(0)},
    "more slots": lambda a: {"pool": torch.cat([a["pool"]] * 2)},
    "slots apart": lambda a: {"pool": torch.cat([a["pool"]] * 2, 1)[:, HV:]},
    "heads first": lambda a: {"pool": a["pool"].transpose(0, 1).contiguous().transpose(0, 1)},
    "address": lambda a: {"pool": misaligned(a["pool"].shape)},
    "float32": lambda a: {"pool": a["pool"].float()},
    "pad": lambda a: {"pad_slot_id": 0},
    "pad of 64 bits": lambda a: {"pad_slot_id": 2**40},
    "indices of 64 bits": lambda a: {"state_indices": a["state_indices"].long()},
    "indices apart": lambda a: {"state_indices": a["state_indices"].repeat_interleave(2)[::2]},
    "in order": lambda a: {"state_indices": None},
    "elsewhere": lambda a: {"output_state_indices": a["state_indices"] + 4},
    "flags": lambda a: {"has_initial_state": torch.ones(N, dtype=torch.bool)},
    "flags apart": lambda a: {"has_initial_state": torch.ones(2 * N, dtype=torch.bool)[::2]},
    "output": lambda a: {"out": torch.zeros_like(a["v"])},
    "output apart": lambda a: {"out": torch.zeros(*a["v"].shape[:2], 2 * HV, a["v"].shape[3]).bfloat16()[:, :, ::2]},
}
"""Arguments that may differ between two calls over a pool."""


@pytest.mark.parametrize("kind", ["prefill", "decode", "decode in shared memory"])
@pytest.mark.parametrize("change", MOVED)
def test_a_replay_uses_the_pool_of_the_call(kind: str, change: str, lines: list[tuple[Any, ...]]):
    """With another pool or other slots, calls after a replay and replays launch what an ordinary call does."""
    if kind == "prefill":
        call, given = prefilled("gdn", pool=states())
    else:
        call, given = decoded("gdn", pool=states(), state_v_first=False)
    if kind == "decode in shared memory":
        q, k, v = (torch.randn(N, 1, heads, 128).bfloat16() for heads in (H, H, HV))
        given |= {"q": q, "k": k, "v": v, "pool": states(width=128)}
    given["g"], given["beta"] = (torch.rand(*given["v"].shape[:3]) for _ in range(2))
    make_replayed((call, given), lines)
    changed = {**given, **MOVED[change](given)}
    with torch.no_grad():
        for _ in range(3):
            _, launches, tensors = observe((call, changed), lines)
        with without_replay():
            _, expected, others = observe((call, changed), lines)
    assert launches and alike(expected, launches, others, tensors)
    shared = kind == "decode in shared memory" and change not in ("address", "float32")
    assert launches[-1][0].endswith("_gluon") == shared
    entries = replay_cache._entries.items()
    public = [entry.recording for key, entry in entries if isinstance(key[0], PublicOperator)]
    assert [type(recording) for recording in public] == [Recording] * (1 + (change not in ("pool", "slots")))


def test_a_number_for_a_flag_is_refused_after_a_replay(lines: list[tuple[Any, ...]]):
    call, given = chunked("gdn", output_final_state=True)
    make_replayed((call, given), lines)
    with torch.no_grad(), pytest.raises(TypeError, match="output_final_state must be True or False, got 1"):
        call(**{**given, "output_final_state": 1})


def test_errors_after_a_replay_are_those_of_a_first_call(lines: list[tuple[Any, ...]]):
    call, given = decoded("gdn")
    make_replayed((call, given), lines)
    for wrong, error in (
        ({"q": "word"}, TypeError),
        ({"q": given["q"].to_sparse()}, ValueError),
        ({"scale": [1.0]}, TypeError),
        ({"q": given["q"].float().requires_grad_()}, ValueError),
        ({"beta": given["beta"].clone().requires_grad_()}, ValueError),
        ({"state_indices": given["state_indices"][:2]}, ValueError),
    ):
        for _ in range(3):
            with pytest.raises(error):
                call(**{**given, **wrong})
    assert not lines


def test_zeros_of_either_sign(lines: list[tuple[Any, ...]]):
    """0.0 equals -0.0, but an output times -0.0 has other bits."""
    call, given = chunked("gdn")
    make_replayed((call, given), lines)
    for scale in (0.0, 0.0, 0.0, -0.0):
        lines.clear()
        with torch.no_grad():
            call(**{**given, "scale": scale})
        numbers = [x for x in lines[-1] if type(x) is float]
        assert [str(x) for x in numbers if x == 0.0] == [str(scale)]


def test_zeros_of_either_sign_with_gradients(lines: list[tuple[Any, ...]]):
    grad_of(chunked("gdn"), lines)  # compiles
    for scale in (0.0, 0.0, 0.0, -0.0, 0.0):
        grad_of(chunked("gdn", scale=scale), lines)
        numbers = [x for line in lines if "scan" in line[0] for x in line if type(x) is float]
        assert {str(x) for x in numbers if x == 0.0} == {str(scale)}


def recorded_heads() -> set[str]:
    """What runs behind the keys that have a recording: names of registered operators, or "public"."""
    entries = replay_cache._entries.items()
    return {
        key[0] if isinstance(key[0], str) else "public" for key, entry in entries if type(entry.recording) is Recording
    }


def test_a_forward_with_gradients_has_the_key_of_its_public_call(lines: list[tuple[Any, ...]]):
    """Unless the public call passes other tensors on: here it casts them."""
    for _ in range(4):
        grad_of(chunked("gdn"), lines)
    assert recorded_heads() == {"public", "delta_bwd"}
    replay_cache.forget()
    for _ in range(4):
        given = {name: x.float() for name, x in tokens("gdn").items()}
        with torch.autocast("cpu", torch.bfloat16):
            grad_of(chunked("gdn", **given), lines)
    assert recorded_heads() == {"delta_fwd", "delta_bwd"}


def test_one_tensor_for_two_arguments(lines: list[tuple[Any, ...]]):
    """A recording with one tensor for two arguments does not serve two tensors, nor the reverse."""
    slots = torch.arange(N, dtype=torch.int32)
    both = lambda: decoded("gdn", state_indices=slots, output_state_indices=slots)
    apart = lambda: decoded("gdn", output_state_indices=torch.arange(N, dtype=torch.int32))
    with torch.no_grad():
        for first, second in ((both, apart), (apart, both)):
            replay_cache.forget()
            make_replayed(first(), lines)
            with without_replay():
                _, launches, tensors = observe(second(), lines)
            _, found, others = observe(second(), lines)
            # `place` finds the first of two names of one tensor.
            assert alike(launches, found, tensors, others)


# --- observers of a call ---------------------------------------------------------------------------------------------


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def launch_hook() -> Iterator[None]:
    hooks = triton.knobs.runtime.launch_enter_hook
    hooks.add(print)
    try:
        yield
    finally:
        hooks.remove(print)


@contextlib.contextmanager
def another_table() -> Iterator[None]:
    with kernel_configs.override_row("sm_90", "recurrent.triton", "default", kernel_configs.Config(blocks={"BV": 8})):
        yield


AROUND: dict[str, Callable[[], Any]] = {
    "a mode": Mode,
    "a function mode": lambda: torch.device("cpu"),
    "a profiler": torch.profiler.profile,
    "a tangent": torch.autograd.forward_ad.dual_level,
    "checked": wyfold.checked,
    "a hook": launch_hook,
    "another table": another_table,
    "another device": lambda: mock.patch.object(driver.active, "get_current_device", lambda: 1),
}


@pytest.mark.parametrize("around", AROUND)
def test_an_observer_sees_an_ordinary_call(around: str, lines: list[tuple[Any, ...]]):
    made = decoded("gdn")
    make_replayed(made, lines)
    asked = []
    usual, forward = kernel_launch.launch_kernel, importlib.import_module("wyfold.kernels.recurrent.triton.forward")
    with (
        torch.no_grad(),
        mock.patch.object(forward, "launch_kernel", lambda *a, **k: asked.append(a) or usual(*a, **k)),
        mock.patch.object(replay_cache, "precompile_kernels", lambda *_: None),
    ):
        made[0](**made[1])
        assert not asked
        with AROUND[around]():
            made[0](**made[1])
        assert len(asked) == 1
        made[0](**made[1])
        # Restoring a table counts as a change as well.
        assert len(asked) == (2 if around == "another table" else 1)


def test_a_hooked_call_is_recorded_later(lines: list[tuple[Any, ...]]):
    call, given = decoded("gdn")
    with torch.no_grad():
        call(**given)
        with launch_hook():
            call(**given)
        assert first_recording() == ""
        call(**given)
    assert isinstance(first_recording(), Recording)


def test_an_explained_call_launches_nothing(lines: list[tuple[Any, ...]]):
    call, given = decoded("gdn")
    make_replayed((call, given), lines)
    assert wyfold.explain(call, **given).backend == "triton"
    assert not lines


@pytest.mark.parametrize("kind", ["solve_tril", "chunk_scaled_dot_kkt", "ttt_decode"])
def test_a_missing_gradient_is_refused_after_a_replay(kind: str, lines: list[tuple[Any, ...]]):
    call, given = KINDS[kind]()
    make_replayed((call, given), lines)
    name = next(name for name, x in given.items() if isinstance(x, torch.Tensor))
    with pytest.raises(ValueError, match=f"{name} must not require a gradient"):
        call(**{**given, name: given[name].clone().requires_grad_()})
    assert not lines


def test_a_step_size_is_part_of_the_key(lines: list[tuple[Any, ...]]):
    """No launch takes it as a number: an operation of PyTorch writes it, with zeros of either sign."""
    call, given = inner()
    for eta in (0.1, 0.1, 0.2, 0.2, 0.0, -0.0, 0.1):
        with torch.no_grad():
            call(**{**given, "eta": eta})
    asked = [
        str(step.arguments[1])
        for recording in recordings()
        if isinstance(recording, Recording)
        for step in recording.steps
        if getattr(step, "operator", None) is torch.ops.aten.full.default
    ]
    assert asked == ["0.1", "0.2", "-0.0"]


@pytest.mark.filterwarnings("error")
def test_the_address_of_a_fake_tensor_is_not_read(lines: list[tuple[Any, ...]]):
    """Reading it warns. Nothing is kept of such a call."""
    call, given = chunked("gdn")
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        fake = {name: torch.empty_like(x) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        assert call(**fake)[0].shape == given["v"].shape
    assert not replay_cache._entries


def test_a_call_with_a_gradient_after_a_replay(lines: list[tuple[Any, ...]]):
    call, given = chunked("gdn")
    make_replayed((call, given), lines)
    o, _ = call(**{**given, "v": given["v"].clone().requires_grad_()})
    assert o.requires_grad and o.grad_fn is not None


def test_under_autocast(lines: list[tuple[Any, ...]]):
    """The call casts float32 inputs before any launch."""
    call, given = chunked("gdn", **{name: x.float() for name, x in tokens("gdn").items() if name in "qkv"})
    with torch.no_grad():
        for context in (torch.no_grad(), torch.autocast("cpu", torch.bfloat16)):
            with context:
                found = [call(**given)[0].dtype for _ in range(4)]
            assert set(found) == {torch.float32 if type(context) is torch.no_grad else torch.bfloat16}
    # The forward inside a recorded call is not recorded separately.
    assert {type(x) for x in recordings()} == {Recording}


def test_memory_is_filled_where_deterministic_algorithms_are_demanded(lines: list[tuple[Any, ...]]):
    """By `torch.empty_strided`; the faster functions of PyTorch do not fill it."""
    made, filled = chunked("gdn"), torch.are_deterministic_algorithms_enabled()
    try:
        for demanded in (False, True):
            torch.use_deterministic_algorithms(demanded)
            make_replayed(made, lines)
    finally:
        torch.use_deterministic_algorithms(filled)
    steps = [x.steps for x in recordings() if isinstance(x, Recording)]
    fast = [{step.make in _FAST_EMPTY.values() for step in each if isinstance(step, Allocate)} for each in steps]
    assert fast == [{True}, {False}]


def test_the_cache_is_bounded(lines: list[tuple[Any, ...]]):
    with mock.patch.object(replay_cache, "CAPACITY", 3), torch.no_grad():
        for scale in range(1, 9):
            call, given = chunked("delta", scale=scale / 8)
            call(**given)
            assert len(replay_cache._entries) <= 3


def test_the_cache_keeps_no_tensor_alive(lines: list[tuple[Any, ...]]):
    """Neither arguments nor results, after successful and failed calls."""
    gc.collect()
    gc.disable()
    try:
        for wrong in ({}, {"scale": "word"}):
            call, given = chunked("gdn", **wrong)
            for _ in range(4):
                with torch.no_grad(), contextlib.suppress(TypeError):
                    call(**given)
            tensors = [weakref.ref(given[name]) for name in "qkvg"]
            lines.clear()
            del given
            assert [x() for x in tensors] == [None] * 4
    finally:
        gc.enable()


def test_a_replay_frees_memory_as_early(lines: list[tuple[Any, ...]]):
    """Large tensors that a call frees before it allocates more are freed at the same point of a replay."""
    kernel, count = Kernel(), recorder.POOLED_BYTES // 4 + 1

    def run(x: torch.Tensor) -> torch.Tensor:
        first = x.new_empty(count)
        kernel_launch.launch_kernel(kernel, 1, x, first, 5, 1.0)
        second = x.new_empty(2, count).unbind()
        kernel_launch.launch_kernel(kernel, 1, first, second[1], 5, 1.0)
        del first
        third = x.new_empty(5)
        kernel_launch.launch_kernel(kernel, 1, second[1], third, 5, 1.0)
        return third

    operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: run(*tensors))
    for _ in range(4):
        x = torch.randn(5)
        with torch.no_grad():
            assert torch.equal(planned(operator, (x,), ()), x + 1.0 + 1.0 + 1.0)
    recording = first_recording()
    assert isinstance(recording, Recording)
    assert [type(step).__name__ for step in recording.steps] == [
        *("Allocate", "RecordedLaunch", "Allocate", "RecordedLaunch", "Free", "Allocate", "RecordedLaunch"),
    ]


def test_tensors_of_one_lifetime_share_memory(lines: list[tuple[Any, ...]]):
    """It is freed after the last use of any of them, and before what is allocated next."""
    kernel, count = Kernel(), recorder.POOLED_BYTES // 4 + 1

    def add(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        kernel_launch.launch_kernel(kernel, 1, of, to, 5, 1.0)
        return to

    def run(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second, result = x.new_empty(count), x.new_empty(count), x.new_empty(5)
        add(add(x, first), second)
        del first
        add(second, result)
        del second
        return result, add(result, x.new_empty(5))

    operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: run(*tensors))
    for _ in range(4):
        x = torch.randn(5)
        with torch.no_grad():
            result, last = planned(operator, (x,), ())
        assert torch.equal(result, x + 1.0 + 1.0 + 1.0) and torch.equal(last, result + 1.0)
    recording = first_recording()
    assert isinstance(recording, Recording)
    assert [type(step).__name__ for step in recording.steps] == [
        *("Allocate", "Allocate", "RecordedLaunch", "RecordedLaunch", "RecordedLaunch", "Free"),
        *("Allocate", "RecordedLaunch"),
    ]


def test_descriptors_are_encoded_once_for_an_address(lines: list[tuple[Any, ...]]):
    """Layers of a model replay one recording on their tensors in turn. Few encodings are kept."""
    wide = lambda: torch.randn(B, T, HV, 128, dtype=torch.bfloat16)
    layers = [chunked("gdn", q=wide(), k=wide(), v=wide()) for _ in range(4)]
    make_replayed(layers[0], lines)
    encode, recording = mock.Mock(side_effect=encoded), first_recording()
    assert isinstance(recording, Recording)
    steps = [
        step._replace(encoders=tuple([encode] * len(step.descriptors)))
        if isinstance(step, recorded_launch.RecordedLaunch)
        else step
        for step in recording.steps
    ]
    next(iter(replay_cache._entries.values())).recording = recording._replace(steps=tuple(steps))
    for most in (1, 99):
        for n, (call, given) in enumerate(layers * 3):
            lines.clear()
            encode.reset_mock()
            with mock.patch.object(recorded_launch, "ENCODINGS", most), torch.no_grad():
                call(**given)
            addresses = {given[name].data_ptr() for name in "qkv"}
            assert addresses <= {x[1] for line in lines for x in line if isinstance(x, tuple) and x[:1] == ("box",)}
            if most > 1 and n >= len(layers):
                assert not addresses & {call.args[0] for call in encode.call_args_list}


def test_threads(lines: list[tuple[Any, ...]]):
    """Threads replay one recording on separate tensors, and no launch mixes their arguments."""
    made = decoded("gdn")
    make_replayed(made, lines)
    wrong = []

    def work() -> None:
        call, given = decoded("gdn")
        address = given["q"].data_ptr()
        for _ in range(50):
            with torch.no_grad():
                call(**given)
        kept.append((address, given))

    kept: list[Any] = []
    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    by_q = dict(kept)
    for line in lines:
        numbers = [x for argument in line for x in (argument if isinstance(argument, tuple) else (argument,))]
        given = next(by_q[x] for x in numbers if isinstance(x, int) and x in by_q)
        wrong += [name for name in ("k", "v", "g", "pool") if given[name].data_ptr() not in numbers]
    assert len(lines) == 200 and not wrong


# --- memory ----------------------------------------------------------------------------------------------------------


class Adding:
    """A compiled kernel that runs on the CPU: writes `count` floats of `of`, plus a number, into `to`."""

    def __call__(self, programs: int, *arguments: Any) -> None:
        of, to, count, number = arguments[-4:]
        source, target = ((ctypes.c_float * count).from_address(x) for x in (of, to))
        for i in range(count):
            target[i] = source[i] + number


class Kernel:
    def __init__(self) -> None:
        self.fn, self.device_caches, self.pre_run_hooks = (lambda: None), {}, []
        self.arg_names, self.constexprs = ["of", "to", "count", "number"], []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        run = Adding()

        def first(*arguments: Any) -> Any:
            run(grid[0], *(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments))
            return SimpleNamespace(run=run, function=None, packed_metadata=())

        return first


def test_replayed_tensors_do_not_overlap(lines: list[tuple[Any, ...]]):
    """With large and small workspace, results, views and copies, a replay computes what an ordinary call does."""
    kernel = Kernel()

    def add(of: torch.Tensor, to: torch.Tensor, number: float) -> torch.Tensor:
        kernel_launch.launch_kernel(kernel, 1, of, to, of.numel(), number)
        return to

    def run(x: torch.Tensor, pool: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        small = [add(x, x.new_empty(5), float(n + 1)) for n in range(3)]
        large = add(x, x.new_empty(recorder.POOLED_BYTES // 2)[3:8], 10.0)
        both = x.new_empty(2, 5)
        for row, of in zip(both.unbind(), (small[0], large)):
            add(of, row, 100.0)
        back = add(both[1], x.new_empty(5, 1).squeeze(1), 0.0)
        zeros = x.new_zeros(5)
        add(small[2], pool[5:], 0.0)
        copied = pool[5:].to(torch.float64)
        cleared = small[1].zero_().clone()
        return both, None, add(cleared, cleared, 7.0), copied, zeros, back, pool

    operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: run(*tensors))
    for number in range(5):
        x, pool = torch.randn(5), torch.zeros(10)
        with torch.no_grad():
            found = planned(operator, (x, pool), ())
        both, nothing, seven, copied, zeros, back, same = found
        assert torch.equal(both, torch.stack([x + 1.0 + 100.0, x + 10.0 + 100.0])), number
        assert nothing is None and same is pool
        assert torch.equal(seven, torch.full((5,), 7.0)) and not zeros.any() and not pool[:5].any()
        assert torch.equal(pool[5:], x + 3.0) and torch.equal(copied, (x + 3.0).double())
        assert torch.equal(back, both[1])
    assert isinstance(first_recording(), Recording)


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "new_zeros": lambda x: x.new_zeros(3, 2, dtype=torch.bfloat16),
    "zeros_like": torch.zeros_like,
    "clone": lambda x: x.clone(),
    "clone of a repeated row": lambda x: x[:1].expand(4, -1).clone(),
    "clone, seen otherwise": lambda x: x.clone()[None],
    "_to_copy": lambda x: x.to(torch.bfloat16),
    "_to_copy of every second column": lambda x: x[:, ::2].to(torch.float64),
    "copy_ and zero_": lambda x: x.new_empty(2, 6).zero_().copy_(x[1]),
    "fill_ and add_": lambda x: x.new_empty(6).fill_(0.5).add_(x[2], alpha=2),
    "mm": lambda x: torch.mm(x, x.t(), out=x.new_empty(4, 4)),
    "addmm": lambda x: torch.addmm(x[0, :4], x, x.t(), out=x.new_empty(4, 4)),
    "mm into a view, and addmm_": lambda x: torch.mm(x, x.t(), out=x.new_empty(6, 4)[1:5]).addmm_(x, x.t()).clone(),
    "sum": lambda x: x.sum(0),
    "sum into another dtype": lambda x: x.sum((0, 1), dtype=torch.float64),
    "cumsum": lambda x: x.cumsum(1),
    "mul and sub": lambda x: x.mul(2.0).sub(x.mul(x)),
    "floor_divide": lambda x: torch.full((5,), 7, dtype=torch.int64).floor_divide(2),
    "index_fill_": lambda x: x.clone().index_fill_(0, torch.arange(2), 3.0),
}


@pytest.mark.parametrize("what", OPERATIONS)
def test_a_replayed_operation_computes_what_it_did(what: str, lines: list[tuple[Any, ...]]):
    kernel, operation = Kernel(), OPERATIONS[what]
    calls = []

    def run(given: torch.Tensor) -> torch.Tensor:
        calls.append(what)
        x = torch.empty_like(given)
        kernel_launch.launch_kernel(kernel, 1, given, x, given.numel(), 1.0)
        return operation(x)

    operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: run(*tensors))
    for _ in range(5):
        x = torch.randn(4, 6)
        with torch.no_grad():
            found, wanted = planned(operator, (x,), ()), operation(x + 1.0)
        assert torch.equal(found, wanted) and found.dtype == wanted.dtype and found.stride() == wanted.stride()
    assert isinstance(first_recording(), Recording) and len(calls) == 2


class Pair(NamedTuple):
    """A record of kernel arguments."""

    of: torch.Tensor
    s_of: tuple[int, ...]
    to: torch.Tensor
    number: float


class PairKernel(Kernel):
    """`Kernel` whose tensors and number are in a record."""

    def __init__(self) -> None:
        super().__init__()
        self.arg_names = ["pair", "count"]

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        add = Adding()

        def run(programs: int, *arguments: Any) -> None:
            pair, count = arguments[-2:]
            of, strides, to, number = (x.data_ptr() if isinstance(x, torch.Tensor) else x for x in pair)
            assert strides == (1,)
            add(programs, of, to, count, number)

        def first(*arguments: Any) -> Any:
            run(grid[0], *arguments)
            return SimpleNamespace(run=run, function=None, packed_metadata=())

        return first


def test_tensors_in_records_are_replayed(lines: list[tuple[Any, ...]]):
    """A replay launches on its own tensors, given, allocated and offset, not on those of the recording."""
    kernel = PairKernel()

    def run(x: torch.Tensor) -> torch.Tensor:
        middle, result = x.new_empty(2, 5)[1], x.new_empty(5)
        kernel_launch.launch_kernel(kernel, 1, Pair(x[1:], (1,), middle, 1.0), count=5)
        kernel_launch.launch_kernel(kernel, 1, count=5, pair=Pair(middle, (1,), result, 10.0))
        return result

    operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: run(*tensors))
    for _ in range(5):
        x = torch.randn(6)
        with torch.no_grad():
            assert torch.equal(planned(operator, (x,), ()), x[1:] + 1.0 + 10.0)
    found = first_recording()
    assert isinstance(found, Recording)
    launches = [step for step in found.steps if type(step).__name__ == "RecordedLaunch"]
    assert [(len(launch.records), len(launch.pointers)) for launch in launches] == [(1, 2), (1, 2)]


REFUSED: dict[str, tuple[str, Callable[[torch.Tensor, Any], Any]]] = {
    "another operation": ("aten::exp.* is called", lambda x, add: add(x.exp(), x.new_empty(5))),
    "contents": ("aten::.* is called", lambda x, add: add(x, x.new_empty(5 + 0 * int(x[0] > 0)))),
    "a part": ("a result is part", lambda x, add: add(x, x.new_empty(6)[1:])),
    "a view of what was given": (
        "a result is a view of an argument",
        lambda x, add: add(x, x.new_empty(5)) is None or x[1:],
    ),
    "a sum, seen otherwise": ("a result is part", lambda x, add: add(x, x.new_empty(5)).sum(0)[None]),
    "another kind": ("the result is a dict", lambda x, add: {"y": add(x, x.new_empty(5))}),
    "memory elsewhere": ("allocated on meta", lambda x, add: add(x, torch.empty(5, device="meta")) is None or None),
    "unknown memory": ("unknown origin", lambda x, add: add(x, BEFORE) is None or None),
    "no launch": ("no kernel is launched", lambda x, add: x.new_empty(5)),
}
BEFORE = torch.zeros(5)


@pytest.mark.parametrize("what", REFUSED)
def test_a_call_that_cannot_be_recorded_runs_as_usual(what: str, lines: list[tuple[Any, ...]]):
    kernel, (reason, run) = Kernel(), REFUSED[what]
    calls = []

    def add(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        if not to.is_meta:
            kernel_launch.launch_kernel(kernel, 1, of, to, 5, 1.0)
        return to

    x = torch.randn(5)
    with torch.no_grad():
        add(x, torch.empty(5))
        operator = PublicOperator(lambda *_: "plan", lambda _, tensors, __: calls.append(what) or run(*tensors, add))
        for _ in range(4):
            planned(operator, (x,), ())
    assert len(calls) == 4
    recording = first_recording()
    assert isinstance(recording, str)
    assert re.search(reason, recording)
