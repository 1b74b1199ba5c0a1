"""Context parallelism of the delta family on kernels: ranks send folds of the segment summaries.

The map of a piece is the fold of its segments' maps: it is the final state [H | M] of a fold that starts from [0 | I].
So the summaries of one GPU's segments (`rank_segments`) also give what ranks send, and every piece is prepared once.
`delta_segment_launches` has the launches.

Example: a sequence of 300 tokens on two ranks, C = 64, too short to be cut. States at borders are stored [V, K].

    rank 0      tokens 0 to 149. Segments of 128 and 22 tokens; the border between them is outgoing.
    rank 1      tokens 150 to 299. Segments of 0 and 150 tokens; the border between them is incoming.
    forward     `maps` on rank 0: H of the 128 tokens from the caller's state, and the tail's map of the 22 tokens.
                `rank_send` applies the tail's map to H and sends the final state of the piece.
                `forward` on rank 1: `rank_carry` writes that state to the border, and the scan of the 150 tokens
                starts from it. Rank 0 scans its two segments.
    backward    `maps_back` on rank 1 sends c of the 150 tokens, the gradient of their entering state.
                `scan_back` on rank 0: `rank_carry` gives it to the second segment as the gradient of its final state.
                Multiplied by the tail's M^T, it is added at the border.
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
    tails, send_rows = _tails(call), call.context.partition.most_outgoing * call.B
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
    call: RankCall, do: Tensor, dleaving: Tensor, incoming_M: Tensor, saved: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Compute c of the pieces that began on another rank (`RankedDeltaImplementation.maps_back`).

    Returns:
        [send_rows, B, HV, K, V + K] send buffer; c of the segments, factors.
    """
    entering, _, _, M, *factors = saved
    send_rows = call.context.partition.most_incoming * call.B
    inputs = MapsBackInputs(call.one_buffer(do), dleaving, incoming_M.flatten(0, 1), M, factors, send_rows)
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
        scanned = tails, do, given.dleaving, states, M, kept[0], kept[1:], given.needs[INITIAL_STATE]
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
        [outgoing B, HV, K, V + K]; zero and identity for a piece that has no such tokens. Without rows if no piece has
        any.
    """
    t, C = call.tensors, call.options.chunk_size
    K, V = t.q.shape[3], t.v.shape[3]
    outgoing = [piece for piece in call.context.pieces if not piece.last]
    if not any(piece.length % C for piece in outgoing):
        return call.states(0, V + K)
    tails, zero_state = call.states(len(outgoing) * call.B, V + K), call.states(call.B, V)
    tails[..., V:] = torch.eye(K, device=tails.device)
    for piece in outgoing:
        if tail := piece.length % C:
            tails.unflatten(0, (-1, call.B))[piece.outgoing] = call.affine_map(piece, zero_state, piece.length - tail)
    return tails
