"""Integrity of checkpoints and saved models, verified before torch is imported.

A checkpoint's `SHA256SUMS` has the digest of every other file, in the format of `sha256sum -c SHA256SUMS`. In addition,
every JSON file is decoded by a schema, the header of every safetensors file is read, and the files are compared with
each other. An error names the damaged file and the fault. A file that was changed together with its digest cannot cause
work that the tensors do not account for.

A checkpoint of a version without digests has the sizes of its files in `training.json`. It is accepted if sizes,
schemas and headers fit; a changed bit inside one of its tensors is not found.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shlex
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from wyfold.cli import UsageError
from wyfold.cli.train import headers
from wyfold.cli.train.headers import CONFIG, RECORD, SHARDS, SUMS, TENSORS, WEIGHTS
from wyfold.cli.train.schema import Model, TrainingRecord, shortened
from wyfold.runtime import files, pattern
from wyfold.runtime.files import CONFIG_FILE, WEIGHTS_FILE, TensorInfo

MOST_JSON = {CONFIG_FILE: files.LARGEST_CONFIG, SUMS: 2**24}
"""File name -> largest size that is read; `LARGEST_JSON` for other JSON files. A history has 200 bytes per step."""
LARGEST_JSON = 2**30

Schema = TypeVar("Schema")

STEP = re.compile(r"step-(\d{8,18})", re.ASCII)
DIGEST = re.compile(r"([0-9a-f]{64})  (\S.*)", re.ASCII)

PICKLED = re.compile(rf"{SHARDS}/(\.metadata|[^/]*\.distcp)")
"""Files of an earlier, pickled format, which the reader of shards refuses."""


class UnreadableError(UsageError):
    """A file that this user has no permission to read. Its content may be intact."""


class DamagedError(UsageError):
    """A damaged file.

    Attributes:
        file: The file.
        reason: What is wrong with it.
        folder: Checkpoint that the file belongs to, or None.
        whole: Newest intact checkpoint of the same run, or None.
    """

    def __init__(self, file: Path, reason: str, folder: Path | None = None, whole: Path | None = None) -> None:
        super().__init__(f"{file} is damaged: {reason}")
        self.file, self.reason, self.folder, self.intact = file, reason, folder, whole

    def of_run(self, folder: Path, others: Collection[Path]) -> DamagedError:
        """A copy of this error for a checkpoint of a run, with the newest intact one among `others`."""
        return DamagedError(self.file, self.reason, folder, newest_intact(folder.parent, others))

    def advice(self, whole: str, otherwise: str) -> UsageError:
        """A UsageError with advice: `whole` if another checkpoint of the run is intact, else `otherwise`."""
        if self.intact is not None:
            return UsageError(f"{self}. The checkpoint {self.intact} is whole: {whole}")
        if self.folder is not None:
            return UsageError(f"{self}. No other checkpoint of this run is whole: {otherwise}")
        return UsageError(f"{self}; {otherwise}")


def step_folders(root: Path) -> list[Path]:
    """Folders below `root` that are named as checkpoints, intact or not, oldest first."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.partition("-")[2]))


def newest(root: Path) -> Path | None:
    """The newest checkpoint below `root`; None if there is none.

    Raises:
        DamagedError: it is damaged. The error names the newest intact one.
    """
    while found := step_folders(root):
        try:
            verify(found[-1])
        except DamagedError as damage:
            if not found[-1].exists():
                continue  # a running training removed it after it was listed
            raise damage.of_run(found[-1], found[:-1]) from damage
        return found[-1]
    return None


def newest_intact(root: Path, among: Collection[Path] | None = None) -> Path | None:
    """The newest intact checkpoint below `root`; None if there is none."""
    for folder in reversed(list(step_folders(root) if among is None else among)):
        try:
            verify(folder)
        except (DamagedError, UnreadableError):
            continue
        return folder
    return None


