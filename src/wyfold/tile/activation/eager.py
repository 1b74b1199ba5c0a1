"""Sigmoid and softplus whose bits do not depend on a number's position in its tensor.

`torch.sigmoid`, `silu` and `softplus` process the last few elements of a block by other code than the rest. Packed and
separate calls would then differ in the last bit on the CPU. `torch.exp` and `torch.log1p` have no such tail
(docs/facts/cpu.md, CPU-2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); exactly 0 where exp(-x) overflows."""
    return x.neg().exp_().add_(1).reciprocal_()


def sigmoid_bwd(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of `sigmoid`: dy * sigmoid(x) * (1 - sigmoid(x)).

    Computed as e / (1 + e)^2 with e = exp(-|x|). The difference 1 - sigmoid(x) would cancel where x is large.
    """
    e = x.abs().neg_().exp_()
    larger = e.add(1).reciprocal_()
    return e.mul_(larger).mul_(larger).mul_(dy)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) = max(x, 0) + log1p(exp(-|x|)), without overflow."""
    return torch.exp(-x.abs()).log1p_().add_(x.clamp(min=0))


def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return sigmoid(x).mul_(x)


def silu_bwd(x: Tensor, dy: Tensor) -> Tensor:
    """Gradient of `silu`: dy * sigmoid(x) * (1 + x * (1 - sigmoid(x)))."""
    s = sigmoid(x)
    return (1 - s).mul_(x).add_(1).mul_(s).mul_(dy)
