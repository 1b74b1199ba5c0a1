"""Boundaries of sequences, and the precision of the reference."""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Independent run of tokens: one packed sequence, or a whole dense batch.

    Attributes:
        rows: Tokens, along the T axis.
        states: Rows of per-sequence tensors, along the N axis.
    """

    rows: slice
    states: slice


def spans(cu_seqlens: Any, batch: int, tokens: int) -> list[Span]:
    """Spans of a batch, in order.

    Args:
        cu_seqlens: [N+1] integer boundaries of sequences packed into one row, or an object with that attribute. None:
            `batch` sequences of equal length, which form one span.
        batch: B.
        tokens: T. The last boundary may be smaller; the rows after it belong to no sequence.
    """
    if cu_seqlens is None:
        return [Span(slice(0, tokens), slice(0, batch))]
    bounds = getattr(cu_seqlens, "cu_seqlens", cu_seqlens).tolist()
    return [Span(slice(bos, eos), slice(n, n + 1)) for n, (bos, eos) in enumerate(pairwise(bounds))]


def sequence_count(spans_: list[Span]) -> int:
    """N, the number of states of a batch."""
    return max((span.states.stop for span in spans_), default=0)


def used_rows(spans_: list[Span]) -> int:
    """Index of the first row past the last boundary. Rows from there on are never read, so they may hold NaN."""
    return max((span.rows.stop for span in spans_), default=0)


def chunks(span: Span, size: int) -> list[slice]:
    """Chunks of `size` rows, counted from the span's first token; the last one may be short."""
    return [slice(at, min(at + size, span.rows.stop)) for at in range(span.rows.start, span.rows.stop, size)]


def working_dtype(*tensors: Tensor | float | None) -> torch.dtype:
    """The widest dtype among the tensors, at least float32."""
    dtype = torch.float32
    for x in tensors:
        if isinstance(x, Tensor):
            dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def share_heads(x: Tensor, value_heads: int) -> Tensor:
    """Repeat heads of x [B, T, H, K] to [B, T, HV, K]: value head j reads key head `j // (HV // H)`."""
    return x.repeat_interleave(value_heads // x.shape[2], dim=2)


def zero_rows(x: Tensor, tokens: int) -> Tensor:
    """Pad x [B, R, ...] with zero rows to [B, tokens, ...], for rows past the last boundary."""
    return torch.cat([x, x.new_zeros(x.shape[0], tokens - x.shape[1], *x.shape[2:])], dim=1)
