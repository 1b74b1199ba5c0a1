"""`metrics.jsonl` of a run: one line of JSON for each step and each evaluation."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from wyfold.cli import Failure
from wyfold.cli.train.rundir import CHECKPOINTS, HISTORY
from wyfold.runtime import files


def append(folder: Path, entry: dict[str, Any]) -> None:
    """Append an entry to the history in a run's folder.

    Raises:
        Failure: the file cannot be written.
    """
    # Create the folder only now: a backend that refuses the first evaluation leaves no folder.
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / HISTORY
    try:
        with open(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666), "a") as stream:
            stream.write(_line(entry))
    except OSError as error:
        raise Failure(
            f"step {entry['step']}: {file} cannot be written ({error.strerror}). What is in {folder / CHECKPOINTS} is "
            "whole; once it can be written, give the same command again"
        ) from error


def rewrite(folder: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Rewrite the file without the entries after the checkpoint, which will be repeated."""
    if entries or (folder / HISTORY).exists():
        files.write(folder / HISTORY, "".join(map(_line, entries)))


def _line(entry: dict[str, Any]) -> str:
    return json.dumps(entry, allow_nan=False) + "\n"
