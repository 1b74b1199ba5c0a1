"""`prepare` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkFactors, Inputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.eager import sigmoid
from wyfold.tile.decay.eager import decayed_grams, log_gate_tiles, running_sum, to_end
from wyfold.tile.index.eager import to_chunks, wide
from wyfold.tile.inverse.eager import inverse
from wyfold.tile.norm.eager import l2norm


def load(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
) -> Inputs:
    """Cut a part's tokens into tiles, normalised and activated.

    Args:
        q, k: [B, T, H, K] of the part, any strides.
        v: [B, T, HV, V].
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters or None.
        table: The part's chunk table.
        options: Uses `qk_l2norm`, `activation`, `lower_bound`, `clamp`, `beta_logit`, `beta_most`, `erases`.
    """
    HV, dtype = v.shape[2], wide(q.dtype)
    q, k, v = (to_chunks(x, table, HV, dtype) for x in (q, k, v))
    rq = rk = None
    if options.qk_l2norm:
        (q, rq), (k, rk) = l2norm(q), l2norm(k)
    gate = log_gate_tiles(g, A_log, dt_bias, table, options, dtype)
    return Inputs(q, k, v, _strength(beta, v, table, options), gate, rq, rk, options.erases)


def fold(inputs: Inputs, kept: ChunkFactors | None = None) -> ChunkFactors:
    """Compute G, E, F, A, J and P of every chunk; with `kept`, recompute only G, which is cheap."""
    G = running_sum(inputs.g)
    if kept is not None:
        return kept._replace(G=G)
    J, P = decayed_grams(inputs.q, inputs.k, G)
    if not inputs.erases:
        J.zero_()
    A = inverse(inputs.beta * J)
    E = torch.bmm(A.transpose(1, 2), to_end(inputs.k, G))
    return ChunkFactors(G, E, torch.bmm(P, A), A, J, P)


def _strength(beta: Tensor | None, v: Tensor, table: ChunkTable, options: DeltaOptions) -> Tensor:
    if beta is None:
        return torch.ones_like(v[..., :1])
    beta = to_chunks(beta[..., None], table, beta.shape[2], v.dtype)
    return sigmoid(beta).mul_(options.beta_most) if options.beta_logit else beta
