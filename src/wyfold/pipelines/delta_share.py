"""What a rank holds of the delta family's sequences, as launches: what comes before ranks tell each other, and after.

    forward     chunk grid, prepare, summary, fold: [H | M] of the pieces that go on elsewhere       gather
                fold, scan
    backward    chunk grid, prepare (unless its tiles were kept), summary, fold: c of those that     gather
                began elsewhere
                fold, scan_bwd, gradients

Segments are those of `parallel.share_segments`, so that what one GPU summarises for itself is what ranks tell each
other: a piece's map is the fold of its segments' maps, of states [H | M] that begin as [0 | I]. What does not depend on
other ranks runs while they are waited for: the segments that begin a sequence, and the states of the backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from wyfold.parallel.chains import arriving, carried, returning
from wyfold.parallel.exchange import arrived
from wyfold.parallel.share_segments import Counts, ShareSegments
from wyfold.pipelines.delta import TENSORS_SCHEMA
from wyfold.pipelines.delta_launches import LaunchedCall, kept_factors, listed, token_gradients, unlisted
from wyfold.pipelines.delta_rank import RankCall
from wyfold.pipelines.delta_records import INITIAL_STATE, TENSORS, DeltaGradient, DeltaTensors
from wyfold.runtime.aside import beside
from wyfold.runtime.chunks import most_chunks
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.register import call as called
from wyfold.runtime.register import register
from wyfold.stages import table
from wyfold.stages.records import Prepared


def maps(call: RankCall, entering: Tensor) -> tuple[Tensor, list[Tensor]]:
    """[leaving, B, HV, K, V + K] H and M of the pieces that go on elsewhere; and tails, H, M, factors."""
    tails = _tails(call)
    sent, *found, factors = called(_maps_op, *call.packed(entering), *_places(call), tails, *call.inside)
    leaving = sum(not piece.last for piece in call.context.pieces)
    return sent.unflatten(0, (leaving, call.B)), [tails, *found, *factors]


def forward(call: RankCall, entering: Tensor, kept: list[Tensor], told: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, final states of all pieces, and what the backward needs: their entering states, tails, states at the
    borders, M, and factors if they are kept."""
    tails, H, M, *factors = kept
    steps = arriving(call.context.shares, call.context.rank)
    own = told, steps, H, M, factors
    o, final_state, entering, states = called(_forward_op, *call.packed(entering), *_places(call), *own, *call.inside)
    if not call.options.keep_factors:
        return o, final_state, [entering, tails, states, M]
    return o, final_state, [entering, tails, states, M, *kept_factors(unlisted(factors))]


