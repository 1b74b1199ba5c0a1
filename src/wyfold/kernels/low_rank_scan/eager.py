"""`low_rank_scan` in PyTorch: a loop over columns, batched over value heads and the sequences with a chunk there."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankFactors, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import across
from wyfold.tile.index.eager import from_chunks, ranked, unranked
from wyfold.tile.state.eager import advance_


def scan(
    inputs: LowRankInputs,
    factors: LowRankFactors,
    S0: Tensor,
    table: ChunkTable,
    scale: float,
    o: Tensor,
    leaving: Tensor | None = None,
) -> Tensor:
    """Run a part's chunks from the entering states. Takes the arguments of `scan` and returns its result."""
    HV, v, decay = S0.shape[1], inputs.v, across(factors.G)
    out = torch.bmm(factors.P, v)
    S = ranked(S0, table)
    for first, count in zip(table.starts, table.columns, strict=True):
        c = slice(first * HV, (first + count) * HV)
        running = S[: count * HV]
        out[c].baddbmm_(factors.Q[c], running)
        U = torch.bmm(factors.rows[c], running)
        advance_(running, None if decay is None else decay[c], factors.E[c], U)
        running.baddbmm_(factors.K[c].transpose(1, 2), v[c])
        if leaving is not None:
            leaving[first : first + count] = running.unflatten(0, (count, HV))
    from_chunks(out.mul_(scale), table, o)
    return unranked(S, table)
