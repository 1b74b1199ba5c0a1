"""Context parallelism: one buffer of tokens over the ranks of a group.

A user makes a `ContextParallel` once per batch and passes it to operators and layers in place of `cu_seqlens`. It holds
the partition of the whole buffer (`partition`). What a rank sends and waits for follows from the boundaries alone, so
all ranks, also those without tokens, take part in the same collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from wyfold.context_parallel import collectives
from wyfold.context_parallel.agreement import Agreement
from wyfold.context_parallel.partition import (
    Partition,
    Piece,
    Range,
    RankSizes,
    describe_partition,
    numbers_of_chains,
    partition_sequences,
)
from wyfold.context_parallel.preceding import Routes, preceding_routes
from wyfold.context_parallel.rank_segments import SegmentTables, segment_tables
from wyfold.context_parallel.unshard import check_tokens, unshard
from wyfold.runtime.chunk_layout import Cut
from wyfold.runtime.layout import SequenceLayout, boundaries, legal_boundaries

_NAME, BUILD = "ContextParallel", "build_cp_context"

Cached = TypeVar("Cached")


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
        tokens: Length of this rank's shard: T of every tensor it passes.
        pieces: This rank's pieces, in token order.
        sizes: What a call's checks and plan depend on, unless the plan is to be explained.
    """

    rank: int
    world: int
    layout: SequenceLayout
    whole: SequenceLayout
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    total_tokens: int
    conv1d_kernel_size: int | None
    tokens: int
    pieces: tuple[Piece, ...]
    sizes: RankSizes

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
        self.group, self.dense, self._check_when = group, bounds is None, check_when
        self.rank, self.world = collectives.rank_and_size(group)
        self.total_tokens, self.conv1d_kernel_size = total_tokens, conv1d_kernel_size
        self._ranges, self._max_seqs = ranges, max_seqs
        self._set_boundaries(torch.tensor([0, total_tokens]) if bounds is None else bounds)

    def _set_boundaries(self, bounds: Tensor) -> None:
        """Set the boundaries: partition the buffer, and clear everything cached for the old ones."""
        on_cpu = legal_boundaries(BUILD, bounds, self.total_tokens)
        partition = partition_sequences(on_cpu.tolist(), self.total_tokens, self._ranges)
        needed = max(map(len, partition.pieces))
        if self._max_seqs is not None and needed > self._max_seqs:  # raised on every rank, whichever has too many
            raise ValueError(f"{BUILD}: max_seqs must be at least {needed}, what one rank holds, got {self._max_seqs}")
        self.partition = partition
        self.tokens, self.pieces = partition.tokens(self.rank), partition.pieces[self.rank]
        self._local = [0, *(piece.offset + piece.length for piece in self.pieces)]
        local = torch.tensor(self._local, device=bounds.device)
        self.layout = SequenceLayout(local, self.tokens, max_seqs=self._max_seqs)
        self.whole = SequenceLayout(bounds, self.total_tokens)
        self.chain_numbers = numbers_of_chains(partition.chains)
        self.starts = tuple(piece.sequence for piece in self.pieces if piece.first)
        self.ends = tuple(piece.sequence for piece in self.pieces if piece.last)
        self.sizes = partition.sizes(self.rank, dense=self.dense)
        description = describe_partition(on_cpu.tolist(), partition.ranges, dense=self.dense)
        self.agreement = Agreement(self.group, self._check_when, description)
        self._cache: dict[tuple[object, ...], Any] = {}

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
        check_tokens("shard", x, dim, self.total_tokens)
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
        return unshard(self, x, dim)

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

    def _cached(self, key: tuple[object, ...], make: Callable[[], Cached]) -> Cached:
        """Cached result of `make` for these boundaries; copying a host tensor to the device would wait for it."""
        if torch.compiler.is_compiling():
            return make()
        if key not in self._cache:
            self._cache[key] = make()
        found: Cached = self._cache[key]
        return found

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

    def segments(self, batch: int, chunk_size: int, cut: Cut, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        """Segment tables of this rank's pieces in `batch` concatenated buffers, as `RankSegments.of` reads them."""
        tables = self.segment_tables(batch, chunk_size, cut)
        make = partial(torch.tensor, tables.numbers, dtype=torch.int64, device=device)
        return self._cached((batch, chunk_size, cut, device), make), tables.counts

    def segment_tables(self, batch: int, chunk_size: int, cut: Cut) -> SegmentTables:
        """Cached `rank_segments.segment_tables` of this rank for these boundaries."""
        how = batch, chunk_size, cut
        return self._cached(("tables", *how), lambda: segment_tables(self.partition, self.rank, *how))

    def preceding_routes(self, count: int | None) -> Routes:
        """Cached `preceding.preceding_routes` of this rank for these boundaries."""
        return self._cached(("preceding", count), lambda: preceding_routes(self.partition, self.rank, count))

    def require_partition(self, op: str, partition: Partition) -> None:
        """Check in a backward that the context still has the partition of the forward; called before collectives.

        Raises:
            ValueError: `update_` was called in between, which is so on every rank.
        """
        if self.partition is not partition:
            raise ValueError(
                f"{op}: cp_context must be as in the forward, got one that was updated before the backward"
            )

    def all_gather(self, x: Tensor) -> Tensor:
        """`collectives.all_gather` in this group; x must have the same shape and dtype on all ranks."""
        return collectives.all_gather(x, self.group)

    def all_to_all(self, x: Tensor) -> Tensor:
        """`collectives.all_to_all` in this group."""
        return collectives.all_to_all(x, self.group)
