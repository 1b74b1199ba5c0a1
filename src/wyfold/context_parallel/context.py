"""Context parallelism: one buffer of tokens over the ranks of a group.

A user makes a `ContextParallel` once per batch and passes it to operators and layers in place of `cu_seqlens`. It holds
the partition of the whole buffer (`partition`). What a rank sends and waits for follows from the boundaries alone, so
all ranks, also those without tokens, take part in the same collectives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from wyfold.context_parallel import collectives
from wyfold.context_parallel.partition import LAYOUTS, Piece, Range, owned_ranges, partition_sequences
from wyfold.context_parallel.preceding import Routes, preceding_routes
from wyfold.context_parallel.rank_segments import SegmentCounts, segment_tables
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import Cut
from wyfold.runtime.layout import SequenceLayout, boundaries, legal_boundaries
from wyfold.runtime.plan import explaining
from wyfold.runtime.torch_ops import once_differentiable

_NAME, _BUILD = "ContextParallel", "build_cp_context"
CHECKS = ("first", "always", "never")
_LISTED = 6  # entries of a long list that a message shows

Decision = TypeVar("Decision")


class RankSizes(NamedTuple):
    """Sizes of a rank's shard, from which a call is checked and planned.

    Attributes:
        tokens: Tokens of the shard.
        pieces: Pieces of the shard.
        starts: Sequences that begin in the shard.
        most_outgoing, most_incoming: As in `Partition`.
        dense: Whether the batch is dense, without boundaries.
    """

    tokens: int
    pieces: int
    starts: int
    most_outgoing: int
    most_incoming: int
    dense: bool


class ContextParallel:
    """The partition of a buffer of tokens over ranks, and this rank's shard of it; made by `build_cp_context`.

    Attributes:
        rank, world: This process's rank in the group, and the group's size.
        layout: Local `SequenceLayout`: one entry for each run of one sequence's tokens on this rank. For a dense batch
            it describes one row.
        starts, ends: Ids of the sequences that begin, and that end, on this rank, in token order. They are the rows of
            the initial states that this rank passes, and of the final states that it gets. In a dense batch of B rows
            each id stands for B rows.
        whole: `SequenceLayout` of the whole buffer, the same on every rank.
        total_tokens: Tokens of the whole buffer.
        conv1d_kernel_size: Kernel size that short convolutions must have; None for any.
    """

    rank: int
    world: int
    layout: SequenceLayout
    whole: SequenceLayout
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    total_tokens: int
    conv1d_kernel_size: int | None

    def __init__(
        self,
        group: Any,
        bounds: Tensor | None,
        total_tokens: int,
        ranges: Sequence[Sequence[Range]],
        *,
        conv1d_kernel_size: int | None,
        max_seqs: int | None,
        check_when: str,
    ):
        self.group, self.dense, self.check = group, bounds is None, check_when
        self.rank, self.world = collectives.rank_and_size(group)
        self.total_tokens, self.conv1d_kernel_size = total_tokens, conv1d_kernel_size
        self._ranges, self._max_seqs = ranges, max_seqs
        self._compared = False
        self._set_boundaries(torch.tensor([0, total_tokens]) if bounds is None else bounds)

    def _set_boundaries(self, bounds: Tensor) -> None:
        """Set the boundaries: partition the buffer, and clear everything cached for the old ones."""
        on_cpu = legal_boundaries(_BUILD, bounds, self.total_tokens)
        partition = partition_sequences(on_cpu.tolist(), self.total_tokens, self._ranges)
        most = max(len(pieces) for pieces in partition.pieces)
        if self._max_seqs is not None and most > self._max_seqs:  # raised on every rank, whichever has too many
            raise ValueError(f"{_BUILD}: max_seqs must be at least {most}, what one rank holds, got {self._max_seqs}")
        self.partition = partition
        self._local = [0, *(piece.offset + piece.length for piece in self.pieces)]
        local = torch.tensor(self._local, device=bounds.device)
        self.layout = SequenceLayout(local, self.tokens, max_seqs=self._max_seqs)
        self.whole = SequenceLayout(bounds, self.total_tokens)
        self.starts = tuple(piece.sequence for piece in self.pieces if piece.first)
        self.ends = tuple(piece.sequence for piece in self.pieces if piece.last)
        self._description = _describe(on_cpu.tolist(), partition.ranges, self.dense)
        self._agreed: set[tuple[object, ...]] = set()
        self._passed: set[tuple[str, Hashable]] = set()  # operators, and kinds of their calls, that passed the checks
        self._tensors: dict[tuple[object, ...], Tensor] = {}
        self._table_cache: dict[tuple[Any, ...], tuple[list[int], SegmentCounts]] = {}
        self._preceding: dict[int | None, Routes] = {}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """This rank's pieces, in token order."""
        return self.partition.pieces[self.rank]

    @property
    def tokens(self) -> int:
        """Length of this rank's shard: T of every tensor it passes."""
        return self.partition.tokens(self.rank)

    @property
    def sizes(self) -> RankSizes:
        """The sizes that a call's checks and plan depend on, unless the plan is to be explained."""
        most = self.partition.most_outgoing, self.partition.most_incoming
        return RankSizes(self.tokens, len(self.pieces), len(self.starts), *most, self.dense)

    def update_(self, cu_seqlens: Tensor) -> ContextParallel:
        """Set other boundaries of the same buffer, in place; call it on every rank, like `build_cp_context`.

        Args:
            cu_seqlens: [N+1] int32 or int64 boundaries.

        Raises:
            ValueError: the context has no boundaries, the new ones are not legal, or a rank's pieces exceed `max_seqs`.
        """
        if self.dense:
            raise ValueError(f"{_NAME}.update_: cu_seqlens must go to a context made from boundaries, got one without")
        self._set_boundaries(boundaries(f"{_NAME}.update_", cu_seqlens))
        return self

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return this rank's shard of a tensor of all tokens. Differentiable.

        Args:
            x: `total_tokens` along `dim`, the same on every rank.
            dim: Dimension of the tokens.
        """
        self._expect("shard", x, dim, self.total_tokens)
        return self.shard_checked(x, dim)

    def shard_checked(self, x: Tensor, dim: int) -> Tensor:
        """`shard` without the check of x, which a compiler cannot trace in a backward."""
        shards = [x.narrow(dim, start, stop - start) for start, stop in self.partition.ranges[self.rank]]
        if len(shards) == 1:
            return shards[0]
        return torch.cat(shards, dim) if shards else x.narrow(dim, 0, 0)

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """Return the tensor of all tokens on every rank. One collective.

        Differentiable: the backward sums the ranks' gradients. It is exact if the loss is the sum of what the ranks
        compute; a loss that all ranks compute alike counts `world` times.

        Args:
            x: This rank's shard along `dim`.
            dim: Dimension of the tokens.

        Raises:
            ValueError: x is not a shard of this rank, or differs between ranks in more than its tokens; on all ranks.
        """
        device = x.device if isinstance(x, Tensor) else torch.device("cpu")
        self.ranks_agree(
            f"{_NAME}.unshard",
            device,
            lambda: self._expect("unshard", x, dim, self.tokens),
            lambda _: self._alike_on_ranks(x, dim % x.dim()),
            kind=_kind_of_unshard(x, dim),
        )
        whole: Tensor = _Unshard.apply(x, dim, self)
        return whole

    def _alike_on_ranks(self, x: Tensor, dim: int) -> dict[str, object]:
        """Metadata that must be equal on all ranks that unshard x."""
        sizes = ["tokens" if axis == dim else size for axis, size in enumerate(x.shape)]
        grad = torch.is_grad_enabled() and x.requires_grad
        return {"the shape of x": f"[{', '.join(map(str, sizes))}]", "dtype of x": x.dtype, "requires_grad": grad}

    def position_ids(self, device: torch.device | str | None = None) -> Tensor:
        """[1, tokens] int64 position of each of this rank's tokens in its whole sequence; -1 outside of sequences.

        Args:
            device: Device of the result; None is the layout's device.
        """
        return self._token_attribute("positions", device)

    def sequence_ids(self, device: torch.device | str | None = None) -> Tensor:
        """[1, tokens] int64 sequence id of each of this rank's tokens; -1 outside of sequences."""
        return self._token_attribute("sequence_ids", device)

    def _token_attribute(self, what: str, device: torch.device | str | None) -> Tensor:
        """This rank's shard of a per-token attribute of the whole layout, cached."""
        device = torch.device(self.whole.device if device is None else device)
        return self._cached((what, device), lambda: self.shard(getattr(self.whole, what)[None]).to(device))

    def __repr__(self) -> str:
        fields = f"rank={self.rank}, world={self.world}, tokens={self.tokens} of {self.total_tokens}"
        return f"{_NAME}({fields}, starts={len(self.starts)}, ends={len(self.ends)})"

    # --- for the operators -------------------------------------------------------------------------------------------

    def boundaries(self, batch: int, device: torch.device) -> Tensor:
        """[batch * pieces + 1] int64 boundaries of this rank's pieces, in `batch` concatenated buffers."""
        ends = (row * self.tokens + end for row in range(batch) for end in self._local[1:])
        return self._cached((batch, device), lambda: torch.tensor([0, *ends], device=device))

    def starting_pieces(self, batch: int, device: torch.device) -> Tensor:
        """[batch * starts] int64 indices of the pieces in which sequences begin, in `batch` concatenated buffers."""
        return self._numbers(batch, device, "first")

    def ending_pieces(self, batch: int, device: torch.device) -> Tensor:
        """[batch * ends] int64 indices of the pieces in which sequences end."""
        return self._numbers(batch, device, "last")

    def _numbers(self, batch: int, device: torch.device, which: str) -> Tensor:
        count = len(self.pieces)
        found = (row * count + p.number for row in range(batch) for p in self.pieces if getattr(p, which))
        return self._cached((batch, device, which), lambda: torch.tensor([*found], dtype=torch.int64, device=device))

    def _cached(self, key: tuple[object, ...], make: Callable[[], Tensor]) -> Tensor:
        """Cached result of `make` for these boundaries; copying a host tensor to the device would wait for it."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._tensors:
            self._tensors[key] = make()
        return self._tensors[key]

    def check_tokens(self, op: str, x: Tensor, name: str) -> None:
        """Check that x [B, T, ...] is this rank's shard; B must be 1 if the context has boundaries.

        Raises:
            ValueError: it is not.
        """
        B, T = x.shape[:2]
        if T != self.tokens:
            raise ValueError(f"{op}: {name} must be [B, T, ...] with T = {self.tokens}, this rank's shard, got T = {T}")
        if not self.dense and B != 1:
            raise ValueError(f"{op}: cp_context with boundaries must come with a batch of B = 1, got B = {B}")

    def segments(self, batch: int, chunk_size: int, cut: Cut, device: torch.device) -> tuple[Tensor, SegmentCounts]:
        """Segment tables of this rank's pieces in `batch` concatenated buffers, as `RankSegments.of` reads them."""
        numbers, counts = self._segment_tables(batch, chunk_size, cut)
        make = partial(torch.tensor, numbers, dtype=torch.int64, device=device)
        return self._cached((batch, chunk_size, cut, device), make), counts

    def counts(self, batch: int, chunk_size: int, cut: Cut) -> SegmentCounts:
        """Lengths of the tables of `segments`."""
        return self._segment_tables(batch, chunk_size, cut)[1]

    def _segment_tables(self, *how: Any) -> tuple[list[int], SegmentCounts]:
        """Cached `rank_segments.segment_tables` for these boundaries."""
        if torch.compiler.is_compiling():
            return segment_tables(self.pieces, how[0], self.tokens, *how[1:])
        if how not in self._table_cache:
            self._table_cache[how] = segment_tables(self.pieces, how[0], self.tokens, *how[1:])
        return self._table_cache[how]

    def forward_routes(self, device: torch.device) -> Tensor:
        """`routes.forward_routes` of this rank, int64, cached."""
        return self._cached(
            ("forward_routes", device), lambda: torch.tensor(forward_routes(self.partition, self.rank), device=device)
        )

    def backward_routes(self, device: torch.device) -> Tensor:
        """`routes.backward_routes` of this rank, int64, cached."""
        return self._cached(
            ("backward_routes", device), lambda: torch.tensor(backward_routes(self.partition, self.rank), device=device)
        )

    def preceding_routes(self, count: int | None) -> Routes:
        """Cached `preceding.preceding_routes` of this rank for these boundaries."""
        if torch.compiler.is_compiling():
            return preceding_routes(self.partition, self.rank, count)
        if count not in self._preceding:
            self._preceding[count] = preceding_routes(self.partition, self.rank, count)
        return self._preceding[count]

    def all_gather(self, x: Tensor) -> Tensor:
        """`collectives.all_gather` in this group; x must have the same shape and dtype on all ranks."""
        return collectives.all_gather(x, self.group)

    def all_to_all(self, x: Tensor) -> Tensor:
        """`collectives.all_to_all` in this group."""
        return collectives.all_to_all(x, self.group)

    def all_gather_async(self, x: Tensor) -> Tensor:
        """`collectives.all_gather_async` in this group; `collectives.wait_gathered` waits for the result."""
        return collectives.all_gather_async(x, self.group)

    def ranks_agree(
        self,
        op: str,
        device: torch.device,
        decide: Callable[[], Decision],
        describe: Callable[[Decision], Mapping[str, object]] | None = None,
        *,
        kind: Hashable = None,
    ) -> Decision:
        """Run `decide`, and return its result after all ranks were checked to make the same call.

        Args:
            op: Operator's name.
            device: Device of the group's collectives.
            decide: Checks this rank's arguments and returns the decision.
            describe: Returns the metadata that must be equal on all ranks. None: this call compares nothing, because
                the operator that follows does; an error of `decide` still reaches the ranks that compare there.
            kind: Metadata that can be read before the checks. Calls of different kinds differ in the compared metadata
                too. With check="first", an error of `decide` reaches other ranks only in the first call of a kind,
                because they compare only in that call. None: all calls are of one kind.

        Raises:
            TypeError, ValueError: `decide` raised it.
            ValueError: `decide` raised on another rank, or metadata differ between ranks.
        """
        if self.check == "never" or torch.compiler.is_compiling() or device.type == "meta" or explaining():
            return decide()
        try:
            decision = decide()
        except (TypeError, ValueError) as refusal:
            # Ranks that have compared this kind of call go straight to the operator's own collective, which would read
            # an error message as numbers. The error is then raised on this rank alone.
            known = (op, None if kind is None else (kind, torch.is_grad_enabled())) in self._passed
            if not self._compared and (self.check == "always" or not known):
                collectives.check_agreement(op, refusal, device, self.group)
            raise
        passed = {(op, None), (op, (kind, torch.is_grad_enabled()))}
        if describe is None:
            self._passed |= passed
            return decision
        metadata = {"the operator": op, **describe(decision), "the cut": self._description}
        compared = tuple(metadata.values())
        if not self._compared and (self.check == "always" or compared not in self._agreed):
            collectives.check_agreement(op, metadata, device, self.group)
        self._agreed.add(compared)
        self._passed |= passed
        return decision

    @contextmanager
    def skip_comparison(self) -> Iterator[None]:
        """Skip the comparison for calls in the block, which follow from metadata that ranks have already compared.

        Calls are still compared with check="always", or if contents are checked, which may be wrong on one rank alone.
        """
        before = self._compared
        self._compared = self.check == "first" and not check.checking_contents()
        try:
            yield
        finally:
            self._compared = before

    def _expect(self, method: str, x: Tensor, dim: int, tokens: int) -> None:
        got = check.tensor(f"{_NAME}.{method}", "x", x).shape
        if not -len(got) <= dim < len(got) or got[dim] != tokens:
            raise ValueError(f"{_NAME}.{method}: x must have {tokens} tokens along dim {dim}, got {list(got)}")


