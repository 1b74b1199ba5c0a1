"""The way from a public function to its first launch: its length, the records that are packed on it, its cache keys."""

import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import wyfold
from wyfold.runtime import kernel_launch, replay_cache, torch_ops
from wyfold.runtime.replay_cache import PublicOperator

triton = pytest.importorskip("triton")

from tests.runtime.test_replay_cache import KINDS, LAUNCHED, WITH_GRAD, Kernel, grad_of, tokens  # noqa: E402
from tests.runtime.test_replay_cache import lines as lines  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="no launch is bound in the interpreter")

PACKAGE = str(Path(wyfold.__file__).parent)
MOST_FRAMES, MOST_RECORDS, KEY_KINDS = 10, 2, 2


def frames() -> list[str]:
    """Functions of this package on the stack, innermost last."""
    found, frame = [], inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            found.append(f"{frame.f_code.co_filename.removeprefix(PACKAGE)}: {frame.f_code.co_name}")
        frame = frame.f_back
    return found[::-1]


@pytest.fixture
def first_stack(lines: list[tuple[Any, ...]]) -> Iterator[list[str]]:
    """The functions on the stack at the first launch of a call, without `launch_kernel`, which is the launch."""
    found: list[str] = []
    run = triton.runtime.jit.JITFunction.run

    def seen(self: Any, *arguments: Any, warmup: bool, **options: Any) -> Any:
        if not warmup and not found:
            found.extend(name for name in frames() if not name.startswith("/runtime/kernel_launch"))
        return run(self, *arguments, warmup=warmup, **options)

    with mock.patch.object(triton.runtime.jit.JITFunction, "run", seen):
        yield found


WIDE = {"chunk gdn, wide": "gdn", "chunk kda, wide": "kda"}
"""Calls that Gluon kernels serve."""


