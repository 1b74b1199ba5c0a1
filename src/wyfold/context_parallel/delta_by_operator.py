"""Context parallelism of the delta family by the ordinary operator: its calls compute the maps that ranks send.

It serves the eager backend, the diagonal-plus-low-rank rules, states too wide for the summary kernels, and ranks
without a token. A piece's map is the final state of the piece alone, with K more value columns. After the all-gather,
one call runs all pieces from the states that enter them. A piece whose sequence continues on another rank therefore
runs twice.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.autograd.delta import implementation_for, run, run_backward
from wyfold.autograd.delta_records import DIFFERENTIABLE, INITIAL_STATE, DeltaBackwardInputs
from wyfold.context_parallel.collectives import after
from wyfold.context_parallel.delta_rank import RankBackwardInputs, RankCall
from wyfold.context_parallel.partition import Piece
from wyfold.context_parallel.routes import backward_routes, forward_routes
from wyfold.kernels.rank_carry.eager import route_count, route_states
from wyfold.runtime.torch_ops import call as call_operator
from wyfold.runtime.torch_ops import register


def forward(call: RankCall, starting: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Run all pieces (`RankedDeltaImplementation.forward`).

    Saves the states that enter the pieces, `_incoming_maps`, and what the operator saves.
    """
    K, V, context = call.K, call.V, call.context
    entering = call.states(call.B * len(context.pieces), V) if starting is None else starting
    send_rows = context.partition.most_outgoing
    send_buffer = call.states(send_rows * call.B, V + K).unflatten(0, (send_rows, call.B))
    for piece in context.pieces:
        if piece.last:
            continue
        S = entering[call.rows(piece)]
        if piece.first:  # M stays zero, because H includes the initial state
            options = call.inside._replace(final_state=True, save=False, keep_factors=False)
            send_buffer[piece.outgoing, ..., :V] = run(call.alone(piece, S), options)[0].final_state
        else:
            send_buffer[piece.outgoing] = call.affine_map(piece, S)
    gathered = context.all_gather(send_buffer)
    S = call_operator(_route_op, gathered, forward_routes(context.partition, context.rank), V)
    entering = after(entering.clone(), gathered)
    for piece in context.pieces:
        if not piece.first:
            entering[call.rows(piece)] = S[piece.incoming]
    result, saved = run(call.packed(entering), call.inside)
    return result.o, result.final_state, [entering, _incoming_maps(call, send_buffer), *saved]


def backward(call: RankCall, given: RankBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient (`RankedDeltaImplementation.backward`)."""
    K, V, context = call.K, call.V, call.context
    entering, incoming_M, *saved = given.saved
    do = call.tensors.v.new_zeros(()).expand(call.tensors.v.shape) if given.do is None else given.do
    leaving = call.states(call.B * len(context.pieces), V) if given.dleaving is None else given.dleaving
    send_rows = context.partition.most_incoming
    send_buffer = call.states(send_rows * call.B, V + K).unflatten(0, (send_rows, call.B))
    for piece in context.pieces:
        if not piece.first:
            rows = call.rows(piece)
            send_buffer[piece.incoming, ..., :V] = _back_through(call, piece, entering[rows], do, leaving[rows])
            send_buffer[piece.incoming, ..., V:] = incoming_M[piece.incoming].mT
    gathered = context.all_gather(after(send_buffer, given.do, given.dleaving))
    dS = call_operator(_route_op, gathered, backward_routes(context.partition, context.rank), V)
    leaving = after(leaving.clone(), gathered)
    for piece in context.pieces:
        if not piece.last:
            leaving[call.rows(piece)] = dS[piece.outgoing]
    packed = call.packed(entering)
    return run_backward(DeltaBackwardInputs(packed, call.inside, saved, call.one_buffer(do), leaving, given.needs))


def _incoming_maps(call: RankCall, send_buffer: Tensor) -> Tensor:
    """Copy the maps M that the backward sends.

    Returns:
        [incoming, B, HV, K, K] M of the pieces that began on another rank; zeros for sequences that end here. Without
        a backward there are no rows.
    """
    incoming = [piece for piece in call.context.pieces if not piece.first] if call.options.save else []
    maps = call.states(len(incoming) * call.B, call.K).unflatten(0, (len(incoming), call.B))
    for piece in incoming:
        if not piece.last:
            maps[piece.incoming] = send_buffer[piece.outgoing, ..., call.V :]
    return maps


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


_route_op = register(  # an operator, because its products must have full precision
    "delta_received(Tensor gathered, int[] routes, int V) -> Tensor",
    route_states,
    lambda gathered, routes, V: gathered.new_empty(route_count(routes), *gathered.shape[2:-1], V),
)
