"""Rows of the tokens that precede a rank's pieces in their sequences, sent by the ranks that hold them.

Softmax attention needs the keys and values of earlier tokens of a sequence: all of them, or as many as its window. The
partition determines on every rank which rows others need, so one all-gather moves these rows alone. Example: one
sequence of 300 tokens on three ranks, and a window of 17 keys, so that a piece needs the 16 tokens before it.

    rank    tokens        sends                receives
    0       0 to 99       tokens 84 to 99      nothing
    1       100 to 199    tokens 184 to 199    tokens 84 to 99
    2       200 to 299    nothing              tokens 184 to 199

The backward returns the gradients of received rows to the ranks that sent them, by one all-to-all; each rank adds them
in the order of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.collectives import after
from wyfold.runtime.differentiation import once_differentiable
from wyfold.tile.index.eager import wide

if TYPE_CHECKING:
    from wyfold.context_parallel.context import ContextParallel
    from wyfold.context_parallel.partition import Partition, Range


class Source(NamedTuple):
    """Consecutive rows of one rank's shard.

    Attributes:
        rank: The rank that holds them.
        start, stop: Their range in its shard.
    """

    rank: int
    start: int
    stop: int


class Routes(NamedTuple):
    """What every rank sends, and what one rank's pieces receive.

    Attributes:
        sent: For each rank, the ranges of its shard that other ranks need: ascending, not adjacent.
        most: Largest number of rows that a rank sends.
        pieces: For each piece of this rank, the sources of the rows before it, in token order.
    """

    sent: tuple[tuple[Range, ...], ...]
    most: int
    pieces: tuple[tuple[Source, ...], ...]

    def place(self, source: Source) -> int:
        """Row of the first row of a source in its rank's send buffer."""
        before = 0
        for start, stop in self.sent[source.rank]:
            if start <= source.start < stop:
                return before + source.start - start
            before += stop - start
        raise ValueError(f"rank {source.rank} does not send its row {source.start}")


def with_preceding_rows(x: Tensor, context: ContextParallel, count: int | None) -> tuple[Tensor, list[int]]:
    """Rows of this rank's pieces, each after the rows of the tokens that precede it in its sequence. Differentiable.

    Args:
        x: [T, ...] rows of this rank's shard.
        context: Partition of the tokens over ranks.
        count: Largest number of tokens before a piece. None: all tokens of its sequence before it.

    Returns:
        rows: [n, ...] of all pieces in token order. Every rank must compute its loss from them, also if n is 0: the
            backward is a collective.
        before: For each piece, the number of rows before it.
    """
    routes = context.preceding_routes(count)
    rows: Tensor = _WithPrecedingRows.apply(x, context, routes)
    return rows, [sum(source.stop - source.start for source in sources) for sources in routes.pieces]


def preceding_routes(partition: Partition, rank: int, count: int | None) -> Routes:
    """Routes of `with_preceding_rows` for one rank; the ranges that ranks send are the same on all of them."""
    wanted: list[list[Range]] = [[] for _ in partition.pieces]
    found: list[tuple[Source, ...]] = [() for _ in partition.pieces[rank]]
    for chain in partition.chains:
        for place, piece in enumerate(chain):
            missing = piece.done if count is None else min(piece.done, count)
            sources: list[Source] = []  # PyTorch's compiler cannot trace a call of `list[Source]`
            for before in reversed(chain[:place]):
                n = min(missing, before.length)
                if n == 0:
                    break
                end = before.offset + before.length
                sources.append(Source(before.rank, end - n, end))
                missing -= n
            for source in sources:
                if source.rank != piece.rank:
                    wanted[source.rank].append((source.start, source.stop))
            if piece.rank == rank:
                found[piece.number] = tuple(reversed(sources))
    sent = tuple(tuple(_union(ranges)) for ranges in wanted)
    return Routes(sent, max(sum(stop - start for start, stop in ranges) for ranges in sent), tuple(found))


def _union(ranges: list[Range]) -> list[Range]:
    """The union of ranges, as ascending ranges that are not adjacent."""
    union: list[Range] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = union[-1][0], max(stop, union[-1][1])
        else:
            union.append((start, stop))
    return union


class _WithPrecedingRows(torch.autograd.Function):
    """`with_preceding_rows` along known routes: one all-gather, and one all-to-all in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel, routes: Routes) -> Tensor:
        ctx.context, ctx.partition, ctx.routes, ctx.tokens = context, context.partition, routes, len(x)
        send_buffer, place = x.new_zeros(routes.most, *x.shape[1:]), 0
        for start, stop in routes.sent[context.rank]:
            send_buffer[place : place + stop - start] = x[start:stop]
            place += stop - start
        gathered = context.all_gather(send_buffer)
        parts = [x[:0]]
        for piece, sources in zip(context.pieces, routes.pieces, strict=True):
            for source in sources:
                if source.rank == context.rank:
                    parts.append(x[source.start : source.stop])
                else:
                    place = routes.place(source)
                    parts.append(gathered[source.rank, place : place + source.stop - source.start])
            parts.append(x[piece.offset : piece.offset + piece.length])
        return after(torch.cat(parts), gathered)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        context, routes = ctx.context, ctx.routes
        context.require_partition("SoftmaxAttention", ctx.partition)
        dx, returned = dy.new_zeros(ctx.tokens, *dy.shape[1:]), dy.new_zeros(context.world, routes.most, *dy.shape[1:])
        read = 0
        for piece, sources in zip(context.pieces, routes.pieces, strict=True):
            for source in (*sources, Source(context.rank, piece.offset, piece.offset + piece.length)):
                n = source.stop - source.start
                if source.rank == context.rank:
                    dx[source.start : source.stop] += dy[read : read + n]
                else:
                    place = routes.place(source)
                    returned[source.rank, place : place + n] += dy[read : read + n]
                read += n
        received = context.all_to_all(after(returned, dy))
        total, place = received.sum(0, dtype=wide(dy.dtype)), 0
        for start, stop in routes.sent[context.rank]:
            dx[start:stop] += total[place : place + stop - start].to(dx.dtype)
            place += stop - start
        return after(dx, received), None, None
