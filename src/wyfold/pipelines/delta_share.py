"""What a rank holds of the delta family's sequences, where kernels cut what is long into segments anyway: the walk that
tells other ranks what the segments' maps fold into.

Segments are those of `parallel.share_segments`, so that what one GPU summarises for itself is what ranks tell each
other: a piece's map is the fold of its segments' maps, of states [H | M] that begin as [0 | I]. A piece is prepared
once. The launches are `delta_share_launches`'.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.parallel.chains import arriving, returning
from wyfold.pipelines import delta_share_launches as launches
from wyfold.pipelines.delta_launches import kept_factors, unlisted
from wyfold.pipelines.delta_rank import RankCall, RankGradient


def maps(call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[leaving, B, HV, K, V + K] H and M of the pieces that go on elsewhere; and tails, H, M, factors."""
    tails = _tails(call)
    sent, *found, factors = launches.maps(call.packed(entering), call.inside, *_places(call), launches.Maps(tails))
    return _by_piece(call, sent), [tails, *found, *factors]


def forward(call: RankCall, entering: Tensor, kept: list[Tensor], told: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final states of all pieces, and what the backward needs: their entering states, tails, states at the
    borders, M, and factors if they are kept."""
    tails, H, M, *factors = kept
    own = launches.Forward(told, arriving(call.context.shares, call.context.rank), H, M, factors)
    o, final_state, entering, states = launches.forward(call.packed(entering), call.inside, *_places(call), own)
    saved = kept_factors(unlisted(factors)) if call.options.keep_factors else []
    return o, final_state, [entering, tails, states, M, *saved]


def maps_back(call: RankCall, do: Tensor, leaving: Tensor, saved: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """[entering, B, HV, K, V] c of the pieces that began elsewhere; and c of segments, and factors."""
    entering, _, _, M, *factors = saved
    own = launches.MapsBack(call.one_buffer(do), leaving, M, factors)
    sent, c, made = launches.maps_back(call.packed(entering), call.inside, *_places(call), own)
    return _by_piece(call, sent), [c, *(factors or made)]


def backward(call: RankCall, given: RankGradient, kept: list[Tensor], told: Tensor) -> list[Tensor]:
    """Every wanted gradient. `kept` is given up: what was made for this is as large as the gradients are."""
    (entering, tails, states, M), c, factors = given.saved[:4], kept.pop(0), kept
    steps = returning(call.context.shares, call.context.rank)
    do = call.one_buffer(given.do)
    own = launches.Backward(told, steps, tails, do, given.leaving, states, M, c, factors, given.needs)
    return launches.backward(call.packed(entering), call.inside, *_places(call), own)


def _places(call: RankCall) -> tuple[Tensor, list[int]]:
    """Where chunks and segments lie."""
    options, device = call.options, call.tensors.q.device
    table, counts = call.context.segments(call.B, options.chunk_size, options.cut, device)
    return table, list(counts)


def _by_piece(call: RankCall, found: Tensor) -> Tensor:
    """[pieces B, ...] as [pieces, B, ...]."""
    return found.unflatten(0, (found.shape[0] // call.B, call.B))


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
