"""Context parallelism of the delta family on kernels: ranks send folds of the segment summaries.

The map of a piece is the fold of its segments' maps: it is the final state [H | M] of a fold that starts from [0 | I].
So the summaries of one GPU's segments (`rank_segments`) also give what ranks send, and every piece is prepared once.
`delta_segment_launches` has the launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.autograd.delta_chunk import backward_factors, factors_from_list
from wyfold.autograd.delta_records import INITIAL_STATE
from wyfold.context_parallel import delta_segment_launches as launches
from wyfold.context_parallel.collectives import wait_gathered
from wyfold.context_parallel.delta_rank import RankBackwardInputs, RankCall
from wyfold.context_parallel.delta_segment_records import (
    ForwardInputs,
    MapsBackInputs,
    MapsInputs,
    PiecesCall,
    ScanBackInputs,
    TokensBackInputs,
)


def maps(call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Compute H and M of the pieces that continue on another rank (`RankedDeltaImplementation.maps`).

    Returns:
        [send_rows, B, HV, K, V + K] send buffer; tails, H and M of the segments, factors.
    """
    tails, send_rows = _tails(call), call.context.partition.most_leaving * call.B
    send_buffer, H, M, factors = launches.maps(_pieces_call(call, entering), MapsInputs(tails, send_rows))
    return send_buffer.unflatten(0, (-1, call.B)), [tails, H, M, *factors]


def forward(
    call: RankCall, entering: Tensor, kept: list[Tensor], gathered: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Run all pieces from their entering states (`RankedDeltaImplementation.forward`).

    Returns:
        Output; final states of all pieces; entering states, tails, states at borders, M, and factors if they are saved.
    """
    tails, H, M, *factors = kept
    try:
        inputs = ForwardInputs(gathered, call.context.forward_routes(gathered.device), H, M, factors)
        o, final_state, entering, states = launches.forward(_pieces_call(call, entering), inputs)
    finally:
        wait_gathered(gathered)  # also if unused: PyTorch keeps a collective until it is waited for
    saved = backward_factors(factors_from_list(factors)) if call.options.keep_factors else []
    return o, final_state, [entering, tails, states, M, *saved]


def maps_back(
    call: RankCall, do: Tensor, leaving: Tensor, between: Tensor, saved: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute c of the pieces that began on another rank (`RankedDeltaImplementation.maps_back`).

    Returns:
        [send_rows, B, HV, K, V + K] send buffer; c of the segments, factors.
    """
    entering, _, _, M, *factors = saved
    send_rows = call.context.partition.most_entering * call.B
    inputs = MapsBackInputs(call.one_buffer(do), leaving, between.flatten(0, 1), M, factors, send_rows)
    send_buffer, c, made = launches.maps_back(_pieces_call(call, entering), inputs)
    return send_buffer.unflatten(0, (-1, call.B)), [c, *(factors or made)]


def backward(call: RankCall, given: RankBackwardInputs, kept: list[Tensor], gathered: Tensor) -> list[Tensor]:
    """Compute every needed gradient (`RankedDeltaImplementation.backward`).

    It empties `kept`, which is as large as the gradients, as soon as its tensors are no longer needed.
    """
    entering, tails, states, M = given.saved[:4]
    try:
        pieces_call, do, routes = (
            _pieces_call(call, entering),
            call.one_buffer(given.do),
            call.context.backward_routes(gathered.device),
        )
        scanned = tails, do, given.leaving, states, M, kept[0], kept[1:], given.needs[INITIAL_STATE]
        dS0, within, tokens = launches.scan_back(pieces_call, ScanBackInputs(gathered, routes, *scanned))
    finally:
        wait_gathered(gathered)
    del scanned
    kept.clear()
    found = launches.tokens_back(pieces_call, TokensBackInputs(do, within, tokens, given.needs))
    found[INITIAL_STATE] = dS0
    return found


def _pieces_call(call: RankCall, entering: Tensor) -> PiecesCall:
    """The call of all pieces from the states `entering`, with its chunk and segment tables."""
    options, device = call.options, call.tensors.q.device
    tables = call.context.segments(call.B, options.chunk_size, options.cut, device)
    return PiecesCall(call.packed(entering), call.inside, *tables)


def _tails(call: RankCall) -> Tensor:
    """Compute H and M of the tokens after the last full chunk of each piece that continues on another rank.

    Returns:
        [leaving B, HV, K, V + K]; zero and identity for a piece that has no such tokens. Without rows if no piece has
        any.
    """
    t, C = call.tensors, call.options.chunk_size
    K, V = t.q.shape[3], t.v.shape[3]
    leaving = [piece for piece in call.context.pieces if not piece.last]
    if not any(piece.length % C for piece in leaving):
        return call.states(0, V + K)
    tails, zero_state = call.states(len(leaving) * call.B, V + K), call.states(call.B, V)
    tails[..., V:] = torch.eye(K, device=tails.device)
    for piece in leaving:
        if tail := piece.length % C:
            tails.unflatten(0, (-1, call.B))[piece.leaving] = call.affine_map(piece, zero_state, piece.length - tail)
    return tails
