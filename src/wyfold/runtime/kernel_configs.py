"""Launch configurations of the kernels: tables of rows, one JSON file per GPU architecture.

Configurations are data that was measured in advance. Nothing is timed in a user's process.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import ModuleType
from typing import Any

import torch

from wyfold.runtime import triton_support


@dataclass(frozen=True)
class Config:
    """Launch configuration of one kernel.

    Attributes:
        warps: Warps of a program.
        stages: Pipeline depth: loop iterations whose loads are in flight.
        blocks: Tile extents by name, such as BV.
        registers: Register limit of a thread, or None. Without a limit the assembler optimises occupancy, and may end
            at 32 registers for a kernel that needs more than there are (docs/facts/compilers.md, PTXAS-1).
    """

    warps: int = 4
    stages: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)
    registers: int | None = None

    def options(self, *, contract: bool = True) -> Mapping[str, Any]:
        """Launch options of a kernel, as keywords.

        Args:
            contract: Whether the compiler may contract a product and a sum into a fused multiply-add.
        """
        return _options(self.warps, self.stages, self.registers, contract)


@functools.cache
def _options(warps: int, stages: int, registers: int | None, contract: bool) -> Mapping[str, Any]:
    limit = {} if registers is None else {"maxnreg": registers}
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract, **limit}


def tuned(kernel: str, key: str, device: torch.device) -> Config:
    """The configuration of a kernel for a key, from the table of the device's architecture.

    Args:
        kernel: Name in `configs/<architecture>.json`, "stage.backend".
        key: What the best configuration depends on, as words, such as "bf16 K128 V128 C64 scalar WF".
        device: Device of the tensors. On the CPU, where the interpreter runs, the table of sm_90 is used.
    """
    architecture = triton_support.architecture(device)
    return _table(architecture)[kernel][row(architecture, kernel, key)]


@functools.cache
def row(architecture: str, kernel: str, key: str) -> str:
    """Name of the row for a key: the row with the most words, among those whose words are all in the key.

    The row "default" has no words. A width in a key counts as two words: K200 is also BK256, its tile width.
    """
    words = _words(key)
    fitting = [name for name in _table(architecture)[kernel] if name == "default" or words.issuperset(name.split())]
    return max(fitting, key=lambda name: 0 if name == "default" else len(name.split()))


@functools.cache
def has_row(architecture: str, kernel: str, key: str) -> bool:
    """Whether the file of an architecture has a row for a key of `kernel`, which may be missing or have no default.

    An architecture without a file has none: the rows that it borrows are for Triton's kernels only.
    """
    rows = shipped(architecture).get(kernel, {}) if architecture in _files() else {}
    return any(set(key.split()).issuperset(name.split()) for name in rows)


def with_occupancy_hint(key: str, programs: int, device: torch.device) -> str:
    """The key, with the word "low_occupancy" added if the programs fill at most half of the GPU's multiprocessors."""
    return f"{key} low_occupancy" if 2 * programs <= processors(device) else key


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU. For the CPU, where the interpreter runs, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tile_width(width: int) -> int:
    """Tile width of K or V: the smallest power of two that is at least `width` and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


@functools.cache
def hardware_limit(architecture: str, kernel: str, key: str) -> str:
    """Reason why a kernel with this key exceeds the GPU's resources, from `configs/support.json`; empty if it fits."""
    for limit in json.loads(triton_support.config_text("support"))["beyond"]:
        listed, words = borrowed_from(architecture) in limit["architectures"], limit["key"].split()
        if kernel == limit["kernel"] and listed and _words(key).issuperset(words):
            return f"{limit['reason']} on {architecture}; {limit['remedy']}"
    return ""


def _words(key: str) -> set[str]:
    """Words of a key, with both words of each width."""
    return {word for exact in key.split() for word in (exact, _tile(exact))}


def _tile(word: str) -> str:
    """The tile width of a width, such as BK256 for K200; any other word unchanged."""
    name, width = word[:1], word[1:]
    if name not in ("K", "V") or not width.isdigit():
        return word
    return f"B{name}{tile_width(int(width))}"


def dtype_word(dtype: torch.dtype) -> str:
    """The word of a key for a dtype."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def shipped(architecture: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Table of an architecture as its file has it: kernel -> row -> fields. Without a file, that of a similar one."""
    rows: dict[str, dict[str, dict[str, Any]]] = json.loads(triton_support.config_text(borrowed_from(architecture)))
    return rows


@functools.cache
def borrowed_from(architecture: str) -> str:
    """Architecture whose file is used: its own, or that of the nearest older one, or of the oldest.

    A newer GPU of NVIDIA's has the resources of the older one of its generation, or more. Another maker's uses the
    file of the oldest, whose configurations need the least.
    """
    numbers = {int(name[3:]): name for name in _files() if name.startswith("sm_")}
    if architecture in _files():
        return architecture
    number = architecture[3:]
    older = [n for n in numbers if architecture.startswith("sm_") and number.isdigit() and n <= int(number)]
    return numbers[max(older, default=min(numbers))]


@functools.cache
def _files() -> frozenset[str]:
    """Architectures that have a file."""
    names = (file.name for file in resources.files("wyfold.runtime").joinpath("configs").iterdir())
    return frozenset(name.removesuffix(".json") for name in names if name.startswith(("sm_", "gfx")))


@contextlib.contextmanager
def override_row(architecture: str, kernel: str, name: str, config: Config) -> Iterator[None]:
    """Add or replace a row of a kernel's table, for all threads, until the context ends."""
    rows = _table(architecture)[kernel]
    before = dict(rows)
    rows[name] = config
    _table_changed()
    try:
        yield
    finally:
        rows.clear()
        rows.update(before)
        _table_changed()


def _table_changed() -> None:
    global _table_version
    _table_version += 1
    row.cache_clear()


_table_version = 0


def table_version() -> int:
    """Counter of changes to the tables in this process, for cache keys of what depends on them."""
    return _table_version


def compiled(module: ModuleType, device: torch.device) -> dict[str, dict[Any, Any]]:
    """Kernels of a module by name, each with its variants that Triton compiled for a device in this process."""
    return {
        # Triton keeps them in the kernel, by device. An interpreted kernel has no such attribute.
        name: getattr(kernel, "device_caches", {}).get(device.index or 0, ({},))[0]
        for name, kernel in vars(module).items()
        if name.startswith("wyfold_")
    }


@functools.cache
def _table(architecture: str) -> dict[str, dict[str, Config]]:
    # Borrowed by AMD's GPUs, which have less shared memory and no limit of registers as an option.
    nvidia = architecture.startswith("sm_")
    return {
        kernel: {
            name: Config(
                row["warps"],
                row["stages"] if nvidia else 1,
                {block: size for block, size in row.items() if block.isupper()},
                row.get("registers") if nvidia else None,
            )
            for name, row in rows.items()
        }
        for kernel, rows in shipped(architecture).items()
    }
