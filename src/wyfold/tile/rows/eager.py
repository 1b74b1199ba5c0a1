"""Blocks of rows that fit the cache, for steps whose rows are independent.

A row's bits must not depend on the number of rows around it or on its layout in memory. Elementwise steps and sums
along a contiguous row have that property; `contiguous_rows` brings a block into the one layout in which sums are taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 17  # numbers: a few float32 blocks fit L2, and one block still occupies four threads


def widest(*tensors: Tensor | None) -> torch.dtype:
    """Dtype of arithmetic on these tensors: float64 if one of them is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` numbers, each of BLOCK numbers but at least one row."""
    step = max(1, BLOCK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def contiguous_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype and contiguous; x itself if it already is both."""
    return x.to(dtype).contiguous()
