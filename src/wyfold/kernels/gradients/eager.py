"""`gradients` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkBorders, ChunkFactors, GradientOutputs, Inputs, TileGradients
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.eager import sigmoid_bwd
from wyfold.tile.decay.eager import (
    across,
    decayed_grams_bwd,
    from_start,
    gate_gradient,
    log_gate_tokens_bwd,
    to_end,
)
from wyfold.tile.index.eager import from_chunks, sum_groups, to_chunks
from wyfold.tile.norm.eager import l2norm_bwd

TINY_STRENGTH = 2.0**-60  # for smaller beta, N / beta does not give e


def gradients(inputs: Inputs, factors: ChunkFactors, borders: ChunkBorders, do: Tensor) -> TileGradients:
    """Gradients of a part's inputs.

    Args:
        inputs, factors: From `prepare`.
        borders: From `scan_bwd`.
        do: [n, C, V] tiles of the output's gradient, times scale.
    """
    q, k, beta, G = inputs.q, inputs.k, inputs.beta, factors.G
    S, dS, R, X = borders
    N = torch.bmm(factors.A, beta * R)
    dR = beta * X
    e = torch.where(beta.abs() >= TINY_STRENGTH, N / beta, R - torch.bmm(factors.J, N))
    dbeta = (X * e).sum(-1, keepdim=True)

    dJ = torch.bmm(X, N.transpose(1, 2)).tril_(-1).mul_(-beta)
    dP = torch.bmm(do, N.transpose(1, 2)).tril_()
    if not inputs.erases:
        dJ.zero_()
    dq, dk, pairs = decayed_grams_bwd(q, k, G, factors.J, factors.P, dJ, dP)

    S_T = S.transpose(1, 2)
    dq_read = from_start(torch.bmm(do, S_T), G)
    dk_read = from_start(torch.bmm(dR, S_T), G).neg_()
    if not inputs.erases:
        dk_read.zero_()
    dk_write = to_end(torch.bmm(N, dS.transpose(1, 2)), G)
    dg, decay = None, across(G)
    if G is not None and decay is not None and pairs is not None:
        carried = (S * dS).sum(-1) * decay[..., 0]
        dg = gate_gradient(q * dq_read + k * dk_read, k * dk_write, carried, G, pairs)
    return TileGradients(dq.add_(dq_read), dk.add_(dk_read).add_(dk_write), dR, dbeta, dg)


def unload(
    found: TileGradients,
    inputs: Inputs,
    beta: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    out: GradientOutputs,
) -> None:
    """Apply the adjoints of grouping, norm and activations, and write every token's gradients once.

    Args:
        found, inputs: Gradient and input tiles of the part.
        beta, g, A_log, dt_bias: As given to `load`.
        table: The part's chunk table.
        options: As given to `load`.
        out: Output views of the part's tokens, written; None where a gradient is not requested. The parameters'
            gradients are added to.
    """
    HV = found.v.shape[0] // max(1, table.chunks)
    for token_gradient, dx, y, r in ((out.q, found.q, inputs.q, inputs.rq), (out.k, found.k, inputs.k, inputs.rk)):
        if token_gradient is not None:
            H = token_gradient.shape[2]
            dx = sum_groups(dx, H, HV)
            if r is not None:
                dx = l2norm_bwd(y[:: HV // H], r[:: HV // H], dx)
            from_chunks(dx, table, token_gradient)
    if out.v is not None:
        from_chunks(found.v, table, out.v)
    if out.beta is not None:
        dbeta = found.beta
        if options.beta_logit and beta is not None:
            logits = to_chunks(beta[..., None], table, HV, dbeta.dtype)
            dbeta = sigmoid_bwd(logits, dbeta).mul_(options.beta_most)
        from_chunks(dbeta, table, out.beta[..., None])
    log_gate_tokens_bwd(found.g, g, A_log, dt_bias, table, options, (out.g, out.A_log, out.dt_bias))
