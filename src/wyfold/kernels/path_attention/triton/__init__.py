"""Softmax of PaTH attention in Triton: one program per chunk of queries and query head.

The backward has five launches; those between blocks run in lanes (`far`).
"""

from __future__ import annotations

from wyfold.kernels.path_attention.triton.backward import empty_workspace, path_attention_bwd
from wyfold.kernels.path_attention.triton.far import wyfold_path_keys_triton, wyfold_path_rows_triton
from wyfold.kernels.path_attention.triton.forward import (
    PathPastTokens,
    launch_key,
    path_attention,
    wyfold_path_attention_triton,
)
from wyfold.kernels.path_attention.triton.own import wyfold_path_own_keys_triton, wyfold_path_own_rows_triton
from wyfold.kernels.path_attention.triton.starts import wyfold_path_starts_triton


def launches(*, backward: bool) -> tuple[str | None, ...]:
    """Names of the launches in `launch_key`."""
    return (None, "starts", "rows", "keys", "own_rows", "own_keys") if backward else (None,)


# Kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "PathPastTokens",
    "empty_workspace",
    "launch_key",
    "launches",
    "path_attention",
    "path_attention_bwd",
    "wyfold_path_attention_triton",
    "wyfold_path_keys_triton",
    "wyfold_path_own_keys_triton",
    "wyfold_path_own_rows_triton",
    "wyfold_path_rows_triton",
    "wyfold_path_starts_triton",
]
