"""`kkt` in PyTorch: batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.runtime.chunks import ChunkTable
from wyfold.tile.decay.eager import decayed_grams, log_gate, running_sum
from wyfold.tile.index.eager import from_chunks, to_chunks


def kkt(k: Tensor, beta: Tensor, g: Tensor, table: ChunkTable, dtype: torch.dtype, out: Tensor) -> None:
    """Write L to out.

    Args:
        k: [B, T, H, K] tokens of the part, any strides.
        beta: [B, T, HV, 1].
        g: [B, T, HV, 1 or K]. Natural-log decay per token, <= 0.
        table: The part's chunk grid.
        dtype: Of the arithmetic.
        out: [B, T, HV, C].
    """
    HV = beta.shape[2]
    k_tiles = to_chunks(k, table, HV, dtype)
    G = running_sum(log_gate(to_chunks(g, table, HV, dtype), None, None, "given", 0.0, 0.0))
    J, _ = decayed_grams(k_tiles, k_tiles, G)
    from_chunks(J.mul_(to_chunks(beta, table, HV, dtype)), table, out)
