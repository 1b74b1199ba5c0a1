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
from wyfold.context_parallel.collectives import after
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta_rank import RankBackwardInputs, RankCall
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.segment_rule import WIDEST
from wyfold.runtime.torch_ops import apply, once_differentiable


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
        entering = call.states_at_pieces(t.initial_state, context.starting_pieces(call.B, device))
        implementation = ranked_implementation_for(call)
        send_buffer, kept = implementation.maps(call, entering)
        o, final_state, saved = implementation.forward(call, entering, kept, context.all_gather_async(send_buffer))
        ctx.set_materialize_grads(False)
        ctx.options, ctx.context, ctx.partition = options, context, context.partition
        ctx.save_for_backward(*given, _incoming_maps(call, send_buffer), *saved)
        if options.final_state:
            final_state = transpose_if_v_first(final_state[context.ending_pieces(call.B, device)], options).to(
                options.state_dtype
            )
        return o.view(t.v.shape), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # read once: checkpointing refuses a second unpacking
        t, (incoming_M, *saved) = DeltaTensors(*kept[:TENSORS]), kept[TENSORS:]
        call, context, device = RankCall(t, ctx.options, ctx.context), ctx.context, t.q.device
        if context.partition is not ctx.partition:  # raised on every rank, before the all-gather
            op = call.options.operator
            raise ValueError(
                f"{op}: cp_context must be as in the forward, got one that was updated before the backward"
            )
        needs = gradient_needs(call.options, ctx.needs_input_grad)
        dST = dST if call.options.final_state else None
        if do is None:
            do = t.v.new_zeros(()).expand(t.v.shape)
        dleaving = call.states_at_pieces(dST, context.ending_pieces(call.B, device))
        implementation = ranked_implementation_for(call)
        send_buffer, made = implementation.maps_back(call, do, dleaving, incoming_M, saved)
        gathered = context.all_gather_async(after(send_buffer, do, dST))
        gradients = implementation.backward(call, RankBackwardInputs(do, dleaving, saved, needs), made, gathered)
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

    Each direction has two steps. The first computes what this rank sends, the second reads what all ranks sent.
    """

    def maps(self, call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Summarize the pieces whose sequences continue on another rank.

        Args:
            call: This rank's part of the call.
            entering: [B pieces, HV, K, V] initial states of the sequences that begin here; zeros elsewhere.

        Returns:
            [send_rows, B, HV, K, V + K] H and M of these pieces, padded with zeros to the rows that every rank sends;
            the tensors that `forward` reads.
        """

    def forward(
        self, call: RankCall, entering: Tensor, kept: list[Tensor], gathered: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Run the pieces from the states that enter them.

        Args:
            call: This rank's part of the call.
            entering, kept: Argument and second result of `maps`.
            gathered: [world, send_rows, B, HV, K, V + K] send buffers of all ranks, maybe still being gathered.

        Returns:
            Output, final states of all pieces, tensors that the backward reads.
        """

    def maps_back(
        self, call: RankCall, do: Tensor, dleaving: Tensor, incoming_M: Tensor, saved: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Summarize the backward of the pieces whose sequences began on another rank.

        Args:
            call: This rank's part of the call.
            do: [B, T, HV, V] gradient of the output.
            dleaving: [B pieces, HV, K, V] gradients of the final states of sequences that end here; zeros elsewhere.
            incoming_M: [incoming, B, HV, K, K] maps M of these pieces; zeros if the sequence ends in the piece.
            saved: Third result of `forward`.

        Returns:
            [send_rows, B, HV, K, V + K] c of these pieces and the transposed maps, padded with zeros to the rows that
            every rank sends; the tensors that `backward` reads.
        """

    def backward(self, call: RankCall, given: RankBackwardInputs, kept: list[Tensor], gathered: Tensor) -> list[Tensor]:
        """Compute every needed gradient.

        Args:
            call: This rank's part of the call.
            given: Inputs of the backward.
            kept: Second result of `maps_back`; this call may empty it, to free memory.
            gathered: [world, send_rows, B, HV, K, V + K] send buffers of all ranks, maybe still being gathered.
        """


def ranked_implementation_for(call: RankCall) -> RankedDeltaImplementation:
    """Return the implementation of this rank's call; ranks may differ, because both exchange the same buffers."""
    t = call.tensors
    by_kernels = call.options.backend == "triton" and summarized_by_kernels(
        call.context, call.B, t.q.shape[3], t.v.shape[3]
    )
    return delta_by_segments if by_kernels else delta_by_operator


def summarized_by_kernels(context: ContextParallel, B: int, K: int, V: int) -> bool:
    """Whether the chunk kernels can compute the maps of this rank's pieces: not for wide states or without tokens."""
    return max(K, V) <= WIDEST and B * context.tokens > 0 and len(context.pieces) > 0


def _incoming_maps(call: RankCall, send_buffer: Tensor) -> Tensor:
    """Copy the maps M that the backward sends.

    Returns:
        [incoming, B, HV, K, K] M of the pieces that began on another rank; zeros for sequences that end here. Without
        a backward there are no rows.
    """
    K, V = call.tensors.q.shape[3], call.tensors.v.shape[3]
    incoming = [piece for piece in call.context.pieces if not piece.first] if call.options.save else []
    maps = call.states(len(incoming) * call.B, K).unflatten(0, (len(incoming), call.B))
    for piece in incoming:
        if not piece.last:
            maps[piece.incoming] = send_buffer[piece.outgoing, ..., V:]
    return maps
