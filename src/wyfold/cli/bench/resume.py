"""Continue a stored result of `bench`: which of its rows a run keeps, and which cases are left."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wyfold.cli import UsageError

if TYPE_CHECKING:
    from wyfold.cli.bench.cases import Case

SAME = ("commit", "versions", "peers", "hardware")
"""Fields that must be equal in both runs. Of the hardware, the GPUs, or the processor without a GPU."""


def resumed(
    file: Path, record: Mapping[str, Any], groups: Sequence[list[Case]]
) -> tuple[list[dict[str, Any]], list[list[Case]]]:
    """Rows that a stored result has for complete groups of cases, and the other groups.

    Args:
        file: A result of `bench`.
        record: Record of this run.
        groups: Groups of cases of this run.

    Raises:
        UsageError: the file cannot be read, or was measured with other sources, packages, peers or hardware.
    """
    from wyfold.cli import records
    from wyfold.cli.train.integrity import DamagedError

    try:
        records.read(file, records.BenchRecord)  # refuses anything else
        earlier = json.loads(file.read_bytes())
    except (DamagedError, OSError) as error:
        raise UsageError(f"--resume: {error}") from error
    for name in SAME:
        there, here = _compared(name, earlier.get(name)), _compared(name, record[name])
        if there != here:
            raise UsageError(f"--resume {file}: was measured with other {name}: {there}, here {here}")
    kept, left = [], []
    for group in groups:
        found = [[row for row in earlier["rows"] if _is_of(row, case)] for case in group]
        if all(found):
            kept += [row for rows in found for row in rows]
        else:
            left.append(group)
    return kept, left


def _compared(name: str, value: Any) -> Any:
    if name == "hardware" and isinstance(value, dict):
        return value.get("gpus") or value.get("processor")
    return value


def _is_of(row: Mapping[str, Any], case: Case) -> bool:
    """Whether a stored row is one of this case."""
    return all(row.get(name) == value for name, value in asdict(case).items())
