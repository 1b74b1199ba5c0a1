"""Kernel implementation of PaTH attention: launches that take a whole call.

    forward     chunks and blocks, softmax; with `use_cache` the keys after each sequence's last token
    backward    chunks and blocks again, the softmax's adjoint, the adjoint of blocks and chunks

The backward has no gradient of keys of earlier calls, nor of returned keys. The host never waits for the device: the
grid is sized by capacity, and kernels read the boundaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.path_records import OPERATOR, PathOptions, PathTensors
from wyfold.kernels import table
from wyfold.kernels.path_records import CHUNK, PathTiles
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.layout import legal_boundaries

TOKENS_AT_ONCE = 65536
"""Tokens of all query heads of which a backward holds workspaces at once: enough programs for a large GPU."""
ALONE = 16384
"""Tokens beyond which a key head has its workspace alone, to save memory."""


def forward(t: PathTensors, options: PathOptions, o: Tensor, keys: Tensor, lse: Tensor, rest: Tensor) -> None:
    """Write the results, which hold zeros, of a call; rest has elements if it is wanted."""
    B, T = t.k.shape[:2]
    if B == 0 or T == 0:
        if keys.numel() and t.past_k is not None:
            keys.copy_(t.past_k)  # no token changes them
        return
    blocks, softmax, grid = _stage("path_blocks", options), _stage("path_attention", options), _grid(t, options)
    factors = blocks.empty_factors(t.q, t.k, blocks.BLOCK, backward=False)
    blocks.path_factors(t.k, t.w, t.beta, grid, blocks.BLOCK, factors)
    if o.numel():
        past = softmax.PathPastTokens(t.past_k, t.past_v, t.past_g, t.past_counts)
        numbers = options.scale, options.gate, blocks.BLOCK
        sums = blocks.path_sums(t.g, grid, blocks.BLOCK)
        left, g = rest if rest.numel() else None, None if t.g is None else _contiguous(t.g)
        softmax.path_attention(t.q, t.k, _contiguous(t.v), g, factors, sums, past, grid, *numbers, o, lse, left)
    if options.use_cache:
        blocks.path_cache(factors, grid, blocks.BLOCK, t.past_k, t.past_counts, keys)


def backward(
    t: PathTensors,
    options: PathOptions,
    o: Tensor,
    lse: Tensor,
    rest: Tensor,
    do: Tensor,
    found: Sequence[Tensor],
) -> None:
    """Write the gradients, which hold zeros, of q, k, v, w, beta and g.

    Long sequences are computed a few key heads at a time, which bounds the memory of the launches. Heads do not depend
    on each other.
    """
    if o.numel() == 0:
        return
    (B, T, H), HQ, (dq, dk, dv, dw, dbeta, dg) = t.k.shape[:3], t.q.shape[2], found[:6]
    grid, count = _grid(t, options), _heads_at_once(H, B * T, HQ // H)
    for first in range(0, H, count):
        keys = slice(first, first + count)
        queries = slice(first * (HQ // H), (first + count) * (HQ // H))
        _heads_backward(
            _heads(PathTiles(t.q, t.k, t.v, t.w, t.beta, t.g), queries, keys),
            _heads(PathTiles(dq, dk, dv, dw, dbeta, None if t.g is None else dg), queries, keys),
            o[:, :, queries],
            rest[:, :, queries] if rest.numel() else None,
            lse[:, :, queries],
            do[:, :, queries],
            grid,
            options,
        )


def _heads_at_once(H: int, tokens: int, group: int) -> int:
    """Key heads whose workspaces are held at once."""
    return 1 if tokens > ALONE else min(H, max(1, TOKENS_AT_ONCE // (tokens * group)))


def _heads(x: PathTiles, queries: slice, keys: slice) -> PathTiles:
    """Some heads of tensors [B, T, heads, ..]."""
    k, v, w, beta = (y[:, :, keys] for y in (x.k, x.v, x.w, x.beta))
    return PathTiles(x.q[:, :, queries], k, v, w, beta, None if x.g is None else x.g[:, :, queries])


def _contiguous(x: Tensor) -> Tensor:
    """A tensor whose rows follow each other from an address on that is a multiple of 16: a copy if x differs.

    The softmax reads tiles of it again and again, and needs few addresses for them.
    """
    if x.is_contiguous() and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _heads_backward(
    x: PathTiles,
    dx: PathTiles,
    o: Tensor,
    rest: Tensor | None,
    lse: Tensor,
    do: Tensor,
    grid: ChunkGrid,
    options: PathOptions,
) -> None:
    """Write the gradients dx of some heads, [B, T, heads, ..]."""
    blocks, softmax = _stage("path_blocks", options), _stage("path_attention", options)
    numbers, lse, do = (options.scale, options.gate, blocks.BLOCK), _contiguous(lse), _contiguous(do)
    x = x._replace(v=_contiguous(x.v), g=None if x.g is None else _contiguous(x.g))
    factors = blocks.empty_factors(x.q, x.k, blocks.BLOCK, backward=True)
    blocks.path_factors(x.k, x.w, x.beta, grid, blocks.BLOCK, factors)
    sums = blocks.path_sums(x.g, grid, blocks.BLOCK)
    d = softmax.path_attention_bwd(x, factors, sums, grid, *numbers, o, rest, lse, do)
    blocks.path_factors_bwd(x, factors, grid, *numbers, lse, do, d, dx)


def _grid(t: PathTensors, options: PathOptions) -> ChunkGrid:
    B, T = t.k.shape[:2]
    if t.cu_seqlens is not None and check.readable(t.cu_seqlens):
        legal_boundaries(OPERATOR, t.cu_seqlens, T)
    grid: ChunkGrid = _stage("chunk_grid", options).chunk_grid(B, T, CHUNK, t.cu_seqlens)
    return grid


def _stage(name: str, options: PathOptions) -> Any:
    return table.kernel_module(name, options.backend)
