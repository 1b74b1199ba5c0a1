"""`segment_summary` in PyTorch: the loops of `scan` and `scan_bwd` without their per-chunk results.

States that are lost before the segment ends are cleared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkFactors, Inputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import across, from_start
from wyfold.tile.decay.horizon.eager import lost_states
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.state.eager import advance_, residual, retreat_


def segment_summary(inputs: Inputs, factors: ChunkFactors, S0: Tensor, table: ChunkTable) -> Tensor:
    """Affine maps [H | M] of the sequences of a part, which are segments or parts of segments.

    Args:
        inputs, factors: From `prepare`.
        S0: [n, HV, K, V + K] entering [S | M].
        table: The part's chunk grid.

    Returns:
        [n, HV, K, V + K] leaving [S | M].
    """
    HV, K = S0.shape[1:3]
    k, decay = from_start(inputs.erasing, factors.G), across(factors.G)
    v = torch.nn.functional.pad(inputs.v, (0, K))
    lost = lost_states(factors.G, inputs.erasing, factors.E, inputs.beta, table, reverse=False)
    S = ranked(S0, table)
    for first, count in zip(table.starts, table.columns, strict=True):
        c = slice(first * HV, (first + count) * HV)
        running = S[: count * HV].masked_fill_(lost[c, None, None], 0)
        y = residual(running, k[c], v[c]).mul_(inputs.beta[c])
        advance_(running, None if decay is None else decay[c], factors.E[c], y)
    return unranked(S, table)


def segment_summary_bwd(inputs: Inputs, factors: ChunkFactors, do: Tensor, dST: Tensor, table: ChunkTable) -> Tensor:
    """Gradient of the state that enters each sequence of a part.

    Args:
        inputs, factors: From `prepare`.
        do: [n, C, V] tiles of the output's gradient, times scale.
        dST: [n, HV, K, V] gradient of the leaving state.
        table: The part's chunk grid.

    Returns:
        [n, HV, K, V].
    """
    HV = dST.shape[1]
    q, k, decay = from_start(inputs.q, factors.G), from_start(inputs.erasing, factors.G), across(factors.G)
    X = torch.bmm(factors.F.transpose(1, 2), do)
    lost = lost_states(factors.G, inputs.erasing, factors.E, inputs.beta, table, reverse=True)
    dS = ranked(dST, table)
    for first, count in reversed(list(zip(table.starts, table.columns, strict=True))):
        c = slice(first * HV, (first + count) * HV)
        running = dS[: count * HV].masked_fill_(lost[c, None, None], 0)
        X[c].baddbmm_(factors.E[c], running)
        retreat_(running, None if decay is None else decay[c], q[c], k[c], do[c], X[c] * inputs.beta[c])
    return unranked(dS, table)
