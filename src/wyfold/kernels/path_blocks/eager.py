"""Chunks and blocks of PaTH attention in PyTorch, and their adjoints."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.path_records import BLOCK_CHUNKS, PathBlocks, PathCall, PathChunks, PathDecays, PathTiles
from wyfold.tile.inverse.eager import inverse


def path_chunks(x: PathTiles) -> PathChunks:
    """Factors of every chunk."""
    n, R, C = x.w.shape[:3]
    b = x.beta.flatten(0, 1)
    q, k, w = (t.flatten(0, 1) for t in (x.q, x.k, x.w))
    N = torch.bmm(w, w.mT).tril(-1)
    A = inverse(b * N)
    P, J = _stacked_tril(torch.bmm(q, w.mT), C), torch.bmm(w, k.mT).tril(-1)
    W, E = torch.bmm(A, b * w), torch.bmm(A, b * J)
    Z = _stacked_tril(torch.bmm(q, k.mT), C) - torch.bmm(P, E)
    found = A, N, J, P, W, E, q - torch.bmm(P, W), k - torch.bmm(E.mT, w), Z
    return PathChunks(*(t.unflatten(0, (n, R)) for t in found))


def path_chunks_bwd(call: PathCall, d: PathCall) -> PathTiles:
    """Gradients of the tokens from those of the chunks' factors.

    The adjoint of A is that of a solve: with X the gradient of a product A Y = U, dL = -stril(X U^T).
    """
    n, R, C, _ = call.x.w.shape
    q, k, w, b = (t.flatten(0, 1) for t in (call.x.q, call.x.k, call.x.w, call.x.beta))
    A, N, J, P, W, E = (t.flatten(0, 1) for t in call.chunks[:6])
    dq, dk, dZ, dW, dw = (t.flatten(0, 1) for t in (d.chunks.q, d.chunks.k, d.chunks.Z, d.chunks.W, d.x.w))
    dP = _stacked_tril(-torch.bmm(dq, W.mT) - torch.bmm(dZ, E.mT), C)
    dE = -torch.bmm(P.mT, dZ) - torch.bmm(w, dk.mT)
    X_W, X_E = torch.bmm(A.mT, dW - torch.bmm(P.mT, dq)), torch.bmm(A.mT, dE)
    dL = -(torch.bmm(X_W, W.mT) + torch.bmm(X_E, E.mT)).tril(-1)
    dbeta = (X_W * (w - torch.bmm(N, W))).sum(-1, True) + (X_E * (J - torch.bmm(N, E))).sum(-1, True)
    dN, dJ, dZ = b * dL, (b * X_E).tril(-1), _stacked_tril(dZ, C)
    dw = dw - torch.bmm(E, dk) + b * X_W + torch.bmm(dN + dN.mT, w) + torch.bmm(dJ, k) + torch.bmm(dP.mT, q)
    dq = dq + torch.bmm(dZ, k) + torch.bmm(dP, w)
    dk = dk + torch.bmm(dZ.mT, q) + torch.bmm(dJ.mT, w)
    dq, dk, dw, dbeta = (t.unflatten(0, (n, R)) for t in (dq, dk, dw, dbeta))
    return PathTiles(dq, dk, d.x.v, dw, dbeta, None if d.decays is None else path_decays_bwd(d.decays))


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


def _stacked_tril(x: Tensor, C: int) -> Tensor:
    """Lower triangle, diagonal included, of each of the G tiles [C, C] that are stacked along the rows."""
    return x.unflatten(-2, (-1, C)).tril().flatten(-3, -2)


def _blocked(tiles: Tensor) -> Tensor:
    """[n, R, C, D] chunk by chunk -> [blocks, R, S, D] block by block."""
    return tiles.unflatten(0, (-1, BLOCK_CHUNKS)).transpose(1, 2).flatten(2, 3)


def _unblocked(tiles: Tensor) -> Tensor:
    """The inverse of `_blocked`."""
    return tiles.unflatten(2, (BLOCK_CHUNKS, -1)).transpose(1, 2).flatten(0, 1)
