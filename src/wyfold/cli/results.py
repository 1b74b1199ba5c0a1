"""Results of the command line: provenance, JSON files, tables on the screen."""

from __future__ import annotations

import datetime
import errno
import importlib.util
import json
import math
import os
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wyfold
from wyfold.cli import UsageError, printable
from wyfold.runtime import files


def provenance(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """Provenance of a result: date, command, machine, versions, commit.

    Args:
        verb: Verb of the command line.
        words: Its options, after defaults were filled in.
    """
    from wyfold.ops.doctor import hardware, versions

    commit, modified = _commit()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["wyfold", verb, *words]),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit,
        "modified": modified,
    }


def _commit() -> tuple[str | None, bool | None]:
    """Commit of the source tree, and whether the package differs from it; None outside a git repository."""
    folder = Path(wyfold.__file__).parent
    try:
        asked = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        head, status = (
            subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.strip(), bool(status.strip())


def ready(folder: Path | None) -> None:
    """Check before any work that the folder of `--out`, if given, can be written.

    The folder is not created, so a later refusal leaves nothing behind; `write` creates it.

    Raises:
        UsageError: the folder cannot be written.
    """
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)):
            pass
    except OSError as error:
        raise UsageError(f"--out: cannot write into {folder}: {error.strerror}") from error


def _nearest(folder: Path) -> Path:
    """The folder, or its nearest existing parent, in which it would be created."""
    for place in (folder, *folder.parents):
        try:
            kind = place.stat().st_mode
        except FileNotFoundError:
            if place.is_symlink():  # a broken link: no folder can be created at this path
                raise
            continue
        if not stat.S_ISDIR(kind):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
        return place
    return folder


def write(folder: Path, name: str, record: Mapping[str, Any]) -> Path:
    """Write the record as JSON to `folder / name`, atomically, and return the path. Creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / name, json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    return folder / name


def _plain(value: Any) -> Any:
    """Convert a value to JSON types. NaN and infinities become strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def say(line: str) -> None:
    """Print a progress line to standard error, escaped by `printable` if that is a terminal."""
    print(printable(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, labels: int = 1) -> None:
    """Print a table. On a terminal that is too narrow for it, every row becomes a few lines.

    Cells are printed as one line with control characters escaped, because their text may come from a file.

    Args:
        title: Line above the table.
        columns: Names of the columns.
        rows: Cells.
        labels: Number of leading columns that identify a row.
    """
    columns, rows = _cells(columns), [_cells(row) for row in rows]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        if sum(max(map(len, column)) + 3 for column in zip(columns, *rows)) + 1 > width:
            print("\n" + "\n".join([title, *stacked(columns, rows, labels, width)]))
            return
        if importlib.util.find_spec("rich") is not None:
            _draw(title, columns, rows)
            return
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for row in (columns, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def stacked(columns: Sequence[str], rows: Sequence[Sequence[str]], labels: int, width: int) -> list[str]:
    """Lines of a table for a narrow terminal: the labels of a row, then its other cells with their column names."""
    lines = []
    for row in rows:
        cells = [f"{column} {cell}".strip() for column, cell in zip(columns[labels:], row[labels:]) if cell]
        lines += textwrap.wrap(", ".join(filter(None, row[:labels])), width, subsequent_indent="  ")
        lines += textwrap.wrap("; ".join(cells), width, initial_indent="    ", subsequent_indent="    ")
    return lines


def _cells(row: Sequence[str]) -> list[str]:
    return [printable(cell).replace("\n", "\\n").replace("\t", "\\t") for cell in row]


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", highlight=True)
    for column in columns:
        table.add_column(column)
    for row in rows:
        table.add_row(*map(Text, row))  # a cell contains no markup
    Console().print(table)
