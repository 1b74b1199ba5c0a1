"""A call of the chunk kernels: inputs of its launches, the launches that both directions make, and saved factors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from wyfold.autograd.delta_records import DeltaResult, DeltaTensors, most_borders, transpose_if_v_first
from wyfold.autograd.row_alignment import aligned, contiguous_for_tma
from wyfold.kernels import table
from wyfold.kernels.records import Prepared
from wyfold.runtime import check, kernel_launch
from wyfold.runtime.chunk_layout import WITHOUT_TABLES, ChunkGrid, EvenSegments, Segments, even_segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions

LONG = {"channel": 32, "scalar": 128}
"""Gate -> fewest chunks of a dense batch's segments whose summaries run beside the scan of first segments."""


class KernelCall:
    """Inputs that both directions derive from a call. It launches nothing by itself.

    Attributes:
        t: The call's tensors; q, k, v and g in layouts that the kernels read.
        options: The call's options.
        grid: Chunk grid of the sequences, set by its launch.
        folded: `prepare.reads_folded` of the call's gate.
        key: Key of the kernel configurations.
        uses_tma: Whether a scan is a Gluon kernel, which reads q, k and v by TMA.
        A_log, dt_bias: Contiguous gate parameters, or None.
        segments: Segments of the sequences, set by their launch; None if no sequence is cut.
    """

    grid: ChunkGrid

    def __init__(self, t: DeltaTensors, options: DeltaOptions):
        K, V, C = t.q.shape[3], t.v.shape[3], options.chunk_size
        self.options = options
        prepare = self.stage("prepare")
        self.t = _aligned(t)
        self.folded = prepare.reads_folded(t.g)
        gate = prepare.gate_kind(t.g)
        self.key: LaunchKey = prepare.launch_key(t.q.dtype, K, V, C, gate, self.folded, erases=options.erases)
        self.uses_tma = any(
            table.selected_backend(name, options.backend, self.key, t.q.device) == "gluon"
            for name in ("scan", "scan_bwd")
        )
        if self.uses_tma:
            # Copied once for all launches: some of them run on a side stream.
            names = "v" if self.key.per_channel else "qkv"
            rows = {name: contiguous_for_tma(getattr(self.t, name)) for name in names}
            if any(x is not getattr(self.t, name) for name, x in rows.items()):
                self.t = self.t._replace(**rows)
        # Kernels read these few numbers as contiguous arrays.
        self.A_log, self.dt_bias = (None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias))
        self.segments: Segments | EvenSegments | None = None

    @property
    def chunk_grid(self) -> Callable[[], ChunkGrid]:
        """The launch that finds the chunks of the sequences."""
        (B, T), cu, options = self.t.q.shape[:2], self.t.cu_seqlens, self.options
        if cu is not None and check.readable(cu):
            legal_boundaries(options.operator, cu, T)
        return partial(self.stage("chunk_grid").chunk_grid, B, T, options.chunk_size, cu, options.checkpoint_every)

    @property
    def segment_grid(self) -> Callable[[], Segments] | None:
        """The launch that cuts sequences into segments; None if no sequence can be long enough."""
        if not most_borders(self.t, self.options):
            return None
        return partial(self.stage("segment_grid").segment_grid, self.grid, self.options.cut, self.t.q.device)

    @property
    def scan_grid(self) -> ChunkGrid:
        """Grid of the scans: the segments' if sequences are cut, else the sequences'."""
        return self.grid if self.segments is None else self.segments.grid

    def forward_segments(self, result: DeltaResult) -> Segments | EvenSegments | None:
        """The segments of a forward, or None; without a launch if the batch is dense and all kernels are Gluon's."""
        if self.segment_grid is None:
            return None
        if self.t.cu_seqlens is None:
            keys = self.key._replace(launch="fwd"), self.key, self.scan_key(result)
            stages = zip(WITHOUT_TABLES, keys, strict=True)
            device, backend = self.t.q.device, self.options.backend
            if all(table.selected_backend(stage, backend, key, device) == "gluon" for stage, key in stages):
                return even_segments(self.grid, self.options.cut)
        return self.segment_grid()

    def overlapping_launches(self) -> contextlib.AbstractContextManager[None]:
        """Context of a forward: of a dense batch on one stream, on Hopper, each launch starts before the last ends."""
        beside = self.segment_grid is not None and self.two_streams
        if self.t.cu_seqlens is not None or beside or not self.uses_tma:
            return contextlib.nullcontext()
        return kernel_launch.overlapping_launches()

    def buffer(self, x: Tensor) -> Tensor:
        """View x [B, T, ...] as the scans read it: [1, B T, ...] if there are segments, which index one buffer."""
        return x if self.segments is None or x.shape[0] == 1 else x.reshape(1, -1, *x.shape[2:])

    def stage(self, name: str) -> Any:
        return table.kernel_module(name, self.options.backend)

    def scan_key(self, result: DeltaResult) -> LaunchKey:
        """`key` with the scan's own variants: intermediate states, and an output dtype other than v's."""
        kept, wide = bool(self.options.checkpoint_every), result.o.dtype != self.t.v.dtype
        return self.key._replace(kept=kept, wide=wide)

    @property
    def prepare(self) -> Callable[..., Prepared]:
        """The launch that computes the factors of every chunk.

        Args of the launch:
            o: [B, T, HV, V] the output, or a tensor of its shape.
            backward, forward: Which directions the factors are for.
            clear: Whether the launch also zeroes o past the last boundary.
        """
        t = self.t
        arguments = t.q, t.k, t.g, t.beta, self.A_log, self.dt_bias, self.grid, self.options
        prepare = table.selected_module("prepare", self.options.backend, self.key, t.q.device).prepare
        return partial(prepare, *arguments, folded=self.folded)

    def summary(
        self,
        k: Tensor,
        v: Tensor,
        prepared: Prepared,
        initial: Tensor | None,
        states: Tensor,
        maps: Tensor,
        **pooled: Any,
    ) -> None:
        """Write H [borders, HV, V, K] and M [borders, HV, K, K] of the segment that ends at each border.

        Args:
            k, v, prepared, initial: As of the launch.
            states, maps: H and M.
            pooled: `slots` and `entering` of the Gluon launch, if it copies the initial states from their slots.
        """
        key = self.key._replace(launch="fwd")
        summary = table.selected_module("segment_summary", self.options.backend, key, k.device).segment_summary
        horizon = self.begins_at_horizon(key)
        arguments = k, v, prepared, initial, self.segments, self.options, self.key, states.mT, maps.mT
        summary(*arguments, horizon=horizon, **pooled)

    def summary_bwd(
        self, q: Tensor, k: Tensor, prepared: Prepared, do: Tensor, final: Tensor | None, gradients: Tensor
    ) -> None:
        """Write c [borders, HV, V, K] of the segment that begins at each border."""
        key = self.key._replace(launch="bwd")
        summary_bwd = table.selected_module("segment_summary", self.options.backend, key, k.device).segment_summary_bwd
        arguments = q, k, prepared, do, final, self.segments, self.options, self.key, gradients.mT
        summary_bwd(*arguments, horizon=self.begins_at_horizon(key))

    def begins_at_horizon(self, key: LaunchKey) -> bool:
        """Whether summaries begin at the exact horizon (`tile/decay/horizon`).

        HORIZON in the kernel's configuration is the fewest chunks of such a segment, and ANY_KEYS those under a scalar
        gate if the search reads the keys; in shorter ones it takes longer than it saves. Without a gate nothing decays.
        """
        device, options = self.t.q.device, self.options
        backend = table.selected_backend("segment_summary", options.backend, key, device)
        reads_keys = key.gate == "scalar" and not options.bounded_keys
        blocks = tuned(f"segment_summary.{backend}", key, device).blocks
        fewest = blocks.get("ANY_KEYS" if reads_keys else "HORIZON", 0)
        return 0 < fewest <= self.segment_chunks and key.gate in ("scalar", "channel")

    @property
    def segment_chunks(self) -> int:
        """Chunks of a dense batch's segments; of a packed batch's, if it were one sequence."""
        return self.options.cut.length(-(-self.t.q.shape[1] // self.options.chunk_size))

    @cached_property
    def two_streams(self) -> bool:
        """Whether a forward in segments scans first segments beside the summaries, which run on the side stream."""
        return self.t.cu_seqlens is not None or pays_two_streams(self.key.gate, self.segment_chunks)

    @property
    def splits_heads(self) -> bool:
        """Whether a backward may take some heads after the others: HEAD_PARTS is set in `scan_bwd`'s configuration."""
        device = self.t.q.device
        backend = table.selected_backend("scan_bwd", self.options.backend, self.key, device)
        return bool(tuned(f"scan_bwd.{backend}", self.key, device).blocks.get("HEAD_PARTS"))

    def fold(self, states: Tensor, maps: Tensor, *, reverse: bool, divided: Tensor | None = None) -> None:
        """Turn summaries into the states (or their gradients) at the borders, in place.

        Args:
            states: [borders, HV, V, K] H, or c if `reverse`.
            maps: [borders, HV, K, K] M of the segment that ends at each border.
            reverse: Whether to fold from the last segment to the first.
            divided: Indices of the sequences to fold; None: all that are cut.
        """
        segments = self.segments
        if divided is not None and isinstance(segments, Segments):
            segments = replace(segments, divided=divided)
        fold = table.selected_module("segment_fold", self.options.backend, self.key, self.t.k.device).segment_fold
        fold(states.mT, maps.mT, segments, reverse=reverse, dtype=self.t.k.dtype)

    def k_first(self, states: Tensor | None) -> Tensor | None:
        """View the caller's states K-first; None for None."""
        return None if states is None else transpose_if_v_first(states, self.options)


def pays_two_streams(gate: str | None, chunks: int) -> bool:
    """Whether a second stream pays in the forward of a dense batch with segments of so many chunks.

    A fork and a join take as long as a few chunks of a scan. That pays if segments have LONG chunks. Under a scalar
    gate summaries are shorter. Without a gate it was not measured, and there is one stream.
    """
    return gate in LONG and chunks >= LONG[gate]


def _aligned(t: DeltaTensors) -> DeltaTensors:
    """The tensors with q, k and g in rows that kernels read as vectors; t itself if they are."""
    q, k, g = aligned(t.q), aligned(t.k), aligned(t.g)
    return t if q is t.q and k is t.k and g is t.g else t._replace(q=q, k=k, g=g)


def backward_factors(prepared: Prepared) -> list[Tensor]:
    """List the factors that the backward reads."""
    if prepared.rows_bwd is not None:
        prepared = prepared._replace(rows=prepared.rows_bwd, FB=None, rows_bwd=None)
    return factors_to_list(prepared)


def factors_to_list(prepared: Prepared) -> list[Tensor]:
    """Return the factors as a list of tensors; a 1-D tensor stands for None."""
    return [prepared.rows.new_empty(0) if x is None else x for x in prepared]


def factors_from_list(factors: list[Tensor]) -> Prepared:
    """The inverse of `factors_to_list`."""
    return Prepared(*(None if x.ndim == 1 else x for x in factors))  # type: ignore[arg-type]
