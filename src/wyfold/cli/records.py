"""Schemas and readers of stored results and runs, for `report` and `tasks`. Imports neither torch nor plotly.

A schema has the fields that are drawn, with their types. All other fields of a record are kept unchanged. A field may
be null only if its type allows None. A field that may be missing has a default, or is absent from the returned dict.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from wyfold.cli.catalog import OVER_RANKS
from wyfold.cli.train import integrity, rundir
from wyfold.cli.train.integrity import DamagedError
from wyfold.cli.train.schema import Count, Entry, Part, Positive, Settings, history_fault

Number = float | Literal["nan", "inf", "-inf"]
"""A number as `results.write` stores it."""

DEEPEST = 64
"""Largest nesting depth of a record; records of the verbs have eight levels."""


class RecordHead(msgspec.Struct):
    """Provenance of a record."""

    date: str | UnsetType = UNSET
    command: str | UnsetType = UNSET
    commit: str | UnsetType | None = UNSET
    kind: str | UnsetType = UNSET


class RunRecord(RecordHead, kw_only=True):
    """A run of `train`, which is a folder; see `read_run`."""

    recipe: Settings
    history: list[Entry]


class TaskResult(RecordHead, kw_only=True):
    """`result.json` of a run of a task."""

    recipe: Settings
    parameters: Count
    seconds: float
    step: Count
    accuracy: Part
    accuracy_at: dict[Count, Part] | UnsetType = UNSET

    def __post_init__(self) -> None:
        """Refuse the recipe of a run that learned a text."""
        if self.recipe.task is None:
            raise ValueError("the recipe must name a task, got null")


class TaskTable(RecordHead, kw_only=True):
    """The table of `tasks`, `tasks.json`."""

    runs: list[TaskResult]


class Milliseconds(msgspec.Struct):
    """Distribution of times in milliseconds."""

    median: Annotated[float, Meta(gt=0)]
    quartile1: float
    quartile3: float


class PeakMemory(msgspec.Struct):
    """Peak memory in MiB."""

    above_inputs_mib: float


class SentBytes(msgspec.Struct):
    """Bytes that a rank sends in collectives."""

    bytes: Count


class BenchRow(msgspec.Struct, kw_only=True):
    """One implementation on one case of `bench`; the stored name of the implementation is `contender`."""

    op: str
    shape: dict[str, int | str | None]
    gate: str
    mode: str
    contender: str
    ran: str
    name: str | None = None
    refused: str | None = None
    milliseconds: Milliseconds | None = None
    worst_error: Number | None = None
    worst_tensor: str | None = None
    peak: PeakMemory | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Refuse times without an error."""
        if self.milliseconds is not None and (self.worst_error is None or self.worst_tensor is None):
            raise ValueError("a row with milliseconds must have worst_error and worst_tensor")


class BenchRanksRow(BenchRow, kw_only=True):
    """One implementation on one case over several ranks."""

    dtype: str
    ranks: Positive
    times_one_rank: float | None
    sent: SentBytes | None


class BenchRecord(RecordHead, kw_only=True):
    """Result of `bench`."""

    rows: list[BenchRow]


class BenchRanksRecord(RecordHead, kw_only=True):
    """Result of `bench` over several ranks."""

    rows: list[BenchRanksRow]


class TensorError(msgspec.Struct, kw_only=True):
    """Error of one tensor, and its target."""

    value: Number
    target: Number
    passed: bool = msgspec.field(name="pass")


class OperatorErrors(msgspec.Struct, kw_only=True):
    """Errors of one operator."""

    operator: str
    dtype: str
    tensors: dict[str, TensorError]
    passed: bool = msgspec.field(name="pass")


class VerifyErrors(RecordHead, kw_only=True):
    """Result of `verify`."""

    operators: list[OperatorErrors]


