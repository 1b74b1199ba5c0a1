"""Atomic file writes, guarded reads, and safetensors headers as data. Imports no torch."""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
"""Names of the files that `Decoder.save` writes."""
LARGEST_CONFIG = 2**20
"""Most bytes of a configuration file. A usual one has about a thousand."""
FLOATING = ("F64", "F32", "F16", "BF16")
"""Dtypes of stored parameters, by safetensors' names."""
PART = 2**20


class TensorInfo(NamedTuple):
    """Entry of a safetensors header for one tensor.

    Attributes:
        dtype: By safetensors' names: "F32", "BF16".
        shape: Extents.
    """

    dtype: str
    shape: tuple[int, ...]


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Temporary path in the folder of `file` that replaces `file` when the block ends without an exception.

    The temporary name cannot be predicted and is created exclusively, so a link planted there is not followed. A link
    at `file` is replaced, not written through. The mode is what the umask leaves, even if the writer replaces the
    temporary file. After an exception the temporary file is removed and `file` is unchanged.
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
    """Write a text file in UTF-8 atomically."""
    with replacing(file) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are written to disk."""
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
    content = bytearray()
    with opened(file) as stream:
        size = os.fstat(stream.fileno()).st_size
        # Do not rely on the size: the file may grow meanwhile, and files of /proc have size 0.
        while size <= most and len(content) <= most:
            part = stream.read(min(PART, most + 1 - len(content)))
            if not part:
                return bytes(content)
            content += part
    raise ValueError(f"it has {max(size, len(content)):,} bytes or more, at most {most:,} are read")


@contextmanager
def opened(file: Path) -> Iterator[BufferedReader]:
    """Open a regular file for reading, without blocking on a pipe or a device.

    Raises:
        ValueError: the reason why it cannot be read, without the file's name.
    """
    try:
        with open(file, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("it is no regular file")
            yield stream
    except FileNotFoundError:
        raise ValueError("it is missing") from None
    except IsADirectoryError:
        raise ValueError("it is no regular file") from None
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from error


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the header of a safetensors file: name -> dtype and shape. safetensors validates it; no tensor is read.

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
    """Recover the operating system's error from safetensors' error, which has it as text only."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))
