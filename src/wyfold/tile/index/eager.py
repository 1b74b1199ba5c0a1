"""Tokens to chunk tiles and back: the only tile functions that read or write whole tensors.

A tile tensor is [chunks * HV, C, W], contiguous, in float32 (float64 for float64 tokens), chunks in the order of
`runtime.chunk_layout`. Rows of padding are zero, so values outside a sequence, NaN included, cannot reach a sum.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype of the arithmetic: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def to_chunks(x: Tensor, table: ChunkTable, heads: int, dtype: torch.dtype) -> Tensor:
    """Gather x into tiles; each head is repeated for the value heads that read it.

    Args:
        x: [B, T, H, W] tokens of the part. B = table.sequences if all lengths are equal, else 1. Any strides.
        table: The part's chunk grid.
        heads: HV, a multiple of H.
        dtype: Dtype of the tiles.

    Returns:
        [chunks * HV, C, W]; value head j holds head j // (HV // H).
    """
    C, H, W = table.chunk_size, x.shape[2], x.shape[3]
    tiles = torch.empty(table.chunks, H, heads // H, C, W, dtype=dtype, device=x.device)
    if table.uniform:
        n, columns = table.sequences, len(table.columns)
        whole = table.tokens // C
        target = tiles.view(columns, n, H, heads // H, C, W)
        # [n, T, H, W] -> [columns, n, H, 1, C, W]
        chunked = x[:, : whole * C].unflatten(1, (whole, C)).permute(1, 0, 3, 2, 4).unsqueeze(3)
        target[:whole].copy_(chunked.expand_as(target[:whole]))
        if whole < columns:
            tail_rows = table.tokens - whole * C
            target[whole, ..., :tail_rows, :] = x[:, whole * C :].permute(0, 2, 1, 3).unsqueeze(2)
            target[whole, ..., tail_rows:, :] = 0
    else:
        token = _on(table.token, x)
        rows = x[0].index_select(0, token.clamp(min=0).flatten()).unflatten(0, token.shape)  # [chunks, C, H, W]
        tiles.copy_(rows.permute(0, 2, 1, 3).unsqueeze(2).expand_as(tiles))
        tiles.masked_fill_((token < 0)[:, None, None, :, None], 0)
    return tiles.view(-1, C, W)


def from_chunks(tiles: Tensor, table: ChunkTable, out: Tensor) -> None:
    """Scatter tiles to their tokens, rounding once to out's dtype.

    Args:
        tiles: [chunks * H, C, W].
        table: The part's chunk grid.
        out: [B, T, H, W] tokens of the part, written in place. Any strides.
    """
    C, H, W = table.chunk_size, out.shape[2], out.shape[3]
    if table.uniform:
        n, columns = table.sequences, len(table.columns)
        rows = tiles.view(columns, n, H, C, W).permute(1, 0, 3, 2, 4)  # [n, columns, C, H, W]
        whole = table.tokens // C
        out[:, : whole * C].unflatten(1, (whole, C)).copy_(rows[:, :whole])
        if whole < columns:
            out[:, whole * C :] = rows[:, whole, : table.tokens - whole * C]
    else:
        rows = tiles.view(table.chunks, H, C, W).transpose(1, 2).reshape(-1, H, W)
        out.copy_(rows.index_select(0, _on(table.slot, tiles))[None])


def sum_groups(tiles: Tensor, heads: int, value_heads: int) -> Tensor:
    """[chunks * HV, C, W] -> [chunks * H, C, W]: sum the gradients of a group's value heads, in the heads' order."""
    if heads == value_heads:
        return tiles
    grouped = tiles.view(-1, value_heads // heads, *tiles.shape[1:])
    total = grouped[:, 0]
    for member in range(1, value_heads // heads):
        total = total + grouped[:, member]
    return total


def ranked(states: Tensor, table: ChunkTable) -> Tensor:
    """[n, HV, K, V] per sequence -> [n * HV, K, V] in the order of the table's ranks; always a contiguous copy."""
    if table.order is None:
        return states.flatten(0, 1).clone(memory_format=torch.contiguous_format)
    return states.index_select(0, _on(table.order, states)).contiguous().flatten(0, 1)


def unranked(states: Tensor, table: ChunkTable) -> Tensor:
    """The inverse of `ranked`: [n * HV, K, V] -> [n, HV, K, V]."""
    states = states.unflatten(0, (table.sequences, -1))
    if table.order is None:
        return states
    return torch.empty_like(states).index_copy_(0, _on(table.order, states), states)


def _on(index: Tensor | None, x: Tensor) -> Tensor:
    if index is None:
        raise ValueError("a table of alike sequences has no index")
    return index.to(x.device)


def run_tokens(
    advance: Callable[[Tensor, slice, int, Tensor], None],
    v: Tensor,
    S0: Tensor,
    table: ChunkTable,
    scale: float,
    o: Tensor,
    leaving: Tensor | None,
) -> Tensor:
    """Run a part's tokens, column by column of its chunks, and return the final states.

    Args:
        advance: Advances states in place over the tokens of a slice of tiles, whose number of rows it gets, and writes
            their outputs.
        v: [n, C, V] tiles.
        S0, table, scale, o, leaving: As of `scan`.
    """
    HV = S0.shape[1]
    out = torch.empty_like(v)
    S = ranked(S0, table)
    for chunks, rows in table.column_rows():  # padding in shorter chunks changes no result
        c = slice(chunks.start * HV, chunks.stop * HV)
        running = S[: c.stop - c.start]
        advance(running, c, rows, out[c])
        if leaving is not None:
            leaving[chunks] = running.unflatten(0, (-1, HV))
    from_chunks(out.mul_(scale), table, o)
    return unranked(S, table)
