"""Compile a call's kernels in parallel before the first of them is launched.

Triton compiles a kernel at its first launch, so kernels are compiled one after another: the first backward of a Gated
DeltaNet waits for three of them, two seconds each. `precompile_kernels` makes a dry run of the call to find its
kernels, and has Triton compile them in threads; most of that work is done outside Python. The call itself then finds
them compiled.

The dry run writes to no tensor. It ends at the first operation that it does not know, and the call compiles the
remaining kernels when it launches them.
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

from wyfold.runtime import kernel_launch, torch_modes, triton_support
from wyfold.runtime.recorder import ALL_GATHER, ALLOCATIONS, PRODUCTS, REPEATABLE, WAIT_TENSOR, OperationMode

THREADS = 8
"""Most threads. A call has at most six kernels."""


def precompile_kernels(run: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `run` would launch on a CUDA device. Errors are suppressed; the call itself raises them.

    Does nothing without Triton, and while the current stream is captured in a graph.
    """
    if not triton_support.triton_version() or _capturing(device):
        return
    # Interrupted while it waits, Triton's mode stays active, and no later launch in this context would compile.
    contextvars.copy_context().run(_precompile, run, device)


def _precompile(run: Callable[[], object], device: torch.device) -> None:
    # Triton may not have been imported yet: this can be the first launch of the process.
    mode = getattr(importlib.import_module("triton"), "AsyncCompileMode", None)
    if mode is None:
        return
    kernels: list[Any] = []

    def compile_kernel(kernel: Any, programs: int, arguments: tuple[Any, ...], fixed: dict[str, Any]) -> None:
        kernels.append(kernel.run(*arguments, grid=(programs,), warmup=True, **fixed))

    threads = ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1))
    dry_run = kernel_launch.dry_run(compile_kernel)
    with contextlib.suppress(Exception), threads:
        with mode(threads, ignore_errors=True):
            with contextlib.suppress(Exception), torch_modes.bypass_dispatch(), dry_run, _NoWrites():
                run()
        # Loading a kernel compiles its launcher, by a separate C compiler.
        for done in [threads.submit(_load, kernel, device) for kernel in kernels]:
            done.result()


class _NotRepeatable(Exception):
    """The call contains an operation that must perhaps not be executed twice."""


class _NoWrites(OperationMode):
    """Mode in which tensors are allocated and viewed, but none that exists is written to."""

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name
        if name == WAIT_TENSOR:
            return args[0]  # the call itself waits, whatever happens here
        if name == ALL_GATHER:  # of which ranks must launch equally many
            sent, world, _ = args
            return sent.new_empty(world * sent.shape[0], *sent.shape[1:])
        if func in PRODUCTS:
            return kwargs["out"]
        if name in REPEATABLE and func._schema.is_mutable:
            return args[0]
        if name in ALLOCATIONS or name in REPEATABLE or func.is_view:
            return func(*args, **kwargs)
        raise _NotRepeatable


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _load(kernel: Any, device: torch.device) -> None:
    """Load a compiled kernel onto the device.

    Args:
        kernel: The compiled kernel, or Triton's future of it.
        device: Made current first, which is a setting of each thread.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    compiled = kernel.result() if hasattr(kernel, "result") else kernel
    compiled.run  # noqa: B018  reading the launcher makes Triton load the kernel
