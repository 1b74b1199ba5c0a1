"""Where sequences begin and end, and in which precision the truth is computed."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """One run of tokens that shares nothing with any other: a packed sequence, or a whole dense batch at once."""

    rows: slice
    """Its tokens, along the T axis."""
    states: slice
    """Its rows of every per-sequence tensor, along the N axis."""


def spans(cu_seqlens: Any, batch: int, tokens: int) -> list[Span]:
    """Spans of a batch, in order.

    Args:
        cu_seqlens: [N+1] integers, boundaries of the sequences packed into one row, or anything that carries them as
            `.cu_seqlens`; or None for `batch` sequences of equal length, which step together as one span.
        batch: B.
        tokens: T. The last boundary may be smaller; the rows after it belong to nobody.
    """
    if cu_seqlens is None:
        return [Span(slice(0, tokens), slice(0, batch))]
    bounds = getattr(cu_seqlens, "cu_seqlens", cu_seqlens).tolist()
    return [Span(slice(bos, eos), slice(n, n + 1)) for n, (bos, eos) in enumerate(pairwise(bounds))]


def sequence_count(spans_: list[Span]) -> int:
    """N, the number of states a batch has."""
    return max((span.states.stop for span in spans_), default=0)


def used_rows(spans_: list[Span]) -> int:
    """The first row that no sequence owns. Rows from here on are never read, so NaN in them cannot matter."""
    return max((span.rows.stop for span in spans_), default=0)


def chunks(span: Span, size: int) -> list[slice]:
    """Chunks of `size` rows, counted from the span's own first token; the last one may be short."""
    return [slice(at, min(at + size, span.rows.stop)) for at in range(span.rows.start, span.rows.stop, size)]


def working_dtype(*tensors: Tensor | float | None) -> torch.dtype:
    """The widest dtype among the tensors, and never less than float32."""
    dtype = torch.float32
    for x in tensors:
        if isinstance(x, Tensor):
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def share_heads(x: Tensor, value_heads: int) -> Tensor:
    """[B, T, HV, K] from x [B, T, H, K]: value head j reads key head `j // (HV // H)`."""
    return x.repeat_interleave(value_heads // x.shape[2], dim=2)


def zero_rows(x: Tensor, tokens: int) -> Tensor:
    """x [B, R, ...] with zero rows behind it, [B, tokens, ...]: what the rows that nobody owns read as."""
    return torch.cat([x, x.new_zeros(x.shape[0], tokens - x.shape[1], *x.shape[2:])], dim=1)
