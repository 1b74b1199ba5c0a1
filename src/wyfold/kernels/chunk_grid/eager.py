"""`chunk_grid` in PyTorch: a dozen small operators. Eager launches have tables of their parts instead."""

from __future__ import annotations

from wyfold.runtime.chunk_layout import chunk_grid

__all__ = ["chunk_grid"]
