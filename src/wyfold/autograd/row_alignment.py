"""Where rows lie, as far as the bits of what is made from them depend on it."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torch.nn import Parameter


def vector_aligned(x: Tensor) -> bool:
    """Whether kernels read the rows of x [B, T, H, K] in vectors of 16 numbers, wherever a row begins.

    The order in which they add up numbers of a row depends on it; rows that lie otherwise are copied first, `aligned`.
    """
    return _first(x) % 16 == 0 and x.stride(3) == 1 and not any(n % 16 for n in x.stride()[:3])


def readable_by_tma(x: Tensor) -> bool:
    """Whether the copy engine reads rows of x [B, T, H, K] as they lie (`tile.index.triton.token_descriptor`)."""
    T, (s_b, s_t, _, s_k) = x.shape[1], x.stride()
    contiguous_for_tma = x.shape[0] == 1 or s_b == T * s_t
    return s_k == 1 and s_t > 0 and s_t * x.itemsize % 16 == 0 and _first(x) % 16 == 0 and contiguous_for_tma


def contiguous_for_tma(x: Tensor) -> Tensor:
    """x [B, T, H, K] if the copy engine reads it as it lies, else a contiguous copy."""
    return x if readable_by_tma(x) else x.new_empty(x.shape).copy_(x)


def _first(x: Tensor) -> int:
    """Where x begins. A fake tensor, of which a plan is asked, has no address."""
    return x.data_ptr() if type(x) in (Tensor, Parameter) else int(x.storage_offset()) * x.itemsize


def alignment_copies(**rows: Tensor | None) -> tuple[str, ...]:
    """Names of those whose rows kernels cannot read as they lie."""
    return tuple([name for name, x in rows.items() if x is not None and not vector_aligned(x)])


def tma_copies(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, ...]:
    """Names of those that the copy engine cannot read as they lie."""
    return tuple([name for name, x in (("q", q), ("k", k), ("v", v)) if not readable_by_tma(x)])


Rows = TypeVar("Rows", Tensor, Tensor | None)


def aligned(x: Rows) -> Rows:
    """A copy of x [B, T, H, K] whose rows are a multiple of 16 numbers apart; x where they are, or it has none."""
    if x is None or x.dim() < 4 or vector_aligned(x):
        return x
    *sizes, K = x.shape
    return x.new_empty(*sizes, -(-K // 16) * 16)[..., :K].copy_(x)