def verify(folder: Path, *, tensors: bool = True) -> dict[str, Any]:
    """Verify a checkpoint and return its record.

    Args:
        folder: A checkpoint.
        tensors: False verifies only the record.

    Raises:
        DamagedError: naming the file.
    """
    record = read_record(folder)
    sums = _sums(folder, record)
    if sums is not None:
        _verify_digest(folder, RECORD, sums)
    if not tensors:
        return record
    sharded = not (folder / WEIGHTS).exists() and (folder / SHARDS).is_dir()
    shards = [f"{SHARDS}/{path.name}" for path in sorted((folder / SHARDS).glob("*.safetensors"))] if sharded else []
    names = shards if sharded else [WEIGHTS, TENSORS]
    for name in (CONFIG, *names):
        _require_regular(folder, name)
    for name in sums or ():
        # Hash known files only: an unknown file may be endless, such as a device.
        if name not in (RECORD, CONFIG, *names) and not PICKLED.fullmatch(name):
            reason = "is missing" if name.startswith(f"{SHARDS}/") else "is no file of a checkpoint"
            raise DamagedError(folder / SUMS, f"it names {shortened(name)}, which {reason}")
    model = _decode(folder / CONFIG, Model)
    _require(folder / CONFIG, headers.recipe_fault(record["recipe"], model))
    if sharded:
        _require(folder / SHARDS, headers.shards_fault(model, [_header(folder / name) for name in names]))
    else:
        infos = _compared_weights(folder / WEIGHTS, model)
        fault = headers.moments_fault(infos, _header(folder / TENSORS), begun=record["step"] > 0)
        _require(folder / TENSORS, fault)
    if sums is None:
        _verify_sizes(folder, record["files"])
    else:
        for name in dict.fromkeys((CONFIG, *names)):
            _verify_digest(folder, name, sums)
    return record


def verify_model(folder: Path) -> None:
    """Verify a folder written by `Decoder.save`, which has no digests.

    Raises:
        DamagedError: naming the file.
    """
    _compared_weights(folder / WEIGHTS_FILE, _decode(folder / CONFIG_FILE, Model))


def _compared_weights(file: Path, model: Model) -> dict[str, TensorInfo]:
    """Header of a file of weights, after a comparison with the configuration beside it."""
    infos = _header(file)
    try:
        period = pattern.parse(model.pattern)
    except ValueError as error:
        raise DamagedError(file.with_name(CONFIG_FILE), str(error)) from error
    _require(file, headers.weights_fault(model, period, infos))
    return infos


def _require(file: Path, fault: str) -> None:
    """Raise DamagedError if there is a fault."""
    if fault:
        raise DamagedError(file, fault)


def read_record(folder: Path) -> dict[str, Any]:
    """Read `training.json` of a checkpoint and check it by its schema.

    Raises:
        DamagedError: the file does not match the schema.
    """
    file = folder / RECORD
    decoded = _decode(file, TrainingRecord)
    if reason := decoded.fault() or ("" if STEP.fullmatch(folder.name) is None else _misnamed(folder, decoded.step)):
        raise DamagedError(file, reason)
    return builtins(decoded)


def builtins(decoded: msgspec.Struct) -> dict[str, Any]:
    """Convert a decoded struct to a dict, with defaults for missing fields and string keys as in JSON."""
    fields: dict[str, Any] = msgspec.to_builtins(decoded, str_keys=True)
    return fields


def write_sums(folder: Path) -> None:
    """Write the digests of all files of a checkpoint that is otherwise complete."""
    found = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    names = sorted(path.as_posix() for path in found if not path.name.startswith("."))  # .DS_Store
    files.write(folder / SUMS, "".join(f"{digest(folder / name)}  {name}\n" for name in names))


def digest(file: Path) -> str:
    """SHA-256 of a regular file's content, in hexadecimal.

    Raises:
        ValueError: the file cannot be read. The message is the reason, without the file's name.
        OSError: it is missing, or this user has no permission.
    """
    found = file.stat()
    if time.time_ns() - found.st_mtime_ns < SETTLED:
        _digest.cache_clear()
    return _digest(file, found.st_ino, found.st_size, found.st_mtime_ns)


SETTLED = 2 * 10**9
"""Nanoseconds after which a change of a file is visible in its modification time."""


