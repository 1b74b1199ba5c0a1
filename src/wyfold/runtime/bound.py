"""Launches that find their compiled kernel without Triton's help, after the first one like them.

Triton's own way into a kernel asks of each argument what the code may depend on, writes the answers out as a text, and
looks the compiled kernel up by it: 25 to 40 microseconds of a launch with fifty arguments, before the driver is asked
for anything. `launched` goes that way once for every combination of answers and keeps what came of it under a key that
holds the same answers, or finer ones.

The ordinary way stays for all that is not recognised: the interpreter, a Triton whose compiled kernels look different,
arguments of other types, and a process whose launches are watched by hooks (profilers) or compiled for debugging.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Ready(NamedTuple):
    """A compiled kernel on one device.

    Attributes:
        run, function, metadata: What Triton launches it by.
        constants: The kernel's constexprs, which a launch passes along without reading them.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]


_ready: dict[tuple[Any, ...], Ready] = {}


def launched(kernel: Any, programs: int, *arguments: Any, **fixed: Any) -> None:
    """Launch a kernel on the current device and its current stream: `kernel[(programs,)](*arguments, **fixed)`.

    Args:
        kernel: Decorated with `triton.jit`.
        programs: Of the grid, which has one dimension.
        arguments: Tensors, integers, tuples of integers, floats, descriptors and None, in the kernel's order: all that
            are no constexprs.
        fixed: Constexprs by name, and options of the launch.
    """
    kinds = None if not hasattr(kernel, "device_caches") or _watched(kernel) else _kinds(arguments)
    if kinds is None:
        kernel[(programs,)](*arguments, **fixed)
        return
    driver = sys.modules["triton"].runtime.driver.active
    device = driver.get_current_device()
    key = kernel.fn, device, kinds, tuple(fixed), tuple(fixed.values())
    ready = _ready.get(key)
    if ready is not None:
        stream = driver.get_current_stream(device)
        run, function, metadata, constants = ready
        run(programs, 1, 1, stream, function, metadata, None, None, None, *arguments, *constants)
        return
    compiled = kernel[(programs,)](*arguments, **fixed)
    if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
        constants = tuple([fixed[name] for name in kernel.arg_names[len(arguments) :]])
        _ready[key] = Ready(compiled.run, compiled.function, compiled.packed_metadata, constants)


def _watched(kernel: Any) -> bool:
    """Whether someone looks at this kernel's launches, or has them compiled in another way."""
    knobs = sys.modules["triton"].knobs
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        # A chain of hooks, which may have none, or one hook, or None.
        getattr(enter, "calls", enter)
        or getattr(leave, "calls", leave)
        or kernel.pre_run_hooks
        or runtime.debug
        or runtime.add_stages_inspection_hook
        or knobs.compilation.instrumentation_mode
    )


def _kinds(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What code is compiled for, of each argument: no tensor, no address, no length. None if one is not recognised."""
    try:
        return tuple([_KINDS.get(type(x), _descriptor)(x) for x in arguments])
    except (AttributeError, TypeError):
        return None


def _nothing(x: None) -> None:
    return None


def _tensor(x: Tensor) -> tuple[torch.dtype, bool]:
    """Element, and whether whole vectors may be loaded from the first one on."""
    return x.dtype, x.data_ptr() % 16 == 0


def _integer(x: int) -> tuple[bool, bool, bool, bool]:
    """Whether it is 1, a multiple of 16, of 32 bits, of 64 bits. Finer than for arguments that are not specialised."""
    return x == 1, x % 16 == 0, -(2**31) <= x < 2**31, x < 2**63


@functools.lru_cache(maxsize=4096)
def _integers(x: tuple[int, ...]) -> tuple[Any, ...]:
    """Strides repeat from call to call; those that come with a new length are told apart by their kinds alone."""
    return tuple([_integer(one) for one in x])


def _real(x: float) -> type[float]:
    return float


def _descriptor(x: Any) -> tuple[Any, ...]:
    """Element and box; what its matrix is like is read at the launch. An AttributeError for what is no descriptor."""
    return x.base.dtype, *x.block_shape


_KINDS: dict[type, Callable[[Any], Any]] = {
    NoneType: _nothing,
    Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    int: _integer,
    tuple: _integers,
    float: _real,
}
