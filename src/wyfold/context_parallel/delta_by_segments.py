"""Context parallelism of the delta family on kernels: ranks send folds of the segment summaries.

The map of a piece is the fold of its segments' maps: it is the final state [H | M] of a fold that starts from [0 | I].
So the summaries of one GPU's segments (`rank_segments`) also give what ranks send, and every piece is prepared once.
`delta_segment_launches` has the launches. Each direction is one registered operator, with its all-gather inside, so
that the replay cache repeats all of it.

Example: a sequence of 300 tokens on two ranks, C = 64, too short to be cut. States at borders are stored [V, K].

    rank 0      tokens 0 to 149. Segments of 128 and 22 tokens; the border between them is outgoing.
    rank 1      tokens 150 to 299. Segments of 0 and 150 tokens; the border between them is incoming.
    forward     rank 0 computes H of the 128 tokens from the caller's state, and the tail's map of the 22 tokens.
                `rank_send` applies the tail's map to H and sends the final state of the piece.
                Rank 1: `rank_carry` writes that state to the border, and the scan of the 150 tokens starts from it.
                Rank 0 scans its two segments.
    backward    rank 1 sends c of the 150 tokens, the gradient of their entering state.
                Rank 0: `rank_carry` gives it to the second segment as the gradient of its final state. Multiplied by
                the tail's M^T, it is added at the border.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.delta import TENSORS_SCHEMA
from wyfold.autograd.delta_records import INITIAL_STATE, TENSORS, DeltaBackwardInputs, DeltaTensors
from wyfold.autograd.kernel_call import backward_factors
from wyfold.context_parallel import delta_segment_launches as launches
from wyfold.context_parallel.delta_rank import Exchange, RankBackwardInputs, RankCall
from wyfold.context_parallel.delta_segment_launches import Saved, SegmentsCall
from wyfold.context_parallel.rank_segments import RankSegments
from wyfold.kernels import table
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.torch_ops import call as call_operator
from wyfold.runtime.torch_ops import register


def forward(call: RankCall, starting: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Run all pieces (`RankedDeltaImplementation.forward`)."""
    tensors, counts, exchange = _inputs(call, starting)
    tails = _tails(call)
    o, final_state, *saved, factors = call_operator(_forward_op, *tensors, tails, counts, *exchange, *call.inside)
    return o, final_state, [tails, *saved, *factors]


def backward(call: RankCall, given: RankBackwardInputs) -> list[Tensor]:
    """Compute every needed gradient (`RankedDeltaImplementation.backward`)."""
    tails, entering, states, M, sent, *factors = given.saved
    tensors, counts, exchange = _inputs(call, entering)
    do = None if given.do is None else call.one_buffer(given.do)
    kept = states, M, sent, factors, do, given.dleaving, given.needs
    found: list[Tensor] = call_operator(_backward_op, *tensors, tails, counts, *exchange, *kept, *call.inside)
    return found


def _inputs(call: RankCall, entering: Tensor | None) -> tuple[tuple[Any, ...], list[int], Exchange]:
    """Tensors of the call of all pieces and the buffer of their tables, the tables' counts, and the exchange."""
    options, context, device = call.options, call.context, call.tensors.q.device
    table_buffer, counts = context.segments(call.B, options.chunk_size, options.cut, device)
    return (*call.packed(entering), table_buffer), [*counts], call.exchange


def _tails(call: RankCall) -> Tensor | None:
    """Compute H and M of the tokens after the last full chunk of each piece that continues on another rank.

    Returns:
        [outgoing B, HV, K, V + K]; zero and identity for a piece that has no such tokens. None if no piece has any.
    """
    t, C = call.tensors, call.options.chunk_size
    K, V = t.q.shape[3], t.v.shape[3]
    outgoing = [piece for piece in call.context.pieces if not piece.last]
    if not any(piece.length % C for piece in outgoing):
        return None
    tails, zero_state = call.states(len(outgoing) * call.B, V + K), call.states(call.B, V)
    tails[..., V:] = torch.eye(K, device=tails.device)
    for piece in outgoing:
        if tail := piece.length % C:
            tails.unflatten(0, (-1, call.B))[piece.outgoing] = call.affine_map(piece, zero_state, piece.length - tail)
    return tails


