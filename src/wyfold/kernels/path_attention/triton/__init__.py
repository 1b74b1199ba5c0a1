"""Softmax of PaTH attention in Triton: one program per chunk of queries and query head.

The backward has seven launches; those between blocks run in turns (`far_rows`).
"""

from __future__ import annotations

from wyfold.kernels.path_attention.triton.backward import path_attention_bwd
from wyfold.kernels.path_attention.triton.far_keys import wyfold_path_far_keys_triton, wyfold_path_far_maps_triton
from wyfold.kernels.path_attention.triton.far_rows import wyfold_path_far_rows_triton, wyfold_path_far_starts_triton
from wyfold.kernels.path_attention.triton.forward import (
    PathPastTokens,
    launch_key,
    path_attention,
    wyfold_path_attention_triton,
)
from wyfold.kernels.path_attention.triton.own import wyfold_path_own_keys_triton, wyfold_path_own_rows_triton
from wyfold.kernels.path_attention.triton.starts import wyfold_path_starts_triton


def launches(*, backward: bool, far: bool) -> tuple[str | None, ...]:
    """Names of the launches in `launch_key`. far: A block of keys may be followed by another."""
    between = ("far_starts", "far_rows", "far_keys", "far_maps") if far else ()
    return (None, "starts", *between, "own_rows", "own_keys") if backward else (None,)


# Kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "PathPastTokens",
    "launch_key",
    "launches",
    "path_attention",
    "path_attention_bwd",
    "wyfold_path_attention_triton",
    "wyfold_path_far_keys_triton",
    "wyfold_path_far_maps_triton",
    "wyfold_path_far_rows_triton",
    "wyfold_path_far_starts_triton",
    "wyfold_path_own_keys_triton",
    "wyfold_path_own_rows_triton",
    "wyfold_path_starts_triton",
]
