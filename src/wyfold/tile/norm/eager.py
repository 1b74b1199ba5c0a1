"""Row norms and their adjoints: the last axis is a row."""

from __future__ import annotations

from torch import Tensor

L2_EPS = 1e-6


def l2norm(x: Tensor, eps: float = L2_EPS) -> tuple[Tensor, Tensor]:
    """y = x r with r = (sum x^2 + eps)^(-1/2).

    Returns:
        y: [..., W].
        r: [..., 1].
    """
    r = (x * x).sum(-1, keepdim=True).add_(eps).rsqrt_()
    return x * r, r


def l2norm_bwd(y: Tensor, r: Tensor, dy: Tensor) -> Tensor:
    """dx = r (dy - y <y, dy>), exact with eps included."""
    return r * (dy - y * (y * dy).sum(-1, keepdim=True))


def rms_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x r with r = (mean x^2 + eps)^(-1/2).

    Returns:
        y: [..., W].
        r: [..., 1].
    """
    r = (x * x).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return x * r, r


def rms_norm_bwd(y: Tensor, r: Tensor, dy: Tensor) -> Tensor:
    """dx = r (dy - y mean(y dy)), exact with eps included."""
    return r * (dy - y * (y * dy).mean(-1, keepdim=True))
