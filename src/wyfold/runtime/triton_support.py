"""Support table of Triton versions and GPU architectures (`configs/support.json`), and state of the interpreter.

A pair of Triton version and GPU architecture is verified (the tests ran there), compiled only, or refused.
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
        proof: "verified": the test suite ran on such a GPU with such a Triton. "compiled": the kernels were compiled
            for it and the code was inspected, no more. Empty: refused.
        refusal: Reason and remedy if refused, else empty.
    """

    architecture: str
    version: str
    proof: str
    refusal: str


@functools.cache
def support_of(device: torch.device) -> Support:
    """Support by the installed Triton on a CUDA device. Does not import Triton."""
    if not torch.cuda.is_available():
        return Support("", triton_version(), "", "there is no CUDA device in this process")
    return support_for(architecture(device), triton_version())


@functools.cache
def support_for(architecture: str, version: str) -> Support:
    """Support by a version of Triton on a GPU architecture."""
    known = json.loads(config_text("support"))
    cells, remedy = known["cells"], known["remedy"]
    minor = ".".join(version.split(".")[:2])
    listed = ", ".join(dict.fromkeys(name for cell in cells.values() for name in cell))
    refusal = version_refusal(version)
    for bad in known["known_bad"]:  # more specific than an unlisted version, so it takes precedence
        if minor in bad["versions"] and architecture in bad["architectures"]:
            refusal = f"Triton {version} is known to be wrong on {architecture}: {bad['reason']}; {remedy}"
    if not refusal and architecture not in cells[minor]:
        refusal = (
            f"no kernel was ever compiled for {architecture}; the table has {listed}; "
            'backend="eager" runs on any device of PyTorch'
        )
    return Support(architecture, version, "" if refusal else cells[minor][architecture], refusal)


@functools.cache
def version_refusal(version: str) -> str:
    """Reason why a version of Triton is not supported on any GPU, and the torch to install; empty if it is supported.

    Args:
        version: Of Triton; empty if it is not installed.
    """
    known = json.loads(config_text("support"))
    if not version:
        return f"Triton is not installed; {known['remedy']}"
    if ".".join(version.split(".")[:2]) in known["cells"]:
        return ""
    *most, last = known["cells"]
    listed = f"{', '.join(most)} and {last}"
    here = f"Triton {version} is not in the table, which has {listed} (torch here is {torch.__version__})"
    return f"{here}; {known['remedy']}"


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
