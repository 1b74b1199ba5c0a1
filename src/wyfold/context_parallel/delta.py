"""DeltaNet, GDN and KDA over the ranks of a group: one autograd function, one collective in each direction.

What a rank holds of one sequence together, a piece, is an affine map of the state that enters it, S -> M S + H:

    H       final state of the piece entered with zeros, or with what the caller gave where the sequence begins
    M       final state of the same scan with values of zero, entered with the identity: K value columns more
    enter   S of the next piece = M S + H, folded from the sequence's first piece on
    replay  the ordinary call of all that the rank holds, from the states that enter its pieces

    c       gradient of the entering state if that of the leaving one is zero, or the caller's where the sequence ends
    leave   dS of the piece before = M^T dS + c, folded from the sequence's last piece back
    replay  the ordinary backward, from the gradients of the states that leave the rank's pieces

so autograd never sees M and H: the gradient of the whole is that of the replay with the right gradients at its borders
(docs/algorithm.md, section 9). Ranks tell each other [H | M], and [c | M^T], in the width that states have inside, of
the pieces that cross their edges: as many numbers however long the sequences are.

How the maps are found, and what the replay makes use of, is the walk's matter: `delta_share` where kernels cut what is
long into segments anyway, whose maps they are; `delta_pieces` by ordinary calls.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from wyfold.autograd.delta_records import (
    DIFFERENTIABLE,
    INITIAL_STATE,
    TENSORS,
    DeltaResult,
    DeltaTensors,
    turned,
)
from wyfold.context_parallel import delta_by_replay, delta_by_segments
from wyfold.context_parallel.collectives import after
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta_rank import RankCall, RankGradient
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.segment_rule import WIDEST
from wyfold.runtime.torch_ops import apply, once_differentiable


def delta_across(tensors: DeltaTensors, options: DeltaOptions, context: ContextParallel) -> DeltaResult:
    """Results of one call whose sequences go on over the ranks of a context.

    Initial states are those of the sequences that begin here, final states of those that end here.
    """
    o, final_state = apply(options.operator, DeltaAcross, *tensors, options, context)
    return DeltaResult(o, final_state, o.new_empty(0))


class DeltaAcross(torch.autograd.Function):
    """The replay of a rank's pieces from the states that enter them."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, options, context = arguments
        t = DeltaTensors(*given)
        call, device = RankCall(t, options, context), t.q.device
        entering = call.at_pieces(t.initial_state, context.beginning(call.B, device))
        way = walk(call)
        sent, kept = way.maps(call, entering)
        o, final_state, saved = way.forward(call, entering, kept, context.gathering(sent))
        ctx.set_materialize_grads(False)
        ctx.options, ctx.context, ctx.shares = options, context, context.shares
        ctx.save_for_backward(*given, _maps_between(call, sent), *saved)
        if options.final_state:
            final_state = turned(final_state[context.ending(call.B, device)], options).to(options.state_dtype)
        return o.view(t.v.shape), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # once: checkpointing refuses a second unpacking
        t, (between, *saved) = DeltaTensors(*kept[:TENSORS]), kept[TENSORS:]
        call, context, device = RankCall(t, ctx.options, ctx.context), ctx.context, t.q.device
        if context.shares is not ctx.shares:  # on every rank, and before anything is sent
            op = call.options.operator
            raise ValueError(
                f"{op}: cp_context must be as in the forward, got one that was updated before the backward"
            )
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        dST = dST if call.options.final_state else None
        if do is None:
            do = t.v.new_zeros(()).expand(t.v.shape)
        leaving = call.at_pieces(dST, context.ending(call.B, device))
        way = walk(call)
        sent, made = way.maps_back(call, do, leaving, between, saved)
        told = context.gathering(after(sent, do, dST))
        gradients = way.backward(call, RankGradient(do, leaving, saved, needs), made, told)
        if needs[INITIAL_STATE] and t.initial_state is not None:
            begun = gradients[INITIAL_STATE][context.beginning(call.B, device)]
            gradients[INITIAL_STATE] = turned(begun, call.options).to(t.initial_state.dtype)
        none = (None,) * (TENSORS + 2 - DIFFERENTIABLE)
        # Gradients of one buffer are those of B rows, one after another.
        wanted = zip(gradients, t, needs, strict=False)
        return *(dx.view_as(x) if need and x is not None else None for dx, x, need in wanted), *none


class Walk(Protocol):
    """Both directions of a rank's call, each in two steps: before ranks tell each other, and after."""

    def maps(self, call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
        """[room, B, HV, K, V + K] H and M of the pieces that go on elsewhere, and zeros, as many rows as every rank
        sends; and what the second step reads.

        `entering`: [B pieces, HV, K, V] states of the sequences that begin here, and zeros.
        """

    def forward(
        self, call: RankCall, entering: Tensor, kept: list[Tensor], told: Tensor
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Output, final states of all pieces, and what the backward needs. `told`: what all ranks sent, under way."""

    def maps_back(
        self, call: RankCall, do: Tensor, leaving: Tensor, between: Tensor, saved: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """[room, B, HV, K, V + K] c of the pieces that began elsewhere beside the transposed maps `between`, and zeros;
        and what the second step reads."""

    def backward(self, call: RankCall, given: RankGradient, kept: list[Tensor], told: Tensor) -> list[Tensor]:
        """Every wanted gradient. `kept` is given up."""


def walk(call: RankCall) -> Walk:
    """The walk of a rank's call. What ranks tell each other is the same, so each has its own."""
    t = call.tensors
    by_kernels = call.options.backend == "triton" and summarised(call.context, call.B, t.q.shape[3], t.v.shape[3])
    return delta_by_segments if by_kernels else delta_by_replay


def summarised(context: ContextParallel, B: int, K: int, V: int) -> bool:
    """Whether kernels find what this rank tells the others, if kernels run the call."""
    return max(K, V) <= WIDEST and B * context.tokens > 0 and len(context.pieces) > 0


def _maps_between(call: RankCall, sent: Tensor) -> Tensor:
    """[entering, B, HV, K, K] maps M of the pieces that come from another rank and go on at one, zeros of those that
    end here, for the backward; none where none will follow."""
    K, V = call.tensors.q.shape[3], call.tensors.v.shape[3]
    coming = [piece for piece in call.context.pieces if not piece.first] if call.options.save else []
    maps = call.states(len(coming) * call.B, K).unflatten(0, (len(coming), call.B))
    for piece in coming:
        if not piece.last:
            maps[piece.entering] = sent[piece.leaving, ..., V:]
    return maps
