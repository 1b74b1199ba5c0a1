"""Fast launches: keys are no coarser than Triton's, and launches that are not recognised go through Triton."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from wyfold.runtime import kernel_launch
from wyfold.runtime.kernel_launch import launch_kernel

triton = pytest.importorskip("triton")

from tests.compile.aot import FakeDriver  # noqa: E402
from triton.runtime import driver  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

HOOKS = ("launch_enter_hook", "launch_exit_hook")


class Device(FakeDriver):
    """A driver whose current device and stream can be changed."""

    def __init__(self) -> None:
        super().__init__("sm_90")
        self.device, self.stream = 7, 100

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        return self.stream + (device or 0)


class Launcher:
    """Launcher of a compiled kernel, which keeps the arguments of each launch."""

    def __init__(self) -> None:
        self.given: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> None:
        self.given.append(arguments)


class Kernel:
    """Fake Triton kernel with arguments x, y and constexprs A, B. `ordinary` lists the launches through Triton."""

    def __init__(self) -> None:
        self.fn, self.device_caches, self.pre_run_hooks = (lambda: None), {}, []
        self.arg_names, self.constexprs = ["x", "y", "A", "B"], [2, 3]
        self.ordinary: list[tuple[Any, ...]] = []
        self.launcher = Launcher()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def run(*arguments: Any, **fixed: Any) -> Any:
            self.ordinary.append((grid, arguments, fixed))
            return SimpleNamespace(run=self.launcher, function=f"function {len(self.ordinary)}", packed_metadata=(4, 1))

        return run


@pytest.fixture
def device():
    found = Device()
    with mock.patch.object(driver, "_active", found), mock.patch.dict(kernel_launch._launches, clear=True):
        yield found


@pytest.fixture
def kernel(device: Device) -> Kernel:
    return Kernel()


def plain(kernel: Kernel, x: Any, y: Any = 16, **changes: Any) -> bool:
    """Launch, and return whether the launch went through Triton."""
    before = len(kernel.ordinary)
    launch_kernel(kernel, 5, x, y, **{"A": 64, "B": "scalar", "num_warps": 4, **changes})
    assert len(kernel.ordinary) + len(kernel.launcher.given) > before
    return len(kernel.ordinary) > before


def test_the_second_launch_of_a_kind_skips_triton(kernel: Kernel, device: Device):
    first, second = torch.zeros(4), torch.zeros(1000)
    assert plain(kernel, first)
    assert kernel.ordinary == [((5,), (first, 16), {"A": 64, "B": "scalar", "num_warps": 4})]
    device.stream = 200
    assert not plain(kernel, second, 32)
    where, metadata = "function 1", (4, 1)
    assert kernel.launcher.given == [
        (5, 1, 1, 207, where, metadata, None, None, None, second.data_ptr(), 32, 64, "scalar")
    ]


def test_launches_that_overlap(kernel: Kernel):
    """The first launch inside starts as always, and so does a kernel that does not wait. Each kind is kept apart."""
    started = []
    for name in ("wyfold_scan_gluon", "wyfold_scan_triton"):
        kernel.fn.__name__ = name
        assert not kernel_launch.overlaps()
        with kernel_launch.overlapping_launches():
            assert kernel_launch.overlaps()
            for _ in range(3):
                plain(kernel, None, A=name)
        plain(kernel, None, A=name)
        started.append([fixed.get("launch_pdl", False) for _, _, fixed in kernel.ordinary])
        kernel.ordinary.clear()
    assert started == [[False, True], [False]]
    assert len(kernel.launcher.given) == 2 + 3


def test_records_reach_the_launcher_as_tuples(kernel: Kernel):
    """With addresses instead of tensors; a second launch of the kind skips Triton."""
    first, second = Rows(torch.zeros(4), (4, 1), 2.0), Rows(torch.zeros(1000), (4, 1), 3.0)
    assert plain(kernel, None, first) and not plain(kernel, None, second)
    assert kernel.ordinary[0][1] == (None, first)
    assert kernel.launcher.given[0][9:11] == (None, (second.x.data_ptr(), (4, 1), 3.0))


def test_arguments_by_name_are_those_by_position(kernel: Kernel):
    assert plain(kernel, X)
    launch_kernel(kernel, 5, X, B="scalar", y=16, num_warps=4, A=64)
    launch_kernel(kernel, 5, y=16, x=X, A=64, B="scalar", num_warps=4)
    by_position, both = kernel.ordinary, kernel.launcher.given
    assert len(by_position) == 2 and len(both) == 1  # the order of constexprs and options is part of the key
    assert by_position[1][1] == by_position[0][1] == (X, 16)
    assert both[0][9:] == (X.data_ptr(), 16, 64, "scalar")


def test_a_missing_argument_is_named(kernel: Kernel):
    with pytest.raises(TypeError, match="needs an argument 'y'"):
        launch_kernel(kernel, 5, X, A=64, B="scalar")


def test_keys_hold_no_tensor(kernel: Kernel):
    plain(kernel, torch.zeros(4))
    (ready,) = kernel_launch._launches
    assert not any(isinstance(x, torch.Tensor) for part in ready if isinstance(part, tuple) for x in part)


class Rows(NamedTuple):
    """A record of kernel arguments."""

    x: torch.Tensor | None
    s_x: tuple[int, ...]
    scale: float | None


X = torch.zeros(64)
OTHER_KINDS = {
    "another dtype": {"x": X.bfloat16()},
    "an address of another alignment": {"x": X[1:]},
    "no tensor": {"x": None},
    "no multiple of 16": {"y": 17},
    "one": {"y": 1},
    "64 bits": {"y": 2**40},
    "a real number": {"y": 16.0},
    "strides": {"y": (64, 1)},
    "a record": {"y": Rows(X, (64, 1), None)},
    "a record without a tensor": {"y": Rows(None, (64, 1), None)},
    "a record with other strides": {"y": Rows(X, (64, 16), None)},
    "a record at an address of another alignment": {"y": Rows(X[1:], (64, 1), None)},
    "a record with a number": {"y": Rows(X, (64, 1), 2.0)},
    "a descriptor": {"x": TensorDescriptor(X, [64], [1], [16])},
    "another constexpr": {"A": 32},
    "another word": {"B": "channel"},
    "another option": {"num_warps": 8},
    "one option more": {"maxnreg": 168},
}


@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_another_kind_is_another_key(kernel: Kernel, kind: str):
    changed = {"x": X, **OTHER_KINDS[kind]}
    assert plain(kernel, X) and not plain(kernel, X)
    assert plain(kernel, **changed)
    assert not plain(kernel, X)


def test_another_device_is_another_key(kernel: Kernel, device: Device):
    assert plain(kernel, X) and not plain(kernel, X)
    device.device = 8
    assert plain(kernel, X) and not plain(kernel, X)
    device.device = 7
    assert not plain(kernel, X)


def test_another_kernel_is_another_key(kernel: Kernel):
    assert plain(kernel, X) and plain(Kernel(), X)


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_see_every_launch(kernel: Kernel, name: str):
    plain(kernel, X)
    runtime = triton.knobs.runtime
    chain = getattr(runtime, name)
    hook = print
    chain.add(hook)
    try:
        assert plain(kernel, X)
    finally:
        chain.remove(hook)
    assert not plain(kernel, X)
    with mock.patch.object(runtime, name, hook):  # without a chain around it
        assert plain(kernel, X)
    with mock.patch.object(runtime, name, None):
        assert not plain(kernel, X)


def test_a_hooked_launch_is_not_kept(kernel: Kernel):
    with mock.patch.object(triton.knobs.runtime, "launch_enter_hook", print):
        assert plain(kernel, X)
    assert plain(kernel, X) and not plain(kernel, X)


def test_other_hooks_and_debug_modes(kernel: Kernel):
    plain(kernel, X)
    kernel.pre_run_hooks.append(print)
    assert plain(kernel, X)
    kernel.pre_run_hooks.clear()
    for knobs, name, value in (
        (triton.knobs.runtime, "debug", True),
        (triton.knobs.compilation, "instrumentation_mode", "consan"),
    ):
        before = knobs.__dict__.copy()
        knobs.__dict__[name] = value
        try:
            assert plain(kernel, X), name
        finally:
            knobs.__dict__.clear()
            knobs.__dict__.update(before)
    assert not plain(kernel, X)


def test_arguments_that_are_not_recognised_go_through_triton(kernel: Kernel):
    for x in ("word", True, object(), torch.zeros(4).as_subclass(type("Sub", (torch.Tensor,), {}))):
        assert plain(kernel, x) and plain(kernel, x)


def test_a_kernel_that_is_interpreted_goes_through_triton(kernel: Kernel):
    del kernel.device_caches
    assert plain(kernel, X) and plain(kernel, X)


def test_an_unknown_kind_of_compiled_kernel_is_not_kept(kernel: Kernel):
    """Also not None, which a launch of the compile check returns."""
    for made in (None, SimpleNamespace(run=kernel.launcher)):
        with mock.patch.object(Kernel, "__getitem__", lambda self, grid, made=made: lambda *_, **__: made):
            launch_kernel(kernel, 1, X, 16, A=1, B=2)
    assert not kernel_launch._launches and not kernel.launcher.given


def make_tensordesc_arg(arg: Any, layout: Any) -> list[Any]:
    """Stand-in for the function of this name in the module of Triton's launcher."""
    return [f"{layout} of {arg.base.data_ptr()}", *arg.shape, *arg.strides]


