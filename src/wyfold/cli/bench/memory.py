"""What has to be measured in a process of its own: peak memory of a call on a CPU, and the time of a first call.

For memory a child process makes the inputs, runs the call once on a small input so that libraries have set themselves
up, gives freed memory back to the system, resets the kernel's record of its peak, notes what is resident, runs the call
once, and reads the peak. Resident bytes are what the machine pays: allocator slack and temporary copies count. (On a
GPU the allocator knows its peak: `timing.Gpu.peak_mib`.)

For a first call the child's home, and with it every cache of compiled kernels, is an empty folder. Its tensors exist
and the library is imported before the clock starts; whatever a library does on being called for the first time counts.
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
"""Where libraries keep compiled kernels, as environment variable -> folder below the empty one."""


def in_fresh_process(request: dict[str, Any]) -> dict[str, Any]:
    """What `wyfold bench --measure` prints in a child of this process.

    Raises:
        RuntimeError: the child failed; the text is the last line it said.
    """
    return _asked([], request)


def first_call(request: dict[str, Any]) -> dict[str, Any]:
    """The same from a child that finds no compiled kernel.

    Raises:
        RuntimeError: the child failed; the text is the last line it said.
    """
    with tempfile.TemporaryDirectory() as empty:
        settings = [f"{name}={Path(empty, folder)}" for name, folder in COMPILED.items()]
        return _asked(["env", *settings], request | {"what": "first call"})


def seconds(call: Callable[[], object], finish: Callable[[], None]) -> dict[str, float]:
    """Time of one call until `finish` returns."""
    began = time.perf_counter()
    call()
    finish()
    return {"seconds": time.perf_counter() - began}


def first_backward(device: str) -> None:
    """A backward of nobody's: PyTorch's first one that is fed a gradient imports sympy for it, for seconds."""
    x = torch.ones(1, device=device, requires_grad=True)
    torch.autograd.grad(x.clone(), x, torch.ones_like(x))


def _asked(prefix: list[str], request: dict[str, Any]) -> dict[str, Any]:
    command = [*prefix, sys.executable, "-m", "wyfold", "bench", "--measure", json.dumps(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise RuntimeError(f"exit code {done.returncode}: {said[-1] if said else 'it said nothing'}")
    return json.loads(done.stdout.splitlines()[-1])


def peak(small: Callable[[], object], call: Callable[[], object]) -> dict[str, Any]:
    """Peak of `call` in MiB: above what is resident before it, and of the whole process.

    Args:
        small: The same kind of call on a small input.
        call: Its inputs exist already; its results are dropped.
    """
    small()
    gc.collect()
    _return_freed()
    making = _highest()
    try:
        RESET.write_text("5", encoding="ascii")
    except OSError:
        call()
        after = _highest()
        return {"above_inputs_mib": after - making, "process_mib": after, "method": METHOD_WITHOUT_RESET}
    before = _field("VmRSS")
    call()
    after = _highest()
    return {"above_inputs_mib": after - before, "process_mib": max(making, after), "method": METHOD}


def _return_freed() -> None:
    """glibc keeps freed memory resident; what is kept would later be used without being seen."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return  # another C library: nothing to return by this name


def _field(name: str) -> float:
    """A line of this process's status, MiB."""
    for line in STATUS.read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"{STATUS} has no {name}")


def _highest() -> float:
    """Peak resident size since the last reset, MiB."""
    if STATUS.exists():
        return _field("VmHWM")
    # Elsewhere than on Linux; there, this figure would begin with the parent's.
    size = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return size / (2**20 if sys.platform == "darwin" else 2**10)
