"""Context parallelism of the delta family by the ordinary operator: its calls compute the maps that ranks send.

It serves the eager backend, states too wide for the summary kernels, and ranks without a token. A piece's map is the
final state of the piece alone, with K more value columns. After the all-gather, one call runs all pieces from the
states that enter them. A piece whose sequence continues on another rank therefore runs twice.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.autograd.delta import implementation_for, run, run_backward
from wyfold.autograd.delta_records import DIFFERENTIABLE, INITIAL_STATE, DeltaBackwardInputs
from wyfold.context_parallel.collectives import after, wait_gathered
from wyfold.context_parallel.delta_rank import RankBackwardInputs, RankCall
from wyfold.context_parallel.partition import Piece
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.kernels.rank_carry.eager import route_count, route_states
from wyfold.runtime.torch_ops import call as called
from wyfold.runtime.torch_ops import register


def maps(call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Compute H and M of the pieces that continue on another rank (`RankedDeltaImplementation.maps`)."""
    K, V = call.tensors.q.shape[3], call.tensors.v.shape[3]
    outgoing = [piece for piece in call.context.pieces if not piece.last]
    send_rows = call.context.partition.most_outgoing
    send_buffer = call.states(send_rows * call.B, V + K).unflatten(0, (send_rows, call.B))
    for piece in outgoing:
        S = entering[call.rows(piece)]
        if piece.first:  # M stays zero, because H includes the initial state
            options = call.inside._replace(final_state=True, save=False, keep_factors=False)
            send_buffer[piece.outgoing, ..., :V] = run(call.alone(piece, S), options)[0].final_state
        else:
            send_buffer[piece.outgoing] = call.affine_map(piece, S)
    return send_buffer, []


def forward(
    call: RankCall, entering: Tensor, kept: list[Tensor], gathered: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run all pieces from their entering states (`RankedDeltaImplementation.forward`)."""
    S = _received(gathered, forward_routes(call.context.partition, call.context.rank), call.tensors.v.shape[3])
    entering = after(entering.clone(), gathered)
    for piece in call.context.pieces:
        if not piece.first:
            entering[call.rows(piece)] = S[piece.incoming]
    result, saved = run(call.packed(entering), call.inside)
    return result.o, result.final_state, [entering, *saved]


def maps_back(
    call: RankCall, do: Tensor, dleaving: Tensor, incoming_M: Tensor, saved: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute c of the pieces that began on another rank (`RankedDeltaImplementation.maps_back`)."""
    K, V = call.tensors.q.shape[3], do.shape[3]
    send_rows = call.context.partition.most_incoming
    send_buffer = call.states(send_rows * call.B, V + K).unflatten(0, (send_rows, call.B))
    for piece in call.context.pieces:
        if not piece.first:
            rows = call.rows(piece)
            send_buffer[piece.incoming, ..., :V] = _back_through(call, piece, saved[0][rows], do, dleaving[rows])
            send_buffer[piece.incoming, ..., V:] = incoming_M[piece.incoming].mT
    return send_buffer, []


def _back_through(call: RankCall, piece: Piece, S: Tensor, do: Tensor, dS: Tensor) -> Tensor:
    """[B, HV, K, V] gradient of the state that enters a piece, given the gradient dS of its final state."""
    # Segments are switched off, because their backward needs maps that only a forward computes.
    options = call.inside._replace(final_state=True, keep_factors=False, segment_chunks=0, segments=1)
    t = call.alone(piece, S)
    needs = [index == INITIAL_STATE for index in range(DIFFERENTIABLE)]
    # The backward expects saved tensors, but the initial state's gradient does not read their contents.
    saved = implementation_for(options).saved(t, options)
    d_out = do.narrow(1, piece.offset, piece.length)
    return run_backward(DeltaBackwardInputs(t, options, saved, d_out, dS, needs))[INITIAL_STATE]


def backward(call: RankCall, given: RankBackwardInputs, kept: list[Tensor], gathered: Tensor) -> list[Tensor]:
    """Compute every needed gradient (`RankedDeltaImplementation.backward`)."""
    dS = _received(gathered, backward_routes(call.context.partition, call.context.rank), given.do.shape[3])
    dleaving = after(given.dleaving.clone(), gathered)
    for piece in call.context.pieces:
        if not piece.last:
            dleaving[call.rows(piece)] = dS[piece.outgoing]
    entering, *saved = given.saved
    packed, do = call.packed(entering), call.one_buffer(given.do)
    return run_backward(DeltaBackwardInputs(packed, call.inside, saved, do, dleaving, given.needs))


def _received(gathered: Tensor, routes: list[int], V: int) -> Tensor:
    """Wait for the gathered buffers and compute the states at the ends of routes (`route_states`), for a compiler."""
    found: Tensor = called(_received_op, gathered, routes, V)
    return found


def _received_fake(gathered: Tensor, routes: list[int], V: int) -> Tensor:
    return gathered.new_empty(route_count(routes), *gathered.shape[2:-1], V)


_received_op = register(
    "delta_received(Tensor gathered, int[] routes, int V) -> Tensor",
    lambda gathered, routes, V: route_states(wait_gathered(gathered), routes, V),
    _received_fake,
)
