"""(I + L)^-1 of strictly lower triangular tiles: substitution inside 16 rows, products between the blocks.

Never powers of L: on repeated keys they grow like binomial coefficients and cancel catastrophically (docs/numerics.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

SUBSTITUTION_ROWS = 16


def inverse(L: Tensor) -> Tensor:
    """A = (I + L)^-1.

    A block of 16 rows is solved row by row, `A[i, :i] = -L[i, :i] A[:i, :i]`; two neighbours A_lo, A_hi then merge by
    `A[hi, lo] = -A_hi (L[hi, lo] A_lo)`, 16 to 32 to 64 rows.

    Args:
        L: [n, C, C] float32 or float64, C = 16, 32 or 64. Only the entries strictly below the diagonal are read.

    Returns:
        [n, C, C] unit lower triangular, exact zeros above the diagonal.
    """
    C = L.shape[-1]
    A = torch.zeros_like(L)
    A.diagonal(dim1=-2, dim2=-1).fill_(1)
    blocks = C // SUBSTITUTION_ROWS
    _substitute(_diagonal_blocks(L, blocks), _diagonal_blocks(A, blocks))
    rows = SUBSTITUTION_ROWS
    while rows < C:
        for start in range(0, C, 2 * rows):
            lo, hi = slice(start, start + rows), slice(start + rows, start + 2 * rows)
            A[:, hi, lo] = torch.bmm(A[:, hi, hi], torch.bmm(L[:, hi, lo], A[:, lo, lo])).neg_()
        rows *= 2
    return A


def _diagonal_blocks(X: Tensor, blocks: int) -> Tensor:
    """[n, blocks, 16, 16] view of the diagonal blocks of [n, C, C]."""
    n, rows = X.shape[0], SUBSTITUTION_ROWS
    step = X.stride(1) + X.stride(2)
    return X.as_strided(
        (n, blocks, rows, rows), (X.stride(0), rows * step, X.stride(1), X.stride(2)), X.storage_offset()
    )


def _substitute(L: Tensor, A: Tensor) -> None:
    for i in range(1, SUBSTITUTION_ROWS):
        A[..., i, :i] = (L[..., i, :i, None] * A[..., :i, :i]).sum(-2).neg_()
