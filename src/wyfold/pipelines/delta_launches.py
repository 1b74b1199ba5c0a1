"""The delta family as launches over whole calls: the walk of the backends whose kernels find their tokens themselves.

    forward     chunk grid, prepare, scan
    backward    chunk grid, prepare (unless its tiles were kept), scan_bwd, gradients

Nothing here waits for the device: grids and tiles are sized by capacity, and what boundaries hold is read by kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.pipelines.delta_records import (
    DIFFERENTIABLE,
    INITIAL_STATE,
    DeltaGradient,
    DeltaResult,
    DeltaTensors,
    empty_result,
    turned,
    vectors,
)
from wyfold.runtime import check
from wyfold.runtime.chunks import most_chunks
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions
from wyfold.stages import table
from wyfold.stages.records import Prepared, TokenGradients


class _Call:
    """What both directions derive from a call's tensors and options before the first launch."""

    def __init__(self, t: DeltaTensors, options: DeltaOptions):
        (B, T, _, K), V, C = t.q.shape, t.v.shape[3], options.chunk_size
        if t.cu_seqlens is not None and check.readable(t.cu_seqlens):
            legal_boundaries(options.operator, t.cu_seqlens, T)
        q, k = (x if vectors(x) else x.clone(memory_format=torch.contiguous_format) for x in (t.q, t.k))
        self.t, self.options = t._replace(q=q, k=k), options
        self.grid = self.stage("chunk_grid").chunk_grid(B, T, C, t.cu_seqlens)
        prepare = self.stage("prepare")
        self.folded = prepare.reads_folded(t.g)
        self.key = prepare.launch_key(t.q.dtype, K, V, C, prepare.gate_kind(t.g), self.folded)
        # Kernels read these few numbers where they lie one after another.
        self.A_log, self.dt_bias = (None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias))

    def stage(self, name: str) -> Any:
        return table.launches(name, self.options.backend)

    def prepare(self, o: Tensor, *, backward: bool, clear: bool) -> Prepared:
        """Factors of every chunk; o, or its like, is cleared past the last boundary on the way."""
        t = self.t
        arguments = t.q, t.k, t.g, t.beta, self.A_log, self.dt_bias, self.grid, self.options, o
        found: Prepared = self.stage("prepare").prepare(*arguments, folded=self.folded, backward=backward, clear=clear)
        return found

    def outside(self, states: Tensor | None) -> Tensor | None:
        """A K-first view of the caller's states."""
        return None if states is None else turned(states, self.options)


def forward(t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None) -> tuple[DeltaResult, list[Tensor]]:
    """Results, and what the backward needs of them."""
    call, result = _Call(t, options), empty_result(t, options, out)
    t = call.t
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, saved(t, options)
    keep = options.save and options.keep_factors
    prepared = call.prepare(result.o, backward=keep, clear=True)
    states = first = None
    if options.checkpoint_every:
        rows = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
        states, first = call.outside(rows), call.grid.first_checkpoints(options.checkpoint_every, t.q.device)
    initial, final = call.outside(t.initial_state), call.outside(result.final_state if options.final_state else None)
    scan = table.serving("scan", options.backend, call.key, t.q.device).scan
    scan(t.q, t.k, t.v, prepared, initial, call.grid, options, call.key, result.o, final, states, first)
    return result, _kept(prepared) if keep else []


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """What the forward keeps, unwritten; sizes come from metadata alone."""
    if not (options.save and options.keep_factors):
        return []
    prepare = table.launches("prepare", options.backend)
    (B, T, HV), C = t.v.shape[:3], options.chunk_size
    tiles = most_chunks(B, T, C, t.packed_sequences) * HV
    return _kept(prepare.empty(t.q, t.g, tiles, C, folded=prepare.reads_folded(t.g), backward=True))


def backward(given: DeltaGradient) -> list[Tensor]:
    """Every wanted gradient."""
    t, options, kept, do, dST, needs = given
    call, dS0 = _Call(t, options), given.room(INITIAL_STATE)
    t = call.t
    if t.v.numel() == 0:
        found = [room.zero_() for room in given.rooms()]
        if needs[INITIAL_STATE]:
            pass_through(dST, found[INITIAL_STATE])
        return found
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    prepared = _prepared(kept) if kept else call.prepare(t.v, backward=True, clear=False)
    initial, final = call.outside(t.initial_state), call.outside(dST)
    entering = call.outside(dS0 if needs[INITIAL_STATE] else None)
    scan_bwd = call.stage("scan_bwd").scan_bwd
    borders = scan_bwd(t.q, t.k, t.v, prepared, initial, do, final, call.grid, options, call.key, entering)
    del prepared  # the tokens' gradients may lie where it lay
    found = [dS0 if index == INITIAL_STATE else given.room(index) for index in range(DIFFERENTIABLE)]
    wanted = [dx if need else None for dx, need in zip(found, needs, strict=True)]
    del wanted[INITIAL_STATE]
    if any(dx is not None for dx in wanted):
        key = call.stage("gradients").gradients_key(call.key, t.q, t.v)
        gradients = table.serving("gradients", options.backend, key, t.q.device).gradients
        inputs = t.q, t.k, t.g, t.beta, call.A_log, call.dt_bias
        gradients(*inputs, do, borders, call.grid, options, key, TokenGradients(*wanted))
    return found


def pass_through(states: Tensor | None, out: Tensor) -> None:
    """Where there are no tokens at all, states leave as they entered, and so do their gradients."""
    if states is None:
        out.zero_()
    else:
        out.copy_(states)


def _kept(prepared: Prepared) -> list[Tensor]:
    """Its tensors; one without a tile's dimensions stands for what is not there."""
    return [prepared.rows.new_empty(0) if x is None else x for x in prepared]


def _prepared(kept: list[Tensor]) -> Prepared:
    """The inverse of `_kept`."""
    return Prepared(*(None if x.ndim == 1 else x for x in kept))  # type: ignore[arg-type]
