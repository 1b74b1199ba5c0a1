"""Find and read the text files of `--data`. Imports no torch."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from wyfold.cli import UsageError

SNIFFED = 8192
"""Leading bytes of a file that are searched for NUL; a file with one is binary."""


class Documents(NamedTuple):
    """Contents of text files.

    Attributes:
        name: Source of the documents, for messages.
        contents: Bytes of each document; none is empty.
    """

    name: str
    contents: list[bytes]


def read(path: str | os.PathLike[str] | None) -> Documents:
    """Read a file as one document, or the text files below a folder in sorted order. None reads `standard_library()`.

    Raises:
        UsageError: the path does not exist, cannot be read, is a binary file, or is empty.
    """
    if path is None:
        return standard_library()
    root = Path(path)
    if root.is_dir():
        contents = [content for file in _files(root) if (content := _text(file))]
        if not contents:
            raise UsageError(f"--data {root}: no text file with anything in it below this folder")
    elif root.is_file():
        try:
            content = root.read_bytes()
        except OSError as error:
            raise UsageError(f"--data {root}: cannot be read ({error.strerror})") from error
        if not content:
            raise UsageError(f"--data {root}: the file is empty")
        if is_binary(content):
            raise UsageError(f"--data {root}: is no text, it has a NUL byte: give a text file in UTF-8")
        contents = [content]
    elif root.exists():
        raise UsageError(f"--data {root}: is neither a file nor a folder")
    else:
        raise UsageError(f"--data {root}: no such file or folder")
    return Documents(str(root), contents)


def is_binary(content: bytes) -> bool:
    """Whether a file with this content is binary."""
    return b"\0" in content[:SNIFFED]


def _files(root: Path) -> Iterator[Path]:
    """Files below `root`, sorted at every level. Skips hidden files and symbolic links to folders."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in sorted(files) if not name.startswith("."))


def _text(file: Path) -> bytes:
    """Bytes of the file; empty if it is binary or not a regular file."""
    if not file.is_file():
        return b""
    try:
        with file.open("rb") as stream:
            head = stream.read(SNIFFED)
            return b"" if is_binary(head) else head + stream.read()
    except OSError as error:
        raise UsageError(f"--data {file}: cannot be read ({error.strerror})") from error


def standard_library() -> Documents:
    """The language reference that `help()` shows, one document per topic; if it is missing, the library's sources.

    Several topics repeat a section of a longer topic verbatim. They are left out, because held-out text that is also in
    the training part would make the validation loss too low.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions ship Python without it
        folder = Path(sysconfig.get_path("stdlib"))
        sources = [content for file in sorted(folder.glob("*.py")) if (content := _text(file))]
        if not sources:
            raise UsageError(f"no pydoc_data.topics in this Python, no sources in {folder}: give --data") from None
        return Documents("the standard library's sources", sources)
    kept: list[str] = []
    # Longest first, so that a topic is compared with those it may repeat. The heading (two lines and a blank) differs.
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        body = topics[name].split("\n", 3)[-1].strip()
        if not any(body in topics[longer] for longer in kept):
            kept.append(name)
    return Documents("the standard library's prose", [topics[name].encode() for name in sorted(kept)])