def maps_back(call: RankCall, do: Tensor, leaving: Tensor, saved: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """[entering, B, HV, K, V] c of the pieces that began elsewhere; and c of segments, and factors."""
    entering, _, _, M, *factors = saved
    own = call.one_buffer(do), leaving, M, factors
    sent, c, made = called(_maps_back_op, *call.packed(entering), *_places(call), *own, *call.inside)
    coming = sum(not piece.first for piece in call.context.pieces)
    return sent.unflatten(0, (coming, call.B)), [c, *(factors or made)]


def backward(
    call: RankCall,
    do: Tensor,
    leaving: Tensor,
    saved: list[Tensor],
    kept: list[Tensor],
    told: Tensor,
    needs: list[bool],
) -> list[Tensor]:
    """Every wanted gradient. What was made for it is given up on the way: it is as large as the gradients."""
    (entering, tails, states, M), c, factors = saved[:4], kept.pop(0), kept
    steps = returning(call.context.shares, call.context.rank)
    own = told, steps, tails, call.one_buffer(do), leaving, states, M, c, factors, needs
    found: list[Tensor] = called(_backward_op, *call.packed(entering), *_places(call), *own, *call.inside)
    return found


def _places(call: RankCall) -> tuple[Tensor, list[int]]:
    """Where the segments lie."""
    options, device = call.options, call.tensors.q.device
    table, counts = call.context.segments(call.B, options.chunk_size, options.cut, device)
    return table, list(counts)


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


# --- what is registered ----------------------------------------------------------------------------------------------


def _maps(*arguments: Any) -> tuple[Any, ...]:
    launched, places, (tails,) = _begun(1, *arguments)
    t, counts = launched.t, places.counts
    HV, K, V = _sizes(t)
    prepared = _prepared(launched, counts, backward=launched.options.save and launched.options.keep_factors)
    H, M = (t.q.new_empty(counts.borders, HV, width, K, dtype=torch.float32) for width in (V, K))
    if counts.borders:
        launched.summary(t.k, t.v, prepared, t.initial_state, H, M)
    if not counts.leaving:
        return H.new_empty(0, HV, K, V + K), H, M, listed(prepared)
    both = H.new_zeros(counts.borders, HV, V + K, K)
    both[:, :, :V] = H
    both[places.entered, :, V:] = torch.eye(K, device=H.device)
    launched.fold(both, M, back=False)
    sent = both[places.exits].mT.contiguous()
    if tails.numel():
        sent = tails[..., V:] @ sent
        sent[..., :V] += tails[..., :V]
    return sent, H, M, listed(prepared)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    launched, places, (told, steps, H, M, factors) = _begun(5, *arguments)
    t, options, counts, prepared = launched.t, launched.options, places.counts, unlisted(factors)
    initial: Tensor = t.initial_state  # type: ignore[assignment]
    o, entering, states = t.v.new_empty(t.v.shape), initial.clone(), H.clone()
    o[:, counts.tokens :] = 0
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    scan = partial(
        table.serving("scan", options.backend, launched.key, t.q.device).scan,
        *(t.q, t.k, t.v, prepared, entering, launched.scanned, options, launched.key, o),
        *(final_state if options.final_state else None, None, None),
        segments=launched.segments,
        borders=states.mT,
    )
    if launched.segments is None:
        scan()
        arrived(told)
        return o, final_state, entering, states
    with beside(o.device) as aside:
        with aside:
            arrived(told)
            if counts.entering:
                S = carried(told, steps, o.shape[3]).flatten(0, 1)
                entering[places.came] = S
                states[places.entered] = S.mT
            launched.fold(states, M, back=False)
            scan(behind=True)
        if counts.entering < counts.sequences:
            # Of sequences from elsewhere these are segments without a token: what they read meanwhile goes nowhere.
            scan(behind=False)
    return o, final_state, entering, states


def _maps_back(*arguments: Any) -> tuple[Any, ...]:
    launched, places, (do, leaving, M, kept) = _begun(4, *arguments)
    t, counts = launched.t, places.counts
    HV, K, V = _sizes(t)
    prepared = unlisted(kept) if kept else _prepared(launched, counts, backward=True, forward=False)
    c = leaving.new_empty(counts.borders, HV, V, K)
    if counts.borders:
        launched.summary_bwd(t.q, t.k, prepared, do, leaving, c)
    sent = leaving.new_empty(0, HV, K, V)
    if counts.entering:
        folded = c.clone()
        launched.fold(folded, M, back=True)
        sent = folded[places.entered].mT.contiguous()
    return sent, c, [] if kept else listed(prepared)


def _backward(*arguments: Any) -> list[Tensor]:
    launched, places, specific = _begun(10, *arguments)
    told, steps, tails, do, leaving, states, M, c, factors, needs = specific
    t, options, counts, prepared = launched.t, launched.options, places.counts, unlisted(factors)
    given = _given(*arguments)
    dS0, final, gradients = given.room(INITIAL_STATE), leaving.clone(), c.clone()
    borders = launched.stage("scan_bwd").token_borders(t.q, t.v, launched.scanned)
    scan_bwd = partial(
        table.serving("scan_bwd", options.backend, launched.key, t.q.device).scan_bwd,
        *(t.q, t.k, t.v, prepared, t.initial_state, do, final, launched.scanned, options, launched.key),
        *(dS0 if needs[INITIAL_STATE] else None, borders),
        segments=launched.segments,
        entering=states.mT,
        leaving=gradients.mT,
    )
    if launched.segments is None:
        scan_bwd()
        arrived(told)
    else:
        with beside(do.device) as aside:
            with aside:
                arrived(told)
                if counts.leaving:
                    dS = carried(told, steps, do.shape[3]).flatten(0, 1)
                    final[places.goes] = dS
                    if tails.numel():
                        dS = tails[..., do.shape[3] :].mT @ dS
                    gradients[places.exits] += dS.mT
                launched.fold(gradients, M, back=True)
                scan_bwd(half="reverse")
            scan_bwd(half="forward")
    del scan_bwd, prepared
    factors.clear()  # the tokens' gradients may lie where they lay
    return given.rounded(token_gradients(launched, given, do, borders, dS0))


def _begun(specific: int, *arguments: Any) -> tuple[LaunchedCall, ShareSegments, list[Any]]:
    """The call with its segments, where they lie, and the arguments that one operator has for itself."""
    t, (table_, counts) = DeltaTensors(*arguments[:TENSORS]), arguments[TENSORS : TENSORS + 2]
    own = arguments[TENSORS + 2 :]
    launched, places = LaunchedCall(t, DeltaOptions(*own[specific:])), ShareSegments.of(table_, counts)
    if places.counts.borders:
        launched.segments = places.segments(launched.grid)
    return launched, places, list(own[:specific])


def _given(*arguments: Any) -> DeltaGradient:
    """The gradients that `_backward` is asked for."""
    t, own = DeltaTensors(*arguments[:TENSORS]), arguments[TENSORS + 2 :]
    do, leaving, factors, needs = own[3], own[4], own[8], own[9]
    return DeltaGradient(t, DeltaOptions(*own[10:]), factors, do, leaving, needs)


def _prepared(launched: LaunchedCall, counts: Counts, *, backward: bool, forward: bool = True) -> Prepared:
    """Factors of every chunk, and zeros in the places that these boundaries do not need: a registered operator must not
    return what happened to lie in memory."""
    prepared = launched.prepare(launched.t.v, backward=backward, forward=forward, clear=False)
    for x in prepared:
        if x is not None:
            x[counts.chunks * launched.t.v.shape[2] :] = 0
    return prepared


def _sizes(t: DeltaTensors) -> tuple[int, int, int]:
    """HV, K, V."""
    return t.v.shape[2], t.q.shape[3], t.v.shape[3]


# --- from metadata alone ---------------------------------------------------------------------------------------------


def _maps_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, options = _described(1, *arguments)
    HV, K, V = _sizes(t)
    H, M = (t.q.new_empty(counts.borders, HV, width, K, dtype=torch.float32) for width in (V, K))
    factors = _factors(t, options, backward=options.save and options.keep_factors)
    return H.new_empty(counts.leaving, HV, K, V + K), H, M, factors


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, _, options = _described(5, *arguments)
    entering: Tensor = t.initial_state  # type: ignore[assignment]
    entering, states = entering.new_empty(entering.shape), torch.empty_like(arguments[TENSORS + 4])
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    return t.v.new_empty(t.v.shape), final_state, entering, states


def _maps_back_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, options = _described(4, *arguments)
    HV, K, V = _sizes(t)
    leaving, kept = arguments[TENSORS + 3], arguments[TENSORS + 5]
    factors = [] if kept else _factors(t, options, backward=True, forward=False)
    return leaving.new_empty(counts.entering, HV, K, V), leaving.new_empty(counts.borders, HV, V, K), factors


def _backward_fake(*arguments: Any) -> list[Tensor]:
    given = _given(*arguments)
    return given.rounded(given.rooms())


def _described(specific: int, *arguments: Any) -> tuple[DeltaTensors, Counts, DeltaOptions]:
    t, counts = DeltaTensors(*arguments[:TENSORS]), Counts(*arguments[TENSORS + 1])
    return t, counts, DeltaOptions(*arguments[TENSORS + 2 + specific :])


def _factors(t: DeltaTensors, options: DeltaOptions, *, backward: bool, forward: bool = True) -> list[Tensor]:
    prepare = table.launches("prepare", options.backend)
    tiles = most_chunks(1, t.v.shape[1], options.chunk_size, t.packed_sequences) * t.v.shape[2]
    folded, ways = prepare.reads_folded(t.g), {"backward": backward, "forward": forward}
    return listed(prepare.empty(t.q, t.g, tiles, options.chunk_size, folded=folded, **ways))


_SHARE = f"{TENSORS_SCHEMA}, Tensor table, int[] counts"

_maps_op = register(
    f"delta_share_maps({_SHARE}, Tensor tails, {DELTA_SCHEMA}) -> (Tensor sent, Tensor H, Tensor M, Tensor[] factors)",
    _maps,
    _maps_fake,
)
_forward_op = register(
    f"delta_share_fwd({_SHARE}, Tensor told, int[] steps, Tensor H, Tensor M, Tensor[] factors, {DELTA_SCHEMA}) "
    "-> (Tensor o, Tensor final_state, Tensor entering, Tensor states)",
    _forward,
    _forward_fake,
)
_maps_back_op = register(
    f"delta_share_maps_bwd({_SHARE}, Tensor do, Tensor leaving, Tensor M, Tensor[] kept, {DELTA_SCHEMA}) "
    "-> (Tensor sent, Tensor c, Tensor[] factors)",
    _maps_back,
    _maps_back_fake,
)
_backward_op = register(
    f"delta_share_bwd({_SHARE}, Tensor told, int[] steps, Tensor tails, Tensor do, Tensor leaving, Tensor states, "
    f"Tensor M, Tensor c, Tensor[] factors, bool[] needs, {DELTA_SCHEMA}) -> Tensor[]",
    _backward,
    _backward_fake,
)
