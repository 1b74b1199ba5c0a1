"""Stored results and runs as `report` and `tasks` read them: decoded by schemas, before torch or plotly is imported.

A schema names what is drawn, with its types. What a record says besides is kept as it is. A field is null only where
its type says so; one that may be missing has a default, or is absent from what is returned.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from wyfold.cli import integrity, rundir
from wyfold.cli.catalog import OVER_RANKS
from wyfold.cli.integrity import DamagedError
from wyfold.cli.schema import Count, Entry, Part, Positive, Settings, history_fault

Number = float | Literal["nan", "inf", "-inf"]
"""As `results.write` spells it."""

DEEPEST = 64
"""Levels of brackets in a record; those of the verbs have eight."""


class Head(msgspec.Struct):
    """Where a record comes from."""

    date: str | UnsetType = UNSET
    command: str | UnsetType = UNSET
    commit: str | UnsetType | None = UNSET
    kind: str | UnsetType = UNSET


class Run(Head, kw_only=True):
    """A run of `train`, which is a folder: see `read_run`."""

    recipe: Settings
    history: list[Entry]


class Task(Head, kw_only=True):
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


class Tasks(Head, kw_only=True):
    """The table of `tasks`."""

    runs: list[Task]


class Milliseconds(msgspec.Struct):
    """A distribution of times."""

    median: Annotated[float, Meta(gt=0)]
    quartile1: float
    quartile3: float


class Memory(msgspec.Struct):
    """Peak memory."""

    above_inputs_mib: float


class Bytes(msgspec.Struct):
    """Bytes that a rank sends."""

    bytes: Count


class Row(msgspec.Struct, kw_only=True):
    """One contender on one case of `bench`."""

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
    peak: Memory | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        """Refuse times without the error that is drawn beside them."""
        if self.milliseconds is not None and (self.worst_error is None or self.worst_tensor is None):
            raise ValueError("a row with milliseconds must have worst_error and worst_tensor")


class RankedRow(Row, kw_only=True):
    """One contender on one case over ranks."""

    dtype: str
    ranks: Positive
    times_one_rank: float | None
    sent: Bytes | None


class Bench(Head, kw_only=True):
    """A race of `bench`."""

    rows: list[Row]


class Ranks(Head, kw_only=True):
    """A race of `bench` over ranks."""

    rows: list[RankedRow]


class Error(msgspec.Struct, kw_only=True):
    """An error of one tensor, and what it may be."""

    value: Number
    target: Number
    passed: bool = msgspec.field(name="pass")


class Operator(msgspec.Struct, kw_only=True):
    """Errors of one operator."""

    operator: str
    dtype: str
    tensors: dict[str, Error]
    passed: bool = msgspec.field(name="pass")


class Errors(Head, kw_only=True):
    """Errors of `verify`."""

    operators: list[Operator]


class Promise(msgspec.Struct):
    """One row of the scorecard."""

    row: int
    promise: str
    target: str
    outcome: str
    value: str


class Promises(Head, kw_only=True):
    """The scorecard, as `verify --tier` keeps it."""

    rows: list[Promise]


class Stored(NamedTuple):
    """What a file or a folder holds.

    Attributes:
        kind: Its schema, which also says how it is drawn (`figures.DRAWN`).
        fields: Its fields: those of the schema, defaults among them, and whatever else is in the file.
    """

    kind: type[Head]
    fields: dict[str, Any]


def read(file: Path, kind: type[Head]) -> dict[str, Any]:
    """Fields of a record of a known kind.

    Raises:
        DamagedError: the file holds no such record.
    """
    return _checked(file, integrity.decode(file, integrity.content(file), dict[str, Any]), kind)


def read_any(file: Path) -> Stored:
    """A record of the kind that its keys say; one of no known kind only has to be an object.

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


def _checked(file: Path, record: dict[str, Any], kind: type[Head]) -> dict[str, Any]:
    return record | integrity.builtins(integrity.convert(file, record, kind))


def _kind_of(record: dict[str, Any]) -> type[Head]:
    """Schema of a record."""
    rows = record.get("rows")
    first = rows[0] if isinstance(rows, list) and rows and isinstance(rows[0], dict) else {}
    if record.get("kind") == "tasks":
        return Tasks
    if record.get("kind") == OVER_RANKS:
        return Ranks
    if "operators" in record:
        return Errors
    if "promise" in first:
        return Promises
    return Bench if "contender" in first else Head


def read_run(folder: Path) -> Stored | None:
    """A run as its newest checkpoint has it, with what it recorded since; None before the first checkpoint.

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
    origin = read(result, Task) if result.exists() else {}
    return Stored(
        Run,
        {
            **{key: origin[key] for key in ORIGIN if key in origin},
            "kind": "run",
            "recipe": record["recipe"],
            "history": history,
        },
    )


ORIGIN = ("date", "command", "hardware", "versions", "commit", "modified")


def _history(file: Path, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries that a run recorded: those of its checkpoint, and those after it."""
    if not file.exists():
        return saved
    lines = integrity.content(file).split(b"\n")[:-1]  # a run may be in the middle of its last line
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
    """Levels of lists and objects."""
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
