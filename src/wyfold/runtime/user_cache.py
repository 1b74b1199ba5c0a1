"""Files in the user's cache folder, and the environment variables that operators read.

A file of the cache is one JSON object. It is replaced atomically,
so a reader in another process sees the old object or the new one. An unreadable or damaged file counts as missing.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from wyfold.runtime import files

FOLDER, SELF_CHECK = "WYFOLD_CACHE", "WYFOLD_SELF_CHECK"
SETTINGS = ("run", "refuse")
"""Values of WYFOLD_SELF_CHECK, the default first."""
MOST_BYTES = 2**20


def cache_folder() -> Path | None:
    """Folder of the cache: $WYFOLD_CACHE, or "wyfold" in $XDG_CACHE_HOME or in ~/.cache; None without a home."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "wyfold"
    try:
        return Path.home() / ".cache" / "wyfold"
    except RuntimeError:
        return None


def self_check_setting() -> str:
    """What happens before the first use of a kernel that is not verified: one of `SETTINGS`.

    Raises:
        ValueError: WYFOLD_SELF_CHECK has another value.
    """
    found = os.environ.get(SELF_CHECK) or SETTINGS[0]
    if found not in SETTINGS:
        raise ValueError(f"{SELF_CHECK} must be one of {', '.join(SETTINGS)}, got {found!r}")
    return found


def read(file: Path) -> dict[str, Any] | None:
    """The object in a file; None if there is no such file, or no whole object in it."""
    try:
        found = json.loads(files.read_bytes(file, MOST_BYTES))
    except ValueError:  # also what `read_bytes` raises, and text that is no UTF-8
        return None
    return found if isinstance(found, dict) else None


def write(file: Path, content: dict[str, Any]) -> str:
    """Write an object, and the folders that are missing. Returns why that is impossible; empty if it is done."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write(file, json.dumps(content, indent=1))
    except OSError as error:
        return error.strerror or str(error)
    return ""
