"""`chunk_grid` in PyTorch, in about a dozen small operators. Eager launches use tables of their parts instead."""

from __future__ import annotations

from wyfold.runtime.chunk_layout import chunk_grid

__all__ = ["chunk_grid"]
