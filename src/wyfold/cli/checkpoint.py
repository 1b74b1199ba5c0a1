"""Checkpoints on disk: whole or not there.

    RUN/checkpoint/step-00000200/model/             the model as `Decoder.save` writes it
                                 training.safetensors   optimizer moments, random state
                                 training.json          step, cursor, recipe, history, size of every file

A run of several processes has, in the place of both files of tensors, a folder `shards` of safetensors files, in which
each process has written what it holds; any number of processes, one included, goes on from it. Nothing is pickled.

A checkpoint is written into a hidden folder beside its place and renamed there when all of it is on the disk, so a
process killed at any moment leaves the previous checkpoints as they were. The last two are kept.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from wyfold.cli import UsageError
from wyfold.models import CONFIG_FILE, WEIGHTS_FILE, Decoder, DecoderConfig
from wyfold.parallel import shards
from wyfold.parallel.team import Team

KEPT = 2
PREFIX = "step-"
UNFINISHED = ".unfinished-"
MODEL, TENSORS, RECORD, SHARDS = "model", "training.safetensors", "training.json", "shards"


def save(
    root: Path, step: int, record: dict[str, Any], tensors: dict[str, Tensor], save_model: Callable[[Path], object]
) -> Path:
    """Folder of the checkpoint of `step` below `root`, complete when this returns; older ones but the last are removed.

    Args:
        root: made if missing.
        step: steps taken; names the folder. An earlier checkpoint of this step is replaced.
        record: whatever JSON can say.
        tensors: name -> tensor; each is stored on its own, whatever memory they share.
        save_model: writes the model into the folder it is given.
    """
    partial = _begin(root, step)
    save_model(partial / MODEL)
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, partial / TENSORS)
    return _finish(partial, step, record)


def save_shards(
    root: Path, step: int, record: dict[str, Any], tensors: dict[str, Tensor], config: DecoderConfig, team: Team
) -> None:
    """The checkpoint of a run of several processes, complete when this returns on any of them.

    Args:
        root, step, record: As of `save`.
        tensors: Name -> tensor, those of the model included; each process has all of it or its shards.
        config: The model's.
        team: All processes, which call this alike.
    """
    partial = root / f"{UNFINISHED}{PREFIX}{step:08d}"
    if team.leads:
        _begin(root, step)
        (partial / MODEL).mkdir()
        (partial / MODEL / CONFIG_FILE).write_text(config.to_json(), encoding="utf-8")
    team.most(0)  # the folder is there
    shards.write(partial / SHARDS, tensors)
    team.most(0)  # all of it is
    if team.leads:
        _finish(partial, step, record)
    team.most(0)  # nobody goes on, or ends, before it has its name


def load_model(path: Path, device: torch.device, backend: str | None) -> Decoder:
    """The model that `path` stands for, as `find_model` understands it."""
    folder = find_model(path)
    if not (folder.parent / SHARDS).is_dir() or (folder / WEIGHTS_FILE).exists():
        return Decoder.load(folder, device=device, backend=backend)
    config = DecoderConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    model = Decoder(config, backend=backend).to(device)
    load_shards(folder.parent, model.state_dict())
    return model


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded as they are here, from a checkpoint of several processes; all processes call this alike.

    Raises:
        UsageError: the checkpoint's shards are damaged, of an earlier format, or not of these tensors.
    """
    try:
        shards.read(folder / SHARDS, tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error


def _begin(root: Path, step: int) -> Path:
    """A fresh hidden folder for the checkpoint of a step."""
    for leftover in root.glob(f"{UNFINISHED}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    partial = root / f"{UNFINISHED}{PREFIX}{step:08d}"
    partial.mkdir(parents=True)
    return partial


def _finish(partial: Path, step: int, record: dict[str, Any]) -> Path:
    """Give a hidden folder whose tensors are written its record and its name."""
    root = partial.parent
    final, replaced = root / f"{PREFIX}{step:08d}", root / f"{UNFINISHED}replaced"
    sizes = {str(file.relative_to(partial)): file.stat().st_size for file in sorted(_files(partial))}
    (partial / RECORD).write_text(json.dumps({**record, "step": step, "files": sizes}))
    _reach_disk(partial)
    if final.exists():  # a kill between these two renames costs this step, never the checkpoint before it
        final.rename(replaced)
    partial.rename(final)
    _sync(root)
    shutil.rmtree(replaced, ignore_errors=True)
    _prune(root)
    return final


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record and tensors of a complete checkpoint, on the CPU; none of shards."""
    tensors = load_file(folder / TENSORS) if (folder / TENSORS).exists() else {}
    return record(folder), tensors


def record(folder: Path) -> dict[str, Any]:
    """What a complete checkpoint says of its run."""
    found: dict[str, Any] = json.loads((folder / RECORD).read_text())
    return found


def complete(folder: Path) -> bool:
    """Whether every file of this checkpoint is there in full length."""
    try:
        sizes = json.loads((folder / RECORD).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def latest(root: Path) -> Path | None:
    """The newest complete checkpoint below `root`, if any."""
    return max(_complete_ones(root), default=None)


def find_model(path: Path) -> Path:
    """The model folder that `path` stands for: a run, its checkpoints, one checkpoint, or a saved model itself.

    Raises:
        UsageError: none of these.
    """
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; give a run of `wyfold train` or a folder that Decoder.save wrote")
    if (path / RECORD).exists():
        if not complete(path):
            raise UsageError(f"{path}: this checkpoint is damaged; the folder above it may hold a whole one")
        return path / MODEL
    found = latest(path / "checkpoint") or latest(path)
    if found:
        return found / MODEL
    if not any(path.glob("*.safetensors")):
        raise UsageError(f"{path}: no complete checkpoint and no saved model in this folder")
    return path


def _complete_ones(root: Path) -> list[Path]:
    return sorted(folder for folder in root.glob(f"{PREFIX}*") if complete(folder))


def _prune(root: Path) -> None:
    for folder in _complete_ones(root)[:-KEPT]:
        # The record goes first: what a kill leaves behind is then plainly incomplete.
        (folder / RECORD).unlink()
        shutil.rmtree(folder)
    for folder in root.glob(f"{PREFIX}*"):
        if not (folder / RECORD).exists():
            shutil.rmtree(folder)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def _reach_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
