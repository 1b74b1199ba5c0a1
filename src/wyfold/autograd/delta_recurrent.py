"""Recurrent implementation of the delta family: kernels that process a whole call token by token.

    forward     chunk_grid (packed batches only), recurrent
    backward    chunk_grid, recurrent for the states at every BLOCK-th token, recurrent_bwd, reduce_partials

The forward saves only its arguments. The backward recomputes the states it starts from with the forward kernel, so they
are bit-identical.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_result,
    pass_through,
)
from wyfold.autograd.row_alignment import vector_loadable
from wyfold.kernels import table
from wyfold.kernels.records import GradientOutputs, Slots
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.layout import legal_boundaries
from wyfold.runtime.options import DeltaOptions


class RecurrentCall:
    """Inputs that both directions derive from a call. It launches nothing by itself.

    Attributes:
        grid: Grid of the blocks of tokens, set by its launch.
    """

    grid: ChunkGrid

    def __init__(self, t: DeltaTensors, options: DeltaOptions):
        self.t, self.options = t, options
        self.stage: Any = table.kernel_module("recurrent", options.backend)
        # Kernels read these few numbers as contiguous arrays.
        self.A_log, self.dt_bias = (None if x is None else x.contiguous() for x in (t.A_log, t.dt_bias))
        self.inputs = t.q, t.k, t.v, t.g, t.beta, self.A_log, self.dt_bias
        self.initial = None if t.initial_state is None else vector_loadable(t.initial_state)

    @property
    def chunk_grid(self) -> Callable[[int], ChunkGrid]:
        """The launch that finds the blocks of the sequences; its argument is the distance of states to be returned."""
        (B, T), cu = self.t.q.shape[:2], self.t.cu_seqlens
        if cu is not None and check.readable(cu):
            legal_boundaries(self.options.operator, cu, T)
        grids: Any = table.kernel_module("chunk_grid", self.options.backend)
        return partial(grids.chunk_grid, B, T, self.stage.BLOCK, cu)


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward; it saves no tensors."""
    result, every = empty_result(t, options, out), options.checkpoint_every
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, []
    call = RecurrentCall(t, options)
    call.grid = call.chunk_grid(every)
    states = first = None
    if every:
        states = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
        first = call.grid.first_states(t.q.device)
    slots = Slots(call.initial, result.final_state if options.final_state else None)
    call.stage.recurrent(*call.inputs, slots, call.grid, options, result.o, states, first, every)
    return result, []


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Return the list of saved tensors, which is empty."""
    return []


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient."""
    t, options, _, do, dST, needs, _ = given
    found = given.empty_grads()
    dS0 = found[INITIAL_STATE] if needs[INITIAL_STATE] else None
    if t.v.numel() == 0:
        for grad in found:
            grad.zero_()
        if dS0 is not None:
            pass_through(dST, dS0)
        return found
    call = RecurrentCall(t, options)
    call.grid = call.chunk_grid(call.stage.BLOCK)
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    wanted = GradientOutputs(*(x if need else None for x, need in _token_gradients(found, needs)))
    states, first = _block_states(call)
    dST = None if dST is None else vector_loadable(dST)
    partials = call.stage.recurrent_bwd(
        *call.inputs, call.initial, states, first, do, dST, call.grid, options, wanted.v, dS0,
        call.stage.BLOCK, call.stage.RUN,
    )  # fmt: skip
    # The order in which parameter gradients are summed follows the gate's layout, so `reduce_partials` gets one layout.
    gate = None if t.g is None else vector_loadable(t.g)
    call.stage.reduce_partials(t.q, t.k, gate, *call.inputs[4:], partials, call.grid, options, wanted)
    return found


def _token_gradients(found: list[Tensor], needs: list[bool]) -> list[tuple[Tensor, bool]]:
    """Return every gradient except that of the initial states, with whether it is needed."""
    pairs = list(zip(found, needs, strict=True))
    del pairs[INITIAL_STATE]
    return pairs


def _block_states(call: RecurrentCall) -> tuple[Tensor | None, Tensor | None]:
    """Compute the states after every BLOCK tokens of each sequence.

    Returns:
        [rows, HV, ...] states, and the row of each sequence's first state; (None, None) if T < BLOCK.
    """
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
