"""Recurrent implementation of the diagonal-plus-low-rank rules: a kernel that processes a whole call token by token.

    forward     chunk_grid (packed batches only), low_rank_recurrent
    backward    that of `low_rank_chunk`, which recomputes everything from the call's tensors

The forward saves only its arguments.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.autograd import low_rank_chunk
from wyfold.autograd.delta_records import (
    LEARNING,
    DeltaBackwardInputs,
    DeltaResult,
    DeltaTensors,
    empty_result,
    pass_through,
)
from wyfold.autograd.low_rank_chunk import BACKWARD_CHUNK, LowRankCall
from wyfold.autograd.row_alignment import vector_loadable
from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.options import DeltaOptions


def forward(
    t: DeltaTensors, options: DeltaOptions, out: Tensor | None = None, grid: ChunkGrid | None = None
) -> tuple[DeltaResult, list[Tensor]]:
    """Run the forward; it saves no tensors."""
    result = empty_result(t, options, out)
    if t.v.numel() == 0:
        if options.final_state:
            pass_through(t.initial_state, result.final_state)
        return result, []
    call = LowRankCall(t, options._replace(chunk_size=BACKWARD_CHUNK))
    grid = grid or call.chunk_grid()
    states = first = None
    if options.checkpoint_every:
        states = result.states if t.cu_seqlens is not None else result.states.flatten(0, 1)
        first = grid.first_states(t.q.device)
    entering = None if t.initial_state is None else vector_loadable(t.initial_state)
    slots = Slots(entering, result.final_state if options.final_state else None)
    recurrent = call.stage("recurrent").recurrent
    recurrent(*call.arguments, call.t.v, call.t.w, slots, grid, options, result.o, states, first)
    return result, []


def saved(t: DeltaTensors, options: DeltaOptions) -> list[Tensor]:
    """Return the list of saved tensors, which is empty."""
    return []


def backward(given: DeltaBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient, by the kernels of the chunk form."""
    t, options = (
        given.tensors,
        given.options._replace(chunk_size=BACKWARD_CHUNK, checkpoint_every=0, keep_factors=False),
    )
    if options.rule != "rates" or t.a is None or t.b is None:
        return low_rank_chunk.backward(given._replace(options=options))
    row, rates = t.a, t.b
    needs = list(given.needs)
    a, b = (LEARNING.index(DeltaTensors._fields.index(name)) for name in "ab")
    needs[a] = needs[b] = needs[a] or needs[b]
    tensors = t._replace(a=row.neg(), b=row * rates)
    given = given._replace(tensors=tensors, options=options._replace(rule="given"), needs=needs)
    found = low_rank_chunk.backward(given)
    if needs[a]:
        used = row.new_ones((), dtype=torch.bool)
        if t.cu_seqlens is not None:  # tokens past the last boundary may hold anything
            used = torch.arange(row.shape[1], device=row.device)[:, None, None] < t.cu_seqlens[-1]
        found[a], found[b] = (torch.where(used, x, 0.0) for x in (rates * found[b] - found[a], row * found[b]))
    return found
