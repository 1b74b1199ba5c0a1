"""`scan` in PyTorch: a loop over columns, batched over value heads and the sequences that have a chunk there."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkFactors, Inputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import across, from_start
from wyfold.tile.index.eager import from_chunks, ranked, unranked
from wyfold.tile.state.eager import advance_, read, residual


def scan(
    inputs: Inputs,
    factors: ChunkFactors,
    S0: Tensor,
    table: ChunkTable,
    scale: float,
    o: Tensor,
    leaving: Tensor | None = None,
) -> Tensor:
    """Run a part's chunks from the entering states.

    Args:
        inputs, factors: From `prepare`.
        S0: [n, HV, K, V] state entering each sequence.
        table: The part's chunk grid.
        scale: Multiplies the output.
        o: [B, T, HV, V] tokens of the part, written.
        leaving: [chunks, HV, K, V] receives the state leaving each chunk, or None.

    Returns:
        [n, HV, K, V] state leaving each sequence.
    """
    HV = S0.shape[1]
    q, k, decay = from_start(inputs.q, factors.G), from_start(inputs.erasing, factors.G), across(factors.G)
    out = torch.empty_like(inputs.v)
    S = ranked(S0, table)
    for first, count in zip(table.starts, table.columns, strict=True):
        c = slice(first * HV, (first + count) * HV)
        running = S[: count * HV]
        y = residual(running, k[c], inputs.v[c]).mul_(inputs.beta[c])
        read(running, q[c], factors.F[c], y, out=out[c])
        advance_(running, None if decay is None else decay[c], factors.E[c], y)
        if leaving is not None:
            leaving[first : first + count] = running.unflatten(0, (count, HV))
    from_chunks(out.mul_(scale), table, o)
    return unranked(S, table)
