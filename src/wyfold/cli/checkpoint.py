"""Checkpoints on disk: whole or not there. Imports torch to save and to load, not to look at one.

    RUN/checkpoint/step-00000200/model/             the model as `Decoder.save` writes it
                                 training.safetensors   optimizer moments, random state
                                 training.json          step, cursor, recipe, history
                                 SHA256SUMS             digest of every other file, for `sha256sum -c` too

A run of several processes has, in the place of both files of tensors, a folder `shards` of safetensors files, in which
each process has written what it holds; any number of processes, one included, goes on from it. Nothing is pickled.

A checkpoint is written into a hidden folder beside its place and renamed there when all of it is on the disk, so a
process killed at any moment leaves the previous checkpoints as they were. The last two are kept. Only folders of the
names given here are ever removed.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from wyfold.cli import Failure, UsageError, integrity, rundir
from wyfold.cli.integrity import MODEL, RECORD, SHARDS, SUMS, TENSORS, DamagedError
from wyfold.runtime import files
from wyfold.runtime.files import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wyfold.cli.distributed import Team
    from wyfold.models import Decoder, DecoderConfig

KEPT = 2
PREFIX = "step-"
UNFINISHED = re.compile(r"\.unfinished-([0-9a-f]{16}|step-\d{8,18}|replaced)", re.ASCII)
"""Hidden names of checkpoints in the making, or half removed; the last two are an earlier version's."""


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

    Raises:
        Failure: the disk is full, or does not let us write; what was written of this checkpoint is removed.
    """
    from wyfold.models import disk

    with _all_or_nothing(root, step):
        partial = _begin(root, secrets.token_hex(8))
        save_model(partial / MODEL)
        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        disk.write_tensors(partial / TENSORS, stored)
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

    Raises:
        Failure: As of `save`.
    """
    from wyfold.cli import sharded_checkpoint

    with _all_or_nothing(root, step):
        # The name is the leader's. 52 bits: a whole number that float64 holds.
        token = f"{int(team.most(secrets.randbits(52) if team.leads else 0)):016x}"
        partial = root / f".unfinished-{token}"
        if team.leads:
            _begin(root, token)
            (partial / MODEL).mkdir()
            files.write(partial / MODEL / CONFIG_FILE, config.to_json())
        team.most(0)  # the folder is there
        sharded_checkpoint.write(partial / SHARDS, tensors)
        team.most(0)  # all of it is
        if team.leads:
            _finish(partial, step, record)
        team.most(0)  # no process continues, or ends, before the checkpoint has its name


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record and tensors of a whole checkpoint, on the CPU; none of shards."""
    from safetensors.torch import load_file

    file = folder / TENSORS
    try:
        return integrity.read_record(folder), load_file(file) if file.exists() else {}
    except SafetensorError as error:
        raise DamagedError(file, f"it cannot be read ({error})") from error


def load_model(path: Path, device: torch.device, backend: str | None) -> Decoder:
    """The model that `path` stands for, as `find_model` understands it."""
    folder = find_model(path)
    try:
        return _load_folder(folder, device, backend)
    except (OSError, ValueError, UsageError):
        if folder.is_dir():
            raise
    return _load_folder(find_model(path), device, backend)  # a live run removed the checkpoint while it was read


def _load_folder(folder: Path, device: torch.device, backend: str | None) -> Decoder:
    """The model of a folder that is whole."""
    import torch

    from wyfold.models import Decoder, DecoderConfig

    if not (folder.parent / SHARDS).is_dir() or (folder / WEIGHTS_FILE).exists():
        return Decoder.load(folder, device=device, backend=backend)
    config = DecoderConfig.from_json(integrity.content(folder / CONFIG_FILE).decode("utf-8"))
    with torch.device("meta"):
        described = Decoder(config).state_dict()
    require_shards(folder.parent, described)
    model = Decoder(config, backend=backend).to(device)
    load_shards(folder.parent, model.state_dict())
    return model


def require_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse shards that are not of these tensors, before they are allocated; all processes call this alike.

    Raises:
        UsageError: as of `load_shards`.
    """
    from wyfold.cli import sharded_checkpoint

    try:
        sharded_checkpoint.require(folder / SHARDS, tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, sharded as they are here, from a checkpoint of several processes; all processes call this alike.

    Raises:
        UsageError: the checkpoint's shards are damaged, of an earlier format, or not of these tensors.
    """
    from wyfold.cli import sharded_checkpoint

    try:
        sharded_checkpoint.read(folder / SHARDS, tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error


def set_aside_damaged(root: Path) -> list[Path]:
    """Rename every checkpoint that is damaged and newer than the newest whole one; nothing is removed.

    Returns:
        The folders under their new names, `step-00000200.damaged`.
    """
    whole = integrity.newest_whole(root)
    found = integrity.step_folders(root)
    newer = found[found.index(whole) + 1 :] if whole else found
    return [rundir.rename_aside(folder, "damaged") for folder in newer]


def remove_all(root: Path) -> None:
    """Remove the checkpoints below `root`, and nothing else that may lie there."""
    for folder in integrity.step_folders(root):
        if _is_ours(folder):
            _remove(folder)


def find_model(path: Path) -> Path:
    """The model folder that `path` stands for: a run, its checkpoints, one checkpoint, or a saved model itself.

    Raises:
        DamagedError: the newest checkpoint there, or the model, is damaged.
        UsageError: nothing of this kind is there.
    """
    asked = "give the folder of a run of `wyfold train`, a checkpoint in it, or a folder that Decoder.save wrote"
    if path.is_file():
        raise UsageError(f"{path}: is a file; {asked}")
    if not path.is_dir():
        raise UsageError(f"{path}: no such folder; {asked}")
    inside = path.parent if path.name == MODEL and (path.parent / RECORD).exists() else path
    if (inside / RECORD).exists() or (inside / SUMS).exists() or (inside / MODEL / CONFIG_FILE).exists():
        try:
            integrity.verify(inside)
        except DamagedError as damage:
            others = [folder for folder in integrity.step_folders(inside.parent) if folder.name != inside.name]
            raise damage.of_run(inside, others) from damage
        return inside / MODEL
    for root in (path / rundir.CHECKPOINTS, path):
        if found := integrity.newest(root):
            return found / MODEL
    if not (path / CONFIG_FILE).exists() and not any(path.glob("*.safetensors")):
        raise UsageError(f"{path}: no checkpoint and no saved model in this folder; {asked}")
    integrity.verify_model(path)
    return path


@contextmanager
def _all_or_nothing(root: Path, step: int) -> Iterator[None]:
    """Report which checkpoint is whole where one cannot be written."""
    try:
        yield
    except OSError as error:
        for leftover in _unfinished(root):
            shutil.rmtree(leftover, ignore_errors=True)
        whole = integrity.newest_whole(root)
        kept = "there is no earlier one" if whole is None else f"{whole} is whole"
        reason = error.strerror or str(error)
        raise Failure(
            f"the checkpoint of step {step} could not be written into {root}: {reason}; {kept}. Once it can be written "
            "there, give the same command again"
        ) from error


def _begin(root: Path, token: str) -> Path:
    """A fresh hidden folder for a checkpoint, of a name that cannot be foreseen."""
    for leftover in _unfinished(root):
        shutil.rmtree(leftover, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".unfinished-{token}"
    partial.mkdir()
    return partial


def _unfinished(root: Path) -> list[Path]:
    """What a process that was killed left of a checkpoint it wrote or removed; no symbolic link."""
    found = root.iterdir() if root.is_dir() else ()
    return [path for path in found if UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _finish(partial: Path, step: int, record: dict[str, Any]) -> Path:
    """Give a hidden folder whose tensors are written its record, its digests and its name."""
    root = partial.parent
    final = root / f"{PREFIX}{step:08d}"
    files.write(partial / RECORD, json.dumps({**record, "step": step}, allow_nan=False))
    integrity.write_sums(partial)
    _reach_disk(partial)
    if os.path.lexists(final) and not _is_ours(final):
        kept = rundir.rename_aside(final, "kept")
        print(f"{final} is no checkpoint of this run; kept: {kept}", file=sys.stderr)
    if final.exists():  # a kill between these two renames costs this step, never the checkpoint before it
        _remove(final, replaced_by=partial)
    else:
        partial.rename(final)
        files.sync(root)
    _prune(root, final)
    return final


def _prune(root: Path, newest: Path) -> None:
    """Remove all but the last checkpoints up to the one that was just written."""
    found = [folder for folder in integrity.step_folders(root) if _is_ours(folder)]
    for folder in found[: max(0, found.index(newest) + 1 - KEPT)]:
        _remove(folder)


def _is_ours(folder: Path) -> bool:
    """Whether a folder has a checkpoint in it and nothing else; a user's own folder may have a checkpoint's name."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}  # .DS_Store, .nfs000
    return RECORD in names and names <= {MODEL, TENSORS, RECORD, SHARDS, SUMS}


def _remove(folder: Path, replaced_by: Path | None = None) -> None:
    """Remove a checkpoint. It has a hidden name first: what a kill leaves behind is plainly no checkpoint."""
    hidden = folder.with_name(f".unfinished-{secrets.token_hex(8)}")
    folder.rename(hidden)
    if replaced_by is not None:
        replaced_by.rename(folder)
    files.sync(folder.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def _reach_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        files.sync(path)
