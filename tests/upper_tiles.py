"""Conversion of upper triangular tiles between full storage and the three quarters of `kernels.records.Prepared`."""

import torch
from torch import Tensor


def to_quarters(x: Tensor) -> Tensor:
    """[tiles, 3, n, n] of tiles [tiles, 2 n, 2 n]; the lower-left quarter is dropped."""
    n = x.shape[-1] // 2
    return torch.stack([x[..., :n, :n], x[..., :n, n:], x[..., n:, n:]], dim=-3)


def from_quarters(x: Tensor) -> Tensor:
    """The inverse of `to_quarters`, with zeros in the lower-left quarter."""
    first, beside, last = x.unbind(-3)
    return torch.cat([torch.cat([first, beside], -1), torch.cat([torch.zeros_like(first), last], -1)], -2)
