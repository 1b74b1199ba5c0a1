"""How the kernels are launched: configurations as data, one file per GPU architecture, nothing timed in a user's process."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

import torch


@dataclass(frozen=True)
class Config:
    """Launch configuration of one kernel.

    Attributes:
        warps: Warps of a program.
        stages: Iterations of a loop whose loads are in flight.
        blocks: Tile extents by name, such as BV.
    """

    warps: int = 4
    stages: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)


def tuned(kernel: str, key: str, device: torch.device) -> Config:
    """The table's configuration of `kernel` ("stage.backend") for `key`, else the kernel's default.

    Args:
        kernel: Name in `configs/<architecture>.json`.
        key: What the best configuration depends on, such as "bf16 K128 V128 C64 scalar AF".
        device: Of the tensors; the interpreter, whose tensors are on the CPU, takes sm_90's.
    """
    rows = _table(_architecture(device))[kernel]
    return rows.get(key) or rows["default"]


def interpreting() -> bool:
    """Whether this process runs kernels in Triton's interpreter, on CPU tensors."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def _architecture(device: torch.device) -> str:
    if device.type != "cuda":
        return "sm_90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@functools.cache
def _table(architecture: str) -> dict[str, dict[str, Config]]:
    text = resources.files("wyfold.runtime").joinpath("configs", f"{architecture}.json").read_text()
    return {
        kernel: {
            key: Config(row["warps"], row["stages"], {name: n for name, n in row.items() if name.isupper()})
            for key, row in rows.items()
        }
        for kernel, rows in json.loads(text).items()
    }
