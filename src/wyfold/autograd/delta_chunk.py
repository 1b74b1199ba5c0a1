"""Chunk implementation of the delta family: kernels that process a whole call chunk by chunk.

    forward     chunk_grid (packed batches only), prepare, scan
    backward    chunk_grid, prepare (unless its factors were saved), scan_bwd, gradients
    segments    segment_grid, segment_summary, segment_fold: before the scan, in either direction

If long sequences are cut into segments, the scan runs over segments instead of sequences, from states, or their
gradients, at the segments' borders.

`segment_summary`, `segment_fold` and the scan that reads their results run on a high-priority side stream. Meanwhile
the main stream runs what needs no fold: in the forward the scan of the segments that begin a sequence, in the backward
the half of `scan_bwd` that recomputes states. In the forward of a dense batch whose summaries are short, all of these
launches follow one another on one stream (`KernelCall.two_streams`). A dense batch's forward on Hopper has no
`segment_grid`, because Gluon kernels compute the tables from sizes (`EvenSegments`); on one stream each launch starts
before the one ahead of it has ended (`kernel_launch.overlapping_launches`), also without segments. A backward with much
memory at the chunks' borders takes some heads after the others (`head_parts`). States, maps and gradients at segment
borders are stored K-last, [V, K]; launches get the [K, V] view, `.mT`. A forward in segments copies the states that
enter from the slots of a pool (`entering_states`), since the scan of a last segment may write a slot before that of the
first one has read it. For a packed batch it does so on the side stream, beside `prepare`.

The host never waits for the device: grids and buffers are sized by capacity, and kernels read the boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.delta_records import (
    DIFFERENTIABLE,
    INITIAL_STATE,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_at_borders,
    empty_result,
    pass_through,
)
from wyfold.autograd.entering_states import entering_states
from wyfold.autograd.head_parts import HeadPart, head_parts
from wyfold.autograd.kernel_call import KernelCall, backward_factors, factors_from_list
from wyfold.autograd.row_alignment import contiguous_for_tma
from wyfold.kernels import table
from wyfold.kernels.records import GradientOutputs, Slots, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid, max_chunks
from wyfold.runtime.kernel_configs import processors
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.side_stream import fork_side_stream


def forward(
    t: DeltaTensors,
    options: DeltaOptions,
    out: Tensor | None = None,
    grid: ChunkGrid | None = None,
    slots: Slots | None = None,
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward.

    Args:
        t, options, out, grid: As of `DeltaImplementation.forward`.
        slots: Slots of the states, of a call with sequences and tokens. None: `t.initial_state` and the results.

    Returns:
        The results, and the tensors that the backward reads besides the call's own.
    """
    call, result = KernelCall(t, options), empty_result(t, options, out)
    t, call.grid = call.t, grid or call.chunk_grid()
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, saved(t, options)
    dense = t.cu_seqlens is None
    with call.overlapping_launches():
        leaving = slots.leaving if slots else result.final_state if options.final_state else None
        keep = options.save and options.keep_factors
        prepare = partial(call.prepare, result.o, backward=keep, forward=True, clear=True)
        call.segments = call.forward_segments(result)
        summarized, entering, copy = entering_states(call, slots)
        o, scans_on = result.o, table.selected_backend("scan", options.backend, call.scan_key(result), t.q.device)
        # First, since `scan` clears outputs while the launch ahead of it may run.
        if dense and (call.segments or scans_on == "gluon"):
            o = contiguous_for_tma(o)
        if copy is None or dense:
            if copy is not None:
                copy()
            prepared = prepare()
        else:
            # Copied beside `prepare`, which does not read them.
            with fork_side_stream(result.o.device) as on_side:
                with on_side:
                    copy()
                prepared = prepare()
        states = first = None
        if options.checkpoint_every:
            rows = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
            states, first = call.k_first(rows), call.grid.first_states(t.q.device)
        initial, final = call.k_first(entering), call.k_first(leaving)
        q, k, v = (call.buffer(x) for x in (t.q, t.k, t.v))
        # After `prepare`, which clears the end of o. If TMA could not write o, both launches would write copies of it.
        if call.segments and not dense:
            o = contiguous_for_tma(o)
        at_borders = empty_at_borders(t, options)
        scan = partial(
            table.kernel_module("scan", scans_on).scan,
            *(q, k, v, prepared, initial, call.scan_grid, options, call.key, call.buffer(o), final, states, first),
            segments=call.segments,
            borders=at_borders[0].mT if at_borders else None,
            slots=slots,
        )
        if call.segments is None:
            scan()
        else:
            pooled: dict[str, Any] = {} if summarized is entering else {"slots": slots, "entering": initial}
            summary = partial(call.summary, k, v, prepared, call.k_first(summarized), *at_borders, **pooled)
            _scan_segments(call, scan, summary, at_borders)
        if o is not result.o:
            result.o.copy_(o)
        return result, [*(at_borders if options.save else []), *(backward_factors(prepared) if keep else [])]


