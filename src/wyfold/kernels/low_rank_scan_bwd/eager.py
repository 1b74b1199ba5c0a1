"""`low_rank_scan_bwd` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankBorders, LowRankFactors, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import across
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.state.eager import advance_


def scan_bwd(
    inputs: LowRankInputs, factors: LowRankFactors, do: Tensor, S0: Tensor, dST: Tensor, table: ChunkTable
) -> tuple[LowRankBorders, Tensor]:
    """States and their gradients at the borders of a part's chunks, with the arguments of `scan_bwd`.

    Returns:
        The border tensors, and dS0 [n, HV, K, V].
    """
    HV, v, decay = S0.shape[1], inputs.v, across(factors.G)
    states, gradients = v.new_empty(2, v.shape[0], inputs.q.shape[-1], v.shape[-1])
    U, Z = torch.empty_like(v), torch.empty_like(v)
    columns = [
        slice(first * HV, (first + count) * HV) for first, count in zip(table.starts, table.columns, strict=True)
    ]

    S = ranked(S0, table)
    for c in columns:
        running = S[: c.stop - c.start]
        states[c] = running
        torch.bmm(factors.rows[c], running, out=U[c])
        advance_(running, None if decay is None else decay[c], factors.E[c], U[c])
        running.baddbmm_(factors.K[c].transpose(1, 2), v[c])

    dS = ranked(dST, table)
    for c in reversed(columns):
        running = dS[: c.stop - c.start]
        gradients[c] = running
        torch.bmm(factors.E[c], running, out=Z[c])
        advance_(running, None if decay is None else decay[c], factors.Q[c], do[c])
        running.baddbmm_(factors.rows[c].transpose(1, 2), Z[c])
    return LowRankBorders(states, gradients, U, Z), unranked(dS, table)
