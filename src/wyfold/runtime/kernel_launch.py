"""Fast kernel launch: after the first launch of a kind, the compiled kernel is found without Triton's lookup.

For each argument and each field of a record, Triton's `JITFunction.run` determines what the code may depend on, formats
that as text, and looks the compiled kernel up by the text. With fifty of them that takes 25 to 40 microseconds before
the driver is called. `launch_kernel` does it once for each cache key and keeps the compiled kernel. Its keys
distinguish at least what Triton distinguishes.

A recorder can observe a thread's launches (`observe_steps`). It gets each as a `RecordedLaunch`, which launches again
on other addresses without any lookup (`runtime/replay_cache.py`). A dry run (`dry_run`) launches nothing and only
reports kernels that are not compiled.

Triton itself launches where something is not recognised. That is so under the interpreter, with a Triton whose compiled
kernels look different, for arguments of other types, and with launch hooks (profilers) or debug compilation.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from wyfold.runtime.compiled_launch import CompiledLaunch, compiled_launch
from wyfold.runtime.recorded_launch import recorded_launch

_launches: dict[tuple[Any, ...], CompiledLaunch] = {}
"""Kernel, device, specialization of the arguments, constexprs and options -> the launch."""

_thread = threading.local()
"""State of a thread: `observer`, `step_map`, `collector`, `overlap` of the contexts below, and `entered`; or unset."""

WAITING = frozenset(
    f"wyfold_{name}"
    for name in (
        "segment_grid_triton",
        "prepare_gluon",
        "prepare_channel_gluon",
        "segment_summary_gluon",
        "segment_fold_gluon",
        "scan_gluon",
    )
)
"""Kernels that may start before the launch ahead of them has ended, and wait for its end themselves."""


def launch_kernel(kernel: Any, programs: int, /, *arguments: Any, **named: Any) -> None:
    """Launch a kernel on the current device and its current stream: `kernel[(programs,)](*arguments, **named)`.

    An argument is a tensor, an integer, a tuple of integers, a float, a tensor descriptor, None, or a record: a
    NamedTuple of these, except descriptors.

    Args:
        kernel: Decorated with `triton.jit`. Its constexprs come last.
        programs: Size of the grid, which has one dimension.
        arguments: The kernel's first arguments, in its order.
        named: All other arguments by name, constexprs, and options of the launch.

    Raises:
        TypeError: An argument is missing.
    """
    enter_context(arguments, named)
    observer = getattr(_thread, "observer", None)
    collector = getattr(_thread, "collector", None)
    # Triton itself launches interpreted kernels, hooked kernels, and kernels with unknown types of arguments.
    by_triton = not hasattr(kernel, "device_caches") or has_launch_hooks(kernel)
    if not by_triton:
        arguments = _by_position(kernel, arguments, named)
        if overlaps():
            named |= _dependent_launch(kernel)
    specialization = None if by_triton else _specialization(arguments)
    if specialization is None:
        if collector is None:
            kernel[(programs,)](*arguments, **named)
            if observer is not None:
                observer(None, kernel, new=False)
        return
    kinds, flat = specialization
    driver = sys.modules["triton"].runtime.driver.active
    device = driver.get_current_device()
    key = kernel.fn, device, kinds, tuple(named), tuple(named.values())
    launch = _launches.get(key)
    if collector is not None:
        if launch is None:
            collector(kernel, programs, arguments, named)
        return
    if launch is None:
        _launch_and_keep(key, kernel, programs, arguments, named)
        if observer is not None:
            observer(None, kernel, new=key in _launches)
        return
    if observer is not None:
        recorded = recorded_launch(launch, programs, arguments)
        observer(None if recorded is None else map_step(recorded), kernel, new=False)
    run, function, metadata, constants, expanders, _ = launch
    for place, expand in expanders:
        flat[place : place + 1] = expand(arguments[place])
    stream = driver.get_current_stream(device)
    run(programs, 1, 1, stream, function, metadata, None, None, None, *flat, *constants)


def _by_position(kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """All arguments that are no constexprs, in the kernel's order; those after `arguments` are taken out of `named`."""
    names, constexprs = kernel.arg_names, kernel.constexprs
    missing = names[len(arguments) : constexprs[0] if constexprs else None]
    try:
        return (*arguments, *[named.pop(name) for name in missing]) if missing else arguments
    except KeyError as error:
        raise TypeError(f"launch_kernel: {kernel.fn.__name__} needs an argument {error}") from None


