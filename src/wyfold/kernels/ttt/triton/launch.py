"""Segment length, launch configurations and the backward workspace, shared by all launches of `ttt`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.ttt_records import TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config, LaunchKey, dtype_word, tile_width, tuned
from wyfold.tile.dot.triton import contracts, operand, precision

SEGMENT = 64
"""Tokens of a segment: a whole number of mini-batches, and one chunk of the `ChunkGrid` that launches get."""

LAUNCHES = ("forward", "outputs", "recompute", "backward", "gradients")


class BackwardWorkspace(NamedTuple):
    """Intermediate results that the backward's launches pass to each other.

    Attributes:
        dO: [B, T, HV, D] gradient of O, the residual norm's input.
        dN: [B, T, HV, D] gradient of N through O. The backward scan overwrites it with -w dY, the gradient of v. It
            shares memory with v's gradient where that has the workspace dtype and strides.
        dZ: [B, T, HV, D] gradient of Z = k S + c.
        step: [B, T, HV] float32, <dS1^T k + dc1, N>.
        dS: [segments * HV, D, D] V-first, gradient of the state leaving a segment.
        dc: [segments * HV, SEGMENT / C, D] float32. Sum of dO over each mini-batch, before dO is rounded.
        read_partials: [2, segments, HV, D] float32 partial sums of dw and du, from `recompute`.
        step_partials: [2, N, HV, D] float32 partial sums of dw and du, from the backward scan.
    """

    dO: Tensor
    dN: Tensor
    dZ: Tensor
    step: Tensor
    dS: Tensor
    dc: Tensor
    read_partials: Tensor
    step_partials: Tensor


def launch_keys(dtype: torch.dtype, D: int, chunk_size: int) -> list[LaunchKey]:
    """Configuration keys of all launches, in the order of `LAUNCHES`."""
    return [_launch_key(dtype, D, chunk_size, launch) for launch in LAUNCHES]


def forward_scan_key(dtype: torch.dtype, D: int, chunk_size: int) -> LaunchKey:
    """Configuration key of the forward scan, which selects the backend; converts a symbolic D to an int."""
    return _launch_key(dtype, int(D), chunk_size, "forward")


@functools.cache
def _launch_key(dtype: torch.dtype, D: int, chunk_size: int, launch: str) -> LaunchKey:
    return LaunchKey(dtype_word(dtype), D, D, C=chunk_size, launch=launch)


def launch_options(x: TTTInputs, grid: ChunkGrid, chunk_size: int, launch: str) -> tuple[Config, dict[str, Any]]:
    """Configuration of a launch, and the constexprs and launch options common to all launches."""
    HV, D = x.v.shape[2:]
    config = tuned("ttt.triton", _launch_key(x.q.dtype, D, chunk_size, launch), x.q.device)
    return config, {
        "H": x.q.shape[2],
        "HV": HV,
        "D": D,
        "BT": chunk_size,
        "BD": max(config.blocks["BD"], tile_width(D)),
        "SEGMENT": SEGMENT,
        "PACKED": grid.cu is not None,
        "OP": operand(x.q.dtype),
        "PRECISION": precision(x.q.dtype),
        **config.options(contract=contracts(x.q.dtype)),
    }
