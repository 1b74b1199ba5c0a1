"""Tensors on disk as processes hold them: each writes its own shards, and any number of processes reads them.

By `torch.distributed.checkpoint`; a folder that other processes see too.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch import Tensor


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write named tensors, of which each process holds all or shards; every process of the run calls it alike."""
    from torch.distributed import checkpoint

    with torch.no_grad():
        checkpoint.save(dict(tensors), checkpoint_id=folder)


def read(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Fill the tensors, sharded as they are here, with what was written under their names.

    Alone, or on every process of a run alike.

    Raises:
        ValueError: a name or a shape is not what was written.
    """
    import torch.distributed as dist
    from torch.distributed import checkpoint

    alone = not dist.is_initialized()
    found = checkpoint.FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, x in tensors.items():
        size = getattr(found.get(name), "size", None)
        if size != x.shape:
            written = "nothing" if size is None else list(size)
            raise ValueError(f"read: {name} must be {list(x.shape)} as in {folder}, got {written}")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # alone is what was meant
        checkpoint.load(dict(tensors), checkpoint_id=folder, no_dist=alone)