class Wrapping:
    """A launcher that searches for descriptors as Triton's does, in a closure with the same variable names."""

    def __init__(self, layouts: list[str], places: set[int]) -> None:
        self.slow, self.raw = 0, []
        launcher, tensordesc_meta, tensordesc_indices = self.raw.append, layouts, places

        def inner(*arguments: Any) -> None:
            self.slow += 1
            found, flat = iter(tensordesc_meta), []
            for place, x in enumerate(arguments):
                flat += make_tensordesc_arg(x, next(found)) if place in tensordesc_indices else [x]
            launcher(flat)

        self.launch = inner

    def __call__(self, *arguments: Any) -> None:
        # A fast launch has expanded the descriptors already.
        self.launch(*arguments[9:]) if self.launch.__name__ == "inner" else self.launch(list(arguments[9:]))


def test_descriptors_are_expanded_without_a_search(kernel: Kernel):
    kernel.launcher = Wrapping(["first", "second"], {0, 1})
    descriptors = [TensorDescriptor(X, [4, 16], [16, 1], [4, 16]), TensorDescriptor(X, [64], [1], [64])]
    kernel.launcher(*range(9), *descriptors, 64, "scalar")
    for _ in range(2):
        launch_kernel(kernel, 5, *descriptors, A=64, B="scalar")
    assert kernel.launcher.slow == 1
    assert kernel.launcher.raw[1] == kernel.launcher.raw[0]


