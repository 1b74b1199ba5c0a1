"""Sharded tensors on disk: each process writes its shards, and any number of processes reads them.

    FOLDER/shard-00001-model-00001-of-00001.safetensors    one file for each process that has a shard

Files are read and written by `torch.distributed.checkpoint` with its safetensors storage. The header of a file has the
name, dtype and shape of every shard, and its offset in the full tensor. There is no separate index, and nothing is
pickled. All processes must share the folder.
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
"""Files of torch.distributed.checkpoint's default storage, which early versions used. Its index is a pickle."""


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors, sharded or not. Every process of the run must call this.

    Raises:
        OSError: a process cannot write, or its folder is not visible to the others; raised on all processes.
    """
    import torch.distributed as dist
    from torch.distributed import checkpoint

    alone = not dist.is_initialized()
    storage = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is supported
        try:
            checkpoint.save(dict(tensors), storage_writer=storage, no_dist=alone)
        except checkpoint.CheckpointException as error:
            rank, reason = _first_failure(error)
            raise OSError(f"shards: rank {rank} cannot write its shards into {folder}: {reason}") from error
    if not alone:
        _require_shared(folder)


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors, with their present sharding, from the files.

    Called by a single process, or by every process of a run. Nothing is filled unless all tensors are present.

    Args:
        folder: Folder that `write` made. It may be untrusted: no code in it is run.
        tensors: Name -> tensor of the stored shape and dtype; filled in place.

    Raises:
        ValueError: the folder has the earlier, pickled format, which is not read; a file is damaged; or a name, shape,
            dtype or shard is missing or differs. Raised on every process of the run.
    """
    import torch.distributed as dist
    from torch.distributed import checkpoint

    require(folder, tensors)
    alone = not dist.is_initialized()
    storage = checkpoint.HuggingFaceStorageReader(str(folder))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # a single process is intended
        try:
            checkpoint.load(dict(tensors), storage_reader=storage, no_dist=alone)
        except checkpoint.CheckpointException as error:
            rank, reason = _first_failure(error)
            raise ValueError(f"shards: rank {rank} cannot read {folder}: {reason}") from error


def require(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse a folder that does not hold these tensors, which may be on the meta device. Allocates nothing.

    Args:
        folder, tensors: As in `read`.

    Raises:
        ValueError: as `read`.
    """
    import torch.distributed as dist

    fault = _fault(folder, tensors)
    if dist.is_initialized():
        fault = next(filter(None, _gathered(fault)), "")
    if fault:
        raise ValueError(f"shards: {fault}")


def _require_shared(folder: Path) -> None:
    """Refuse a folder in which a process does not see the files of another one."""
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
    """Why these tensors cannot be filled from the folder; empty if they can."""
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
    except Exception as error:  # the library trusts the headers, which may be invalid in any way
        return f"{folder} is damaged: the shards' offsets cannot be read ({type(error).__name__}: {error})"
    for name, x in tensors.items():
        if name not in written:
            return f"{name} must be in {folder}, got nothing of this name"
        if reason := _difference(written[name], x):
            return f"{name} {reason}, in {folder}"
    return ""


def _difference(written: Any, x: Tensor) -> str:
    """How the stored tensor differs from x; empty if it matches and is complete."""
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
                break  # sorted by offset: later shards do not overlap either
            spans = zip(one.offsets, one.sizes, other.offsets, other.sizes)
            if all(begin < second + length and second < begin + size for begin, size, second, length in spans):
                return True
    return False


def _first_failure(error: Any) -> tuple[int, BaseException]:
    """Lowest rank that failed, and its exception."""
    rank, (reason, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return rank, reason
