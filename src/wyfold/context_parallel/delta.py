"""DeltaNet, GDN and KDA over the ranks of a group: one autograd function, one all-gather in each direction.

A piece is a run of one sequence's tokens that one rank holds. It is an affine map of the state that enters it,
S -> M S + H:

    H       final state of the piece with an initial state of zero, or the caller's where the sequence begins
    M       final state of the same scan with zero values and the identity as initial state: K more value columns
    enter   S of the next piece = M S + H, folded from the sequence's first piece on
    run     the ordinary forward of all pieces of the rank, from the states that enter them

    c       gradient of the entering state if that of the final state is zero, or the caller's where the sequence ends
    leave   dS of the piece before = M^T dS + c, folded from the sequence's last piece back
    run     the ordinary backward, from the gradients of the pieces' final states

Autograd never sees M and H: the gradient of the whole is that of the ordinary calls with the right gradients at their
borders (docs/algorithm.md, section 9). Ranks gather [H | M], and [c | M^T], of the pieces whose sequences continue on
another rank, in the wide dtype of states. Their size does not depend on sequence lengths.

Two implementations compute the maps: `delta_by_segments` from the segment summaries of the chunk kernels,
`delta_by_operator` by ordinary calls.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wyfold.autograd.delta_records import (
    INITIAL_STATE,
    TENSORS,
    DeltaResult,
    DeltaTensors,
    as_input_grads,
    gradient_needs,
    transpose_if_v_first,
)
from wyfold.context_parallel import delta_by_operator, delta_by_segments
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta_rank import RankBackwardInputs, RankCall
from wyfold.runtime.differentiation import apply, once_differentiable
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.segment_rule import WIDEST


def delta_across_ranks(tensors: DeltaTensors, options: DeltaOptions, context: ContextParallel) -> DeltaResult:
    """Run one call whose sequences span the ranks of a context.

    Initial states are those of the sequences that begin on this rank, final states those of the sequences that end on
    it.
    """
    o, final_state = apply(options.operator, DeltaAcrossRanks, *tensors, options, context)
    return DeltaResult(o, final_state, o.new_empty(0))


class DeltaAcrossRanks(torch.autograd.Function):
    """The forward and backward of a rank's pieces, from the states and gradients that other ranks send."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, options, context = arguments
        t = DeltaTensors(*given)
        call, device = RankCall(t, options, context), t.q.device
        starting: Tensor | None = None
        if t.initial_state is not None:
            starting = call.states_at_pieces(t.initial_state, context.starting_pieces(call.B, device))
        o, final_state, saved = ranked_implementation_for(call).forward(call, starting)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.context, ctx.partition = options, context, context.partition
        ctx.save_for_backward(*given, *saved)
        if options.final_state:
            final_state = transpose_if_v_first(final_state[context.ending_pieces(call.B, device)], options).to(
                options.state_dtype
            )
        return o.view(t.v.shape), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: checkpointing refuses a second unpacking
        t, saved = DeltaTensors(*kept[:TENSORS]), list(kept[TENSORS:])
        call, context, device = RankCall(t, ctx.options, ctx.context), ctx.context, t.q.device
        context.require_partition(call.options.operator, ctx.partition)
        needs = gradient_needs(call.options, ctx.needs_input_grad)
        dleaving: Tensor | None = None
        if dST is not None and call.options.final_state:
            dleaving = call.states_at_pieces(dST, context.ending_pieces(call.B, device))
        gradients = ranked_implementation_for(call).backward(call, RankBackwardInputs(do, dleaving, saved, needs))
        if needs[INITIAL_STATE] and t.initial_state is not None:
            starting = gradients[INITIAL_STATE][context.starting_pieces(call.B, device)]
            gradients[INITIAL_STATE] = transpose_if_v_first(starting, call.options).to(t.initial_state.dtype)
        # Gradients of one buffer are those of B rows, one after another.
        found = zip(
            as_input_grads([dx if need else None for dx, need in zip(gradients, needs, strict=True)], TENSORS), t
        )
        return *(None if dx is None or x is None else dx.view_as(x) for dx, x in found), None, None


class RankedDeltaImplementation(Protocol):
    """An implementation of both directions of a rank's call: a module.

    Each direction gathers one send buffer from all ranks. In the forward it has H and M of the pieces whose sequences
    continue on another rank, [most_outgoing, B, HV, K, V + K]; in the backward c and M^T of the pieces whose sequences
    began on another rank, [most_incoming, B, HV, K, V + K]. Rows without a piece are zeros.
    """

    def forward(self, call: RankCall, starting: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Run the pieces from the states that enter them.

        Args:
            call: This rank's part of the call.
            starting: [B pieces, HV, K, V] initial states of the sequences that begin here, zeros elsewhere; None for
                zeros.

        Returns:
            Output, final states of all pieces, tensors that the backward reads.
        """

    def backward(self, call: RankCall, given: RankBackwardInputs) -> list[Tensor]:
        """Compute every needed gradient; that of the initial states [B pieces, HV, K, V]."""


def ranked_implementation_for(call: RankCall) -> RankedDeltaImplementation:
    """Return the implementation of this rank's call; ranks may differ, because both exchange the same buffers."""
    t = call.tensors
    options, K, V = call.options, t.q.shape[3], t.v.shape[3]
    by_kernels = options.backend == "triton" and summarized_by_kernels(call.context, options.rule, call.B, K, V)
    return delta_by_segments if by_kernels else delta_by_operator


def summarized_by_kernels(context: ContextParallel, rule: str, B: int, K: int, V: int) -> bool:
    """Whether summary kernels can compute the maps of this rank's pieces.

    They cannot for a diagonal-plus-low-rank rule, for wide states, or without tokens.
    """
    return rule == "delta" and max(K, V) <= WIDEST and B * context.tokens > 0 and len(context.pieces) > 0
