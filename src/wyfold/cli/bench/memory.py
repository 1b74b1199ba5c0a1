"""Measurements in a fresh process: peak memory of a call on a CPU, and the time of a first call.

For memory, a child process makes the inputs and runs the call once on a small input, so that libraries initialise. It
returns freed memory to the system, resets the peak that the OS records, reads the resident size, runs the call once,
and reads the peak. Resident bytes include allocator slack and temporary copies. (On a GPU the allocator records its
peak: `timing.Gpu.peak_mib`.)

For a first call, the child's home directory is empty, and so is every cache of compiled kernels. The tensors exist and
the library is imported before the clock starts. Everything that the library does on its first call is included.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

METHOD = (
    "a fresh process each: inputs made, one small call, freed memory returned, peak reset through "
    "/proc/self/clear_refs, one call; VmHWM after it minus VmRSS before it. process: largest VmHWM, all included"
)
METHOD_WITHOUT_RESET = (
    "a fresh process each: inputs made, one small call, one call; the process's peak after it minus the peak before "
    "it, which counts too little where making the inputs took more than they keep. process: its peak"
)
METHOD_GPU = (
    "most memory that PyTorch's allocator holds during one call above what it holds before it, results and gradients "
    "included, after calls that compiled and tuned"
)

COMPILED = {
    "HOME": "",
    "XDG_CACHE_HOME": "cache",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TILELANG_CACHE_DIR": "tilelang",
    "CUDNN_FRONTEND_CAKE_CACHE_DIR": "cake",
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}
"""Environment variable of a cache of compiled kernels -> its folder below the empty directory."""


def in_fresh_process(request: dict[str, Any]) -> dict[str, Any]:
    """Run `wyfold bench --measure` in a child process and return its answer.

    Raises:
        RuntimeError: the child failed; the message is its last line on standard error.
    """
    return _request([], request)


def first_call(request: dict[str, Any]) -> dict[str, Any]:
    """Time a first call in a child process without cached kernels.

    Raises:
        RuntimeError: the child failed; the message is its last line on standard error.
    """
    with tempfile.TemporaryDirectory() as empty:
        settings = [f"{name}={Path(empty, folder)}" for name, folder in COMPILED.items()]
        return _request(["env", *settings], request | {"what": "first call"})


def seconds(call: Callable[[], object], finish: Callable[[], None]) -> dict[str, float]:
    """Time one call, until `finish` returns."""
    began = time.perf_counter()
    call()
    finish()
    return {"seconds": time.perf_counter() - began}


def first_backward(device: str) -> None:
    """Run an unrelated backward: PyTorch imports sympy in the first one with a given gradient, which takes seconds."""
    x = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(x.clone(), x, torch.ones_like(x))


def _request(prefix: list[str], request: dict[str, Any]) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-m", "wyfold", "bench", "--measure", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {lines[-1] if lines else 'it lines nothing'}")
    return json.loads(done.stdout.splitlines()[-1])


def peak(small: Callable[[], object], call: Callable[[], object]) -> dict[str, Any]:
    """Peak resident memory of `call` in MiB, above the level before it and of the whole process.

    Args:
        small: The same kind of call on a small input.
        call: Call to measure. Its inputs exist already, and its results are dropped.
    """
    small()
    gc.collect()
    _return_freed()
    making = _peak_rss()
    try:
        RESET.write_text("5", encoding="ascii")
    except OSError:
        call()
        after = _peak_rss()
        return {"above_inputs_mib": after - making, "process_mib": after, "method": METHOD_WITHOUT_RESET}
    before = _field("VmRSS")
    call()
    after = _peak_rss()
    return {"above_inputs_mib": after - before, "process_mib": max(making, after), "method": METHOD}


def _return_freed() -> None:
    """Return freed memory to the system. glibc keeps it resident, and reuse would not show in the peak."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library, without this function


def _field(name: str) -> float:
    """A field of /proc/self/status in MiB."""
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{STATUS} has no {name}")


def _peak_rss() -> float:
    """Peak resident size since the last reset, MiB."""
    if STATUS.exists():
        return _field("VmHWM")
    # Not on Linux, where this figure would start at the parent's peak.
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)
