"""Steps of the state inside one chunk, with written values folded: the body of `scan`, and its adjoint.

Tiles are matrices [n, rows, columns]. Keys and queries are already decayed from the chunk's start (`from_start`).
"""

from __future__ import annotations

import torch
from torch import Tensor


def residual(S: Tensor, k_in: Tensor, v: Tensor) -> Tensor:
    """R = v - k_in S, the part of v that the state does not predict.   [n, C, V]"""
    return torch.baddbmm(v, k_in, S, alpha=-1)


def read(S: Tensor, q_in: Tensor, F: Tensor, y: Tensor, out: Tensor) -> None:
    """out = q_in S + F y: the chunk's output before `scale`.   [n, C, V]"""
    torch.bmm(q_in, S, out=out)
    out.baddbmm_(F, y)


def advance_(S: Tensor, across: Tensor | None, E: Tensor, y: Tensor) -> None:
    """S <- across * S + E^T y, in place.   [n, K, V]"""
    if across is not None:
        S.mul_(across)
    S.baddbmm_(E.transpose(1, 2), y)


def retreat_(dS: Tensor, across: Tensor | None, q_in: Tensor, k_in: Tensor, do: Tensor, dR: Tensor) -> None:
    """dS <- across * dS + q_in^T do - k_in^T dR, in place: the adjoint of one chunk in its entering state."""
    if across is not None:
        dS.mul_(across)
    dS.baddbmm_(q_in.transpose(1, 2), do)
    dS.baddbmm_(k_in.transpose(1, 2), dR, alpha=-1)


def paired(x: Tensor) -> Tensor:
    """Append a row of zeros: an outer product then has two rows (docs/facts/cpu.md, CPU-1).   [.., W] -> [.., 2, W]"""
    return torch.stack([x, torch.zeros_like(x)], -2)


def columns_dot(S: Tensor, k: Tensor) -> Tensor:
    """S^T k.   [n, K, V], [n, K] -> [n, V]"""
    return (S * k[..., None]).sum(-2)


def rows_dot(S: Tensor, v: Tensor) -> Tensor:
    """S v.   [n, K, V], [n, V] -> [n, K]"""
    return (S * v[:, None]).sum(-1)
