"""Row alignment: kernels read rows in 16-element vectors or by TMA, so rows laid out otherwise are copied first.

Vector reads determine the order of sums, so the copies keep results bit-identical for every input layout.
"""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor
from torch.nn import Parameter


def vector_aligned(x: Tensor) -> bool:
    """Whether every row of x [B, T, H, K] starts at a multiple of 16 bytes and of 16 elements from the others.

    Kernels then read rows in vectors of 16 elements, which determines the order of sums over a row. Other tensors are
    copied first (`aligned`).
    """
    return _address(x) % 16 == 0 and x.stride(3) == 1 and not any(n % 16 for n in x.stride()[:3])


def readable_by_tma(x: Tensor) -> bool:
    """Whether a TMA descriptor can address the rows of x [B, T, H, K] without a copy."""
    T, (s_b, s_t, _, s_k) = x.shape[1], x.stride()
    one_token_stride = x.shape[0] == 1 or s_b == T * s_t
    return s_k == 1 and s_t > 0 and s_t * x.itemsize % 16 == 0 and _address(x) % 16 == 0 and one_token_stride


def contiguous_for_tma(x: Tensor) -> Tensor:
    """Return x [B, T, H, K] if TMA can read it, else a contiguous copy."""
    return x if readable_by_tma(x) else x.new_empty(x.shape).copy_(x)


def _address(x: Tensor) -> int:
    """Address of x; for a fake tensor, which has none but is planned for, its storage offset in bytes."""
    return x.data_ptr() if type(x) in (Tensor, Parameter) else int(x.storage_offset()) * x.itemsize


def alignment_copies(**rows: Tensor | None) -> tuple[str, ...]:
    """Names of the tensors that are copied because their rows are not vector-aligned."""
    return tuple([name for name, x in rows.items() if x is not None and not vector_aligned(x)])


def tma_copies(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, ...]:
    """Names of the tensors that are copied because TMA cannot read them."""
    return tuple([name for name, x in (("q", q), ("k", k), ("v", v)) if not readable_by_tma(x)])


Rows = TypeVar("Rows", Tensor, Tensor | None)


def aligned(x: Rows) -> Rows:
    """Copy x [B, T, H, K] to rows a multiple of 16 elements apart; return x if it is aligned, None or below 4-D."""
    if x is None or x.dim() < 4 or vector_aligned(x):
        return x
    *sizes, K = x.shape
    return x.new_empty(*sizes, -(-K // 16) * 16)[..., :K].copy_(x)


def vector_loadable(states: Tensor) -> Tensor:
    """Copy states unless they are contiguous and 16-byte aligned: vector loads determine the order of sums."""
    states = states.contiguous()
    return states if states.data_ptr() % 16 == 0 else states.clone()
