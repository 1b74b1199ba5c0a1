"""Folder of a run: refusal of other folders, and a lock for one process. Imports no torch."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from wyfold.cli import UsageError
from wyfold.cli.train import integrity

CHECKPOINTS, HISTORY, CURVE, RESULT = "checkpoint", "metrics.jsonl", "curve.png", "result.json"
MARK = ".wyfold-run"
"""File in the folder of every run: marks the folder, and is locked while a process writes into it."""

UNFINISHED = re.compile(r"\.[0-9a-f]{16}\.part", re.ASCII)
"""Temporary file names of `files.replacing`."""
UNLOCKABLE = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of flock on a file system without locks."""


def require_run_or_empty(folder: Path) -> None:
    """Refuse a folder that is neither empty nor a run of `wyfold train`, or a run that cannot be written.

    Raises:
        UsageError: names a file in the folder.
    """
    try:
        str(folder).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(f"--out {folder}: its name must be UTF-8, which safetensors needs to open a file") from error
    _require_own_files(folder)
    if not folder.is_dir() or (folder / MARK).is_file() or integrity.step_folders(folder / CHECKPOINTS):
        return
    other = min((path.name for path in folder.iterdir()), default=None)
    if other is not None:
        raise UsageError(
            f"--out {folder}: is no run of `wyfold train`, and not empty: there is {other}. Give a folder that is new "
            "or empty; nothing in this one was touched"
        )


def _require_own_files(folder: Path) -> None:
    """Refuse symbolic links out of the run, and files and folders whose type differs from what a run writes."""
    root = folder / CHECKPOINTS
    steps = [path for path in root.iterdir() if integrity.STEP.fullmatch(path.name)] if root.is_dir() else []
    for path in (folder / MARK, root, *sorted(steps)):
        if path.is_symlink():
            raise UsageError(
                f"--out {folder}: {path} is a symbolic link, through which `wyfold train` does not write; "
                "remove the link, or give another --out"
            )
    for path in (root, *sorted(steps)):
        if path.exists() and not path.is_dir():
            raise UsageError(f"--out {folder}: {path} must be a folder, got a file; rename it, or give another --out")
    for path in (folder / HISTORY, folder / CURVE, folder / RESULT):
        if path.is_dir():
            raise UsageError(f"--out {folder}: {path} must be a file, got a folder; rename it, or give another --out")


def rename_with_suffix(path: Path, ending: str) -> Path:
    """Rename a path to `name.ending`, or `name.ending1`, `name.ending2` .. if that exists. Returns the new path."""
    free = next(
        name
        for name in (path.with_name(f"{path.name}.{ending}{number or ''}") for number in itertools.count())
        if not os.path.lexists(name)
    )
    path.rename(free)
    return free


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder of a run for this process; it is created if missing, and removed at the end if still empty.

    Temporary files that a killed process left are removed.

    Raises:
        UsageError: another process holds the lock, the file system has no locks, or the folder cannot be created.
    """
    _require_own_files(folder)
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # No soft lock: it is the existence of the lock file, and this file stays in the run.
        lock = FileLock(folder / MARK, is_singleton=False, fallback_to_soft=False)
        lock.acquire(blocking=False)
    except Timeout as error:
        raise UsageError(
            f"--out {folder}: another process of `wyfold train` is writing into this folder; wait until it has ended, "
            "or give another --out"
        ) from error
    except OSError as error:
        if error.errno in UNLOCKABLE:
            raise UsageError(
                f"--out {folder}: its file system has no file locks ({error.strerror}), without which two processes "
                "could write into one run; give an --out on another file system"
            ) from error
        raise UsageError(f"--out {folder}: cannot be written ({error.strerror})") from error
    try:
        for path in folder.iterdir():
            if UNFINISHED.fullmatch(path.name) and path.is_file() and not path.is_symlink():
                path.unlink()
        yield
    finally:
        if {path.name for path in folder.iterdir()} <= {MARK}:
            (folder / MARK).unlink(missing_ok=True)
            for path in made:
                with suppress(OSError):  # another file was put there meanwhile
                    path.rmdir()
        lock.release()
