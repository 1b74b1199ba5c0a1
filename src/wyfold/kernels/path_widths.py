"""Tile widths of the kernels of PaTH attention."""

from __future__ import annotations

from wyfold.runtime.kernel_configs import tile_width
from wyfold.tile.dot.triton import NARROWEST


def key_width(width: int) -> int:
    """Tile width of K or V, `NARROWEST` at least.

    In float32 as well: with tiles of 16 columns, a call ended in an illegal memory access on an H200.
    """
    return max(tile_width(width), NARROWEST)
