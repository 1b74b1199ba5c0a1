"""Decayed grams under a channel gate, and their adjoint, in PyTorch.

A channel gate is inside the contraction. Dyadic halving splits it: at each level, blocks of 2h rows pair their later
half with their earlier half, both anchored at the later half's first row, which lies between them in time. Each pair
r > s is computed at exactly one level, no exponent is positive, and no row depends on later gates. The diagonal needs
no gate.
"""

from __future__ import annotations

import torch
from torch import Tensor


def suffix_sum(x: Tensor) -> Tensor:
    """Suffix sum along the rows, sum_{r >= i} x[r]."""
    return x.flip(-2).cumsum(-2).flip(-2)


def exclusive_sum(x: Tensor) -> Tensor:
    """Exclusive prefix sum along the rows, sum_{s < i} x[s]: a shifted scan, never "inclusive minus self"."""
    return torch.nn.functional.pad(x[..., :-1, :], (0, 0, 1, 0)).cumsum_(-2)


def _halves(x: Tensor, h: int) -> tuple[Tensor, Tensor]:
    """Upper (earlier) and lower (later) halves, [n, C / 2h, h, W] each, of the blocks of 2h rows of [n, C, W]."""
    blocks = x.unflatten(1, (-1, 2, h))
    return blocks[:, :, 0], blocks[:, :, 1]


def _lower_left(X: Tensor, h: int) -> Tensor:
    """View [n, C / 2h, h, h] of the lower left quarters of the diagonal blocks of 2h rows of a contiguous [n, C, C]."""
    n, C, _ = X.shape
    return X.as_strided((n, C // (2 * h), h, h), (C * C, 2 * h * (C + 1), C, 1), X.storage_offset() + h * C)


def _levels(C: int) -> list[int]:
    return [1 << level for level in reversed(range((C - 1).bit_length()))]


def channel_grams(rows: tuple[Tensor, ...], k: Tensor, G: Tensor) -> list[Tensor]:
    """Grams of each of `rows` with k below the diagonal, zero elsewhere. G may have a wider dtype than k."""
    n, C, _ = k.shape
    grams = [k.new_zeros(n, C, C) for _ in rows]
    for h in _levels(C):
        G_upper, G_lower = _halves(G, h)
        anchor = G_lower[:, :, :1]
        column = (_halves(k, h)[0] * torch.exp((anchor - G_upper).to(k.dtype))).transpose(2, 3)
        row = torch.exp((G_lower - anchor).to(k.dtype))
        for x, gram in zip(rows, grams, strict=True):
            _lower_left(gram, h).copy_((_halves(x, h)[1] * row) @ column)
    return grams


def channel_grams_bwd(q: Tensor, k: Tensor, G: Tensor, dJ: Tensor, dP: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and each token's log gate, from the grams' gradients on and below the diagonal."""
    diagonal = dP.diagonal(dim1=1, dim2=2)[..., None]
    dq, dk = diagonal * k, diagonal * q
    dg = torch.zeros_like(G)
    for h in _levels(k.shape[1]):
        G_upper, G_lower = _halves(G, h)
        anchor = G_lower[:, :, :1]
        row, column = torch.exp(G_lower - anchor), torch.exp(anchor - G_upper)
        (k_upper, k_lower), q_lower = _halves(k, h), _halves(q, h)[1]
        dJ_block, dP_block = _lower_left(dJ, h), _lower_left(dP, h)
        k_column = k_upper * column
        dq_lower = (dP_block @ k_column) * row
        dk_lower = (dJ_block @ k_column) * row
        dk_upper = (dP_block.transpose(2, 3) @ (q_lower * row) + dJ_block.transpose(2, 3) @ (k_lower * row)) * column
        _halves(dq, h)[1].add_(dq_lower)
        _halves(dk, h)[1].add_(dk_lower)
        _halves(dk, h)[0].add_(dk_upper)
        _halves(dg, h)[1].add_(suffix_sum(q_lower * dq_lower + k_lower * dk_lower))
        _halves(dg, h)[0].add_(exclusive_sum(k_upper * dk_upper))
    return dq, dk, dg


def row_grams_bwd(
    rows: tuple[Tensor, ...], column: Tensor, G: Tensor, dgrams: tuple[Tensor, ...]
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Gradients of several kinds of rows, of their column, and of each token's log gate.

    Args:
        rows, column: [n, C, K] each.
        dgrams: [n, C, C] gradient of each row's gram, contiguous, on and below the diagonal.
    """
    diagonals = [dgram.diagonal(dim1=1, dim2=2)[..., None] for dgram in dgrams]
    drows = [diagonal * column for diagonal in diagonals]
    dcolumn = sum((diagonal * row for diagonal, row in zip(diagonals, rows, strict=True)), torch.zeros_like(column))
    dg = torch.zeros_like(G)
    for h in _levels(column.shape[1]):
        G_upper, G_lower = _halves(G, h)
        anchor = G_lower[:, :, :1]
        row_decay, column_decay = torch.exp(G_lower - anchor), torch.exp(anchor - G_upper)
        upper = _halves(column, h)[0]
        decayed, dupper = upper * column_decay, torch.zeros_like(upper)
        for row, drow, dgram in zip(rows, drows, dgrams, strict=True):
            lower, block = _halves(row, h)[1], _lower_left(dgram, h)
            dlower = (block @ decayed) * row_decay
            _halves(drow, h)[1].add_(dlower)
            _halves(dg, h)[1].add_(suffix_sum(lower * dlower))
            dupper += block.transpose(2, 3) @ (lower * row_decay)
        dupper *= column_decay
        _halves(dcolumn, h)[0].add_(dupper)
        _halves(dg, h)[0].add_(exclusive_sum(upper * dupper))
    return drows, dcolumn, dg
