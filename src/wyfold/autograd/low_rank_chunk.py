"""Chunk implementation of the diagonal-plus-low-rank rules: kernels that process a whole call chunk by chunk.

    forward     chunk_grid (packed batches only), low_rank_prepare, low_rank_scan
    backward    chunk_grid, low_rank_prepare (unless its factors were saved), low_rank_scan_bwd, low_rank_gradients

The backward has chunks of `BACKWARD_CHUNK` rows where the forward has more for its Gluon kernel.

If long sequences are cut into segments, `segment_grid` follows `chunk_grid`, and each scan runs once more for the
segments' maps, which `segment_fold` folds (`low_rank_segments`). As in `delta_chunk` the host never waits for the
device.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_at_borders,
    empty_result,
    most_borders,
    pass_through,
    transpose_if_v_first,
)
from wyfold.autograd.low_rank_segments import SegmentedScans
from wyfold.autograd.row_alignment import aligned
from wyfold.kernels import table
from wyfold.kernels.records import GradientOutputs, LowRankPrepared
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid, in_chunks_of, max_chunks
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions

BACKWARD_CHUNK = 32
"""Rows of a chunk for which the kernels of the backward are fastest."""


def backward_options(t: DeltaTensors, options: DeltaOptions) -> DeltaOptions:
    """Options of the backward of a call: with shorter chunks if the forward launched the Gluon `low_rank_prepare`.

    The cut is that of the forward's chunks.
    """
    if options.chunk_size <= BACKWARD_CHUNK:
        return options
    stage = options.stage("prepare")
    _, key = launch_keys(t, options)
    if table.selected_backend(stage, options.backend, key, t.q.device) != "gluon":
        return options
    return options._replace(chunk_size=BACKWARD_CHUNK, keep_factors=False)


def launch_keys(t: DeltaTensors, options: DeltaOptions) -> tuple[LaunchKey, LaunchKey]:
    """Launch keys of a call: that of its stages, and that of `low_rank_prepare`."""
    prepare: Any = table.kernel_module(options.stage("prepare"), options.backend)
    key = prepare.launch_key(t.q.dtype, t.q.shape[3], t.v.shape[3], options.chunk_size)
    return key, prepare.prepare_key(key, t.q, t.g, options)


class LowRankCall:
    """Inputs that both directions derive from a call. It launches nothing by itself.

    Attributes:
        t: The call's tensors, in layouts that the kernels read.
        options: The call's options.
        key, prepare_key: Keys of the kernel configurations of the call, and of `low_rank_prepare`.
        arguments: Kernel arguments of `low_rank_prepare` and `low_rank_gradients`.
    """

    def __init__(self, t: DeltaTensors, options: DeltaOptions):
        self.options = options
        prepare = self.stage("prepare")
        rows = {name: aligned(getattr(t, name)) for name in ("q", "k", "a", "b", "g")}
        self.t = t = t._replace(**rows)
        # Kernels read these few numbers as contiguous arrays.
        A_log, dt_bias = (None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias))
        self.key, self.prepare_key = launch_keys(t, options)
        tokens = t.q, t.k, t.a, t.b
        self.arguments = prepare.call_arguments(tokens, t.g, t.beta, A_log, dt_bias, t.v.shape[2], options)

    def stage(self, name: str) -> Any:
        return table.kernel_module(self.options.stage(name), self.options.backend)

    def prepare(self, grid: ChunkGrid, o: Tensor, *, backward: bool, clear: bool) -> LowRankPrepared:
        """Launch `low_rank_prepare`; arguments are its."""
        options, key = self.options, self.prepare_key
        module: Any = table.selected_module(options.stage("prepare"), options.backend, key, self.t.q.device)
        found: LowRankPrepared = module.prepare(*self.arguments, grid, options, key, o, backward=backward, clear=clear)
        return found

    def scan(
        self,
        prepared: LowRankPrepared,
        initial: Tensor | None,
        grid: ChunkGrid,
        o: Tensor,
        final: Tensor | None,
        states: Tensor | None,
        first: Tensor | None,
    ) -> None:
        """Launch `low_rank_scan` over whole sequences; arguments are its."""
        t, options, triton = self.t, self.options, self.stage("scan")
        key = triton.scan_key(self.prepare_key, t.v, t.w, kept=states is not None, wide=o.dtype != t.v.dtype)
        module: Any = table.selected_module(options.stage("scan"), options.backend, key, t.v.device)
        given = t.v, t.w, prepared, initial, grid, options, key, o, final
        if module is triton:
            module.scan(*given, states, first)
        else:
            module.scan(*given)

    def chunk_grid(self) -> ChunkGrid:
        """Launch what finds the chunks of the sequences."""
        (B, T), cu, options = self.t.q.shape[:2], self.t.cu_seqlens, self.options
        if cu is not None and check.readable(cu):
            legal_boundaries(options.operator, cu, T)
        grids: Any = table.kernel_module("chunk_grid", options.backend)
        found: ChunkGrid = grids.chunk_grid(B, T, options.chunk_size, cu, options.checkpoint_every)
        return found

    def buffer(self, x: Tensor) -> Tensor:
        """View x [B, T, ...] as one buffer, in which segments are found: [1, B T, ...]."""
        return x if x.shape[0] == 1 else x.reshape(1, -1, *x.shape[2:])

    def segmented(
        self, grid: ChunkGrid, prepared: LowRankPrepared, forward: LowRankCall | None = None
    ) -> SegmentedScans:
        """Launch what finds the segments; the scans that run them.

        Args:
            grid, prepared: Chunks of the call, and their factors.
            forward: The call in its forward, which cut sequences into segments of its chunks; None: this one.
        """
        t, options = self.t, self.options
        cut_grid = grid if forward is None else forward.chunk_grid()
        segments = table.kernel_module("segment_grid", options.backend).segment_grid(cut_grid, options.cut, t.q.device)
        if cut_grid.chunk_size != grid.chunk_size:
            segments = in_chunks_of(segments, cut_grid, grid)
        w = None if t.w is None else self.buffer(t.w)
        scan, scan_bwd = self.stage("scan").scan, self.stage("scan_bwd").scan_bwd
        fold = table.selected_module("segment_fold", options.backend, self.key, t.v.device).segment_fold
        return SegmentedScans(self.buffer(t.v), w, prepared, segments, options, self.key, scan, scan_bwd, fold)

    def k_first(self, states: Tensor | None) -> Tensor | None:
        """View the caller's states K-first; None for None."""
        return None if states is None else transpose_if_v_first(states, self.options)


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward, as of `DeltaImplementation.forward`."""
    result = empty_result(t, options, out)
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, saved(t, options)
    call = LowRankCall(t, options)
    t, grid = call.t, grid or call.chunk_grid()
    keep = options.save and options.keep_factors
    prepared = call.prepare(grid, result.o, backward=keep, clear=True)
    states = first = None
    if options.checkpoint_every:
        rows = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
        states, first = call.k_first(rows), grid.first_states(t.q.device)
    initial, final = call.k_first(t.initial_state), call.k_first(result.final_state if options.final_state else None)
    at_borders = empty_at_borders(t, options)
    if at_borders:
        o = result.o.view(1, -1, *result.o.shape[2:])
        call.segmented(grid, prepared).forward(initial, o, final, *at_borders)
    else:
        call.scan(prepared, initial, grid, result.o, final, states, first)
    return result, [*(at_borders if options.save else []), *(factors_to_list(prepared) if keep else [])]


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate the tensors that `forward` saves, uninitialized, from metadata alone."""
    if not options.save:
        return []
    at_borders = empty_at_borders(t, options)
    if not options.keep_factors:
        return at_borders
    prepare: Any = table.kernel_module(options.stage("prepare"), options.backend)
    (B, T, HV), C = t.v.shape[:3], options.chunk_size
    tiles = max_chunks(B, T, C, t.packed_sequences) * HV
    return [*at_borders, *factors_to_list(prepare.empty(t.q, options.rule, tiles, C, backward=True))]


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient."""
    t, options, kept, do, dST, needs, _ = given
    found = given.empty_grads()
    wanted = [dx if need else None for dx, need in zip(found, needs, strict=True)]
    dS0 = wanted.pop(INITIAL_STATE)
    if t.v.numel() == 0:
        for grad in found:
            grad.zero_()
        if dS0 is not None:
            pass_through(dST, dS0)
        return found
    forward, options = LowRankCall(t, options), backward_options(t, options)
    call = LowRankCall(forward.t, options)
    t, grid = call.t, call.chunk_grid()
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    at_borders, kept = (kept[:2], kept[2:]) if most_borders(t, forward.options) else ([], kept)
    prepared = factors_from_list(kept) if kept else call.prepare(grid, t.v, backward=True, clear=False)
    out = GradientOutputs(*wanted)
    initial, final, dS0 = (call.k_first(x) for x in (t.initial_state, dST, dS0))
    if at_borders:
        dv, dw = (None if dx is None else dx.view(1, -1, *dx.shape[2:]) for dx in (out.v, out.w))
        scans = call.segmented(grid, prepared, forward)
        borders = scans.backward(at_borders[0], at_borders[1], initial, call.buffer(do), final, dS0, (dv, dw))
        del scans
    else:
        scan_bwd = call.stage("scan_bwd").scan_bwd
        borders = scan_bwd(t.v, t.w, prepared, initial, do, final, grid, options, call.key, dS0, (out.v, out.w))
    del prepared  # frees the factors, whose memory the tokens' gradients may reuse
    if any(dx is not None for dx in (*out[:2], *out[3:9])):
        gradients = call.stage("gradients").gradients
        gradients(*call.arguments, t, do, borders, grid, options, call.key, out)
    return found


def factors_to_list(prepared: LowRankPrepared) -> list[Tensor]:
    """Return the factors as a list of tensors; a 1-D tensor stands for None."""
    return [prepared.rows.new_empty(0) if x is None else x for x in prepared]


def factors_from_list(factors: list[Tensor]) -> LowRankPrepared:
    """The inverse of `factors_to_list`."""
    return LowRankPrepared(*(None if x.ndim == 1 else x for x in factors))  # type: ignore[arg-type]
