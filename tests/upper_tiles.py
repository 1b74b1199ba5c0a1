"""Upper triangular tiles as `kernels.records.Prepared` keeps them, three quarters each, and whole."""

import torch
from torch import Tensor


def in_quarters(x: Tensor) -> Tensor:
    """[tiles, 3, n, n] of tiles [tiles, 2 n, 2 n], whatever is in their fourth quarter."""
    n = x.shape[-1] // 2
    return torch.stack([x[..., :n, :n], x[..., :n, n:], x[..., n:, n:]], dim=-3)


def whole(x: Tensor) -> Tensor:
    """The inverse of `in_quarters`, zeros in the fourth one."""
    first, beside, last = x.unbind(-3)
    return torch.cat([torch.cat([first, beside], -1), torch.cat([torch.zeros_like(first), last], -1)], -2)
