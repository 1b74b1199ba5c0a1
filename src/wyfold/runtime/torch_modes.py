"""State of PyTorch around a call: transforms, modes, tracers, profilers, autocast."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd import forward_ad


def in_plain_eager() -> bool:
    """Whether no mode, transform, compiler, tracer or profiler is active that could observe a call's operations."""
    return not (
        torch.compiler.is_compiling()
        or transforming() is not None
        or getattr(forward_ad, "_current_level", 0) >= 0
        or dispatch_modes()
        or _function_modes()
        or tracing() is not None
        or _profiling()
    )


class _ThreadState(threading.local):
    """State of a thread.

    Attributes:
        bypassing: Whether the thread is inside `bypass_dispatch`.
    """

    bypassing = False


_thread = _ThreadState()


@contextlib.contextmanager
def bypass_dispatch() -> Iterator[None]:
    """Call the implementations of registered operators directly on this thread, without autograd.

    For dry runs and recordings, whose own dispatch mode is to see the operations that an implementation calls.
    """
    _thread.bypassing = True
    try:
        yield
    finally:
        _thread.bypassing = False


def bypassing() -> bool:
    """Whether this thread is inside `bypass_dispatch`."""
    return _thread.bypassing


def _torch_query(path: str) -> Callable[[], Any]:
    """A private query function of PyTorch; in a version without it, one that returns True."""
    function: Any = torch
    for name in path.split("."):
        function = getattr(function, name, None)
    return function if callable(function) else lambda: True


dispatch_modes = _torch_query("_C._len_torch_dispatch_stack")
_function_modes = _torch_query("_C._len_torch_function_stack")
transforming = _torch_query("_C._functorch.peek_interpreter_stack")
tracing = _torch_query("_C._get_tracing_state")
_profiling = _torch_query("autograd._profiler_enabled")


def differentiating() -> bool:
    """Whether derivatives of a call may be taken: by autograd, forward mode, a transform or a compiler."""
    return torch.compiler.is_compiling() or (
        not _thread.bypassing
        and (torch.is_grad_enabled() or transforming() is not None or getattr(forward_ad, "_current_level", 0) >= 0)
    )


AUTOCASTING = frozenset(name for name in ("cpu", "cuda", "xpu", "mps") if torch.amp.is_autocast_available(name))
"""Device types with autocast. Determined once, because PyTorch 2.11's compiler cannot trace the query."""


def autocast_dtype(device: str) -> torch.dtype | None:
    """Dtype of the active autocast on a device type; None if autocast is off."""
    if device not in AUTOCASTING or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)
