"""Serving: sequences whose states lie in the slots of a pool, updated in place, by one registered operator.

It has no gradient. Token by token its kernel is that of the differentiable operators, which finds the slots itself. In
chunks their walk runs between states taken out of their slots and put back, two launches more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.pipelines.delta import walk
from wyfold.pipelines.delta_records import DeltaTensors
from wyfold.runtime import check
from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.register import call, register
from wyfold.stages import table
from wyfold.stages.records import Slots


class Serving(NamedTuple):
    """One serving call: tokens as the public operators document them, and where their states are.

    Attributes:
        q, k, v, g, beta, A_log, dt_bias, cu_seqlens: As of `DeltaTensors`.
        pool: [slots, HV, K, V], or V-first. Updated in place.
        source, target, given, accepted, each, pad: As of `Slots`.
        checkpoints: Pool of states between, updated in place, or None.
        checkpoint_source: [rows, 1] its slot for each of them.
        o: [B, T, HV, V], written.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    pool: Tensor
    source: Tensor | None
    target: Tensor | None
    given: Tensor | None
    accepted: Tensor | None
    checkpoints: Tensor | None
    checkpoint_source: Tensor | None
    o: Tensor
    each: bool
    pad: int

    @property
    def sequences(self) -> int:
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


SERVING_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, "
    "Tensor(a!) pool, Tensor? source, Tensor? target, Tensor? given, Tensor? accepted, "
    "Tensor(b!)? checkpoints, Tensor? checkpoint_source, Tensor(c!) o, bool each, int pad"
)


def serve(serving: Serving, options: DeltaOptions) -> None:
    """Run one call: `serving.o` and the pools hold its results."""
    call(_serve_op, *serving, *options)


def _serve(*arguments: Any) -> None:
    fields = len(Serving._fields)
    s, options = Serving(*arguments[:fields]), DeltaOptions(*arguments[fields:])
    if s.sequences == 0 and s.cu_seqlens is None:
        return
    (B, T), C = s.q.shape[:2], options.chunk_size
    if s.cu_seqlens is not None and check.readable(s.cu_seqlens):
        legal_boundaries(options.operator, s.cu_seqlens, T)
    grid = table.launches("chunk_grid", options.backend).chunk_grid(B, T, C, s.cu_seqlens)
    slots = Slots(s.pool, s.pool, s.source, s.target, s.given, s.accepted, s.each, s.pad)
    if options.recurrent and options.backend != "eager":
        recurrent: Any = table.launches("recurrent", options.backend)
        A_log, dt_bias = (None if x is None else x.contiguous() for x in (s.A_log, s.dt_bias))
        recurrent.recurrent(*s[:5], A_log, dt_bias, slots, grid, options, s.o)
    else:
        _between(s, slots, grid, options)


def _between(s: Serving, slots: Slots, grid: ChunkGrid, options: DeltaOptions) -> None:
    """The walk of the differentiable operators between `enter` and `leave`."""
    stage: Any = table.launches("slots", options.backend)
    entering = s.pool.new_empty(grid.sequences, *s.pool.shape[1:], dtype=options.state_dtype)
    stage.enter(s.pool, slots, entering)
    tokens = DeltaTensors(*s[:5], entering, s.A_log, s.dt_bias, s.cu_seqlens, None)
    result, _ = walk(options).forward(tokens, options, s.o)
    states = result.states
    if options.checkpoint_every and s.cu_seqlens is None:
        states = states.flatten(0, 1)
    if slots.each:
        stage.leave_each(states, slots, s.pool, grid, s.o)
        return
    stage.leave(result.final_state, slots, s.pool, grid, s.o)
    if s.checkpoints is not None and s.checkpoint_source is not None and states.shape[0]:
        stored = _stored(s, grid, options.checkpoint_every, states.shape[0])
        between = torch.where(stored[:, None], s.checkpoint_source, s.pad)
        stage.leave(states, Slots(None, None, between, pad=s.pad), s.checkpoints)


def _stored(s: Serving, grid: ChunkGrid, every: int, rows: int) -> Tensor:
    """[rows] bool, which states between are stored: those of no skipped sequence, where a boundary was completed."""
    N, device = grid.sequences, s.pool.device
    slot = torch.arange(N, device=device) if s.source is None else s.source[:, 0]
    live = (slot > s.pad) & (slot < s.pool.shape[0])
    if grid.cu is None:
        return live[:, None].expand(N, rows // N).flatten()
    ends = (grid.cu[: N + 1].diff() // every).cumsum(0)
    # Rows past the last boundary are those of sequence N, which there is not.
    sequence = torch.searchsorted(ends, torch.arange(rows, device=device, dtype=ends.dtype), right=True)
    return torch.nn.functional.pad(live, (0, 1))[sequence]


def _serve_fake(*arguments: Any) -> None:
    """Nothing is returned."""


_serve_op = register(f"serve({SERVING_SCHEMA}, {DELTA_SCHEMA}) -> ()", _serve, _serve_fake)
