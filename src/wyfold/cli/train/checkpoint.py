"""Atomic checkpoints on disk. Torch is imported to save and load, not to inspect a checkpoint.

    RUN/checkpoint/step-00000200/model/             the model as `Decoder.save` writes it
                                 training.safetensors   optimizer moments, random state
                                 training.json          step, cursor, recipe, history
                                 SHA256SUMS             digest of every other file, for `sha256sum -c` too

A run of several processes has a folder `shards` of safetensors files instead of the two files of tensors. Each process
writes its shards. Any number of processes, one included, can continue from it. Nothing is pickled.

A checkpoint is written into a hidden folder next to its final one, and renamed once all of it is on disk. A process
that is killed at any moment leaves the previous checkpoints intact. The last two are kept. Only folders with the names
given here are ever removed.
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

from wyfold.cli import Failure, UsageError
from wyfold.cli.train import integrity, rundir
from wyfold.cli.train.headers import MODEL, RANDOM, RECORD, SHARDS, SUMS, TENSORS
from wyfold.cli.train.integrity import DamagedError
from wyfold.runtime import files
from wyfold.runtime.files import CONFIG_FILE, WEIGHTS_FILE

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from wyfold.cli.distributed import World
    from wyfold.models import Decoder, DecoderConfig

KEPT = 2
PREFIX = "step-"
UNFINISHED = re.compile(r"\.unfinished-([0-9a-f]{16}|step-\d{8,18}|replaced)", re.ASCII)
"""Hidden names of checkpoints that are being written or removed. The last two forms are of an earlier version."""


def save(
    root: Path, step: int, record: dict[str, Any], tensors: dict[str, Tensor], save_model: Callable[[Path], object]
) -> Path:
    """Write the checkpoint of `step` below `root`, and remove all older ones but the last.

    Args:
        root: Folder of the checkpoints; made if missing.
        step: Steps taken, which names the folder. An earlier checkpoint of this step is replaced.
        record: JSON object for `training.json`.
        tensors: Name -> tensor. Tensors that share memory are stored separately.
        save_model: Writes the model into the folder it is given.

    Returns:
        The folder of the complete checkpoint.

    Raises:
        Failure: the disk is full or not writable. The unfinished checkpoint is removed.
    """
    from wyfold.models import disk

    with _clean_up_on_failure(root, step):
        partial = _begin(root, secrets.token_hex(8))
        save_model(partial / MODEL)
        stored = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        disk.write_tensors(partial / TENSORS, stored)
        return _finish(partial, step, record)


def save_shards(
    root: Path, step: int, record: dict[str, Any], tensors: dict[str, Tensor], config: DecoderConfig, world: World
) -> None:
    """Write the checkpoint of a run of several processes; it is complete when this returns on any process.

    Args:
        root, step, record: As in `save`.
        tensors: Name -> tensor, including those of the model. Each process passes the whole tensor or its shards.
        config: Configuration of the model.
        world: All processes of the run; each calls this function with the same arguments.

    Raises:
        Failure: as `save`.
    """
    from wyfold.cli.train import sharded_checkpoint

    with _clean_up_on_failure(root, step):
        # All processes use the name that rank 0 draws: 52 bits, an integer that float64 represents.
        token = f"{int(world.all_reduce_max(secrets.randbits(52) if world.is_main else 0)):016x}"
        partial = root / f".unfinished-{token}"
        if world.is_main:
            _begin(root, token)
            (partial / MODEL).mkdir()
            files.write(partial / MODEL / CONFIG_FILE, config.to_json())
        world.all_reduce_max(0)  # barrier: the folder exists
        sharded_checkpoint.write(partial / SHARDS, tensors)
        world.all_reduce_max(0)  # barrier: all shards are written
        if world.is_main:
            _finish(partial, step, record)
        world.all_reduce_max(0)  # barrier: no process continues or exits before the final rename


def load(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Record and tensors of an intact checkpoint, on the CPU. A sharded checkpoint has no tensors here."""
    from safetensors.torch import load_file

    file = folder / TENSORS
    try:
        return integrity.read_record(folder), load_file(file) if file.exists() else {}
    except SafetensorError as error:
        raise DamagedError(file, f"it cannot be read ({error})") from error


def load_model(path: Path, device: torch.device, backend: str | None) -> Decoder:
    """Load the model at `path`, resolved by `find_model`."""
    folder = find_model(path)
    try:
        return _load_folder(folder, device, backend)
    except (OSError, ValueError, UsageError):
        if folder.is_dir():
            raise
    return _load_folder(find_model(path), device, backend)  # a running training removed the checkpoint meanwhile


