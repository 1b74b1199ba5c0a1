"""Chunks and blocks of PaTH attention in PyTorch, and their adjoints."""

from __future__ import annotations

from wyfold.kernels.path_blocks.eager.blocks import path_blocks, path_blocks_bwd, path_cache, path_cache_bwd
from wyfold.kernels.path_blocks.eager.chunks import path_chunks, path_chunks_bwd
from wyfold.kernels.path_blocks.eager.decays import path_decays, path_decays_bwd

__all__ = [
    "path_blocks",
    "path_blocks_bwd",
    "path_cache",
    "path_cache_bwd",
    "path_chunks",
    "path_chunks_bwd",
    "path_decays",
    "path_decays_bwd",
]
