"""Rotary position embedding of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float, *, neighbours: bool = False) -> Tensor:
    """Rotate pair d of channels, d = 0 .. D/2 - 1, by the angle positions * base^(-2 d / D).

    Args:
        x: [B, T, H, D], D even.
        positions: [B, T] or [1, T] integer.
        base: Longest wavelength is about 2 pi base tokens.
        neighbours: Pairs are (x[2 d], x[2 d + 1]); otherwise (x[d], x[d + D/2]).

    Returns:
        Rotated x: [B, T, H, D], dtype of x.

    Source:
        RoFormer, arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    precision = torch.promote_types(x.dtype, torch.float32)
    rate = base ** -(torch.arange(half, device=x.device, dtype=precision) / half)
    angle = positions[..., None, None] * rate  # [B, T, 1, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.unflatten(-1, (half, 2)).unbind(-1) if neighbours else x.chunk(2, dim=-1)
    rotated = first * cos - second * sin, second * cos + first * sin
    return torch.stack(rotated, dim=-1).flatten(-2) if neighbours else torch.cat(rotated, dim=-1)
