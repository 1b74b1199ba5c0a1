"""`scan_bwd` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkBorders, ChunkFactors, Inputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import across, from_start
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.state.eager import advance_, residual, retreat_


def scan_bwd(
    inputs: Inputs, factors: ChunkFactors, do: Tensor, S0: Tensor, dST: Tensor, table: ChunkTable
) -> tuple[ChunkBorders, Tensor]:
    """States and their gradients at the borders of a part's chunks.

    Args:
        inputs, factors: From `prepare`.
        do: [n, C, V] tiles of the output's gradient, times scale.
        S0: [n, HV, K, V] state entering each sequence.
        dST: [n, HV, K, V] gradient of the state leaving each sequence.
        table: The part's chunk grid.

    Returns:
        The border tensors, and dS0 [n, HV, K, V].
    """
    HV, (n, _, K), V = S0.shape[1], inputs.k.shape, inputs.v.shape[-1]
    q, k, decay = from_start(inputs.q, factors.G), from_start(inputs.erasing, factors.G), across(factors.G)
    states, gradients = inputs.v.new_empty(2, n, K, V)
    R, X = torch.empty_like(inputs.v), torch.bmm(factors.F.transpose(1, 2), do)
    columns = [
        slice(first * HV, (first + count) * HV) for first, count in zip(table.starts, table.columns, strict=True)
    ]

    S = ranked(S0, table)
    for c in columns:
        running = S[: c.stop - c.start]
        states[c] = running
        R[c] = residual(running, k[c], inputs.v[c])
        advance_(running, None if decay is None else decay[c], factors.E[c], R[c] * inputs.beta[c])

    dS = ranked(dST, table)
    for c in reversed(columns):
        running = dS[: c.stop - c.start]
        gradients[c] = running
        X[c].baddbmm_(factors.E[c], running)
        retreat_(running, None if decay is None else decay[c], q[c], k[c], do[c], X[c] * inputs.beta[c])
    return ChunkBorders(states, gradients, R, X), unranked(dS, table)
