"""Sharded tensors on disk: each process writes what it holds, and any number of processes reads it.

    FOLDER/shard-00001-model-00001-of-00001.safetensors    one file for each process that holds something

Reading and writing are `torch.distributed.checkpoint`'s, with its safetensors storage. A file's header gives name,
dtype and shape of every shard in it, and where in the whole tensor the shard begins; there is no index beside the
files, and nothing is pickled. All processes have to see the folder.
"""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wyfold.runtime import files

PATTERN = "*.safetensors"
PICKLED = (".metadata", "*.distcp")
"""What torch.distributed.checkpoint's usual storage writes, which Wyfold used at first: its index is a pickle."""


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors, of which each process holds all or shards; every process of the run calls it alike.

    Raises:
        OSError: a process cannot write, or writes into a folder of this name that the others do not see; raised on all
            of them.
    """
    import torch.distributed as dist
    from torch.distributed import checkpoint

    alone = not dist.is_initialized()
    storage = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # one process is as good
        try:
            checkpoint.save(dict(tensors), storage_writer=storage, no_dist=alone)
        except checkpoint.CheckpointException as error:
            rank, reason = _first_failure(error)
            raise OSError(f"shards: rank {rank} cannot write its shards into {folder}: {reason}") from error
    if not alone:
        _require_shared(folder)


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors, sharded as they are here, with what was written under their names.

    Called by one process alone, or by every process of a run. Nothing is filled unless all that is asked for is there.

    Args:
        folder: As `write` left it, or from anybody: no code in it is run.
        tensors: Name -> tensor of the shape and dtype that were written; filled in place.

    Raises:
        ValueError: the folder was written in an earlier, pickled format, which is not read; a file is damaged; a name,
            shape, dtype or shard is missing or another. Raised on every process of the run.
    """
    import torch.distributed as dist
    from torch.distributed import checkpoint

    require(folder, tensors)
    alone = not dist.is_initialized()
    storage = checkpoint.HuggingFaceStorageReader(str(folder))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # alone is what was meant
        try:
            checkpoint.load(dict(tensors), storage_reader=storage, no_dist=alone)
        except checkpoint.CheckpointException as error:
            rank, reason = _first_failure(error)
            raise ValueError(f"shards: rank {rank} cannot read {folder}: {reason}") from error


def require(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse a folder that does not hold these tensors, which may be on the meta device; nothing is allocated.

    Args:
        folder, tensors: As of `read`.

    Raises:
        ValueError: as of `read`.
    """
    import torch.distributed as dist

    fault = _fault(folder, tensors)
    if dist.is_initialized():
        fault = next(filter(None, _gathered(fault)), "")
    if fault:
        raise ValueError(f"shards: {fault}")


def _require_shared(folder: Path) -> None:
    """Refuse a folder in which a process does not see what another one wrote."""
    import torch.distributed as dist

    own = sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*"))
    sizes = [
        (rank, name, size)
        for rank, written in enumerate(_gathered([(x.name, x.stat().st_size) for x in own]))
        for name, size in written
    ]
    missing = next((entry for entry in sizes if not _is_there(folder / entry[1], entry[2])), None)
    for rank, entry in enumerate(_gathered(missing)):
        if entry is not None:
            writer, name, _ = entry
            raise OSError(
                f"shards: rank {rank} does not see {name} in {folder}, which rank {writer} wrote; "
                "all processes of a run must share its folder"
            )


def _is_there(file: Path, size: int) -> bool:
    try:
        return file.stat().st_size == size
    except FileNotFoundError:
        return False


def _gathered(value: Any) -> list[Any]:
    """All-gather of a value, by rank."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _fault(folder: Path, tensors: dict[str, Tensor]) -> str:
    """Why these tensors cannot be filled from the folder; empty where they can be."""
    if any(next(folder.glob(pattern), None) for pattern in PICKLED):
        return (
            f"{folder} is of an earlier format, whose index ({PICKLED[0]}) is a pickle; reading it could run code of "
            "its author, so it is not read. Train again, or, if you trust the author, continue it with the version "
            "that wrote it, in one process: its next checkpoint has no shards"
        )
    shards = sorted(folder.glob(PATTERN))
    if not shards:
        return f"{folder} holds no shards ({PATTERN})"
    for shard in shards:
        try:
            files.read_header(shard)
        except ValueError as error:
            return f"{shard} is damaged: {error}"
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    try:
        written = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except Exception as error:  # headers may hold anything, and the library believes them
        return f"{folder} is damaged: the shards' offsets cannot be read ({type(error).__name__}: {error})"
    for name, x in tensors.items():
        if name not in written:
            return f"{name} must be in {folder}, got nothing of this name"
        if reason := _difference(written[name], x):
            return f"{name} {reason}, in {folder}"
    return ""


def _difference(written: Any, x: Tensor) -> str:
    """What is written instead of a tensor like x, all of it; empty where it is."""
    if written.size != x.shape:
        return f"must be {list(x.shape)} as here, got {list(written.size)}"
    if written.properties.dtype != x.dtype:
        return f"must be {x.dtype} as here, got {written.properties.dtype}"
    for chunk in written.chunks:
        if len(chunk.offsets) != x.dim() or any(offset < 0 for offset in chunk.offsets):
            return f"must have shards inside of {list(x.shape)}, got one at {list(chunk.offsets)}"
    count = sum(math.prod(chunk.sizes) for chunk in written.chunks)
    if count != x.numel():
        return f"must have shards of {x.numel()} numbers in all, got {count}"
    return "must have shards that do not overlap" if _overlap(written.chunks) else ""


def _overlap(chunks: list[Any]) -> bool:
    """Whether two chunks of a tensor share an element."""
    chunks = sorted((chunk for chunk in chunks if math.prod(chunk.sizes)), key=lambda chunk: tuple(chunk.offsets))
    for i, one in enumerate(chunks):
        for other in chunks[i + 1 :]:
            if other.offsets[0] >= one.offsets[0] + one.sizes[0]:
                break  # and so do all after it: shards of the first dimension are compared with one other each
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes)
            if all(begin < second + length and second < begin + size for begin, size, second, length in spans):
                return True
    return False


def _first_failure(error: Any) -> tuple[int, BaseException]:
    """The lowest rank that failed, and its exception."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return rank, reason
