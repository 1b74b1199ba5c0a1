"""Launch configurations of the kernels, and where Gluon kernels are launched: tables of rows, keyed by `LaunchKey`.

Two kinds of tables, which do not depend on each other:

- Tuning: `configs/default.json`, and the rows that differ on an architecture in `configs/<architecture>.json`.
- Dispatch: `configs/dispatch.json`, the keys for which an architecture launches a Gluon kernel instead of Triton's,
  and with which card, toolchain and commit that was proved.

Both are data that was measured in advance. Nothing is timed in a user's process.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib import resources
from types import ModuleType
from typing import Any, NamedTuple

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


class LaunchKey(NamedTuple):
    """What the best configuration of a kernel depends on. A row of a table has one too: None fits any value.

    Written as words in tables and plans, such as "bf16 K128 V128 C64 scalar WF", or "default" for no field.

    Attributes:
        dtype: Of the tokens, or of stored states: "bf16", "fp16" or "fp32".
        K, V: Head widths.
        BK, BV: Tile widths of K and V, in a row only: it then fits all widths of the tile.
        C: Chunk size.
        W: Taps of a filter.
        order: Layout of states: "KV", or "VK" if they are V-first.
        gate: Kind of the gate: "none", "scalar" or "channel".
        form: Factors that the scans read: "EF", or "WF" if unfolded.
        launch: Which of a stage's launches.
        group: Value heads of a key head.
        additive: Writes erase nothing, as in GLA. The kernels then read fewer factors.
        norm: `prepare` normalises the rows of q and k.
        kept: Intermediate states are stored, or a low-rank rule runs segments.
        wide: The output, or a factor of the values, has another dtype than v.
        alone: Every sequence has one token.
        low_occupancy: The programs fill at most half of the GPU's multiprocessors.
    """

    dtype: str | None = None
    K: int | None = None
    V: int | None = None
    BK: int | None = None
    BV: int | None = None
    C: int | None = None
    W: int | None = None
    order: str | None = None
    gate: str | None = None
    form: str | None = None
    launch: str | None = None
    group: int | None = None
    additive: bool = False
    norm: bool = False
    kept: bool = False
    wide: bool = False
    alone: bool = False
    low_occupancy: bool = False

    @classmethod
    def parse(cls, words: str) -> LaunchKey:
        """The key that is written as these words.

        Raises:
            ValueError: Two words are of one field, or a word is of none.
        """
        found: dict[str, Any] = {}
        for word in words.split() if words != "default" else ():
            name, value = _field(word)
            if name in found:
                raise ValueError(f"launch key {words!r}: {word} is the second word for {name}")
            found[name] = value
        return cls(**found)

    def __str__(self) -> str:
        words = []
        for name, value in self.fields().items():
            if value is True:
                words.append(name)
            else:
                words.append(f"{_PREFIXES[name]}{value}" if name in _PREFIXES else str(value))
        return " ".join(words) or "default"

    @property
    def per_channel(self) -> bool:
        """Whether every key channel has another decay."""
        return self.gate == "channel"

    def fields(self) -> dict[str, Any]:
        """The fields that are set."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None and x is not False}

    def fits(self, key: LaunchKey) -> bool:
        """Whether this row is for launches with a key."""
        return all(
            key.tile(name) == x if name in ("BK", "BV") else getattr(key, name) == x
            for name, x in self.fields().items()
        )

    def asked(self) -> tuple[str | None, bool, bool]:
        """The fields that say what a launch computes, and not of which sizes."""
        return self.launch, self.kept, self.wide

    def rank(self) -> tuple[int, list[int]]:
        """How specific this row is. Two rows that fit one key have different ranks."""
        places = [n for n, name in enumerate(self._fields) if name in self.fields()]
        return len(places), places[::-1]

    def tile(self, name: str) -> int | None:
        """The tile width "BK" or "BV" of the key."""
        width: int | None = getattr(self, name[1])
        return None if width is None else tile_width(width)


_PREFIXES = {"K": "K", "V": "V", "BK": "BK", "BV": "BV", "C": "C", "W": "W", "group": "GR"}
"""Fields that are numbers, and what is written before the number."""

_CHOICES = {
    "dtype": ("bf16", "fp16", "fp32"),
    "order": ("KV", "VK"),
    "gate": ("none", "scalar", "channel"),
    "form": ("EF", "WF"),
}


