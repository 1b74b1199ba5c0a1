"""The horizon in PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import from_start

HORIZON = {torch.float32: -282, torch.float64: -2103}
"""Power of two at and below which a decay erases any state: float32 holds 2^-149 to 2^128, and K is at most 128."""


def lost_states(G: Tensor | None, k: Tensor, E: Tensor, beta: Tensor, table: ChunkTable, *, reverse: bool) -> Tensor:
    """Whether the state that enters a chunk is lost before it leaves its sequence.

    Args:
        G: [n, C, 1 or K] running sum of the log gate of each chunk; None without a gate.
        k: [n, C, K] keys that erase.
        E: [n, C, K] of `ChunkFactors`.
        beta: [n, C, 1] write strengths.
        table: Chunk grid.
        reverse: The state is a gradient, which enters a chunk at its end and passes earlier ones.

    Returns:
        [n] bool. False for the chunk at which a sequence's own state enters, and for any without a gate.
    """
    lost = torch.zeros(k.shape[0], dtype=torch.bool, device=k.device)
    if G is None or not table.columns:
        return lost
    heads = k.shape[0] // table.chunks
    power = _power(G, k, beta) if G.shape[-1] == 1 else _channel_power(G, k, E, beta)
    passed = power.new_zeros(table.columns[0] * heads)
    columns = list(zip(table.starts, table.columns, [*table.columns[1:], 0], strict=True))
    for first, count, later in columns if reverse else reversed(columns):
        chunks, inside = slice(first * heads, (first + count) * heads), later if reverse else count * (first > 0)
        passed[: count * heads] += power[chunks]
        lost[chunks][: inside * heads] = passed[: inside * heads] <= HORIZON[k.dtype]
    return lost


def _power(G: Tensor, k: Tensor, beta: Tensor) -> Tensor:
    """Power of two that bounds the transition of each chunk under a scalar gate.   [n] float64"""
    contracts = ((beta[..., 0] * k.square().sum(-1) - 1).abs() <= 1 + 1e-5).all(-1)
    return torch.where(contracts, G[:, -1, 0].double() / math.log(2), math.inf)


def _channel_power(G: Tensor, k: Tensor, E: Tensor, beta: Tensor) -> Tensor:
    """`_power` under a channel gate: the transition diag(total) - E^T diag(beta) k of decayed keys, row by row."""
    rows = beta[..., 0].double().abs() * _row_norms(E) * _row_norms(from_start(k, G))
    return ((G[:, -1].double().exp().amax(-1) + rows.sum(-1)) * (1 + 1e-5)).log2()


def _row_norms(x: Tensor) -> Tensor:
    """Norms of rows, at least what elements add whose squares float64 cannot hold.   [n, C] float64"""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64) + 2.0**-530