@functools.lru_cache(maxsize=4096)
def _digest(file: Path, *version: int) -> str:
    # A checkpoint is verified more than once before it is loaded; an unchanged file is hashed once.
    with files.opened(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content(file: Path) -> bytes:
    """Read a whole file.

    Raises:
        DamagedError: it is missing, not a regular file, or larger than any file that Wyfold writes.
    """
    try:
        return files.read_bytes(file, MOST_JSON.get(file.name, LARGEST_JSON))
    except ValueError as error:
        raise _refusal(file, error) from error


def _refusal(file: Path, error: ValueError) -> UsageError:
    """Convert an error of `runtime.files` to the error that names the file."""
    if isinstance(error.__cause__, PermissionError):
        return UnreadableError(f"{file} cannot be read ({error.__cause__.strerror}): give this user the right to read")
    return DamagedError(file, str(error))


def _decode(file: Path, kind: type[Schema]) -> Schema:
    return decode(file, content(file), kind)


def decode(file: Path, stored: bytes, kind: type[Schema]) -> Schema:
    """Decode the JSON of a file by a schema.

    Raises:
        DamagedError: the JSON does not match the schema; the message has the path.
    """
    try:
        return msgspec.json.decode(stored, type=kind)
    except msgspec.ValidationError as error:
        raise DamagedError(file, f"{OTHER_FORM}{error}") from error
    except msgspec.DecodeError as error:
        raise DamagedError(file, f"it is no whole JSON file ({error})") from error
    except UnicodeDecodeError as error:
        raise DamagedError(file, f"it is no text in UTF-8 ({error.reason})") from error
    except RecursionError as error:
        raise DamagedError(file, "its brackets are nested too deeply") from error


OTHER_FORM = "it has another form: "


def convert(file: Path, fields: dict[str, Any], kind: type[Schema]) -> Schema:
    """Convert a decoded JSON object of a file to a schema.

    Raises:
        DamagedError: the object does not match the schema; the message has the path.
    """
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise DamagedError(file, f"{OTHER_FORM}{error}") from error


def _header(file: Path) -> dict[str, TensorInfo]:
    try:
        return files.read_header(file)
    except ValueError as error:
        raise _refusal(file, error) from error


def _misnamed(folder: Path, step: int) -> str:
    named = int(folder.name.partition("-")[2])
    return "" if named == step else f"it is of step {step}, its folder of step {named}"


def _sums(folder: Path, record: Mapping[str, Any]) -> dict[str, str] | None:
    """File name -> digest; None for a checkpoint that has sizes instead of digests."""
    file = folder / SUMS
    if "files" in record and not os.path.lexists(file):
        return None
    if not os.path.lexists(file):
        tensors = f"{SHARDS}/*.safetensors" if (folder / SHARDS).is_dir() else f"{WEIGHTS} {TENSORS}"
        again = f"cd {shlex.quote(str(folder))} && sha256sum {CONFIG} {RECORD} {tensors} > {SUMS}"
        raise DamagedError(file, f"it is missing. If the other files are as they were written, make it: {again}")
    sums: dict[str, str] = {}
    for number, line in enumerate(content(file).decode("utf-8", "replace").splitlines(keepends=True), 1):
        found = DIGEST.fullmatch(line.removesuffix("\n"))
        if found is None or not line.endswith("\n") or found[2] in sums:
            raise DamagedError(file, f"line {number} is no digest and name of another file")
        sums[found[2]] = found[1]
    return sums


def _verify_digest(folder: Path, name: str, sums: Mapping[str, str]) -> None:
    if name not in sums:
        raise DamagedError(folder / SUMS, f"it has no digest of {name}")
    _require_regular(folder, name)
    try:
        found = digest(folder / name)
    except ValueError as error:
        raise _refusal(folder / name, error) from error
    except OSError as error:
        raise DamagedError(folder / name, f"it cannot be read ({error.strerror})") from error
    if found != sums[name]:
        raise DamagedError(folder / name, f"its SHA-256 is {found[:12]}..., {SUMS} has {sums[name][:12]}...")


def _require_regular(folder: Path, name: str) -> None:
    """Refuse a file outside the checkpoint, a link, or a file that is not regular, which may be endless."""
    file = folder / name
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise DamagedError(folder / SUMS, f"it names {name}, outside of the checkpoint")
    for path in (file, *file.parents[: len(Path(name).parts) - 1]):
        if path.is_symlink():
            raise DamagedError(path, "it is a symbolic link")
    if not file.exists():
        raise DamagedError(file, "it is missing")
    if not file.is_file():
        raise DamagedError(file, "it is no regular file")


def _verify_sizes(folder: Path, sizes: Mapping[str, int]) -> None:
    for name, size in sizes.items():
        _require_regular(folder, name)
        found = (folder / name).stat().st_size
        if found != size:
            raise DamagedError(folder / name, f"it has {found:,} bytes, {size:,} were written")