# --- registered operators ---------------------------------------------------------------------------------------------

_CALL = f"{TENSORS_SCHEMA}, Tensor table, Tensor? tails, int[] counts"
_EXCHANGE = "int batch, int most_outgoing, int most_incoming, int world, str group"
_CALL_FIELDS = TENSORS + 3 + len(Exchange._fields)


def _segments_call(arguments: tuple[Any, ...], options: tuple[Any, ...]) -> SegmentsCall:
    """The call that an operator's first arguments and its options describe."""
    *tensors, buffer, tails, counts = arguments[: TENSORS + 3]
    exchange = Exchange(*arguments[TENSORS + 3 : _CALL_FIELDS])
    places = RankSegments.of(buffer, counts)
    return SegmentsCall(DeltaTensors(*tensors), DeltaOptions(*options), places, tails, exchange)


def _forward(*arguments: Any) -> tuple[Any, ...]:
    o, final_state, saved = launches.forward(_segments_call(arguments, arguments[_CALL_FIELDS:]))
    return o, final_state, *saved


def _forward_fake(*arguments: Any) -> tuple[Any, ...]:
    *tensors, buffer, _, counts = arguments[: TENSORS + 3]
    t, options = DeltaTensors(*tensors), DeltaOptions(*arguments[_CALL_FIELDS:])
    places, exchange = RankSegments.of(buffer, counts), Exchange(*arguments[TENSORS + 3 : _CALL_FIELDS])
    (HV, V), K = t.v.shape[2:], t.q.shape[3]

    def states(count: int, *sizes: int) -> Tensor:
        return t.q.new_empty(count, HV, *sizes, dtype=torch.float32)

    factors = []
    if options.save and options.keep_factors:
        prepare = table.kernel_module("prepare", options.backend)
        tiles, folded = places.grid_piece.shape[0] * HV, prepare.reads_folded(t.g)
        sizes = {"folded": folded, "norm": options.qk_l2norm}
        made = prepare.empty(t.q, t.g, tiles, options.chunk_size, **sizes, backward=True, forward=False)
        factors = backward_factors(made)
    return (
        t.v.new_empty(t.v.shape),
        states(places.pieces, K, V) if options.final_state else t.q.new_empty(0, dtype=torch.float32),
        states(places.pieces, K, V),
        states(places.borders, V, K),
        states(places.borders, K, K),
        states(exchange.batch * exchange.most_outgoing, K, V + K),
        factors,
    )


def _backward(*arguments: Any) -> list[Tensor]:
    *kept, do, dleaving, needs = arguments[_CALL_FIELDS : _CALL_FIELDS + 7]
    call = _segments_call(arguments, arguments[_CALL_FIELDS + 7 :])
    return launches.backward(call, Saved(arguments[INITIAL_STATE], *kept), do, dleaving, needs)


def _backward_fake(*arguments: Any) -> list[Tensor]:
    do, _, needs, *options = arguments[_CALL_FIELDS + 4 :]
    t = DeltaTensors(*arguments[:TENSORS])
    given = DeltaBackwardInputs(t, DeltaOptions(*options), [], do, None, needs)
    return given.to_input_dtypes(given.empty_grads())


_forward_op = register(
    f"delta_rank_fwd({_CALL}, {_EXCHANGE}, {DELTA_SCHEMA}) -> (Tensor o, Tensor final_state, Tensor entering, "
    "Tensor states, Tensor M, Tensor sent, Tensor[] factors)",
    _forward,
    _forward_fake,
)
_backward_op = register(
    f"delta_rank_bwd({_CALL}, {_EXCHANGE}, Tensor states, Tensor M, Tensor sent, Tensor[] factors, Tensor? do, "
    f"Tensor? dleaving, bool[] needs, {DELTA_SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
)
