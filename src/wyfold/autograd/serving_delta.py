"""The delta family for serving: one registered operator that updates states in a pool's slots in place.

It has no gradient. Its kernels are those of the differentiable operators, which read and write the slots themselves.
The recurrent form is one launch. The chunk form has the launches of a call without a pool, and one more if intermediate
states are stored. If it cuts sequences into segments, it copies states out of their slots before the scan, in which the
first segment reads a state while the last one writes it: one launch more, but where the Gluon kernels of a dense batch
do so themselves. The eager backend gathers states, runs, and scatters them back. So do the kernels of a
diagonal-plus-low-rank rule.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.autograd import delta_chunk
from wyfold.autograd.delta import implementation_for
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.kernels import table
from wyfold.kernels.records import Slots
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.torch_ops import register


class PoolCall(NamedTuple):
    """The states of one serving call, and its output.

    Attributes:
        pool: [slots, HV, K, V], or V-first; updated in place.
        source, target, given, accepted, each, pad: As of `Slots`.
        checkpoints: Pool of intermediate states, updated in place, or None.
        checkpoint_source: [rows] slot of `checkpoints` for each intermediate state, or None.
        o: [B, T, HV, V] output buffer.
    """

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


SERVING_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? beta, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, "
    "Tensor? a, Tensor? b, Tensor? w, Tensor(a!) pool, Tensor? source, Tensor? target, Tensor? given, "
    "Tensor? accepted, "
    "Tensor(b!)? checkpoints, Tensor? checkpoint_source, Tensor(c!) o, bool each, int pad"
)
TOKENS = 11
"""Tensors of the schema before the pool."""


def _serve(*arguments: Any) -> None:
    q, k, v, g, beta, A_log, dt_bias, cu, *columns = arguments[:TOKENS]
    t = DeltaTensors(q, k, v, g, beta, None, A_log, dt_bias, cu, None, *columns)
    fields = TOKENS + len(PoolCall._fields)
    s, options = PoolCall(*arguments[TOKENS:fields]), DeltaOptions(*arguments[fields:])
    B, T = q.shape[:2]
    if B == 0 and cu is None:
        return
    if cu is not None and check.readable(cu):
        legal_boundaries(options.operator, cu, T)
    grids: Any = table.kernel_module("chunk_grid", options.backend)
    own_rows = options.rule == "delta" and s.each  # these kernels store the state after every token themselves
    grid = grids.chunk_grid(B, T, options.chunk_size, cu, 0 if own_rows else options.checkpoint_every)
    given, accepted = (None if x is None else x.contiguous() for x in (s.given, s.accepted))
    slots = Slots(s.pool, s.pool, s.source, s.target, given, accepted, s.each, s.pad)
    on_slots = options.backend != "eager" and options.rule == "delta"
    if options.recurrent and on_slots:
        recurrent: Any = table.selected_module("recurrent", options.backend, _key(t, s, options), q.device)
        A_log, dt_bias = (None if x is None else x.contiguous() for x in (A_log, dt_bias))
        recurrent.recurrent(q, k, v, g, beta, A_log, dt_bias, slots, grid, options, s.o)
    elif on_slots and s.o.numel() and (grid.sequences or not options.segment_chunks):
        # The scan reads states from the pool, or of segments from a copy, and writes them back.
        result, _ = delta_chunk.forward(t, options._replace(final_state=False), s.o, grid, slots)
        _store_checkpoints(t, s, result.states, slots, grid, options)
    else:
        _run_on_gathered_states(t, s, slots, grid, options)


def _key(t: DeltaTensors, s: PoolCall, options: DeltaOptions) -> LaunchKey:
    """Configuration key of a recurrent serving call."""
    keys: Any = table.kernel_module("recurrent", "triton")
    (_, T, _, K), alone = t.q.shape, t.cu_seqlens is None and not s.each and options.erases
    order = {"v_first": options.state_v_first, "alone": alone and T == 1}
    found: LaunchKey = keys.served_key(s.pool, K, t.v.shape[3], t.g, **order)
    return found


def _run_on_gathered_states(t: DeltaTensors, s: PoolCall, slots: Slots, grid: ChunkGrid, options: DeltaOptions) -> None:
    """Gather states from slots (`enter`), run the differentiable implementation, scatter them back (`leave`).

    The eager backend takes this path, and kernels for a low-rank rule, and for a call without tokens or sequences.
    """
    stage: Any = table.kernel_module("state_pool", options.backend)
    entering = s.pool.new_empty(grid.sequences, *s.pool.shape[1:], dtype=options.state_dtype)
    stage.enter(s.pool, slots, entering)
    result, _ = implementation_for(options).forward(t._replace(initial_state=entering), options, s.o, grid)
    if slots.each:
        stage.leave_each(_state_rows(t, result.states), slots, s.pool, grid, s.o)
        return
    stage.leave(result.final_state, slots, s.pool, grid, s.o)
    _store_checkpoints(t, s, result.states, slots, grid, options)


def _store_checkpoints(
    t: DeltaTensors, s: PoolCall, states: Tensor, slots: Slots, grid: ChunkGrid, options: DeltaOptions
) -> None:
    """Store intermediate states in the checkpoint pool, if the call has one and there are any."""
    if s.checkpoints is not None and states.numel():
        stage: Any = table.kernel_module("state_pool", options.backend)
        stage.leave_between(_state_rows(t, states), slots, grid, s.checkpoints, s.checkpoint_source)


def _state_rows(t: DeltaTensors, states: Tensor) -> Tensor:
    """View intermediate states as [rows, HV, ...]."""
    return states if t.cu_seqlens is not None else states.flatten(0, 1)


def _serve_fake(*arguments: Any) -> None:
    """Fake implementation: the operator returns nothing."""


serve_op = register(f"serve({SERVING_SCHEMA}, {DELTA_SCHEMA}) -> ()", _serve, _serve_fake)
