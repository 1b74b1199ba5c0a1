"""The delta family token by token as launches over whole calls: the walk of the recurrent kernels.

    forward     (chunk grid of a packed batch), recurrent
    backward    the same, recurrent for the states at every BLOCK-th token, recurrent_bwd, gather

The forward keeps nothing but its arguments: its own kernel makes the states again that the backward starts from, so
they have its bits.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.autograd.delta_chunk import pass_through
from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_result,
)
from wyfold.kernels import table
from wyfold.kernels.records import GradientOutputs, Slots
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions


class RecurrentCall:
    """What both directions derive from a call's tensors and options before the first launch."""

    def __init__(self, t: DeltaTensors, options: DeltaOptions, every: int | None = None):
        B, T = t.q.shape[:2]
        if t.cu_seqlens is not None and check.readable(t.cu_seqlens):
            legal_boundaries(options.operator, t.cu_seqlens, T)
        self.t, self.options = t, options
        self.stage: Any = table.kernel_module("recurrent", options.backend)
        grids: Any = table.kernel_module("chunk_grid", options.backend)
        self.grid = grids.chunk_grid(B, T, self.stage.BLOCK, t.cu_seqlens, self.stage.BLOCK if every is None else every)
        # Kernels read these few numbers where they lie one after another.
        self.A_log, self.dt_bias = (None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias))
        self.inputs = t.q, t.k, t.v, t.g, t.beta, self.A_log, self.dt_bias
        self.initial = None if t.initial_state is None else _in_place(t.initial_state)


def _in_place(states: Tensor) -> Tensor:
    """States where the kernels can load them as vectors, which is what the order of their sums follows from."""
    states = states.contiguous()
    return states if states.data_ptr() % 16 == 0 else states.clone()


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Results; the backward needs nothing of them."""
    result, every = empty_result(t, options, out), options.checkpoint_every
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, []
    call = RecurrentCall(t, options, every)
    states = first = None
    if every:
        states = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
        first = call.grid.first_states(t.q.device)
    slots = Slots(call.initial, result.final_state if options.final_state else None)
    call.stage.recurrent(*call.inputs, slots, call.grid, options, result.o, states, first, every)
    return result, []


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """What the forward keeps: nothing."""
    return []


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Every wanted gradient."""
    t, options, _, do, dST, needs = given
    found = given.empty_grads()
    dS0 = found[INITIAL_STATE] if needs[INITIAL_STATE] else None
    if t.v.numel() == 0:
        for grad in found:
            grad.zero_()
        if dS0 is not None:
            pass_through(dST, dS0)
        return found
    call = RecurrentCall(t, options)
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    wanted = GradientOutputs(*(x if need else None for x, need in _without_states(found, needs)))
    states, first = _between(call)
    dST = None if dST is None else _in_place(dST)
    shares = call.stage.recurrent_bwd(
        *call.inputs, call.initial, states, first, do, dST, call.grid, options, wanted.v, dS0,
        call.stage.BLOCK, call.stage.RUN,
    )  # fmt: skip
    # As the parameters' shares of a gate's gradient are added up, so the gate has to be read: in one layout.
    gate = None if t.g is None else _in_place(t.g)
    call.stage.gather(t.q, t.k, gate, *call.inputs[4:], shares, call.grid, options, wanted)
    return found


def _without_states(found: list[Tensor], needs: list[bool]) -> list[tuple[Tensor, bool]]:
    """Every gradient but that of the initial states, and whether it is wanted."""
    pairs = list(zip(found, needs, strict=True))
    del pairs[INITIAL_STATE]
    return pairs


def _between(call: RecurrentCall) -> tuple[Tensor | None, Tensor | None]:
    """States after every BLOCK tokens of each sequence, and the row of each sequence's first; None where T is less."""
    (B, T, HV, V), K, BLOCK = call.t.v.shape, call.t.q.shape[3], call.stage.BLOCK
    rows = B * (T // BLOCK)
    if rows == 0:
        return None, None
    order = (V, K) if call.options.state_v_first else (K, V)
    states = call.t.v.new_empty(rows, HV, *order, dtype=call.stage.WIDE)
    first = call.grid.first_states(call.t.q.device)
    slots = Slots(call.initial, None)
    call.stage.recurrent(*call.inputs, slots, call.grid, call.options, None, states, first, BLOCK)
    return states, first
