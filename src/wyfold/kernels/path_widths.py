"""Tile widths of the kernels of PaTH attention."""

from __future__ import annotations

import torch

from wyfold.runtime.kernel_configs import tile_width
from wyfold.tile.dot.triton import NARROWEST


def key_width(dtype: torch.dtype, width: int) -> int:
    """Tile width of K or V. Operands of 16 bits are `NARROWEST` wide at least."""
    return max(tile_width(width), NARROWEST if dtype.itemsize == 2 else 0)
