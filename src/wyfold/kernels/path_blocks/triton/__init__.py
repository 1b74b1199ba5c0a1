"""Chunks and blocks of PaTH attention in Triton, and their adjoints: one program per chunk, block or sequence."""

from __future__ import annotations

from wyfold.kernels.path_blocks.triton.backward import path_factors_bwd
from wyfold.kernels.path_blocks.triton.blocks import wyfold_path_blocks_bwd_triton, wyfold_path_maps_bwd_triton
from wyfold.kernels.path_blocks.triton.forward import (
    empty_factors,
    launch_key,
    path_cache,
    path_factors,
    wyfold_path_blocks_triton,
    wyfold_path_cache_triton,
    wyfold_path_chunks_triton,
)
from wyfold.kernels.path_blocks.triton.own_chunk import (
    wyfold_path_own_factors_bwd_triton,
    wyfold_path_own_logits_bwd_triton,
)
from wyfold.kernels.path_blocks.triton.solve import wyfold_path_solve_bwd_triton, wyfold_path_tokens_bwd_triton
from wyfold.kernels.path_blocks.triton.sums import path_sums, wyfold_path_sums_triton

BLOCK = 8
"""Chunks of a block."""


def launches(*, backward: bool, far: bool) -> tuple[str | None, ...]:
    """Names of the launches in `launch_key`. far: A block of keys may be followed by another."""
    forward, between = (None, "chunks"), ("maps", "blocks") if far else ()
    return (*forward, "logits", *between, "factors", "solve", "tokens") if backward else forward


# Kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "BLOCK",
    "empty_factors",
    "launch_key",
    "launches",
    "path_cache",
    "path_factors",
    "path_factors_bwd",
    "path_sums",
    "wyfold_path_blocks_bwd_triton",
    "wyfold_path_blocks_triton",
    "wyfold_path_cache_triton",
    "wyfold_path_chunks_triton",
    "wyfold_path_maps_bwd_triton",
    "wyfold_path_own_factors_bwd_triton",
    "wyfold_path_own_logits_bwd_triton",
    "wyfold_path_solve_bwd_triton",
    "wyfold_path_sums_triton",
    "wyfold_path_tokens_bwd_triton",
]
