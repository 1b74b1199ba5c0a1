"""Files that appear whole or not at all, and safetensors headers read as data. Imports no torch."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
"""What `Decoder.save` writes."""


class TensorInfo(NamedTuple):
    """What a safetensors header says of one tensor.

    Attributes:
        dtype: As safetensors spells it: "F32", "BF16".
        shape: Extents.
    """

    dtype: str
    shape: tuple[int, ...]


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """A path to write to, in the folder of `file`, that takes its place when the block ends without an exception.

    The temporary name cannot be predicted and is created exclusively, so a link planted there is not followed; a link
    at `file` is replaced, not written through. The mode is what the umask leaves, also where the writer
    creates a new file under the name. After an exception the temporary file is removed and `file` is as it was.
    """
    temporary = file.with_name(f".{secrets.token_hex(8)}.part")
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
    mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    os.close(descriptor)
    try:
        yield temporary
        os.chmod(temporary, mode)
        sync(temporary)
        temporary.replace(file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write(file: Path, text: str) -> None:
    """Write a text file in UTF-8, whole or not at all."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_bytes(file: Path, most: int) -> bytes:
    """Content of a regular file of at most so many bytes.

    Raises:
        ValueError: the reason why it cannot be read, without the file's name.
    """
    try:
        found = file.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError("it is no regular file")
        if found.st_size > most:
            raise ValueError(f"it has {found.st_size:,} bytes, at most {most:,} are read")
        return file.read_bytes()
    except FileNotFoundError:
        raise ValueError("it is missing") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Name -> dtype and shape of each tensor in a safetensors file, by the library's own checks; no tensor is read.

    Raises:
        ValueError: the reason why it is no safetensors file, without the file's name.
        ImportError: safetensors is missing.
    """
    from safetensors import SafetensorError, safe_open

    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError("it is no regular file")
        with safe_open(file, framework="np") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}
            return {name: TensorInfo(x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except FileNotFoundError:
        raise ValueError("it is missing") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror or error})") from error
    except SafetensorError as error:
        reason = str(error).removeprefix("Error while deserializing header: ")
        raise ValueError(f"it is no whole safetensors file ({reason})") from error


def os_error(error: Exception) -> OSError:
    """The operating system's error that safetensors reports as text."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