def _scan_segments(
    call: KernelCall, scan: Callable[..., None], summary: Callable[[], None], at_borders: list[Tensor]
) -> None:
    """Summarize the segments, fold the summaries, and scan; on two streams first segments wait for neither."""
    if not call.two_streams:
        summary()
        call.fold(*at_borders, reverse=False)
        scan()
        return
    with fork_side_stream(call.t.q.device) as on_side:
        with on_side:
            summary()
            call.fold(*at_borders, reverse=False)
            scan(from_borders=True)
        scan(from_borders=False)


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Allocate the tensors that `forward` saves, uninitialized, from metadata alone."""
    if not options.save:
        return []
    at_borders = empty_at_borders(t, options)
    if not options.keep_factors:
        return at_borders
    prepare = table.kernel_module("prepare", options.backend)
    (B, T, HV), C = t.v.shape[:3], options.chunk_size
    tiles = max_chunks(B, T, C, t.packed_sequences) * HV
    how = {"folded": prepare.reads_folded(t.g), "norm": options.qk_l2norm, "erases": options.erases}
    return [
        *at_borders,
        *backward_factors(prepare.empty(t.q, t.g, tiles, C, **how, backward=True, forward=False)),
    ]


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient."""
    t, options, kept, do, dST, needs, _ = given
    call, dS0 = KernelCall(t, options), given.empty_grad(INITIAL_STATE)
    t, call.grid = call.t, call.chunk_grid()
    if call.segment_grid is not None:
        call.segments = call.segment_grid()
    if t.v.numel() == 0:
        found = [grad.zero_() for grad in given.empty_grads()]
        if needs[INITIAL_STATE]:
            pass_through(dST, found[INITIAL_STATE])
        return found
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    if call.uses_tma:
        do = contiguous_for_tma(do)
    if call.splits_heads and not (kept or call.segments):
        parts = head_parts(t, call.grid, processors(t.q.device))
        if len(parts) > 1:
            return _backward_in_parts(call, given, do, parts)
    borders = _token_borders(call, kept, do, dST, dS0 if needs[INITIAL_STATE] else None)
    return token_gradients(call, given, do, borders, dS0)


def _backward_in_parts(call: KernelCall, given: DeltaBackwardInputs, do: Tensor, parts: list[HeadPart]) -> list[Tensor]:
    """Compute every needed gradient for some heads after the others."""
    t, found = call.t._replace(A_log=call.A_log, dt_bias=call.dt_bias), given.empty_grads()
    for part in parts:
        share, d_out = KernelCall(part.of_call(t), call.options), do[:, :, part.values]
        share.grid = call.grid
        wanted = part.of_gradients(found, t.v.shape[2])
        dST = None if given.dST is None else given.dST[:, part.values]
        # Passed on without a name: the next part's borders reuse the memory.
        _write_gradients(share, d_out, _token_borders(share, [], d_out, dST, wanted[INITIAL_STATE]), wanted)
    return found


def _token_borders(
    call: KernelCall, kept: list[Tensor], do: Tensor, dST: Tensor | None, dS0: Tensor | None
) -> TokenBorders:
    """Run everything before `gradients`. The factors are freed, and the tokens' gradients may reuse their memory.

    Args:
        call: The call, or a part of its heads.
        kept: Tensors that the forward saved.
        do, dST: Gradients of the output and of the final states.
        dS0: Gradient of the initial states, written, or None.
    """
    t, options = call.t, call.options
    at_borders, kept = (kept[:2], kept[2:]) if call.segments else ([], kept)
    prepared = factors_from_list(kept) if kept else call.prepare(t.v, backward=True, forward=False, clear=False)
    initial, final = call.k_first(t.initial_state), call.k_first(dST)
    q, k, v, d_out = (call.buffer(x) for x in (t.q, t.k, t.v, do))
    borders: TokenBorders = call.stage("scan_bwd").token_borders(q, v, call.scan_grid)._replace(norms=prepared.norms)
    gradients = torch.empty_like(at_borders[0]) if at_borders else None
    scan_bwd = partial(
        table.selected_module("scan_bwd", options.backend, call.key, t.q.device).scan_bwd,
        *(q, k, v, prepared, initial, d_out, final, call.scan_grid, options, call.key, call.k_first(dS0), borders),
        segments=call.segments,
        entering=at_borders[0].mT if at_borders else None,
        leaving=None if gradients is None else gradients.mT,
    )
    if gradients is None:
        scan_bwd()
    else:
        with fork_side_stream(q.device) as on_side:
            with on_side:
                call.summary_bwd(q, k, prepared, d_out, final, gradients)
                call.fold(gradients, at_borders[1], reverse=True)
                scan_bwd(half="reverse")
            scan_bwd(half="forward")
    return borders


def token_gradients(
    call: KernelCall, given: DeltaBackwardInputs, do: Tensor, borders: TokenBorders, dS0: Tensor
) -> list[Tensor]:
    """Compute every needed gradient from the states and state gradients at the chunks' borders."""
    found = [dS0 if index == INITIAL_STATE else given.empty_grad(index) for index in range(DIFFERENTIABLE)]
    _write_gradients(call, do, borders, [dx if need else None for dx, need in zip(found, given.needs, strict=True)])
    return found


def _write_gradients(call: KernelCall, do: Tensor, borders: TokenBorders, wanted: list[Tensor | None]) -> None:
    """Write the gradients of all tensors but the initial states; None where one is not wanted."""
    t, tokens = call.t, [dx for index, dx in enumerate(wanted) if index != INITIAL_STATE]
    if any(dx is not None for dx in tokens):
        key = call.stage("gradients").gradients_key(call.key, t.q, t.v)
        gradients = table.selected_module("gradients", call.options.backend, key, t.q.device).gradients
        inputs = t.q, t.k, t.g, t.beta, call.A_log, call.dt_bias
        gradients(*inputs, do, borders, call.grid, call.options, key, GradientOutputs(*tokens))