def made(kind: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    if kind not in WIDE:
        return (WITH_GRAD.get(kind) or KINDS[kind])()
    call = {"gdn": wyfold.chunk_gdn, "kda": wyfold.chunk_kda}[WIDE[kind]]
    given = tokens(WIDE[kind])
    for name in "qkv":
        given[name] = torch.randn(*given[name].shape[:3], 128, dtype=torch.bfloat16)
    if WIDE[kind] == "kda":
        given["g"] = -torch.rand(*given["v"].shape[:3], 128)
    return call, {**given, "chunk_size": 64, "backend": "triton"}


@pytest.mark.parametrize("kind", [*LAUNCHED, *WIDE])
def test_few_functions_are_between_a_call_and_its_first_launch(kind: str, first_stack: list[str]):
    call, given = made(kind)
    with torch.no_grad():
        call(**given)
    assert 0 < len(first_stack) <= MOST_FRAMES, first_stack


@pytest.mark.parametrize("kind", [*WITH_GRAD, *WIDE])
def test_as_few_with_gradients(kind: str, first_stack: list[str], lines: list[tuple[Any, ...]]):
    grad_of(made(kind), lines)
    assert 0 < len(first_stack) <= MOST_FRAMES, first_stack


class RecordCount:
    """Counts records of this package, outside of the kernels, that are made with a tensor among their fields."""

    def __init__(self, x: Tensor):
        self.x, self.found = x, list[str]()

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        kind = frame.f_locals.get("_cls") if event == "call" and frame.f_code.co_name == "<lambda>" else None
        module = getattr(kind, "__module__", "")
        if module.startswith("wyfold.") and not module.startswith("wyfold.kernels"):
            if any(value is self.x for value in frame.f_locals.values()):
                self.found.append(kind.__name__)


@pytest.mark.parametrize("kind", [*LAUNCHED, *WIDE])
def test_a_call_is_packed_twice(kind: str, lines: list[tuple[Any, ...]]):
    """Once by the public function, for checks and plan, and once by the registered operator, whose schema is flat."""
    call, given = made(kind)
    with torch.no_grad():
        call(**given)
        replay_cache.forget()
        counted = RecordCount(next(given[name] for name in ("v", "k", "x", "g", "A", "mixed_qkv") if name in given))
        with mock.patch.object(replay_cache, "precompile_kernels", lambda *_: None):  # a dry run packs once more
            sys.setprofile(counted)
            try:
                call(**given)
            finally:
                sys.setprofile(None)
    assert len(counted.found) <= MOST_RECORDS, counted.found


def test_there_are_two_kinds_of_cache_keys(lines: list[tuple[Any, ...]]):
    """That of a public function, and that of a registered operator, which name what runs behind them."""
    with torch.no_grad():
        for kind in LAUNCHED:
            call, given = made(kind)
            call(**given)
    heads = {key[0] for key in replay_cache._entries}
    assert len({type(head) for head in heads}) <= KEY_KINDS
    names = {registered.name for registered in torch_ops._registered.values()}
    assert all(isinstance(head, PublicOperator) or head in names for head in heads)
    functions = [function for head in heads if isinstance(head, PublicOperator) for function in head]
    functions += [registered.run for registered in torch_ops._registered.values()]
    assert [function for function in functions if inspect.getclosurevars(function).nonlocals] == []


# --- every argument of every registered operator is in its key ------------------------------------------------------


def example(kind: str) -> Any:
    """An argument for a type of a schema."""
    plain = kind.removeprefix("Optional[").removesuffix("]") if kind.startswith("Optional") else kind
    if plain.startswith("List["):
        return [example(plain.removeprefix("List[").removesuffix("]")) for _ in range(2)]
    values = {"int": 3, "bool": False, "float": 0.5, "str": "word"}
    return values[plain] if plain in values else torch.zeros(4, 8)


def others(kind: str, x: Any) -> list[Any]:
    """Other arguments for a type of a schema, of which a launch may depend on each."""
    if isinstance(x, list):
        inner = kind.removeprefix("List[").removesuffix("]")
        return [x[:1], [*x, example(inner)], *([x[0], y] for y in others(inner, x[1]))]
    if isinstance(x, Tensor):
        strided = torch.zeros(8, 4).mT
        shifted = torch.zeros(33)[1:].view(4, 8)
        found = [torch.zeros(4, 9), strided, shifted, torch.zeros(4, 8, dtype=torch.float64), torch.zeros(4, 8, 1)]
        return [*found, None] if kind.startswith("Optional") else found
    return {bool: [True], int: [4, 0, 1, 2**40], float: [0.25, 0.0, -0.0, 1.0], str: ["other"]}[type(x)]


def fingerprint(x: Any) -> str:
    """All that a launch can depend on of an argument."""
    if isinstance(x, list):
        return f"[{', '.join(map(fingerprint, x))}]"
    if isinstance(x, Tensor):
        return f"{tuple(x.shape)} {x.stride()} {x.dtype} {x.data_ptr() % 16}"
    return f"{type(x).__name__} {x}"


@pytest.mark.parametrize("operator", torch_ops._registered, ids=lambda operator: operator.__name__)
def test_no_argument_of_an_operator_leaves_a_stale_launch(operator: Any, lines: list[tuple[Any, ...]]):
    """The operator's implementation is replaced by one launch, with a number that stands for all arguments."""
    kernel, numbers, launched = Kernel(), dict[str, int](), []

    class Launch:
        def __call__(self, programs: int, *arguments: Any) -> None:
            launched.append(arguments[-1])

    def run(*arguments: Any) -> None:
        text = " | ".join(map(fingerprint, arguments))
        number = float(numbers.setdefault(text, len(numbers) + 1))
        kernel_launch.launch_kernel(kernel, 1, arguments[0], arguments[0], 1, number)

    def launches_of(arguments: list[Any]) -> list[float]:
        launched.clear()
        torch_ops.call(operator, *arguments)
        return launched.copy()

    kinds = [str(argument.type) for argument in operator._schema.arguments]
    usual = [example(kind) for kind in kinds]
    with (
        torch.no_grad(),
        mock.patch.object(torch_ops._registered[operator], "run", run),
        mock.patch.object(Kernel, "__getitem__", lambda self, grid: lambda *x: compiled(Launch(), x)),
    ):
        for _ in range(3):
            assert launches_of(usual) == [1.0]
        for place, (kind, x) in enumerate(zip(kinds, usual, strict=True)):
            for other in others(kind, x):
                changed = [*usual[:place], other, *usual[place + 1 :]]
                for _ in range(3):
                    (number,) = launches_of(changed)
                    text = next(text for text, n in numbers.items() if n == number)
                    assert text == " | ".join(map(fingerprint, changed)), operator._schema.arguments[place].name
                assert launches_of(usual) == [1.0]
    replayed = [entry for entry in replay_cache._entries.values() if type(entry.recording) is replay_cache.Recording]
    assert len(replayed) > 1


def compiled(launch: Callable[..., None], arguments: tuple[Any, ...]) -> Any:
    """What Triton returns of a first launch."""
    launch(1, *arguments)
    return mock.Mock(run=launch, function=None, packed_metadata=())


def test_every_argument_of_a_public_function_is_in_its_key(lines: list[tuple[Any, ...]]):
    """Also its type: 1 equals True, but is not a legal flag."""
    seen: dict[Any, tuple[Any, ...]] = {}
    find_call = replay_cache.find_call

    def noted(head: Any, tensors: tuple[Any, ...], values: tuple[Any, ...]) -> Any:
        if isinstance(head, PublicOperator):
            seen[head] = tensors, values
        return find_call(head, tensors, values)

    with torch.no_grad(), mock.patch.object(replay_cache, "find_call", noted):
        for kind in LAUNCHED:
            call, given = made(kind)
            call(**given)
    assert len(seen) >= 10
    entry = lambda head, tensors, values: find_call(head, tensors, values)._entry
    # Without PyTorch's comparison every call is looked up by its key.
    for comparison in (replay_cache._Guards, None):
        replay_cache.forget()
        with mock.patch.object(replay_cache, "_Guards", comparison):
            for head, (tensors, values) in seen.items():
                usual = entry(head, tensors, values)
                for n, x in enumerate(tensors):
                    for other in [torch.zeros(3)] if x is None else others("Optional", x):
                        if other is None and n == 0:
                            continue
                        assert entry(head, (*tensors[:n], other, *tensors[n + 1 :]), values) is not usual
                for n, value in enumerate(values):
                    same = int(value) if isinstance(value, bool) else float(value) if isinstance(value, int) else None
                    for other in ("another", 3.25, same) if same is not None else ("another", 3.25):
                        assert entry(head, tensors, (*values[:n], other, *values[n + 1 :])) is not usual
                assert entry(head, tensors, values) is usual
