"""What a rank holds of the delta family's sequences, where kernels cut what is long into segments anyway: the walk that
tells other ranks what the segments' maps fold into.

Segments are those of `parallel.share_segments`, so that what one GPU summarises for itself is what ranks tell each
other: a piece's map is the fold of its segments' maps, of states [H | M] that begin as [0 | I]. A piece is prepared
once. The launches are `delta_share_launches`'.
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
    """[send_rows, B, HV, K, V + K] H and M of the pieces that go on elsewhere, and zeros; and tails, H, M, factors."""
    tails, send_rows = _tails(call), call.context.partition.most_leaving * call.B
    send_buffer, H, M, factors = launches.maps(_pieces_call(call, entering), MapsInputs(tails, send_rows))
    return send_buffer.unflatten(0, (-1, call.B)), [tails, H, M, *factors]


def forward(
    call: RankCall, entering: Tensor, kept: list[Tensor], gathered: Tensor
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final states of all pieces, and what the backward needs: their entering states, tails, states at the
    borders, M, and factors if they are kept."""
    tails, H, M, *factors = kept
    try:
        inputs = ForwardInputs(gathered, call.context.forward_routes(gathered.device), H, M, factors)
        o, final_state, entering, states = launches.forward(_pieces_call(call, entering), inputs)
    finally:
        wait_gathered(gathered)  # whoever needed it: PyTorch keeps a collective that nobody waits for
    saved = backward_factors(factors_from_list(factors)) if call.options.keep_factors else []
    return o, final_state, [entering, tails, states, M, *saved]


def maps_back(
    call: RankCall, do: Tensor, leaving: Tensor, between: Tensor, saved: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """[send_rows, B, HV, K, V + K] c and M^T of pieces that began on another rank; then c of segments, and factors."""
    entering, _, _, M, *factors = saved
    send_rows = call.context.partition.most_entering * call.B
    inputs = MapsBackInputs(call.one_buffer(do), leaving, between.flatten(0, 1), M, factors, send_rows)
    send_buffer, c, made = launches.maps_back(_pieces_call(call, entering), inputs)
    return send_buffer.unflatten(0, (-1, call.B)), [c, *(factors or made)]


def backward(call: RankCall, given: RankBackwardInputs, kept: list[Tensor], gathered: Tensor) -> list[Tensor]:
    """Every wanted gradient. `kept` is given up: what was made for this is as large as the gradients are."""
    entering, tails, states, M = given.saved[:4]
    try:
        at, do, routes = (
            _pieces_call(call, entering),
            call.one_buffer(given.do),
            call.context.backward_routes(gathered.device),
        )
        scanned = tails, do, given.leaving, states, M, kept[0], kept[1:], given.needs[INITIAL_STATE]
        dS0, within, tokens = launches.scan_back(at, ScanBackInputs(gathered, routes, *scanned))
    finally:
        wait_gathered(gathered)
    del scanned
    kept.clear()
    found = launches.tokens_back(at, TokensBackInputs(do, within, tokens, given.needs))
    found[INITIAL_STATE] = dS0
    return found


def _pieces_call(call: RankCall, entering: Tensor) -> PiecesCall:
    """The call of all pieces, from these states, and where chunks and segments lie."""
    options, device = call.options, call.tensors.q.device
    places = call.context.segments(call.B, options.chunk_size, options.cut, device)
    return PiecesCall(call.packed(entering), call.inside, *places)


def _tails(call: RankCall) -> Tensor:
    """[leaving B, HV, K, V + K] H and M of the tokens behind the last full chunk of each piece that goes on elsewhere:
    zeros and the identity where there are none. Of no elements if no piece has any."""
    t, C = call.tensors, call.options.chunk_size
    K, V = t.q.shape[3], t.v.shape[3]
    leaving = [piece for piece in call.context.pieces if not piece.last]
    if not any(piece.length % C for piece in leaving):
        return call.states(0, V + K)
    tails, nothing = call.states(len(leaving) * call.B, V + K), call.states(call.B, V)
    tails[..., V:] = torch.eye(K, device=tails.device)
    for piece in leaving:
        if rest := piece.length % C:
            tails.unflatten(0, (-1, call.B))[piece.leaving] = call.affine_map(piece, nothing, piece.length - rest)
    return tails
