"""`recurrent` in PyTorch, and the loop over tokens that both directions run."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import token_decay
from wyfold.tile.index.eager import run_tokens


def recurrent(
    inputs: LowRankInputs, S0: Tensor, table: ChunkTable, scale: float, o: Tensor, leaving: Tensor | None = None
) -> Tensor:
    """Run a part's tokens from the entering states. Takes the arguments of `scan` and returns its result."""
    advance = lambda S, c, rows, out: run(S, tile_rows(inputs, c), rows, out)
    return run_tokens(advance, inputs.v, S0, table, scale, o, leaving)


def tile_rows(inputs: LowRankInputs, c: slice) -> LowRankInputs:
    """A slice of the tiles. b stays k itself, if it was: then both have one gradient."""
    k = inputs.k[c]
    b = k if inputs.b is inputs.k else inputs.b[c]
    g = None if inputs.g is None else inputs.g[c]
    return inputs._replace(q=inputs.q[c], a=inputs.a[c], b=b, k=k, v=inputs.v[c], g=g)


def run(S: Tensor, inputs: LowRankInputs, rows: int, out: Tensor | None, states: list[Tensor] | None = None) -> None:
    """Advance S [n, K, V] in place over `rows` tokens; appends the state before each token to `states`."""
    q, a, b, k, v, g, before = inputs[:7]
    decay = token_decay(g)
    q_read, a_read = (q, a) if decay is None else (q * decay[..., 0], a if before else a * decay[..., 0])
    reading, column = torch.stack([a_read, q_read], 2), torch.stack([b, k], 2)
    qb, qk = ((q * x).sum(-1, keepdim=True) for x in (b, k))
    for t in range(rows):
        if states is not None:
            states.append(S.clone())
        read = torch.bmm(reading[:, t], S)
        values = torch.stack([read[:, 0], v[:, t]], 1)
        if out is not None:
            out[:, t] = read[:, 1] + qb[:, t] * values[:, 0] + qk[:, t] * values[:, 1]
        if decay is not None:
            S.mul_(decay[:, t])
        S.baddbmm_(column[:, t].transpose(1, 2), values)
