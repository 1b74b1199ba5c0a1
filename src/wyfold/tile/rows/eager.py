"""Runs of rows that fit a cache, for steps in which rows have nothing to do with each other.

A row's bits must not depend on how many rows stand around it, nor on how they lie in memory. Elementwise steps and sums
along a contiguous row have that property; `contiguous_rows` brings a block into the one layout in which sums are taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 1 << 17  # numbers: a few float32 blocks stay in a second-level cache, and one still feeds four threads


def widest(*tensors: Tensor | None) -> torch.dtype:
    """The dtype arithmetic on these tensors runs in: float64 as soon as one is float64, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def row_blocks(rows: int, width: int) -> Iterator[slice]:
    """Slices that cover `rows` rows of `width` numbers, BLOCK numbers each but at least one row."""
    step = max(1, BLOCK // max(1, width))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def contiguous_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in dtype, contiguous; x itself where it is both."""
    return x.to(dtype).contiguous()
