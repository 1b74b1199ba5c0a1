"""Sums of log gates of chunks and blocks, and their adjoint."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.path_records import BLOCK_CHUNKS, PathDecays


def path_decays(g: Tensor) -> PathDecays:
    """Sums of log gates of all chunks and blocks; g [n, R, G, C]."""
    rows, blocks = torch.arange(g.shape[-1], device=g.device), (-1, BLOCK_CHUNKS)
    later = rows[:, None] > rows  # l > j
    inside = torch.where(later, g[..., :, None], 0).cumsum(-2)
    total = g.sum(-1)
    end = _exclusive(g, after=True)
    following = _exclusive(total.unflatten(0, blocks).movedim(1, -1), after=True)  # [blocks, R, G, chunks of a block]
    block_end = end.unflatten(0, blocks).movedim(1, -2) + following[..., None]
    return PathDecays(inside, g.cumsum(-1), end, total, block_end.flatten(-2), total.unflatten(0, blocks).sum(1))


def path_decays_bwd(d: PathDecays) -> Tensor:
    """Gradient [n, R, G, C] of the log gates from those of their sums."""
    rows = torch.arange(d.inside.shape[-1], device=d.inside.device)
    block_end = d.block_end.unflatten(-1, (BLOCK_CHUNKS, -1)).movedim(-2, 1)  # [blocks, chunks of a block, R, G, C]
    following = _exclusive(block_end.sum(-1).movedim(1, -1)).movedim(-1, 1) + d.block_total[:, None]
    total = d.total + following.flatten(0, 1)
    inside = torch.where(rows[:, None] > rows, d.inside.flip(-2).cumsum(-2).flip(-2), 0).sum(-1)
    return (
        inside + d.start.flip(-1).cumsum(-1).flip(-1) + _exclusive(d.end + block_end.flatten(0, 1)) + total[..., None]
    )


def _exclusive(x: Tensor, *, after: bool = False) -> Tensor:
    """Sums of the elements before each one along the last axis, or after it, without the element itself."""
    x = x.flip(-1) if after else x
    sums = torch.nn.functional.pad(x.cumsum(-1)[..., :-1], (1, 0))
    return sums.flip(-1) if after else sums
