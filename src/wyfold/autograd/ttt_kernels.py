"""Kernel implementation of TTT-Linear: launches that take a whole call and find their tokens themselves.

    forward     the scan over mini-batches, outputs; one launch on Hopper if its configurations have a row for the call
    backward    replay of the scan, reverse scan, gradients

The forward saves the states that its scan leaves. Recomputing them would hold as much memory during the backward, which
is when a call needs most, and would take a sixth of the time of both directions: a scan is serial, and leaves the card
mostly idle.

The host never waits for the device: the grid is sized by capacity, and kernels read the boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from wyfold.autograd.row_alignment import aligned
from wyfold.autograd.ttt_records import TTTOptions, TTTResult, TTTTensors, transpose_if_v_first
from wyfold.kernels import table
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTGradients, TTTInputs
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid, max_chunks
from wyfold.runtime.layout import legal_boundaries


def forward(t: TTTTensors, options: TTTOptions, result: TTTResult, saved: Sequence[Tensor]) -> None:
    """Write the output and final states to `result`, and to `saved`, if not empty, the states for the backward."""
    final = StateViews(result.state, result.bias)
    if t.v.numel() == 0:
        if options.final_state:
            _pass_through(StateViews(t.state, t.bias), final)
        return
    leaving = _k_first(options, *final) if options.final_state else StateViews(None, None)
    entering, grid = _k_first(options, t.state, t.bias), _chunk_grid(t, options)()
    borders = SegmentBorders(*saved) if saved else None
    numbers = options.chunk_size, options.scale, options.eps
    _stage(t, options).ttt(_tokens(t, options), entering, leaving, grid, *numbers, result.o, borders)


def saved(t: TTTTensors, options: TTTOptions) -> list[Tensor]:
    """Allocate the saved tensors, from metadata alone; [] without a backward."""
    if not options.save:
        return []
    stage, (B, T) = _stage(t, options), t.v.shape[:2]
    N = None if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1
    found = list(stage.empty(t.q, t.v, max_chunks(B, T, stage.SEGMENT, N), True))
    # The capacity of a packed batch exceeds what its sequences write, and an operator's results must be deterministic.
    return found if t.cu_seqlens is None else [x.zero_() for x in found]


def backward(
    t: TTTTensors,
    options: TTTOptions,
    saved: Sequence[Tensor],
    do: Tensor | None,
    dfinal: StateViews,
    found: Sequence[Tensor],
) -> None:
    """Write the gradient of every differentiable tensor.

    Args:
        t, options: The call.
        saved: Tensors of the forward.
        do, dfinal: Gradients of the results; None stands for zeros.
        found: Gradient buffers of the call's tensors, in their order; without elements for a state that is None.
    """
    dq, dk, dv, dw, db, deta, dcol, dS, dc = found
    if t.v.numel() == 0:
        for dx in (dw, db):
            dx.zero_()
        _pass_through(dfinal, StateViews(dS, dc))
        return
    # The order in which b's gradient sums rows of `do` depends on how they are read.
    do = t.v.new_zeros(()).expand(t.v.shape) if do is None else aligned(do)
    grid = _chunk_grid(t, options)()
    _stage(t, options).ttt_bwd(
        _tokens(t, options),
        SegmentBorders(*saved),
        do,
        _k_first(options, *dfinal),
        grid,
        options.chunk_size,
        options.scale,
        options.eps,
        TTTGradients(dq, dk, dv, dw, db, deta, None if t.eta_col is None else dcol),
        _k_first(options, None if t.state is None else dS, None if t.bias is None else dc),
    )


def _stage(t: TTTTensors, options: TTTOptions) -> Any:
    key = table.kernel_module("ttt", options.backend).forward_scan_key(t.q.dtype, t.v.shape[3], options.chunk_size)
    return table.selected_module("ttt", options.backend, key, t.q.device)


def _tokens(t: TTTTensors, options: TTTOptions) -> TTTInputs:
    """Inputs of the launches. The scans sum rows in the order in which they are read, so unaligned rows are copied."""
    return TTTInputs(aligned(t.q), aligned(t.k), aligned(t.v), t.w, t.b, t.eta, t.eta_col, options.residual)


def _chunk_grid(t: TTTTensors, options: TTTOptions) -> Callable[[], ChunkGrid]:
    """The launch that finds the segments of the sequences."""
    B, T = t.v.shape[:2]
    if t.cu_seqlens is not None and check.readable(t.cu_seqlens):
        legal_boundaries(options.operator, t.cu_seqlens, T)
    grids: Any = table.kernel_module("chunk_grid", options.backend)
    return partial(grids.chunk_grid, B, T, _stage(t, options).SEGMENT, t.cu_seqlens)


def _k_first(options: TTTOptions, S: Tensor | None, c: Tensor | None) -> StateViews:
    """View the caller's states, the matrix K-first."""
    return StateViews(None if S is None else transpose_if_v_first(S, options), c)


def _pass_through(states: StateViews, out: StateViews) -> None:
    """Copy states to out (zeros for None): without tokens, states and their gradients pass unchanged."""
    for x, y in zip(states, out, strict=True):
        if y is not None and y.numel():
            y.zero_() if x is None else y.copy_(x)
