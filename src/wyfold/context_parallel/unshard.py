"""Gathering of all ranks' shards into one tensor, with its gradient."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.agreement import RankedCall
from wyfold.runtime import check
from wyfold.runtime.differentiation import once_differentiable

if TYPE_CHECKING:
    from wyfold.context_parallel.context import ContextParallel
    from wyfold.context_parallel.partition import Partition


def unshard(context: ContextParallel, x: Tensor, dim: int) -> Tensor:
    """The tensor of all tokens, as `ContextParallel.unshard` documents it."""
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    with RankedCall(context.agreement, "ContextParallel.unshard", device, _kind(x, dim)) as ranked:
        check_tokens("unshard", x, dim, context.tokens)
    if ranked.compares:
        sizes = ["tokens" if axis == dim % x.dim() else size for axis, size in enumerate(x.shape)]
        grad = torch.is_grad_enabled() and x.requires_grad
        shape = f"[{', '.join(map(str, sizes))}]"
        ranked.assert_same({"the shape of x": shape, "dtype of x": x.dtype, "requires_grad": grad})
    whole: Tensor = _Unshard.apply(x, dim, context)
    return whole


def check_tokens(method: str, x: Tensor, dim: int, tokens: int) -> None:
    """Refuse a tensor that does not have `tokens` tokens along `dim`."""
    got = check.tensor(f"ContextParallel.{method}", "x", x).shape
    if not -len(got) <= dim < len(got) or got[dim] != tokens:
        raise ValueError(f"ContextParallel.{method}: x must have {tokens} tokens along dim {dim}, got {list(got)}")


def _kind(x: object, dim: int) -> Hashable:
    """Shape without the number of tokens, and dtype; None if x has no dimension `dim`."""
    if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
        return None
    return (*x.shape[: dim % x.dim()], -1, *x.shape[dim % x.dim() + 1 :]), x.dtype


class _Unshard(torch.autograd.Function):
    """All-gather of the shards. The backward sends each rank the gradients of its shard, and sums them there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, context: ContextParallel) -> Tensor:
        ctx.dim, ctx.context, ctx.partition = dim, context, context.partition
        x = x.movedim(dim, 0)
        padded = x.new_zeros(_longest(context.partition), *x.shape[1:])
        padded[: x.shape[0]] = x
        gathered, whole = context.all_gather(padded), x.new_empty(context.total_tokens, *x.shape[1:])
        for rank, row, start, stop in _rows(context.partition):
            whole[start:stop] = gathered[rank, row : row + stop - start]
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        context, partition = ctx.context, ctx.partition
        dy = dy.movedim(ctx.dim, 0)
        send_buffer = dy.new_zeros(context.world, _longest(partition), *dy.shape[1:])
        for rank, row, start, stop in _rows(partition):
            send_buffer[rank, row : row + stop - start] = dy[start:stop]
        received = context.all_to_all(send_buffer)
        return received[:, : partition.tokens(context.rank)].sum(0).movedim(0, ctx.dim), None, None


def _longest(partition: Partition) -> int:
    """Tokens of the longest shard."""
    return max(map(partition.tokens, range(len(partition.ranges))))


def _rows(partition: Partition) -> list[Rows]:
    """All ranges of the buffer that ranks hold."""
    found = []
    for rank, ranges in enumerate(partition.ranges):
        row = 0
        for start, stop in ranges:
            found.append(Rows(rank, row, start, stop))
            row += stop - start
    return found


class Rows(NamedTuple):
    """A range of the buffer that a rank holds.

    Attributes:
        rank: The rank.
        row: Its first row in the rank's shard.
        start, stop: The range.
    """

    rank: int
    row: int
    start: int
    stop: int
