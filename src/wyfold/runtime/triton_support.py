"""Support table of Triton versions and GPU architectures (`configs/support.json`), and state of the interpreter.

A pair of Triton version and GPU architecture is verified (the tests ran there), known to be wrong and refused, or
neither: then each kernel is checked at its first use (`kernels/self_check.py`).
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import json
import sys
from importlib import resources
from typing import NamedTuple

import torch


class Support(NamedTuple):
    """Support of the kernels by one Triton on one GPU.

    Attributes:
        architecture: Of the GPU, such as "sm_90".
        version: Of Triton; empty if it is not installed.
        verified: Whether the test suite passed on such a GPU with such a Triton.
        refusal: Reason and remedy if kernels are refused there, else empty.
    """

    architecture: str
    version: str
    verified: bool
    refusal: str


@functools.cache
def support_of(device: torch.device) -> Support:
    """Support by the installed Triton on a CUDA device. Does not import Triton."""
    if not torch.cuda.is_available():
        return Support("", triton_version(), False, "there is no CUDA device in this process")
    return support_for(architecture(device), triton_version())


@functools.cache
def support_for(architecture: str, version: str) -> Support:
    """Support by a version of Triton on a GPU architecture."""
    known = json.loads(config_text("support"))
    minor = ".".join(version.split(".")[:2])
    refusal = version_refusal(version)
    for bad in known["known_bad"]:
        if minor in bad["versions"] and architecture in bad["architectures"]:
            refusal = f"Triton {version} is known to be wrong on {architecture}: {bad['reason']}; {known['remedy']}"
    verified = not refusal and known["cells"].get(minor, {}).get(architecture) == "verified"
    return Support(architecture, version, verified, refusal)


@functools.cache
def version_refusal(version: str) -> str:
    """Reason why there are no kernels on any GPU, and the torch to install; empty if there is a Triton.

    Args:
        version: Of Triton; empty if it is not installed.
    """
    return "" if version else f"Triton is not installed; {json.loads(config_text('support'))['remedy']}"


@functools.cache
def triton_version() -> str:
    """Version of the installed Triton, without importing it; empty if there is none."""
    if importlib.util.find_spec("triton") is None:
        return ""
    return importlib.metadata.version("triton")


@functools.cache
def architecture(device: torch.device) -> str:
    """Architecture of a GPU, as its compiler names it. For the CPU, where the interpreter runs, sm_90."""
    if device.type != "cuda":
        return "sm_90"
    if torch.version.hip:
        return str(torch.cuda.get_device_properties(device).gcnArchName).partition(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def interpreting() -> bool:
    """Whether this process runs kernels in Triton's interpreter, on CPU tensors."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


_repaired_interpreter = False


def trust_interpreter() -> None:
    """Allow kernels in this process's interpreter, which the test suite has repaired (`tests/triton_bf16.py`)."""
    global _repaired_interpreter
    _repaired_interpreter = True


def interpreter_state() -> tuple[bool, bool]:
    """Whether this process interprets kernels, and whether its interpreter is trusted, for cache keys."""
    return interpreting(), _repaired_interpreter


def interpreter_refusal() -> str:
    """Reason why kernels must not run in this process's interpreter; empty if they may, or if there is none."""
    if not can_interpret() or _repaired_interpreter:
        return ""
    return (
        "this process was started with TRITON_INTERPRET=1, and Triton's interpreter computes wrong numbers without an "
        "error: bfloat16 as the integers of its bits, a fused multiply-add rounded twice. Start it without "
        'TRITON_INTERPRET; backend="eager" runs on any device of PyTorch'
    )


def can_interpret() -> bool:
    """`interpreting`, after importing Triton if it is installed. Triton reads its environment at import."""
    if triton_version():
        importlib.import_module("triton")
    return interpreting()


def config_text(name: str) -> str:
    """Text of `configs/<name>.json`."""
    return resources.files("wyfold.runtime").joinpath("configs", f"{name}.json").read_text(encoding="utf-8")