def _launch_and_keep(
    key: tuple[Any, ...], kernel: Any, programs: int, arguments: tuple[Any, ...], fixed: dict[str, Any]
) -> None:
    """Launch through Triton, which compiles the kernel or looks it up, and keep what it launched under the key."""
    compiled = kernel[(programs,)](*arguments, **fixed)
    if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        constants = tuple([fixed[name] for name in kernel.arg_names[len(arguments) :]])
        _launches[key] = compiled_launch(compiled, arguments, constants)


def enter_context(arguments: Sequence[Any], named: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Make the device's context current on the calling thread, which the driver needs to encode a descriptor.

    A launch does this by itself, but descriptors are encoded before it, and a thread of autograd may not have used the
    device yet. Recording an event is allowed during graph capture and waits for nothing.
    """
    if not hasattr(_thread, "entered") and any(map(_is_on_cuda, (*arguments, *named.values()))):
        torch.cuda.Event().record()
        _thread.entered = True


def _is_on_cuda(x: Any) -> bool:
    """Whether an argument is a CUDA tensor, or has one."""
    return any(map(_is_on_cuda, x)) if isinstance(x, tuple) else isinstance(x, Tensor) and x.is_cuda


def current_device() -> int:
    """Index of the current device."""
    index: int = sys.modules["triton"].runtime.driver.active.get_current_device()
    return index


def current_stream(device: int) -> Any:
    """Handle of a device's current stream, as a launcher takes it."""
    return sys.modules["triton"].runtime.driver.active.get_current_stream(device)


# --- specialization: what a compiled kernel depends on


def _specialization(arguments: tuple[Any, ...]) -> tuple[tuple[Any, ...], list[Any]] | None:
    """Specialization key of the arguments, and the launcher's arguments; None if an argument is not recognised.

    The key holds everything that the compiled code depends on, but no tensor, address or length. The launcher's
    arguments have addresses instead of tensors. Triton's launcher then does not query the driver for the device of each
    tensor, which the operators have checked. A record is a tuple among them, and in the key it is one as well.
    """
    kinds: list[Any] = []
    flat = list(arguments)
    for place, x in enumerate(arguments):
        kind = type(x)
        if x is None:
            kinds.append(None)
        elif kind is Tensor or kind is torch.nn.Parameter:
            flat[place] = address = x.data_ptr()
            # Alignment decides whether whole vectors are loaded.
            kinds += x.dtype, address % 16 == 0
        elif kind is tuple:
            kinds.append(_integers_class(x))
        elif isinstance(x, tuple):
            record = _specialization(x)
            if record is None:
                return None
            kinds.append(record[0])
            flat[place] = tuple(record[1])
        elif kind is int:
            kinds.append(_integer_class(x))
        elif kind is float:
            kinds.append(kind)
        elif hasattr(x, "block_shape"):
            # Shape and strides of a descriptor's tensor are read at the launch.
            kinds += kind, x.base.dtype, *x.block_shape
        else:
            return None
    return tuple(kinds), flat


@functools.lru_cache(maxsize=4096)
def _integer_class(x: int) -> str:
    """Whether an integer is 1, a multiple of 16, of 32 bits, of 64 bits.

    For an argument that Triton does not specialise on, this is finer than necessary.
    """
    return f"{x == 1} {x % 16 == 0} {-(2**31) <= x < 2**31} {x < 2**63}"


@functools.lru_cache(maxsize=4096)
def _integers_class(x: tuple[int, ...]) -> str:
    """Classes of strides. Strides repeat from call to call, and those of a new length often have known classes."""
    return f"({', '.join(map(_integer_class, x))})"


def any_launch_hooks() -> bool:
    """Whether a hook observes all kernels' launches now."""
    return "triton" in sys.modules and has_launch_hooks()


def has_launch_hooks(*kernels: Any) -> bool:
    """Whether hooks observe these kernels' launches or change their compilation.

    True under a Triton whose settings have other names.
    """
    try:
        knobs = sys.modules["triton"].knobs
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        for kernel in kernels:
            if kernel.pre_run_hooks:
                return True
        return bool(
            # Each is a chain of hooks, which may be empty, or one hook, or None.
            getattr(enter, "calls", enter)
            or getattr(leave, "calls", leave)
            or runtime.debug
            or runtime.add_stages_inspection_hook
            or knobs.compilation.instrumentation_mode
        )
    except AttributeError:
        return True


# --- launches that overlap


@contextlib.contextmanager
def overlapping_launches() -> Iterator[None]:
    """Start this thread's launches before the ones ahead of them have ended (programmatic dependent launch).

    Only the kernels of `WAITING` start early. Each of them waits for the end of the launch ahead before it reads what
    that launch wrote, and ends after it. `segment_summary` and `segment_fold` let the next launch start only after this
    wait: `segment_fold` and `scan` may read at once what launches before the one ahead wrote. `prepare` lets it start
    at once. The first launch inside starts as always, and so does every launch on another stream. So any of them may
    read at once what was written before the first one. The GPU is Hopper or newer.
    """
    _thread.overlap = 0
    try:
        yield
    finally:
        _thread.overlap = None


def overlaps() -> bool:
    """Whether `overlapping_launches` is in force on this thread."""
    return getattr(_thread, "overlap", None) is not None


def _dependent_launch(kernel: Any) -> dict[str, bool]:
    """Options of the next launch in `overlapping_launches`."""
    _thread.overlap += 1
    return {"launch_pdl": True} if _thread.overlap > 1 and kernel.fn.__name__ in WAITING else {}


# --- recording and dry runs


@contextlib.contextmanager
def observe_steps(observer: Callable[..., None]) -> Iterator[None]:
    """Report this thread's launches, and the steps passed to `emit_step`, to `observer(step, kernel, new=...)`.

    `step` is None for a launch that cannot be replayed. `kernel` is None for a step that is no launch. `new` means that
    Triton compiled the kernel or looked it up.
    """
    _thread.observer = observer
    try:
        yield
    finally:
        _thread.observer = None


def emit_step(step: Any) -> None:
    """Report a step that is no launch (e.g. a stream fork) to this thread's observer, if there is one."""
    observer = getattr(_thread, "observer", None)
    if observer is not None:
        observer(step, None, new=False)


@contextlib.contextmanager
def redirect_steps(step_map: Callable[[Any], Any]) -> Iterator[None]:
    """Pass recorded launches and waits through `step_map`, because a replay needs more, such as another stream."""
    _thread.step_map = step_map
    try:
        yield
    finally:
        _thread.step_map = None


def map_step(step: Any) -> Any:
    """A launch or wait as this thread's observer is to record it: passed through the `step_map` in force, if any."""
    step_map = getattr(_thread, "step_map", None)
    return step if step_map is None else step_map(step)


@contextlib.contextmanager
def dry_run(collector: Callable[..., None]) -> Iterator[None]:
    """Launch nothing on this thread, and report each kernel that has not been launched like this.

    Reported as `collector(kernel, programs, arguments, fixed)`, with the arguments of `launch_kernel`.
    """
    _thread.collector = collector
    try:
        yield
    finally:
        _thread.collector = None
