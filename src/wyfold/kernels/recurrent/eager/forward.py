"""`recurrent` in PyTorch, and the loop over tokens that both directions run."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from wyfold.kernels.records import Inputs, TileGradients
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import token_decay
from wyfold.tile.index.eager import run_tokens
from wyfold.tile.state.eager import paired

Tiles = TypeVar("Tiles", Inputs, TileGradients)


def recurrent(
    inputs: Inputs, S0: Tensor, table: ChunkTable, scale: float, o: Tensor, leaving: Tensor | None = None
) -> Tensor:
    """Run a part's tokens from the entering states. Takes the arguments of `scan` and returns its result."""
    advance = lambda S, c, rows, out: run(S, tile_rows(inputs, c), rows, out)
    return run_tokens(advance, inputs.v, S0, table, scale, o, leaving)


def tile_rows(tiles: Tiles, c: slice) -> Tiles:
    own = {name: x[c] for name, x in tiles._asdict().items() if isinstance(x, Tensor)}
    return tiles._replace(**own)  # type: ignore[arg-type]  # the fields that are tensors


def run(S: Tensor, inputs: Inputs, rows: int, out: Tensor | None, states: list[Tensor] | None = None) -> None:
    """Advance S [n, K, V] in place over `rows` tokens; appends the decayed state before each write to `states`."""
    q, k, v, beta = inputs[:4]
    decay = token_decay(inputs.g)
    # Two rows, not one: a single-row product uses another code path in batches of one (docs/facts/cpu.md, CPU-1).
    kq, k_pair, y_pair = torch.stack([inputs.erasing, q], 2), paired(k), paired(v[:, 0])
    qk = (q * k).sum(-1, keepdim=True)
    for t in range(rows):
        if decay is not None:
            S.mul_(decay[:, t])
        if states is not None:
            states.append(S.clone())
        read = torch.bmm(kq[:, t], S)
        y = (v[:, t] - read[:, 0]).mul_(beta[:, t])
        if out is not None:
            out[:, t] = read[:, 1] + qk[:, t] * y
        y_pair[:, 0] = y
        S.baddbmm_(k_pair[:, t].transpose(1, 2), y_pair)
