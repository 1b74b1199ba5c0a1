"""Where rows lie, as far as the bits of what is made from them depend on it."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torch.nn import Parameter


def vectors(x: Tensor) -> bool:
    """Whether kernels read the rows of x [B, T, H, K] in vectors of 16 numbers, wherever a row begins.

    The order in which they add up numbers of a row depends on it; rows that lie otherwise are copied first, `aligned`.
    """
    # A fake tensor, of which a plan is asked, has no address.
    first = x.data_ptr() if type(x) in (Tensor, Parameter) else x.storage_offset() * x.itemsize
    return first % 16 == 0 and x.stride(3) == 1 and not any(n % 16 for n in x.stride()[:3])


def copied(**rows: Tensor | None) -> tuple[str, ...]:
    """Names of those whose rows kernels cannot read as they lie."""
    return tuple([name for name, x in rows.items() if x is not None and not vectors(x)])


Rows = TypeVar("Rows", Tensor, Tensor | None)


def aligned(x: Rows) -> Rows:
    """A copy of x [B, T, H, K] whose rows are a multiple of 16 numbers apart; x where they are, or it has none."""
    if x is None or x.dim() < 4 or vectors(x):
        return x
    *sizes, K = x.shape
    return x.new_empty(*sizes, -(-K // 16) * 16)[..., :K].copy_(x)