def _field(word: str) -> tuple[str, Any]:
    """Field and value of a word of a key."""
    for name, values in _CHOICES.items():
        if word in values:
            return name, word
    if word in LaunchKey._fields[-6:]:
        return word, True
    letters = word.rstrip("0123456789")
    for name, prefix in _PREFIXES.items():
        if letters == prefix and letters != word:
            return name, int(word[len(letters) :])
    if word.isidentifier() and word.islower():
        return "launch", word
    raise ValueError(f"launch key: {word!r} is a word of no field")


def tuned(kernel: str, key: LaunchKey, device: torch.device) -> Config:
    """The configuration of a kernel for a key, from the tables of the device's architecture.

    Args:
        kernel: Name in the tables, "stage.backend".
        key: What the best configuration depends on.
        device: Device of the tensors. On the CPU, where the interpreter runs, the tables of sm_90 are used.
    """
    architecture = triton_support.architecture(device)
    return _table(architecture)[kernel][row(architecture, kernel, key)]


@functools.cache
def row(architecture: str, kernel: str, key: LaunchKey) -> str:
    """Words of the row for a key: of those that fit, the one with the most fields.

    Of two with as many, the one with a later field, such as the launch rather than the dtype.
    """
    rows = {words: LaunchKey.parse(words) for words in _table(architecture)[kernel]}
    return max((words for words, found in rows.items() if found.fits(key)), key=lambda words: rows[words].rank())


@functools.cache
def dispatched(architecture: str, stage: str, key: LaunchKey) -> bool:
    """Whether an architecture launches a stage's Gluon kernel for a key, by `configs/dispatch.json`.

    A row serves only what it names: a key with a launch, `kept` or `wide` needs a row with the same.
    """
    named = [LaunchKey.parse(row["key"]) for row in dispatch_table().get(architecture, ()) if row["stage"] == stage]
    return any(row.fits(key) and row.asked() == key.asked() for row in named)


@functools.cache
def dispatch_table() -> dict[str, list[dict[str, Any]]]:
    """Architecture -> rows of the dispatch table.

    Each has the stage, the key, and `proved` where a stored result has it: card, versions and commit with which the
    kernel was checked and timed, and the result's name in docs/results.
    """
    found: dict[str, list[dict[str, Any]]] = json.loads(triton_support.config_text("dispatch"))
    return found


def with_occupancy_hint(key: LaunchKey, programs: int, device: torch.device) -> LaunchKey:
    """The key, with `low_occupancy` if the programs fill at most half of the GPU's multiprocessors."""
    return key._replace(low_occupancy=True) if 2 * programs <= processors(device) else key


@functools.cache
def processors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU. For the CPU, where the interpreter runs, that of an H200."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def tile_width(width: int) -> int:
    """Tile width of K or V: the smallest power of two that is at least `width` and at least 16."""
    return max(16, 1 << (width - 1).bit_length())


@functools.cache
def hardware_limit(architecture: str, kernel: str, key: LaunchKey) -> str:
    """Reason why a kernel with this key exceeds the GPU's resources, from `configs/support.json`; empty if it fits."""
    for limit in json.loads(triton_support.config_text("support"))["beyond"]:
        listed = borrowed_from(architecture) in limit["architectures"]
        if kernel == limit["kernel"] and listed and LaunchKey.parse(limit["key"]).fits(key):
            return f"{limit['reason']} on {architecture}; {limit['remedy']}"
    return ""


def dtype_word(dtype: torch.dtype) -> str:
    """The word of a key for a dtype."""
    return {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[dtype]


def shipped(architecture: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Tuning table of an architecture: kernel -> row -> fields. The defaults, with the architecture's own rows.

    An architecture without a file has those of a similar one.
    """
    rows = overrides("default")
    for kernel, own in overrides(borrowed_from(architecture)).items():
        rows[kernel] = {**rows.get(kernel, {}), **own}
    return rows


def overrides(name: str) -> dict[str, dict[str, dict[str, Any]]]:
    """Rows of one file: an architecture's own ones, or the defaults."""
    rows: dict[str, dict[str, dict[str, Any]]] = json.loads(triton_support.config_text(name))
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
    """Kernels of a module by name, each with its variants that Triton compiled for a device in this process.

    Kernels of the forward come first.
    """
    kernels = {name: kernel for name, kernel in vars(module).items() if name.startswith("wyfold_")}
    return {
        # Triton keeps them in the kernel, by device. An interpreted kernel has no such attribute.
        name: getattr(kernels[name], "device_caches", {}).get(device.index or 0, ({},))[0]
        for name in sorted(kernels, key=lambda name: "_bwd_" in name)
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
