"""Gradients of the tiles of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import ChunkBorders, ChunkFactors, Inputs, TileGradients
from wyfold.tile.decay.eager import across, decayed_grams_bwd, from_start, gate_gradient, to_end

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
