"""Stored results and runs as `report` and `tasks` read them: decoded by schemas, before torch or plotly is imported.

A schema names what is drawn, with its types; other fields are let through, since a record keeps more than is drawn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from wyfold.cli import integrity, rundir
from wyfold.cli.integrity import DamagedError
from wyfold.cli.schema import Count, Entry, Part, Positive, Settings, history_fault

Schema = TypeVar("Schema")
Number = float | Literal["nan", "inf", "-inf"]
"""As `results.write` spells it."""

OVER_RANKS = "bench-ranks"
DEEPEST = 64
"""Levels of brackets in a record; those of the verbs have eight."""


class Head(msgspec.Struct):
    """Where a record comes from."""

    date: str | None = None
    command: str | None = None
    commit: str | None = None
    kind: str | None = None


class Task(Head, kw_only=True):
    """`result.json` of a run of a task."""

    recipe: Settings
    parameters: Count
    seconds: float
    step: Count
    accuracy: Part
    accuracy_at: dict[Count, Part] | None = None


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

    above_inputs_mib: float | None = None


class Bytes(msgspec.Struct):
    """What a rank sends."""

    bytes: Count | None = None


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
    milliseconds: dict[str, float] | None = None
    worst_error: Number | None = None
    worst_tensor: str | None = None
    peak: Memory | None = None


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


def read(file: Path, kind: type[Schema]) -> dict[str, Any]:
    """A record of a known kind.

    Raises:
        DamagedError: it is none; says where.
    """
    content = integrity.content(file)
    integrity.decode(file, content, kind)
    return integrity.decode(file, content, dict[str, Any])


def read_any(file: Path) -> dict[str, Any]:
    """A record of whatever kind its keys say; one of no known kind only has to be an object.

    Raises:
        DamagedError: it is none; says where.
    """
    content = integrity.content(file)
    record = integrity.decode(file, content, dict[str, Any])
    if _depth(record) > DEEPEST:
        raise DamagedError(file, "its brackets are nested too deeply")
    if record.get("kind") == "run":
        raise DamagedError(file, "it says to be a run, which is a folder")
    schema = kind_of(record)
    decoded = integrity.decode(file, content, schema)
    rows = decoded.rows if isinstance(decoded, Bench | Ranks) else ()
    for number, row in enumerate(rows):
        _check_row(file, number, row)
    return record


def kind_of(record: dict[str, Any]) -> type[Head]:
    """The schema for a record."""
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


def read_run(folder: Path) -> dict[str, Any] | None:
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
        whole = integrity.newest_whole(folder / rundir.CHECKPOINTS, steps[:-1])
        raise DamagedError(damage.file, damage.reason, steps[-1], whole) from damage
    history = _history(folder / rundir.HISTORY, record["history"])
    result = folder / rundir.RESULT
    origin = read(result, Task) if result.exists() else {}
    return {
        **{key: origin[key] for key in ORIGIN if key in origin},
        "kind": "run",
        "recipe": record["recipe"],
        "history": history,
    }


ORIGIN = ("date", "command", "hardware", "versions", "commit", "modified")


def _history(file: Path, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a run recorded: what its checkpoint has, and what came after it."""
    if not file.exists():
        return saved
    lines = integrity.content(file).split(b"\n")[:-1]  # a run may be in the middle of its last line
    history = []
    for number, line in enumerate(lines, 1):
        try:
            integrity.decode(file, line, Entry)
            history.append(integrity.decode(file, line, dict[str, Any]))
        except DamagedError as damage:
            raise DamagedError(file, f"line {number}: {damage.reason}") from damage
        if number <= len(saved) and history[-1] != saved[number - 1]:
            raise DamagedError(file, f"line {number} is not what the newest checkpoint has in its history")
    if len(history) < len(saved):
        raise DamagedError(file, f"it ends after {len(history)} entries, the newest checkpoint has {len(saved)}")
    if reason := history_fault([msgspec.convert(entry, Entry) for entry in history]):
        raise DamagedError(file, reason)
    return history


def _check_row(file: Path, number: int, row: Row) -> None:
    """Times come whole, with the error they were judged by."""
    if not row.milliseconds:
        return
    try:
        msgspec.convert(row.milliseconds, Milliseconds)
    except msgspec.ValidationError as error:
        raise DamagedError(file, f"it has another form: {error} - in `$.rows[{number}].milliseconds`") from error
    if row.worst_error is None or row.worst_tensor is None:
        raise DamagedError(file, f"it has another form: times without worst_error - at `$.rows[{number}]`")


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