class Stored(NamedTuple):
    """A decoded file or run folder.

    Attributes:
        kind: Its schema, which also selects how it is drawn (`figures.DRAWN`).
        fields: Fields of the schema, with defaults, and all other fields of the file.
    """

    kind: type[RecordHead]
    fields: dict[str, Any]


def read(file: Path, kind: type[RecordHead]) -> dict[str, Any]:
    """Read a record of a known kind and return its fields.

    Raises:
        DamagedError: the file holds no such record.
    """
    return _checked(file, integrity.decode(file, integrity.content(file), dict[str, Any]), kind)


def read_any(file: Path) -> Stored:
    """Read a record whose kind follows from its keys. A record of unknown kind must only be an object.

    Raises:
        DamagedError: the file holds no such record.
    """
    record = integrity.decode(file, integrity.content(file), dict[str, Any])
    if _depth(record) > DEEPEST:
        raise DamagedError(file, "its brackets are nested too deeply")
    if record.get("kind") == "run":
        raise DamagedError(file, "it says to be a run, which is a folder")
    kind = _kind_of(record)
    return Stored(kind, _checked(file, record, kind))


def _checked(file: Path, record: dict[str, Any], kind: type[RecordHead]) -> dict[str, Any]:
    return record | integrity.builtins(integrity.convert(file, record, kind))


def _kind_of(record: dict[str, Any]) -> type[RecordHead]:
    """Schema of a record, chosen by its keys."""
    if record.get("kind") == "tasks":
        return TaskTable
    if record.get("kind") == OVER_RANKS:
        return BenchRanksRecord
    if "operators" in record:
        return VerifyErrors
    rows = record.get("rows")
    first = rows[0] if isinstance(rows, list) and rows else None
    return BenchRecord if isinstance(first, dict) and "contender" in first else RecordHead


def read_run(folder: Path) -> Stored | None:
    """Read a run from its newest checkpoint and the history since then; None before the first checkpoint.

    Raises:
        DamagedError: the checkpoint's record, `metrics.jsonl` or `result.json` is damaged.
    """
    steps = integrity.step_folders(folder / rundir.CHECKPOINTS)
    if not steps:
        return None
    try:
        record = integrity.verify(steps[-1], tensors=False)
    except DamagedError as damage:
        raise damage.of_run(steps[-1], steps[:-1]) from damage
    history = _history(folder / rundir.HISTORY, record["history"])
    result = folder / rundir.RESULT
    origin = read(result, TaskResult) if result.exists() else {}
    return Stored(
        RunRecord,
        {
            **{key: origin[key] for key in ORIGIN if key in origin},
            "kind": "run",
            "recipe": record["recipe"],
            "history": history,
        },
    )


ORIGIN = ("date", "command", "hardware", "versions", "commit", "modified")


def _history(file: Path, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """History of a run: entries of its checkpoint, and later ones of `metrics.jsonl`."""
    if not file.exists():
        return saved
    lines = integrity.content(file).split(b"\n")[:-1]  # a running training may be writing the last line
    entries, history = [], []
    for number, line in enumerate(lines, 1):
        try:
            entries.append(integrity.decode(file, line, Entry))
        except DamagedError as damage:
            raise DamagedError(file, f"line {number}: {damage.reason}") from damage
        history.append(integrity.builtins(entries[-1]))
        if number <= len(saved) and history[-1] != saved[number - 1]:
            raise DamagedError(file, f"line {number} is not what the newest checkpoint has in its history")
    if len(history) < len(saved):
        raise DamagedError(file, f"it ends after {len(history)} entries, the newest checkpoint has {len(saved)}")
    if reason := history_fault(entries):
        raise DamagedError(file, reason)
    return history


def _depth(value: Any) -> int:
    """Nesting depth of lists and objects."""
    level, depth = [value], 0
    while level:
        level = [
            item
            for container in level
            if isinstance(container, dict | list)
            for item in (container.values() if isinstance(container, dict) else container)
        ]
        depth += 1
    return depth
