"""`kkt` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import decayed_key_gram, log_gate, running_sum
from wyfold.tile.index.eager import from_chunks, to_chunks


def kkt(k: Tensor, beta: Tensor, g: Tensor | None, table: ChunkTable, dtype: torch.dtype, out: Tensor) -> None:
    """Write L to out.

    Args:
        k: [B, T, H, K] tokens of the part, any strides.
        beta: [B, T, HV, 1].
        g: [B, T, HV, 1 or K] natural-log decay per token, <= 0; None for no decay.
        table: The part's chunk table.
        dtype: Dtype of the arithmetic.
        out: [B, T, HV, C], written.
    """
    HV = beta.shape[2]
    log = None
    if g is not None:
        # In float64: a float32 sum over a chunk with resets reaches thousands, and later differences would lose bits.
        log = log_gate(to_chunks(g, table, HV, dtype), None, None, "given", 0.0, 0.0).double()
    J = decayed_key_gram(to_chunks(k, table, HV, dtype), running_sum(log))
    from_chunks(J.mul_(to_chunks(beta, table, HV, dtype)), table, out)
