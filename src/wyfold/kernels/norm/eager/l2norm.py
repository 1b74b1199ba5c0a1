"""`l2norm` in PyTorch, in blocks of rows that fit the cache."""

from __future__ import annotations

from torch import Tensor

from wyfold.tile.norm import eager as norm
from wyfold.tile.rows.eager import contiguous_rows, row_blocks, widest


def l2norm(x: Tensor, eps: float, out: Tensor) -> None:
    """Write x at unit length to out.

    Args:
        x: [n, W], any float.
        eps: Added to the squared length.
        out: [n, W], any float.
    """
    for rows in row_blocks(*x.shape):
        out[rows] = norm.l2norm(contiguous_rows(x[rows], widest(x)), eps)[0]


def l2norm_bwd(x: Tensor, eps: float, dy: Tensor, dx: Tensor) -> None:
    """Write the gradient of `l2norm` in x to dx; all [n, W]."""
    dtype = widest(x)
    for rows in row_blocks(*x.shape):
        y, r = norm.l2norm(contiguous_rows(x[rows], dtype), eps)
        dx[rows] = norm.l2norm_bwd(y, r, contiguous_rows(dy[rows], dtype))
