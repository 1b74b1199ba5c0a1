"""Peak memory of one call, measured in a process of its own.

A child process makes the inputs, runs the call once on a small input so that libraries have set themselves up, gives
freed memory back to the system, resets the kernel's record of its peak, notes what is resident, runs the call once, and
reads the peak. Resident bytes are what the machine pays: allocator slack and temporary copies count.
"""

from __future__ import annotations

import ctypes
import gc
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

METHOD = (
    "a fresh process each: inputs made, one small call, freed memory returned, peak reset through "
    "/proc/self/clear_refs, one call; VmHWM after it minus VmRSS before it. process: largest VmHWM, all included"
)
METHOD_WITHOUT_RESET = (
    "a fresh process each: inputs made, one small call, one call; the process's peak after it minus the peak before "
    "it, which counts too little where making the inputs took more than they keep. process: its peak"
)


def in_fresh_process(request: dict[str, Any]) -> dict[str, Any]:
    """What `wyfold bench --measure` prints in a child of this process.

    Raises:
        RuntimeError: the child failed; the text is the last line it said.
    """
    command = [sys.executable, "-m", "wyfold", "bench", "--measure", json.dumps(request)]
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