def _load_folder(folder: Path, device: torch.device, backend: str | None) -> Decoder:
    """Load the model of a folder that was verified."""
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
    """Refuse shards that do not match these tensors, before allocation. All processes must call this.

    Raises:
        UsageError: as `load_shards`.
    """
    from wyfold.cli.train import sharded_checkpoint

    try:
        sharded_checkpoint.require(folder / SHARDS, tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error


def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, with their present sharding, from a sharded checkpoint. All processes must call this.

    Raises:
        UsageError: the shards are damaged, of an earlier format, or do not match these tensors.
    """
    from wyfold.cli.train import sharded_checkpoint

    try:
        sharded_checkpoint.read(folder / SHARDS, tensors)
    except ValueError as error:
        raise UsageError(str(error)) from error


def set_random_state(state: Tensor, folder: Path) -> None:
    """Restore the state of PyTorch's generator from a checkpoint."""
    import torch

    try:
        torch.set_rng_state(state)
    except (RuntimeError, TypeError) as error:
        raise DamagedError(folder / TENSORS, f"{RANDOM} is no state of PyTorch's generator ({error})") from error


def rename_damaged(root: Path) -> list[Path]:
    """Rename all checkpoints newer than the newest intact one, which are damaged. Nothing is removed.

    Returns:
        The folders under their new names, `step-00000200.damaged`.
    """
    whole = integrity.newest_intact(root)
    found = integrity.step_folders(root)
    newer = found[found.index(whole) + 1 :] if whole else found
    return [rundir.rename_with_suffix(folder, "damaged") for folder in newer]


def remove_all(root: Path) -> None:
    """Remove the checkpoints below `root`, and no other files."""
    for folder in integrity.step_folders(root):
        if _is_ours(folder):
            _remove(folder)


def find_model(path: Path) -> Path:
    """Find the model folder of `path`: a run, its folder of checkpoints, one checkpoint, or a saved model.

    Raises:
        DamagedError: the newest checkpoint, or the model, is damaged.
        UsageError: there is no checkpoint and no model.
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
def _clean_up_on_failure(root: Path, step: int) -> Iterator[None]:
    """Remove an unfinished checkpoint after an OSError, and name the newest intact one in the error."""
    try:
        yield
    except OSError as error:
        for leftover in _unfinished(root):
            shutil.rmtree(leftover, ignore_errors=True)
        whole = integrity.newest_intact(root)
        kept = "there is no earlier one" if whole is None else f"{whole} is whole"
        reason = error.strerror or str(error)
        raise Failure(
            f"the checkpoint of step {step} could not be written into {root}: {reason}; {kept}. Once it can be written "
            "there, give the same command again"
        ) from error


def _begin(root: Path, token: str) -> Path:
    """Make a hidden folder for a new checkpoint, after removing leftovers."""
    for leftover in _unfinished(root):
        shutil.rmtree(leftover, ignore_errors=True)
    root.mkdir(parents=True, exist_ok=True)
    partial = root / f".unfinished-{token}"
    partial.mkdir()
    return partial


def _unfinished(root: Path) -> list[Path]:
    """Hidden folders that a killed process left while it wrote or removed a checkpoint; no symbolic links."""
    found = root.iterdir() if root.is_dir() else ()
    return [path for path in found if UNFINISHED.fullmatch(path.name) and path.is_dir() and not path.is_symlink()]


def _finish(partial: Path, step: int, record: dict[str, Any]) -> Path:
    """Write record and digests into a hidden folder, then rename it to its final name."""
    root = partial.parent
    final = root / f"{PREFIX}{step:08d}"
    files.write(partial / RECORD, json.dumps({**record, "step": step}, allow_nan=False))
    integrity.write_sums(partial)
    _sync_tree(partial)
    if os.path.lexists(final) and not _is_ours(final):
        kept = rundir.rename_with_suffix(final, "kept")
        print(f"{final} is no checkpoint of this run; kept: {kept}", file=sys.stderr)
    if final.exists():  # a kill between the two renames loses this step, not the one before
        _remove(final, replaced_by=partial)
    else:
        partial.rename(final)
        files.sync(root)
    _prune(root, final)
    return final


def _prune(root: Path, newest: Path) -> None:
    """Remove old checkpoints; the last `KEPT` up to `newest` stay."""
    found = [folder for folder in integrity.step_folders(root) if _is_ours(folder)]
    for folder in found[: max(0, found.index(newest) + 1 - KEPT)]:
        _remove(folder)


def _is_ours(folder: Path) -> bool:
    """Whether a folder holds a checkpoint and nothing else. A user's folder may have the name of a checkpoint."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}  # .DS_Store, .nfs000
    return RECORD in names and names <= {MODEL, TENSORS, RECORD, SHARDS, SUMS}


def _remove(folder: Path, replaced_by: Path | None = None) -> None:
    """Remove a checkpoint. It is renamed to a hidden name first, so a kill leaves no partial checkpoint."""
    hidden = folder.with_name(f".unfinished-{secrets.token_hex(8)}")
    folder.rename(hidden)
    if replaced_by is not None:
        replaced_by.rename(folder)
    files.sync(folder.parent)
    shutil.rmtree(hidden, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        files.sync(path)