class _Unshard(torch.autograd.Function):
    """Gather all shards into one tensor; the backward sums the ranks' gradients of this rank's shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, context: ContextParallel) -> Tensor:
        ctx.dim, ctx.context = dim, context
        partition = context.partition
        x = x.movedim(dim, 0)
        longest = max(partition.tokens(rank) for rank in range(context.world))
        padded = x.new_zeros(longest, *x.shape[1:])
        padded[: x.shape[0]] = x
        gathered, whole = context.all_gather(padded), x.new_empty(context.total_tokens, *x.shape[1:])
        for rank, ranges in enumerate(partition.ranges):
            taken = 0
            for start, stop in ranges:
                whole[start:stop] = gathered[rank, taken : taken + stop - start]
                taken += stop - start
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        context = ctx.context
        return context.shard_checked(collectives.sum_over_ranks(dy, context.group), ctx.dim), None, None


def _kind_of_unshard(x: object, dim: int) -> Hashable:
    """Shape without the number of tokens, and dtype; None if x has no dimension `dim`."""
    if not isinstance(x, Tensor) or not -x.dim() <= dim < x.dim():
        return None
    return (*x.shape[: dim % x.dim()], -1, *x.shape[dim % x.dim() + 1 :]), x.dtype


def _describe(bounds: Sequence[int], ranges: Sequence[Sequence[Range]], dense: bool) -> str:
    """Describe a partition for comparison between ranks: its first entries for the reader, and a digest of all."""
    ends = str(bounds[1 : _LISTED + 1])[1:-1] + ", .." * (len(bounds) > _LISTED + 1)
    what = "whole rows" if dense else f"sequences that end at {ends}"
    own = ["+".join(f"{start}-{stop}" for start, stop in some[:_LISTED]) or "nothing" for some in ranges[:_LISTED]]
    shards = ", ".join([*own, *[".."] * (len(ranges) > _LISTED)])
    digest = hashlib.sha256(repr((bounds, ranges, dense)).encode()).hexdigest()[:16]
    return f"{what} in shards {shards} ({digest})"


def build_cp_context(
    cu_seqlens: Tensor | SequenceLayout | None,
    mesh_or_group: Any,
    *,
    total_tokens: int | None = None,
    layout: str = "contiguous",
    fragments: Sequence[Sequence[Range]] | None = None,
    conv1d_kernel_size: int | None = None,
    max_seqs: int | None = None,
    check: str = "first",
) -> ContextParallel:
    """Partition one buffer of tokens over ranks, for `cp_context=` of operators and layers.

    Every rank of the group calls it with the same arguments; it runs no collective. The library sets no group, timeout
    or environment variable: a rank that never calls an operator is an error after the group's own timeout.

    Args:
        cu_seqlens: [N+1] int32 or int64 boundaries of the packed sequences of the whole buffer; waits for its device
            once. None with `total_tokens`: a dense batch of any B, whose rows are cut alike along T.
        mesh_or_group: A `ProcessGroup`, or a `DeviceMesh` of one axis (`mesh["cp"]`).
        total_tokens: Length of the whole buffer. None: the last boundary. Tokens past it belong to no sequence.
        layout: Which tokens a rank owns. "contiguous": the r-th of `world` parts, whose lengths differ by at most one
            token. "zigzag": parts r and 2 world - 1 - r of 2 world parts. "fragments": those of `fragments`.
        fragments: For each rank, a list of (start, stop); together they cover every token once. A rank holds its tokens
            in ascending order.
        conv1d_kernel_size: W of the short convolutions that will use this context; another W is an error. None: any.
        max_seqs: Capacity of the local layout, for `update_`. None: what these boundaries need.
        check: When ranks compare their calls: once for each operator and kind of arguments ("first"), in each call
            ("always") or never ("never"). The comparison is an extra collective that waits for the device. A difference
            is a ValueError on all ranks, and so is an error of one rank's arguments; after the first comparison only
            "always" detects them.

    Returns:
        ContextParallel.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: arguments that do not fit together; raised on every rank.

    Examples:
        >>> import torch, wyfold.cp
        >>> store = torch.distributed.HashStore()
        >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        >>> context = wyfold.cp.build_cp_context(torch.tensor([0, 3, 8]), torch.distributed.group.WORLD)
        >>> context.starts, context.ends, context.position_ids().tolist()
        ((0, 1), (0, 1), [[0, 1, 2, 0, 1, 2, 3, 4]])
        >>> torch.distributed.destroy_process_group()
    """
    group = collectives.process_group(_BUILD, mesh_or_group)
    _, world = collectives.rank_and_size(group)
    bounds: Tensor | None = None
    if cu_seqlens is None:
        if total_tokens is None:
            raise ValueError(f"{_BUILD}: total_tokens must be given without cu_seqlens, got None")
    else:
        if isinstance(cu_seqlens, SequenceLayout):
            total_tokens = cu_seqlens.tokens if total_tokens is None else total_tokens
            cu_seqlens = cu_seqlens.cu_seqlens
        bounds = boundaries(_BUILD, cu_seqlens)
    if total_tokens is None and bounds is not None:
        total_tokens = int(bounds[-1])
    total = _integer("total_tokens", total_tokens, least=0)
    _choice("layout", layout, LAYOUTS)
    _choice("check", check, CHECKS)
    if conv1d_kernel_size is not None:
        _choice("conv1d_kernel_size", conv1d_kernel_size, range(2, 9))
    if max_seqs is not None:
        _integer("max_seqs", max_seqs, least=0)
    if (fragments is not None) is not (layout == "fragments"):
        raise ValueError(f'{_BUILD}: fragments must come with layout="fragments" and only there, got layout={layout!r}')
    ranges = owned_ranges(layout, total, world) if fragments is None else _fragments(fragments, total, world)
    return ContextParallel(
        group, bounds, total, ranges, conv1d_kernel_size=conv1d_kernel_size, max_seqs=max_seqs, check_when=check
    )


def _integer(name: str, value: object, *, least: int) -> int:
    return check.integer(_BUILD, name, value, least=least)


def _choice(name: str, value: object, options: Sequence[object]) -> None:
    check.choice(_BUILD, name, value, options)


def _fragments(fragments: Sequence[Sequence[Range]], total: int, world: int) -> list[list[Range]]:
    """Check that the fragments cover every token once; return them as ranges of every rank."""
    if not isinstance(fragments, list | tuple):
        raise TypeError(f"{_BUILD}: fragments must be a list of lists of (start, stop), got {type(fragments).__name__}")
    if len(fragments) != world:
        raise ValueError(f"{_BUILD}: fragments must be one list for each of {world} ranks, got {len(fragments)}")
    found = []
    for owns in fragments:
        for pair in owns:
            if len(pair) != 2 or _integer("fragments", pair[0], least=0) > _integer("fragments", pair[1], least=0):
                raise ValueError(f"{_BUILD}: fragments must be (start, stop) with start <= stop, got {pair}")
        found.append([(start, stop) for start, stop in owns])
    place = 0
    for start, stop in sorted(pair for owns in found for pair in owns if pair[0] < pair[1]):
        if start != place:
            raise ValueError(f"{_BUILD}: fragments must hold every token once, got {(start, stop)} after token {place}")
        place = stop
    if place != total:
        raise ValueError(f"{_BUILD}: fragments must end at total_tokens = {total}, got {place}")
    return found
