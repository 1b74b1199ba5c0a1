"""Precompilation: a first call compiles all kernels before it launches one, without side effects."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests import processes

import wyfold
from wyfold.runtime import kernel_launch, precompile, replay_cache

triton = pytest.importorskip("triton")

from tests.compile.aot import RUN, pretend_gpu  # noqa: E402
from tests.runtime.test_replay_cache import KINDS, LAUNCHED, WITH_GRAD, Kernel, chunked, grad_of, lines, tokens  # noqa: E402, F401
from triton.runtime import _async_compile  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from wyfold.kernels.norm import triton as norm  # noqa: E402

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")


@pytest.fixture
def asked(lines: list[Any]) -> Iterator[list[tuple[str, str]]]:  # noqa: F811
    """Log of Triton's work, in order: ("compile" or "launch", name of a kernel)."""
    found: list[tuple[str, str]] = []
    usual = JITFunction.run

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
        found.append(("compile" if warmup else "launch", self.__name__))
        return usual(self, *arguments, grid=grid, warmup=warmup, **fixed)

    with mock.patch.object(JITFunction, "run", run), mock.patch.dict(kernel_launch._launches, clear=True):
        replay_cache.forget()
        yield found


def names(asked: list[tuple[str, str]], what: str) -> list[str]:
    return [name for how, name in asked if how == what]


@pytest.mark.parametrize("kind", LAUNCHED)
def test_all_kernels_are_compiled_before_one_is_launched(kind: str, asked: list[tuple[str, str]]):
    call, given = KINDS[kind]()
    tensors = {n: x for n, x in given.items() if isinstance(x, torch.Tensor)}
    before = {n: x._version for n, x in tensors.items()}
    with torch.no_grad():
        call(**given)
    launches = names(asked, "launch")
    assert launches and set(names(asked, "compile")) == set(launches)
    first = asked.index(("launch", launches[0]))
    assert "compile" not in [how for how, _ in asked[first:]]
    assert {n: x._version for n, x in tensors.items()} == before


@pytest.mark.parametrize("kind", WITH_GRAD)
def test_each_direction_of_a_differentiated_call(kind: str, asked: list[Any], lines: list[Any]):  # noqa: F811
    """Kernels of the backward are compiled when the backward begins."""
    grad_of(WITH_GRAD[kind](), lines)
    assert set(names(asked, "compile")) == set(names(asked, "launch"))
    for how, name in asked:
        if how == "launch":
            assert asked.index(("compile", name)) < asked.index(("launch", name))
    compiled_first = [how for how, _ in asked].index("launch")
    again = [how for how, _ in asked[compiled_first:]]
    backward = again.index("compile")
    assert "compile" not in again[again.index("launch", backward) :]


def test_once_for_all_lengths(asked: list[Any]):
    with torch.no_grad():
        wyfold.l2norm(torch.randn(64, 3, 64), backend="triton")
        first = names(asked, "compile")
        for T in (128, 256):
            wyfold.l2norm(torch.randn(T, 3, 64), backend="triton")
        assert names(asked, "compile") == first
        wyfold.l2norm(torch.randn(64, 3, 32), backend="triton")
        assert len(names(asked, "compile")) == 2 * len(first)


def called(name: str, run: Callable[[torch.Tensor], object], x: torch.Tensor, *values: object) -> object:
    """A first call of an operator with this name and implementation, as `torch_ops.call` makes it."""
    known = replay_cache.find_call(name, (x,), values)
    assert known is not None and known.is_first()
    known.precompile(lambda: run(x))
    return run(x)


def test_numbers_and_lengths_do_not_compile_again(asked: list[Any]):
    """They cause no dry run and no cache entry, because a training run has many of both."""
    dry_runs = mock.Mock()
    with torch.no_grad(), mock.patch.object(replay_cache, "precompile_kernels", dry_runs):
        for n, T in enumerate((128, 192, 256, 320)):
            call, given = chunked("gdn", **tokens("gdn", T=T), scale=float(n))
            call(**given)
            if n == 0:
                first = dry_runs.call_count
        assert first and dry_runs.call_count == first
        call, given = chunked("gdn", **tokens("gdn", T=129))
        call(**given)
        assert dry_runs.call_count == 2 * first  # another alignment of rows selects other kernels


