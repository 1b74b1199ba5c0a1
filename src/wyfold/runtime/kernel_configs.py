"""Launch configurations of the kernels: tables of rows, one JSON file per GPU architecture.

Configurations are data that was measured in advance. Nothing is timed in a user's process.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from wyfold.runtime import triton_support


@dataclass(frozen=True)
class Config:
    """Launch configuration of one kernel.

    Attributes:
        warps: Warps of a program.
        stages: Iterations of a loop whose loads are in flight.
        blocks: Tile extents by name, such as BV.
        registers: Most of a thread, or None for the assembler's own choice, which looks for occupancy and, where a
            kernel needs more than there are, can end at 32 (docs/facts/compilers.md, PTXAS-1).
    """

    warps: int = 4
    stages: int = 1
    blocks: Mapping[str, int] = field(default_factory=dict)
    registers: int | None = None

    def options(self, *, contract: bool = True) -> Mapping[str, Any]:
        """Keywords of a kernel's launch. `contract`: the compiler may contract products into sums, as it sees fit."""
        return _options(self.warps, self.stages, self.registers, contract)


@functools.cache
def _options(warps: int, stages: int, registers: int | None, contract: bool) -> Mapping[str, Any]:
    limit = {} if registers is None else {"maxnreg": registers}
    return {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract, **limit}


def tuned(kernel: str, key: str, device: torch.device) -> Config:
    """The table's configuration of `kernel` ("stage.backend") for `key`.

    Args:
        kernel: Name in `configs/<architecture>.json`.
        key: What the best configuration depends on, as words, such as "bf16 K128 V128 C64 scalar WF".
        device: Of the tensors; the interpreter, whose tensors are on the CPU, takes sm_90's.
    """
    where = triton_support.architecture(device)
    return _table(where)[kernel][row(where, kernel, key)]


@functools.cache
def row(architecture: str, kernel: str, key: str) -> str:
    """Name of the row that `tuned` takes: the one with the most words among those whose words are all in the key.

    "default" has none. A width has two words: K200 is BK256 as well, the tile that holds it.
    """
    words = _words(key)
    fitting = [name for name in _table(architecture)[kernel] if name == "default" or words.issuperset(name.split())]
    return max(fitting, key=lambda name: 0 if name == "default" else len(name.split()))


@functools.cache
def has_row(architecture: str, kernel: str, key: str) -> bool:
    """Whether an architecture has a row of `kernel`, which may have no "default", or not be there at all, for `key`."""
    rows = shipped(architecture).get(kernel, {})
    return any(set(key.split()).issuperset(name.split()) for name in rows)


def with_occupancy_hint(key: str, programs: int, device: torch.device) -> str:
    """The key, with the word "few" if a GPU could run twice as many programs, each on a multiprocessor of its own."""
    return f"{key} low_occupancy" if 2 * programs <= processors(device) else key


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; an H200's for the tensors of the interpreter, which are on the CPU."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tile_width(width: int) -> int:
    """The smallest power of two, from 16 on, that holds a width: the tile of K or V."""
    return max(16, 1 << (width - 1).bit_length())


@functools.cache
def hardware_limit(architecture: str, kernel: str, key: str) -> str:
    """Why `kernel` does not fit into a GPU with this key, in the words of `configs/support.json`; empty if it does."""
    for limit in json.loads(triton_support.config_text("support"))["beyond"]:
        where, words = limit["architectures"], limit["key"].split()
        if kernel == limit["kernel"] and architecture in where and _words(key).issuperset(words):
            return f"{limit['reason']} on {architecture}; {limit['remedy']}"
    return ""


def _words(key: str) -> set[str]:
    """Of a key; a width has two of them."""
    return {word for exact in key.split() for word in (exact, _tile(exact))}


def _tile(word: str) -> str:
    """BK256 of K200, the tile of that width; any other word as it is."""
    name, width = word[:1], word[1:]
    if name not in ("K", "V") or not width.isdigit():
        return word
    return f"B{name}{tile_width(int(width))}"


def dtype_word(dtype: torch.dtype) -> str:
    """Of a key."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def shipped(architecture: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Kernel -> row -> its fields, as an architecture's file has them."""
    rows: dict[str, dict[str, dict[str, Any]]] = json.loads(triton_support.config_text(architecture))
    return rows


@contextlib.contextmanager
def override_row(architecture: str, kernel: str, name: str, config: Config) -> Iterator[None]:
    """Within, a kernel's table has this row, in every thread."""
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
    """How often the tables changed in this process: what was decided by them holds while this does."""
    return _table_version


def compiled(module: ModuleType, device: torch.device) -> dict[str, dict[Any, Any]]:
    """Kernels of a module, by name, each with what Triton compiled of it for a device in this process."""
    return {
        # Triton keeps that in the kernel itself, for each device; one that it interprets has no such place.
        name: getattr(kernel, "device_caches", {}).get(device.index or 0, ({},))[0]
        for name, kernel in vars(module).items()
        if name.startswith("wyfold_")
    }


@functools.cache
def _table(architecture: str) -> dict[str, dict[str, Config]]:
    return {
        kernel: {
            name: Config(
                row["warps"],
                row["stages"],
                {block: size for block, size in row.items() if block.isupper()},
                row.get("registers"),
            )
            for name, row in rows.items()
        }
        for kernel, rows in shipped(architecture).items()
    }
