"""Keys and maps of the blocks of PaTH attention, the cache that they give, and their adjoints."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.path_records import BLOCK_CHUNKS, PathBlocks, PathCall, PathChunks, PathTiles


def path_blocks(x: PathTiles, f: PathChunks) -> PathBlocks:
    """Keys and map of every block."""
    n, R, C, K = x.w.shape
    blocks = n // BLOCK_CHUNKS
    w, W, k = (t.view(blocks, BLOCK_CHUNKS, R, C, K) for t in (x.w, f.W, f.k))
    M = torch.eye(K, dtype=x.w.dtype, device=x.w.device).expand(blocks, R, K, K)
    keys, after = torch.empty_like(k), x.w.new_empty(blocks, BLOCK_CHUNKS, R, K, K)
    for c in reversed(range(BLOCK_CHUNKS)):
        after[:, c] = M
        keys[:, c] = k[:, c] @ M.mT
        M = M - (M @ w[:, c].mT) @ W[:, c]
    return PathBlocks(_blocked(keys.flatten(0, 1)), after.flatten(0, 1), M, _blocked(x.v))


def path_blocks_bwd(call: PathCall, d: PathCall) -> None:
    """Add to the gradients of k, W, w and v of the chunks what the blocks' keys, maps and values pass on."""
    grid = -1, BLOCK_CHUNKS
    w, W, k, after = (t.unflatten(0, grid) for t in (call.x.w, call.chunks.W, call.chunks.k, call.blocks.after))
    dw, dW, dk = (t.unflatten(0, grid) for t in (d.x.w, d.chunks.W, d.chunks.k))
    dkeys, dR = _unblocked(d.blocks.k).unflatten(0, grid), d.blocks.M
    for c in range(BLOCK_CHUNKS):
        u, du = after[:, c] @ w[:, c].mT, -dR @ W[:, c].mT
        dW[:, c] -= u.mT @ dR
        dw[:, c] += du.mT @ after[:, c]
        dk[:, c] += dkeys[:, c] @ after[:, c]
        dR = dR + du @ w[:, c] + dkeys[:, c].mT @ k[:, c]
    d.x.v.add_(_unblocked(d.blocks.v))


def path_cache(call: PathCall) -> tuple[Tensor, Tensor | None]:
    """Keys of all tokens [n, R, C, K], and of earlier calls [R, S, K], after the last token."""
    found = torch.empty_like(call.blocks.k)
    R = torch.eye(found.shape[-1], dtype=found.dtype, device=found.device).expand(found.shape[1], -1, -1)
    for b in reversed(range(found.shape[0])):
        found[b] = torch.bmm(call.blocks.k[b], R.mT)
        R = torch.bmm(R, call.blocks.M[b])
    return _unblocked(found), None if call.past is None else torch.bmm(call.past.k, R.mT)


def path_cache_bwd(call: PathCall, dcache: Tensor, dpast: Tensor | None, d: PathCall) -> None:
    """Add to the gradients of the blocks' keys and maps, and of earlier keys, those of `path_cache`."""
    dkeys = _blocked(dcache)
    blocks = range(dkeys.shape[0])
    maps = [torch.eye(dcache.shape[-1], dtype=dcache.dtype, device=dcache.device).expand(dkeys.shape[1], -1, -1)]
    for b in reversed(blocks):
        maps.append(torch.bmm(maps[-1], call.blocks.M[b]))
    R, dR = maps.pop(), torch.zeros_like(call.blocks.M[0])
    if call.past is not None and d.past is not None and dpast is not None:
        d.past.k.add_(torch.bmm(dpast, R))
        dR = torch.bmm(dpast.mT, call.past.k)
    for b in blocks:
        R = maps.pop()
        d.blocks.M[b] += torch.bmm(R.mT, dR)
        dR = torch.bmm(dR, call.blocks.M[b].mT) + torch.bmm(dkeys[b].mT, call.blocks.k[b])
        d.blocks.k[b] += torch.bmm(dkeys[b], R)


def _blocked(tiles: Tensor) -> Tensor:
    """[n, R, C, D] chunk by chunk -> [blocks, R, S, D] block by block."""
    return tiles.unflatten(0, (-1, BLOCK_CHUNKS)).transpose(1, 2).flatten(2, 3)


def _unblocked(tiles: Tensor) -> Tensor:
    """The inverse of `_blocked`."""
    return tiles.unflatten(2, (BLOCK_CHUNKS, -1)).transpose(1, 2).flatten(0, 1)
