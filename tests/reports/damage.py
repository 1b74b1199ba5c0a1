"""Seeded variants of a training run, each with one damaged file."""

import json
import os
import random
import shutil
import struct
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wyfold.cli.train import integrity, schema

DURATIONS = ("steps", "minutes")
"""Fields of a recipe whose change, if the digests match, gives a valid, longer run."""


@dataclass(frozen=True)
class Variant:
    """One damaged run.

    Args:
        kind: Kind of damage.
        file: The damaged file, relative to the run.
        what: Description for a table or a failure message.
        signed: Whether the digests were recomputed, so that only schemas and headers can detect the damage.
        interrupted: Whether the run is unfinished, so that `train --resume` trains.
        expected: Command -> required exit status. Other commands may end either way.
    """

    kind: str
    file: str
    what: str
    signed: bool
    interrupted: bool = False
    expected: dict[str, int] = field(default_factory=dict)


def newest(run: Path) -> Path:
    """Folder of the newest checkpoint."""
    return integrity.step_folders(run / "checkpoint")[-1]


def files_of(run: Path) -> list[str]:
    """Files of a run that commands read, relative to the run: all checkpoints' files, the history and the result."""
    inside = sorted(path for path in (run / "checkpoint").rglob("*") if path.is_file())
    beside = [run / name for name in ("metrics.jsonl", "result.json") if (run / name).is_file()]
    return [path.relative_to(run).as_posix() for path in (*inside, *beside)]


def variants(
    run: Path, target: Path, count: int, seed: int, kinds: Sequence[str] = ()
) -> Iterator[tuple[Variant, Path]]:
    """Copies of a finished run in the folder `target`, one after another, each with a different damage.

    Half of the copies are made unfinished first: their last checkpoint and their result are removed.
    """
    kinds = kinds or tuple(KINDS)
    draw = random.Random(seed)
    for number in range(count):
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(run, target)
        interrupted = number // len(kinds) % 2 == 1
        if interrupted:
            shutil.rmtree(newest(target))
            (target / "result.json").unlink(missing_ok=True)
        kind = kinds[number % len(kinds)]
        file, what, signed, *expected = KINDS[kind](target, draw)
        yield Variant(kind, file, what, signed, interrupted, *expected), target


