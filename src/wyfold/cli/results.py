"""A result as the command line keeps it: where and when it was measured, as JSON, and as a table on the screen."""

from __future__ import annotations

import datetime
import errno
import importlib.util
import json
import math
import os
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wyfold
from wyfold.cli import UsageError, printable
from wyfold.runtime import files


def provenance(verb: str, words: Sequence[str]) -> dict[str, Any]:
    """What a number means nothing without: date, command, machine, versions, commit.

    Args:
        verb: Of the command line.
        words: Its options, as they were understood.
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
    """Commit of the source tree the package runs from, and whether its sources differ from it; None outside of one."""
    room = Path(wyfold.__file__).parent
    try:
        asked = (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "."])
        head, status = (
            subprocess.run(["git", *words], cwd=room, capture_output=True, text=True, check=True).stdout
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None, None
    return head.strip(), bool(status.strip())


def ready(folder: Path | None) -> None:
    """Ask whether the folder of `--out`, if there is to be one, can be written, before there is anything to lose.

    Nothing is made: who is refused afterwards, for whatever reason, leaves no folder behind. `write` makes it.

    Raises:
        UsageError: nothing can be written there.
    """
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)):
            pass
    except OSError as error:
        raise UsageError(f"--out: cannot write into {folder}: {error.strerror}") from error


def _nearest(folder: Path) -> Path:
    """The folder, or the one above it that is there, in which it would be made."""
    for place in (folder, *folder.parents):
        try:
            kind = place.stat().st_mode
        except FileNotFoundError:
            if place.is_symlink():  # to nowhere: no folder can be made in its place
                raise
            continue
        if not stat.S_ISDIR(kind):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(place))
        return place
    return folder


def write(folder: Path, name: str, record: Mapping[str, Any]) -> Path:
    """The file `name` in `folder`, made if missing, with the record as JSON; whole or not there."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write(folder / name, json.dumps(_plain(record), indent=1, allow_nan=False) + "\n")
    return folder / name


def _plain(value: Any) -> Any:
    """value as JSON can say it; a number that is not finite becomes its name."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def say(line: str) -> None:
    """A line about the work in progress, apart from its results; on a terminal with the escapes of `printable`."""
    print(printable(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn by rich where it is installed and stdout is a terminal, in plain text elsewhere.

    A cell is one line, and shows control characters as escapes: it may come from a file.
    """
    columns, rows = _cells(columns), [_cells(row) for row in rows]
    if importlib.util.find_spec("rich") is not None and sys.stdout.isatty():
        _draw(title, columns, rows)
        return
    print(f"\n{title}")
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
    for row in (columns, ["-" * width for width in widths], *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


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
        table.add_row(*map(Text, row))  # a cell is no markup
    Console().print(table)
