"""A call's kernels, compiled side by side before the first of them is launched.

Triton compiles a kernel when it is launched for the first time, one after another: the first backward of a Gated
DeltaNet waits for three of them, two seconds each. `precompile_kernels` makes a dry run of a call, which finds its
kernels, and has Triton compile them in threads: most of that work is done outside Python. Then the
call itself finds them. Nobody's tensor changes meanwhile; where a call does anything that is not understood, the
rehearsal ends, and the call compiles what is left as it comes to it.
"""

from __future__ import annotations

import contextlib
import contextvars
import importlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from wyfold.runtime import kernel_launch, torch_ops, triton_support
from wyfold.runtime.recorder import ALLOCATIONS, REPEATABLE, WAIT_TENSOR, OperationMode

THREADS = 8
"""At most; a call has six kernels or fewer."""


def precompile_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Compile what `run` would launch on a CUDA device. Whatever fails here is left for the call itself to say."""
    if not triton_support.triton_version() or _capturing(device):
        return
    # Triton's mode stays on if it is interrupted while it waits, and then no later launch of the thread compiles.
    contextvars.copy_context().run(_precompile, run, device)


def _precompile(run: Callable[[], object], device: torch.device) -> None:
    # Nothing may have been launched yet, and so nobody may have imported it.
    mode = getattr(importlib.import_module("triton"), "AsyncCompileMode", None)
    if mode is None:
        return
    kernels: list[Any] = []

    def compile_kernel(kernel: Any, programs: int, arguments: tuple[Any, ...], fixed: dict[str, Any]) -> None:
        kernels.append(kernel.run(*arguments, grid=(programs,), warmup=True, **fixed))

    threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    with contextlib.suppress(Exception), threads:
        with mode(threads, ignore_errors=True):
            with (
                contextlib.suppress(Exception),
                torch_ops.bypass_dispatch(),
                kernel_launch.dry_run(compile_kernel),
                _NoWrites(),
            ):
                run()
        # Loading a kernel compiles its launcher, by a C compiler of its own.
        for done in [threads.submit(_load, kernel, device) for kernel in kernels]:
            done.result()


class _NotRepeatable(Exception):
    """The call does something that may not bear being done twice."""


class _NoWrites(OperationMode):
    """Within, tensors are made, and looked at in other shapes; none is written to."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name == WAIT_TENSOR:
            return args[0]  # by the call itself, as it does whatever happens here
        if name in REPEATABLE and func._schema.is_mutable:
            return args[0]
        if name in ALLOCATIONS or name in REPEATABLE or func.is_view:
            return func(*args, **kwargs)
        raise _NotRepeatable


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _load(kernel: Any, device: torch.device) -> None:
    """Onto the device, which is current for each thread apart. `result`: of a kernel that was still to be compiled."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    ready = kernel.result() if hasattr(kernel, "result") else kernel
    ready.run  # noqa: B018  Triton loads it when it is asked for its launcher
