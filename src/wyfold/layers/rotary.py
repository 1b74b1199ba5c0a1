"""Rotary positions: what tells one place of a sequence from another by turning queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, positions: Tensor, base: float, *, neighbours: bool = False) -> Tensor:
    """x with each pair of channels turned by positions * base^(-2 d / D), d = 0 .. D/2 - 1 being the pair's number.

    Args:
        x: [B, T, H, D], D even.
        positions: [B, T] or [1, T] integer.
        base: Longest wavelength is about 2 pi base.
        neighbours: Pairs are (x[2 d], x[2 d + 1]); otherwise (x[d], x[d + D/2]).

    Source:
        arXiv:2104.09864.
    """
    half = x.shape[-1] // 2
    precision = torch.promote_types(x.dtype, torch.float32)
    rate = base ** -(torch.arange(half, device=x.device, dtype=precision) / half)
    angle = positions[..., None, None] * rate  # [B, T, 1, D/2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    first, second = x.unflatten(-1, (half, 2)).unbind(-1) if neighbours else x.chunk(2, dim=-1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, dim=-1).flatten(-2) if neighbours else torch.cat(turned, dim=-1)