def test_lengths_select_kernels_by_being_zero_or_not(asked: list[Any]):
    """Kernels depend only on whether there are documents of a kind, not on how many."""
    dry_runs = mock.Mock()
    with torch.no_grad(), mock.patch.object(replay_cache, "precompile_kernels", dry_runs):
        for counts, times in (((3, 4), 1), ((5, 9), 1), ((0, 9), 2), ((0, 2), 2)):
            called("some", lambda x: None, torch.zeros(4), replay_cache.Lengths(counts))
            assert dry_runs.call_count == times
    assert len(replay_cache._entries) == 4, "each has a cache entry"


def test_the_cache_of_precompiled_kinds_is_bounded(asked: list[Any]):
    with torch.no_grad(), mock.patch.object(replay_cache, "CAPACITY", 3):
        for width in range(1, 9):
            wyfold.l2norm(torch.randn(2, 3, width), backend="triton")
            assert len(replay_cache._precompiled) <= 3


def test_a_dry_run_writes_to_no_tensor():
    pool, made = torch.zeros(4), []
    with precompile._NoWrites():
        pool.add_(1)
        pool.view(2, 2).copy_(torch.empty(2, 2))
        made.append(pool.new_zeros(3))
        with pytest.raises(precompile._NotRepeatable):
            pool.relu_()
        with pytest.raises(precompile._NotRepeatable):
            pool.exp()
    assert torch.equal(pool, torch.zeros(4))
    assert made[0].shape == (3,)


def test_an_unknown_operation_ends_the_dry_run(lines: list[Any]):  # noqa: F811
    """The first kernel is compiled in advance, those after the unknown operation at their launch."""
    kernels, asked = [Kernel(), Kernel()], []
    for n, kernel in enumerate(kernels):
        kernel.run = lambda *_, n=n, **__: asked.append(("compile", n))
    x = torch.randn(5)

    def run(x: torch.Tensor) -> torch.Tensor:
        for n, kernel in enumerate(kernels):
            asked.append(("ask", n))
            kernel_launch.launch_kernel(kernel, 1, x, x, 5, 1.0)
            y = x.sin()
        return y

    with torch.no_grad():
        called("made up", run, x)
    assert asked == [("ask", 0), ("compile", 0), ("ask", 0), ("ask", 1)]


def test_the_call_itself_raises_its_error(asked: list[Any]):
    def run(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("x: expected more")

    with torch.no_grad(), pytest.raises(ValueError, match="expected more"):
        called("made up", run, torch.randn(4))
    assert not asked


@pytest.fixture
def found() -> Iterator[list[int]]:
    """Real compilations without a GPU. One entry a launch: how many variants of its kernel were compiled before."""
    launches: list[int] = []

    def launch_kernel(kernel: Any, *arguments: Any, **options: Any) -> None:
        launches.append(len(kernel.device_caches[90][0]))

    def run(self: JITFunction, *arguments: Any, grid: Any, warmup: bool, **fixed: Any) -> Any:
        if warmup:
            return RUN(self, *arguments, grid=grid, warmup=True, **fixed)
        launch_kernel(self, *arguments)
        return SimpleNamespace()

    with (
        pretend_gpu("sm_90", launch_kernel),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(replay_cache, "DEVICES", frozenset(("cpu",))),
        mock.patch.dict(kernel_launch._launches, clear=True),
        mock.patch.dict(norm.wyfold_l2norm_triton.device_caches, clear=True),
        torch.no_grad(),
    ):
        replay_cache.forget()
        yield launches
        replay_cache.forget()


def test_a_launch_finds_the_kernel_that_threads_compiled(found: list[int]):
    """Loading fails without a GPU and is left to the launch."""
    wyfold.l2norm(torch.randn(4, 8, 64), backend="triton")
    assert found == [1]


def test_an_interruption_leaves_nothing_behind(found: list[int]):
    """After Ctrl-C during compilation, the next call compiles as usual."""
    with mock.patch.object(_async_compile, "as_completed", side_effect=KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            wyfold.l2norm(torch.randn(4, 8, 64), backend="triton")
    assert _async_compile.active_mode.get() is None
    for width in (32, 16):
        wyfold.l2norm(torch.randn(4, 8, width), backend="triton")
    assert found[1] == found[0] + 1


IMPORTS = """
import sys, torch
from wyfold.runtime import precompile, recorder
x = torch.zeros(4)
with precompile._NoWrites():
    x.new_empty(3).view(3, 1)
recorder.record((x,), lambda: x.new_empty(3))
print("torch._dynamo" in sys.modules)
"""


def test_pytorch_s_compiler_is_not_imported():
    """The import would take seconds, at the first and the second call of a process."""
    done = processes.fresh().run(["-c", IMPORTS])
    assert done.stdout.split() == ["False"], done.stderr
