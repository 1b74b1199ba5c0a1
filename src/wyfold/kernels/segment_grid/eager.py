"""`segment_grid` in PyTorch: two dozen small operators."""

from __future__ import annotations

from wyfold.runtime.chunk_layout import segment_grid

__all__ = ["segment_grid"]
