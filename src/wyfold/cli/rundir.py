"""The folder of a run: whose it is, and the lock that keeps it to one process. Imports no torch."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from wyfold.cli import UsageError, integrity

CHECKPOINTS, HISTORY, CURVE, RESULT = "checkpoint", "metrics.jsonl", "curve.png", "result.json"
MARK = ".wyfold-run"
"""Lies in every run's folder: says that the folder is a run's, and is locked while a process writes into it."""


def require_run_or_empty(folder: Path) -> None:
    """Refuse a folder that holds anything but a run of `wyfold train`.

    Raises:
        UsageError: naming what lies there.
    """
    if not folder.is_dir() or (folder / MARK).is_file() or integrity.step_folders(folder / CHECKPOINTS):
        return
    other = min((path.name for path in folder.iterdir()), default=None)
    if other is not None:
        raise UsageError(
            f"--out {folder}: is no run of `wyfold train`, and not empty: there is {other}. Give a folder that is new "
            "or empty; nothing in this one was touched"
        )


def rename_aside(path: Path, ending: str) -> Path:
    """Rename a file or folder to `name.ending`, or `name.ending1` and so on where that is taken; its new path."""
    free = next(
        name
        for name in (path.with_name(f"{path.name}.{ending}{number or ''}") for number in itertools.count())
        if not os.path.lexists(name)
    )
    path.rename(free)
    return free


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep a run's folder, made if missing, to this process; removed at the end if nothing else was written into it.

    Raises:
        UsageError: another process has it, or no folder can be made there.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / MARK, is_singleton=False)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UsageError(
            f"--out {folder}: another process of `wyfold train` is writing into this folder; wait until it has ended, "
            "or give another --out"
        ) from error
    except OSError as error:
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror})") from error
    try:
        yield
    finally:
        if {path.name for path in folder.iterdir()} <= {MARK}:
            (folder / MARK).unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):  # something else was put there meanwhile
                    path.rmdir()
        lock.release()
