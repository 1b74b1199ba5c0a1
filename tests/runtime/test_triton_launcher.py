"""Fast launches against the launcher of the installed Triton, whose interfaces differ from version to version.

Kernels are compiled as for an H200. Only the driver's own functions are replaced: they keep what they are given.
"""

import gc
import importlib.metadata
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from wyfold.runtime import kernel_launch
from wyfold.runtime.kernel_launch import launch_kernel

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")

import triton.backends.nvidia.driver as nvidia  # noqa: E402
import triton.language as tl  # noqa: E402
from tests.compile.aot import FakeDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

MINOR = tuple(int(x) for x in importlib.metadata.version("triton").split(".")[:2])


class Numbers(NamedTuple):
    """A record of kernel arguments: pointer, strides, and a tensor that may be None."""

    numbers: Any
    s_numbers: Any
    others: Any
    scale: float
    end: None = None


class Sizes(NamedTuple):
    """A record of constexprs."""

    ROWS: int
    WIDTH: int


@triton.jit
def copy_rows(source, target, rows, n, SIZES: tl.constexpr):
    """Scale a tile that is read and written through descriptors, and add numbers that are read through a pointer."""
    WIDTH: tl.constexpr = SIZES.WIDTH
    x = source.load([0, 0])
    for _ in range(n):
        x = x * rows.scale + load_numbers(rows, WIDTH)[None, :]
    if rows.others is not None:
        x += tl.load(rows.others)
    target.store([n, 0], x)


@triton.jit
def load_numbers(rows, WIDTH: tl.constexpr):
    return tl.load(rows.numbers + tl.arange(0, WIDTH) * rows.s_numbers[1])


class Utilities:
    """The driver's functions: they keep what they are given, and unload nothing."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, ...]] = []
        self.unloaded: list[int] = []

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        return 11, 22, 32, 0, 1024

    def unload_module(self, module: int) -> None:
        self.unloaded.append(module)

    def launch(self, *arguments: Any) -> None:
        self.launched.append(arguments)

    def build_signature_metadata(self, signature: Any) -> tuple[Any, ...]:
        return tuple(signature)

    def fill_tma_descriptor(self, *arguments: Any) -> tuple[Any, ...]:
        return "encoded", *map(str, arguments)

    fill_tma_descriptor_tiled = fill_tma_descriptor


@pytest.fixture
def utilities(tmp_path, monkeypatch):
    """The driver's functions while a process pretends to have an H200."""
    found, fake = Utilities(), FakeDriver("sm_90")
    fake.utils, fake.launcher_cls = found, nvidia.CudaLauncher
    monkeypatch.setattr(driver, "_active", fake)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    if MINOR == (3, 6):  # it compiles a launcher for each kernel, which takes the kernel's arguments one by one
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: SimpleNamespace(launch=found.launch))
        monkeypatch.setattr(nvidia, "library_dirs", list)
    for name in ("PyKernelArg", "ARG_CONSTEXPR", "ARG_KERNEL", "ARG_TUPLE"):  # attributes of the driver's C module
        if hasattr(nvidia, name):
            monkeypatch.setattr(nvidia, name, SimpleNamespace if name == "PyKernelArg" else name)
    with mock.patch.dict(kernel_launch._launches, clear=True):
        yield found
        copy_rows.device_caches.clear()
        kernel_launch._launches.clear()
        gc.collect()


def given(x: torch.Tensor) -> tuple[Any, ...]:
    """Arguments of `copy_rows` on a tensor [64, 64]."""
    box = TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 64])
    return box, box, Numbers(x, x.stride(), None, 2.0), 16


def launched(x: torch.Tensor) -> None:
    launch_kernel(copy_rows, 5, *given(x), SIZES=Sizes(16, 64), num_warps=4, enable_fp_fusion=True)


def plain(arguments: Any) -> Any:
    """The launcher's arguments in a form that can be compared: addresses instead of tensors, tuples for lists."""
    if isinstance(arguments, torch.Tensor):
        return arguments.data_ptr()
    if isinstance(arguments, list | tuple):
        return tuple(map(plain, arguments))
    return arguments if isinstance(arguments, int | float | str | bytes | None) else repr(arguments)


def test_a_fast_launch_gives_the_driver_what_triton_gives_it(utilities: Utilities):
    """Except for hooks, which Triton passes although they are empty."""
    x, y = torch.zeros(64, 64), torch.ones(64, 64)
    launched(x)
    (launch,) = kernel_launch._launches.values()
    assert [place for place, _ in launch.expanders] == [1, 0]
    assert all(expander.encode is not None for _, expander in launch.expanders), "descriptors are encoded by Triton"
    with mock.patch.object(triton.JITFunction, "run", None):  # Triton's path is not taken again
        launched(x)
        launched(y)
    (of_triton, ours, moved), compiled = map(plain, utilities.launched), launch.owner
    differing = [place for place, (a, b) in enumerate(zip(of_triton, ours, strict=True)) if a != b]
    hooks = {place for place, a in enumerate(of_triton) if "HookChain" in str(a) or "LazyDict" in str(a)}
    assert set(differing) <= hooks and {ours[place] for place in hooks} <= {None}
    assert str(y.data_ptr()) in str(moved) and str(x.data_ptr()) not in str(moved)
    assert compiled.function == 22


def test_a_recorded_launch_gives_the_driver_the_same(utilities: Utilities):
    x = torch.zeros(64, 64)
    launched(x)
    steps: list[Any] = []
    with kernel_launch.observe_steps(lambda step, kernel, new: steps.append(step)):
        launched(x)
    (step,) = steps
    step = step.rebind(lambda tensor, offset: (0, offset))
    step.replay(0, [], [x.data_ptr()])
    assert plain(utilities.launched[2]) == plain(utilities.launched[1])


def test_a_kept_launch_keeps_the_kernel_loaded(utilities: Utilities):
    launched(torch.zeros(64, 64))
    copy_rows.device_caches.clear()
    gc.collect()
    assert not utilities.unloaded
    launched(torch.zeros(64, 64))
    kernel_launch._launches.clear()
    gc.collect()
    assert utilities.unloaded == ([11] if MINOR >= (3, 8) else [])


def test_a_hook_sees_the_launch(utilities: Utilities):
    launched(torch.zeros(64, 64))
    seen: list[Any] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        launched(torch.zeros(64, 64))
        assert utilities.launched[-1] != utilities.launched[0]
        assert kernel_launch.has_launch_hooks(copy_rows)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert not kernel_launch.has_launch_hooks(copy_rows)