def test_unknown_descriptors_are_left_to_triton(kernel: Kernel):
    descriptors = [TensorDescriptor(X, [4, 16], [16, 1], [4, 16]), 16]
    for _ in range(2):
        launch_kernel(kernel, 5, *descriptors, A=64, B="scalar")
    assert kernel.launcher.given[0][9] is descriptors[0]


# --- against Triton itself -------------------------------------------------------------------------------------------

NUMBERS = (0, 1, 2, 15, 16, 17, -1, -16, -15, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1, -(2**31), -(2**31) - 16, 2**62)
NUMBERS += (2**63 - 16, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 16)
ARGUMENTS = (
    None,
    1.0,
    16.0,
    *NUMBERS,
    *((x,) for x in NUMBERS),
    *itertools.product((1, 16, 17, 2**31), repeat=2),
    *(x[at:] for x in (X, X.bfloat16(), X.half(), X.long(), X.bool()) for at in (0, 1, 4, 8)),
    torch.nn.Parameter(X),
    torch.zeros(0),
    *(TensorDescriptor(X.to(dtype), [64], [1], [block]) for dtype in (torch.float32, torch.half) for block in (16, 32)),
    *(TensorDescriptor(X, [8, 8], [8, 1], block) for block in ([4, 4], [4, 8], [8, 4])),
)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="nothing is compiled here")
def test_no_key_is_coarser_than_triton_s(device: Device):
    """Arguments for which Triton compiles separate kernels have separate keys, with and without specialisation."""

    @triton.jit(do_not_specialize=["plain"])
    def nothing(x, plain):
        pass

    device.device = 91
    binder = nothing.device_caches[device.device][4]
    of_triton: dict[Any, set[str]] = {}
    for x in ARGUMENTS:
        for plain in (x, 3) if isinstance(x, int) else (3,):
            looked = kernel_launch._specialization((x, plain))
            assert looked is not None, x
            of_triton.setdefault(looked[0], set()).add(str(binder(x, plain)[1]))
    apart = {key: found for key, found in of_triton.items() if len(found) > 1}
    assert not apart
    assert len(of_triton) > 30


def test_every_kernel_is_launched_by_launch_kernel():
    """Any other launch looks up its compiled kernel at each call."""
    for file in (Path(kernel_launch.__file__).parents[1] / "kernels").glob("*/triton.py"):
        assert "_triton[" not in file.read_text(encoding="utf-8"), file
