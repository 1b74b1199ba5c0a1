"""What the launches have in common: their segments, configurations and workspaces."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.ttt import TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import Config, dtype_word, tile_width, tuned
from wyfold.tile.dot.triton import contracts, operand, precision

SEGMENT = 64
"""Tokens between two borders: a whole number of mini-batches, and a chunk of the grid that launches are given."""

LAUNCHES = ("walk", "outputs", "replay", "back", "gradients")


class Replayed(NamedTuple):
    """What a backward's launches leave for each other.

    Attributes:
        dO: [B, T, HV, D].
        dN: [B, T, HV, D] through what is read in the mini-batch; then its place is -w dY's. The memory of v's gradient,
            which that is, where it has the dtype of such tiles.
        dZ: [B, T, HV, D].
        step: [B, T, HV] float32, <dS1^T k + dc1, N>.
        dS: [segments * HV, D, D] V-first, gradient of the state leaving a segment.
        dc: [segments * HV, SEGMENT / C, D] float32. Sum of dO over each mini-batch, before dO is rounded.
        read, stepped: [w and u, segments or N, HV, D] float32, shares of dw and du.
    """

    dO: Tensor
    dN: Tensor
    dZ: Tensor
    step: Tensor
    dS: Tensor
    dc: Tensor
    read: Tensor
    stepped: Tensor


def launch_keys(dtype: torch.dtype, D: int, chunk_size: int) -> list[str]:
    """What the configurations of all launches depend on, in the order of `LAUNCHES`."""
    return [_launch_key(dtype, D, chunk_size, launch) for launch in LAUNCHES]


def walk_key(dtype: torch.dtype, D: int, chunk_size: int) -> str:
    """What decides which backend's launches walk forward; a compiler's symbol of a width becomes a number."""
    return _launch_key(dtype, int(D), chunk_size, "walk")


@functools.cache
def _launch_key(dtype: torch.dtype, D: int, chunk_size: int, launch: str) -> str:
    return f"{dtype_word(dtype)} K{D} V{D} C{chunk_size} {launch}"


def arranged(x: TTTInputs, grid: ChunkGrid, chunk_size: int, launch: str) -> tuple[Config, dict[str, Any]]:
    """A launch's configuration, and the constexprs and options that all of them have."""
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