def flipped(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    name = draw.choice(files_of(run))
    content = bytearray((run / name).read_bytes())
    place, bit = draw.randrange(len(content)), draw.randrange(8)
    content[place] ^= 1 << bit
    (run / name).write_bytes(content)
    return name, f"bit {bit} of byte {place}", False


def cut(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    name = draw.choice(files_of(run))
    length = draw.choice([0, draw.randrange((run / name).stat().st_size)])
    os.truncate(run / name, length)
    return name, f"cut to {length} bytes", False


def lengthened(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    name = draw.choice(files_of(run))
    more = draw.choice([b"\0", b"\n", b" ", b"}", b"{}\n", draw.randbytes(100)])
    with (run / name).open("ab") as stream:
        stream.write(more)
    return name, f"{more[:10]!r} at its end", False


def overwritten(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    name = draw.choice(files_of(run))
    content = bytearray((run / name).read_bytes())
    place, length = draw.randrange(len(content)), draw.randrange(1, 600)
    fill = draw.choice([bytes(length), draw.randbytes(length), b"\xff" * length])
    content[place : place + length] = fill[: len(content) - place]
    (run / name).write_bytes(content)
    return name, f"{length} bytes from {place} on", False


def swapped(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Replace the file by another file of the run, possibly one of the older checkpoint."""
    name = draw.choice(files_of(run))
    here = (run / name).read_bytes()
    others = [path for path in (run / "checkpoint").rglob("*") if path.is_file() and path.read_bytes() != here]
    same = [path for path in others if path.name == Path(name).name]
    other = draw.choice(same or others) if draw.random() < 0.5 else draw.choice(others)
    shutil.copyfile(other, run / name)
    return name, f"content of {other.relative_to(run)}", False


def replaced(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Replace the file by something that is not a file of its kind."""
    name = draw.choice(files_of(run))
    file = run / name
    file.unlink()
    what = draw.choice(
        ["missing", "folder", "pipe", "link to nothing", "link to itself", "noise", "deep", "unreadable"]
    )
    if what == "folder":
        file.mkdir()
    elif what == "pipe":
        os.mkfifo(file)
    elif what.startswith("link"):
        file.symlink_to("nothing" if what.endswith("nothing") else file)
    elif what != "missing":
        noise = {"noise": draw.randbytes(5000), "deep": b"[" * 200_000, "unreadable": b"\xff\xfe\x00"}
        file.write_bytes(noise[what])
    return name, what, False


def retyped(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Change the type of a value in a JSON file."""
    values = [None, "text", "", [], {}, True, 0.5, -1, [[[]]], {"a": {"b": {}}}, "1", "nan"]
    return _changed(run, draw, lambda old: draw.choice([value for value in values if type(value) is not type(old)]))


def huge(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Replace a number in a JSON file by one that is not finite or absurdly large."""
    values = ["NaN", "Infinity", "-Infinity", "1e999", "-1", "0", "1e308", "1" + "0" * 12, "1" + "0" * 30, "9" * 5000]
    return _changed(run, draw, lambda old: _Literal(draw.choice(values)), numbers=True)


def renamed(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Remove, rename or add a field of a JSON file."""
    name, data = _some_json(run, draw)
    holder, key = draw.choice([place for place in _places(data) if isinstance(place[1], str)])
    what = draw.choice(["missing", "renamed", "added"])
    value = holder[key]
    if what != "added":
        del holder[key]
    if what != "missing":
        holder[f"{key}_"] = value
    return name, f"{key} {what}", _store(run, name, data, draw)


def patterns(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Change the layer pattern to one that does not match the tensors."""
    folder = newest(run)
    word = draw.choice(["gdn*1000000000", "gdn*" + "9" * 5000, "", "mamba", "gdn " * 10_000, "kda attention", "gdn*0"])
    for file, path in (
        (folder / "model" / "config.json", ("pattern",)),
        (folder / "training.json", ("recipe", "layers")),
    ):
        data = holder = json.loads(file.read_text())
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = word
        file.write_text(json.dumps(data))
    _sign(folder)
    return f"checkpoint/{folder.name}/model/config.json", f"pattern {word[:20]!r} in both files", True


def headers(run: Path, draw: random.Random) -> tuple[str, str, bool]:
    """Make a safetensors header contradict its tensors."""
    name = draw.choice([name for name in files_of(run) if name.endswith(".safetensors")])
    content = (run / name).read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    tensor = draw.choice([key for key in header if key != "__metadata__"])
    entry = header[tensor]
    what = draw.choice(["dtype", "shape", "offsets", "name", "missing", "length", "empty", "huge"])
    if what == "dtype":
        entry["dtype"] = draw.choice(["F64", "I32", "F8_E4M3", "Q9", 3, None])
    elif what == "shape":
        entry["shape"] = draw.choice([[], [*entry["shape"], 1], entry["shape"][::-1] + [2], [-1], "x", [2**63]])
    elif what == "offsets":
        entry["data_offsets"] = draw.choice([[0, 0], entry["data_offsets"][::-1], [0, 2**70], [0], None, [0, 4]])
    elif what == "name":
        header[draw.choice(["x", "blocks.x.y", "blocks.999999999.w", "\u0000", f"{tensor}/x"])] = header.pop(tensor)
    elif what == "missing":
        del header[tensor]
    elif what == "huge":
        entry["shape"] = [10**12, 10**12]
    text = b"{}" if what == "empty" else json.dumps(header).encode()
    said = draw.choice([0, 2**63, 2**64 - 1, len(text) + 1, len(content)]) if what == "length" else len(text)
    (run / name).write_bytes(struct.pack("<Q", said) + text + data)
    signed = draw.random() < 0.7
    if signed:
        _sign((run / name).parents[1] if Path(name).parent.name == "model" else (run / name).parent)
    return name, f"{what} of {tensor}", signed


def nulled(run: Path, draw: random.Random) -> tuple[str, str, bool, dict[str, int]]:
    """Set a field to null, which the schema may or may not allow."""
    name = draw.choice(_records(run))
    data = json.loads((run / name).read_text())
    places = [(data["recipe"], key.name) for key in msgspec.structs.fields(schema.Settings) if not _may_be_null(key)]
    if name == "result.json":
        places += [(data, key) for key in ("date", "command", "accuracy_at")]
    else:
        fields = [key.name for key in msgspec.structs.fields(schema.Entry)]
        places += [(data, "files"), *((entry, key) for entry in data["history"] for key in fields)]
    holder, key = draw.choice(places)
    holder[key] = None
    (run / name).write_text(json.dumps(data))
    if name == "result.json":
        return name, f"{key} = null", False, {"generate": 0, "report": 2}
    _sign((run / name).parent)
    return name, f"{key} = null", True, {"generate": 2, "train --resume": 2, "report": 2}


def dropped(run: Path, draw: random.Random) -> tuple[str, str, bool, dict[str, int]]:
    """Remove an optional field."""
    name = draw.choice(_records(run))
    data = json.loads((run / name).read_text())
    recipe = msgspec.structs.fields(schema.Settings)
    defaults = {key.name: msgspec.to_builtins(key.default) for key in recipe if key.default is not msgspec.NODEFAULT}
    kept = data["recipe"]
    places = [(kept, key) for key, value in defaults.items() if kept[key] == _plain(value)]
    optional = ("mfu", "accuracy_at", "last")
    for number, entry in enumerate(data.get("history", [])):
        places += [(number, key) for key in optional if key in entry]
    if name == "result.json":
        places += [(data, key) for key in ("date", "command", "commit", "accuracy_at") if key in data]
    holder, key = draw.choice(places)
    if isinstance(holder, int):
        # A history is stored in two files, which are compared.
        del data["history"][holder][key]
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        del lines[holder][key]
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        del holder[key]
    (run / name).write_text(json.dumps(data))
    if name != "result.json":
        _sign((run / name).parent)
    expected = {"generate": 0, "train --resume": 0, "report": 0}
    return name, f"{key} missing", name != "result.json", expected


def _records(run: Path) -> list[str]:
    """The newest checkpoint's record, and the result if there is one."""
    record = (newest(run) / "training.json").relative_to(run).as_posix()
    return [record, *(["result.json"] if (run / "result.json").exists() else [])]


def _may_be_null(key: msgspec.structs.FieldInfo) -> bool:
    return type(None) in typing.get_args(key.type)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


KINDS: dict[str, Callable[[Path, random.Random], tuple[Any, ...]]] = {
    "flipped": flipped,
    "cut": cut,
    "lengthened": lengthened,
    "overwritten": overwritten,
    "swapped": swapped,
    "replaced": replaced,
    "retyped": retyped,
    "huge": huge,
    "renamed": renamed,
    "patterns": patterns,
    "headers": headers,
    "nulled": nulled,
    "dropped": dropped,
}


class _Literal:
    """A number as it is spelled in a file."""

    def __init__(self, text: str) -> None:
        self.text = text


def _changed(
    run: Path, draw: random.Random, change: Callable[[Any], Any], numbers: bool = False
) -> tuple[str, str, bool]:
    name, data = _some_json(run, draw)
    places = [
        (holder, key)
        for holder, key in _places(data)
        if not numbers or (isinstance(holder[key], int | float) and not isinstance(holder[key], bool))
    ]
    holder, key = draw.choice(places)
    value = change(holder[key])
    holder[key] = value
    shown = value.text[:20] if isinstance(value, _Literal) else json.dumps(value)
    return name, f"{key} = {shown}", _store(run, name, data, draw, may_sign=key not in DURATIONS)


def _some_json(run: Path, draw: random.Random) -> tuple[str, Any]:
    name = draw.choice([name for name in files_of(run) if name.endswith((".json", ".jsonl"))])
    text = (run / name).read_text()
    if name.endswith(".jsonl"):
        return name, [json.loads(line) for line in text.splitlines()]
    return name, json.loads(text)


def _places(data: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every nested value."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return [place for key, value in items for place in ((data, key), *_places(value))]


def _store(run: Path, name: str, data: Any, draw: random.Random, may_sign: bool = True) -> bool:
    literals: dict[str, str] = {}

    def spelled(value: Any) -> str:
        literals[f"literal {len(literals)}"] = value.text
        return f"literal {len(literals) - 1}"

    lines = data if name.endswith(".jsonl") else [data]
    text = "\n".join(json.dumps(line, default=spelled) for line in lines) + "\n"
    for mark, literal in literals.items():
        text = text.replace(f'"{mark}"', literal)
    (run / name).write_text(text)
    signed = may_sign and "checkpoint" in name and draw.random() < 0.6
    if signed:
        _sign(run / Path(*Path(name).parts[:2]))
    return signed


def _sign(folder: Path) -> None:
    (folder / integrity.SUMS).unlink()
    integrity.write_sums(folder)
