"""Factors of the chunks of PaTH attention, and their adjoint."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.path_blocks.eager.decays import path_decays_bwd
from wyfold.kernels.path_records import PathCall, PathChunks, PathTiles
from wyfold.tile.inverse.eager import inverse


def path_chunks(x: PathTiles) -> PathChunks:
    """Factors of every chunk."""
    n, R, C = x.w.shape[:3]
    b = x.beta.flatten(0, 1)
    q, k, w = (t.flatten(0, 1) for t in (x.q, x.k, x.w))
    N = torch.bmm(w, w.mT).tril(-1)
    A = inverse(b * N)
    P, J = _stacked_tril(torch.bmm(q, w.mT), C), torch.bmm(w, k.mT).tril(-1)
    W, E = torch.bmm(A, b * w), torch.bmm(A, b * J)
    Z = _stacked_tril(torch.bmm(q, k.mT), C) - torch.bmm(P, E)
    found = A, N, J, P, W, E, q - torch.bmm(P, W), k - torch.bmm(E.mT, w), Z
    return PathChunks(*(t.unflatten(0, (n, R)) for t in found))


def path_chunks_bwd(call: PathCall, d: PathCall) -> PathTiles:
    """Gradients of the tokens from those of the chunks' factors.

    The adjoint of A is that of a solve: with X the gradient of a product A Y = U, dL = -stril(X U^T).
    """
    n, R, C, _ = call.x.w.shape
    q, k, w, b = (t.flatten(0, 1) for t in (call.x.q, call.x.k, call.x.w, call.x.beta))
    A, N, J, P, W, E = (t.flatten(0, 1) for t in call.chunks[:6])
    dq, dk, dZ, dW, dw = (t.flatten(0, 1) for t in (d.chunks.q, d.chunks.k, d.chunks.Z, d.chunks.W, d.x.w))
    dP = _stacked_tril(-torch.bmm(dq, W.mT) - torch.bmm(dZ, E.mT), C)
    dE = -torch.bmm(P.mT, dZ) - torch.bmm(w, dk.mT)
    X_W, X_E = torch.bmm(A.mT, dW - torch.bmm(P.mT, dq)), torch.bmm(A.mT, dE)
    dL = -(torch.bmm(X_W, W.mT) + torch.bmm(X_E, E.mT)).tril(-1)
    dbeta = (X_W * (w - torch.bmm(N, W))).sum(-1, True) + (X_E * (J - torch.bmm(N, E))).sum(-1, True)
    dN, dJ, dZ = b * dL, (b * X_E).tril(-1), _stacked_tril(dZ, C)
    dw = dw - torch.bmm(E, dk) + b * X_W + torch.bmm(dN + dN.mT, w) + torch.bmm(dJ, k) + torch.bmm(dP.mT, q)
    dq = dq + torch.bmm(dZ, k) + torch.bmm(dP, w)
    dk = dk + torch.bmm(dZ.mT, q) + torch.bmm(dJ.mT, w)
    dq, dk, dw, dbeta = (t.unflatten(0, (n, R)) for t in (dq, dk, dw, dbeta))
    return PathTiles(dq, dk, d.x.v, dw, dbeta, None if d.decays is None else path_decays_bwd(d.decays))


def _stacked_tril(x: Tensor, C: int) -> Tensor:
    """Lower triangle, diagonal included, of each of the G tiles [C, C] that are stacked along the rows."""
    return x.unflatten(-2, (-1, C)).tril().flatten(-3, -2)
