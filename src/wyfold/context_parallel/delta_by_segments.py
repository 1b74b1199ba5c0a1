"""What a rank holds of the delta family's sequences, where kernels cut what is long into segments anyway: the walk that
tells other ranks what the segments' maps fold into.

Segments are those of `parallel.share_segments`, so that what one GPU summarises for itself is what ranks tell each
other: a piece's map is the fold of its segments' maps, of states [H | M] that begin as [0 | I]. A piece is prepared
once. The launches are `delta_share_launches`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.autograd.delta_chunk import kept_factors, unlisted
from wyfold.autograd.delta_records import INITIAL_STATE
from wyfold.context_parallel import delta_segment_launches as launches
from wyfold.context_parallel.collectives import arrived
from wyfold.context_parallel.delta_rank import RankCall, RankGradient
from wyfold.context_parallel.delta_segment_records import Forward, Maps, MapsBack, ScanBack, TokensBack, Where


def maps(call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[room, B, HV, K, V + K] H and M of the pieces that go on elsewhere, and zeros; and tails, H, M, factors."""
    tails, room = _tails(call), call.context.shares.most_leaving * call.B
    sent, H, M, factors = launches.maps(_where(call, entering), Maps(tails, room))
    return sent.unflatten(0, (-1, call.B)), [tails, H, M, *factors]


def forward(call: RankCall, entering: Tensor, kept: list[Tensor], told: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final states of all pieces, and what the backward needs: their entering states, tails, states at the
    borders, M, and factors if they are kept."""
    tails, H, M, *factors = kept
    try:
        own = Forward(told, call.context.arriving(told.device), H, M, factors)
        o, final_state, entering, states = launches.forward(_where(call, entering), own)
    finally:
        arrived(told)  # whoever needed it: PyTorch keeps a collective that nobody waits for
    saved = kept_factors(unlisted(factors)) if call.options.keep_factors else []
    return o, final_state, [entering, tails, states, M, *saved]


def maps_back(
    call: RankCall, do: Tensor, leaving: Tensor, between: Tensor, saved: list[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """[room, B, HV, K, V + K] c of the pieces that began elsewhere, maps, and zeros; and c of segments, and factors."""
    entering, _, _, M, *factors = saved
    room = call.context.shares.most_entering * call.B
    own = MapsBack(call.one_buffer(do), leaving, between.flatten(0, 1), M, factors, room)
    sent, c, made = launches.maps_back(_where(call, entering), own)
    return sent.unflatten(0, (-1, call.B)), [c, *(factors or made)]


def backward(call: RankCall, given: RankGradient, kept: list[Tensor], told: Tensor) -> list[Tensor]:
    """Every wanted gradient. `kept` is given up: what was made for this is as large as the gradients are."""
    entering, tails, states, M = given.saved[:4]
    try:
        at, do, routes = _where(call, entering), call.one_buffer(given.do), call.context.returning(told.device)
        scanned = tails, do, given.leaving, states, M, kept[0], kept[1:], given.needs[INITIAL_STATE]
        dS0, within, tokens = launches.scan_back(at, ScanBack(told, routes, *scanned))
    finally:
        arrived(told)
    del scanned
    kept.clear()
    found = launches.tokens_back(at, TokensBack(do, within, tokens, given.needs))
    found[INITIAL_STATE] = dS0
    return found


def _where(call: RankCall, entering: Tensor) -> Where:
    """The call of all pieces, from these states, and where chunks and segments lie."""
    options, device = call.options, call.tensors.q.device
    places = call.context.segments(call.B, options.chunk_size, options.cut, device)
    return Where(call.packed(entering), call.inside, *places)


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
            tails.unflatten(0, (-1, call.B))[piece.leaving] = call.map_of(piece, nothing, piece.length - rest)
    return tails
