"""The launches of `delta_share`: what comes before ranks tell each other, and after, each as a registered operator.

    forward     prepare, summary, fold: [H | M] of the pieces that go on elsewhere                          gather
                fold, scan
    backward    prepare (unless its tiles were kept), summary, fold: c of the pieces that began elsewhere   gather
                fold, scan_bwd, gradients

What does not depend on other ranks runs while they are waited for: the segments that begin a sequence, and the states
of the backward. Where chunks and segments lie the host knows, and says (`parallel.share_segments`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from wyfold.parallel.chains import carried
from wyfold.parallel.exchange import arrived
from wyfold.parallel.share_segments import Counts, ShareSegments
from wyfold.pipelines.delta import TENSORS_SCHEMA
from wyfold.pipelines.delta_launches import LaunchedCall, listed, token_gradients, unlisted
from wyfold.pipelines.delta_records import INITIAL_STATE, TENSORS, DeltaGradient, DeltaTensors
from wyfold.runtime.aside import beside
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.register import call as called
from wyfold.runtime.register import register
from wyfold.stages import table
from wyfold.stages.records import Prepared

Own = TypeVar("Own", bound="Maps | Forward | MapsBack | Backward")


class Maps(NamedTuple):
    """Of `maps`.

    Attributes:
        tails: [leaving, HV, K, V + K] H and M of the tokens behind a piece's last full chunk; of no elements if no
            piece has any.
    """

    tails: Tensor


class Forward(NamedTuple):
    """Of `forward`.

    Attributes:
        told: What all ranks sent, maybe under way.
        steps: `chains.arriving`.
        H, M, factors: From `maps`.
    """

    told: Tensor
    steps: list[int]
    H: Tensor
    M: Tensor
    factors: list[Tensor]


class MapsBack(NamedTuple):
    """Of `maps_back`.

    Attributes:
        do: [1, B T, HV, V].
        leaving: [pieces, HV, K, V] gradients of final states, and zeros where a sequence goes on elsewhere.
        M: From `maps`.
        kept: Factors, if they were kept.
    """

    do: Tensor
    leaving: Tensor
    M: Tensor
    kept: list[Tensor]


class Backward(NamedTuple):
    """Of `backward`.

    Attributes:
        told: What all ranks sent, maybe under way.
        steps: `chains.returning`.
        tails, do, leaving, M: As above.
        states: From `forward`.
        c, factors: From `maps_back`. The list is emptied where it is the caller's own, so without a dispatcher between.
        needs: Of each differentiable tensor, whether its gradient is wanted.
    """

    told: Tensor
    steps: list[int]
    tails: Tensor
    do: Tensor
    leaving: Tensor
    states: Tensor
    M: Tensor
    c: Tensor
    factors: list[Tensor]
    needs: list[bool]


def maps(t: DeltaTensors, options: DeltaOptions, table_: Tensor, counts: list[int], own: Maps) -> tuple[Any, ...]:
    """Before ranks tell each other.

    Args:
        t: The call of all pieces as sequences of one buffer; `initial_state` holds what enters those that begin here,
            and zeros.
        options: Of that call.
        table_, counts: From `ContextParallel.segments`.
        own: What else there is.

    Returns:
        [leaving, HV, K, V + K] H and M of the pieces that go on elsewhere, by piece and row; [borders, HV, V, K] H and
        [borders, HV, K, K] M of the segment that ends at each border; `Prepared`, listed.
    """
    found: tuple[Any, ...] = called(_maps_op, *t, table_, counts, *own, *options)
    return found


def forward(t: DeltaTensors, options: DeltaOptions, table_: Tensor, counts: list[int], own: Forward) -> tuple[Any, ...]:
    """After it. Arguments as of `maps`.

    Returns:
        [1, B T, HV, V] output; [pieces, HV, K, V] final states, or no elements; [pieces, HV, K, V] states that enter
        the pieces; [borders, HV, V, K] states at the borders.
    """
    found: tuple[Any, ...] = called(_forward_op, *t, table_, counts, *own, *options)
    return found


def maps_back(
    t: DeltaTensors, options: DeltaOptions, table_: Tensor, counts: list[int], own: MapsBack
) -> tuple[Any, ...]:
    """Before ranks tell each other of gradients. Arguments as of `maps`, with the states that enter the pieces.

    Returns:
        [entering, HV, K, V] gradients of the states that enter from other ranks, as if nothing came back from others;
        [borders, HV, V, K] c of the segment that begins at each border; the factors, if they were not kept.
    """
    found: tuple[Any, ...] = called(_maps_back_op, *t, table_, counts, *own, *options)
    return found


def backward(t: DeltaTensors, options: DeltaOptions, table_: Tensor, counts: list[int], own: Backward) -> list[Tensor]:
    """After it: every wanted gradient. Arguments as of `maps_back`."""
    found: list[Tensor] = called(_backward_op, *t, table_, counts, *own, *options)
    return found


# --- what is registered ----------------------------------------------------------------------------------------------


class _Call(Generic[Own]):
    """A registered operator's arguments, and the call with its segments.

    Attributes:
        launched: On the pieces' chunk grid.
        places, counts: Where everything lies, and how much there is.
        own: What only this operator is given.
        HV, K, V: Sizes.
    """

    def __init__(self, kind: type[Own], arguments: tuple[Any, ...]):
        t, counts, self.own, options = _read(kind, arguments)
        self.places = ShareSegments.of(arguments[TENSORS], counts)
        grid = self.places.grid(options.chunk_size, t.v.shape[1])
        self.launched = LaunchedCall(t, options._replace(segment_chunks=0, segments=1), grid)
        self.launched.segments = self.places.segments(grid) if counts.borders else None
        self.t, self.options, self.counts = self.launched.t, options, counts
        self.HV, self.K, self.V = t.v.shape[2], t.q.shape[3], t.v.shape[3]

    def prepare(self, *, backward: bool, forward: bool = True) -> Prepared:
        """Factors of every chunk, and zeros where rows belong to nobody: a registered operator must not return what
        happened to lie in memory."""
        prepared = self.launched.prepare(self.t.v, backward=backward, forward=forward, clear=False)
        for x in prepared if self.counts.chunks < self.counts.tiles else ():
            if x is not None:
                x[self.counts.chunks * self.HV :] = 0
        return prepared

    def fold(self, states: Tensor, maps: Tensor, *, back: bool, of: Tensor | None = None) -> None:
        """`LaunchedCall.fold`, or of some sequences alone."""
        launched = self.launched
        if launched.segments is None:
            return
        segments = launched.segments if of is None else replace(launched.segments, divided=of)
        launched.stage("fold").fold(states.mT, maps.mT, segments, back=back, dtype=self.t.k.dtype)

    def stage(self, name: str) -> Any:
        return table.serving(name, self.options.backend, self.launched.key, self.t.q.device)


class _Asked(NamedTuple, Generic[Own]):
    """The arguments of an operator: those of a call, its counts, its own, its options."""

    tensors: DeltaTensors
    counts: Counts
    own: Own
    options: DeltaOptions


def _read(kind: type[Own], arguments: tuple[Any, ...]) -> _Asked[Own]:
    rest = arguments[TENSORS + 2 :]
    own: Own = kind(*rest[: len(kind._fields)])
    counts = Counts(*arguments[TENSORS + 1])
    return _Asked(DeltaTensors(*arguments[:TENSORS]), counts, own, DeltaOptions(*rest[len(own) :]))


def _waits(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, whose first own argument is under way; if it breaks off, that has arrived all the same: PyTorch keeps a
    collective that nobody waits for."""

    @functools.wraps(run)
    def waits(*arguments: Any) -> Any:
        try:
            return run(*arguments)
        except BaseException:
            arrived(arguments[TENSORS + 2])
            raise

    return waits


def _maps(*arguments: Any) -> tuple[Any, ...]:
    call = _Call(Maps, arguments)
    t, counts, places, (HV, K, V) = call.t, call.counts, call.places, (call.HV, call.K, call.V)
    tails: Tensor = call.own.tails
    prepared = call.prepare(backward=call.options.save and call.options.keep_factors)
    H, M = _at_borders(t, counts)
    if counts.borders:
        call.launched.summary(t.k, t.v, prepared, t.initial_state, H, M)
    if not counts.leaving:
        return H.new_empty(0, HV, K, V + K), H, M, listed(prepared)
    both = H.new_zeros(counts.borders, HV, V + K, K)
    both[:, :, :V] = H
    both[places.entered, :, V:] = torch.eye(K, device=H.device)
    call.fold(both, M, back=False, of=places.goes)
    sent = both[places.exits].mT.contiguous()
    if tails.numel():
        sent = tails[..., V:] @ sent
        sent[..., :V] += tails[..., :V]
    return sent, H, M, listed(prepared)


@_waits
def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = _Call(Forward, arguments)
    t, options, counts, places = call.t, call.options, call.counts, call.places
    told, steps, H, M, factors = call.own
    launched, prepared = call.launched, unlisted(factors)
    initial: Tensor = t.initial_state  # type: ignore[assignment]
    o, entering, states = t.v.new_empty(t.v.shape), initial.clone(), H.clone()
    o[:, counts.tokens :] = 0
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    scan = partial(
        call.stage("scan").scan,
        *(t.q, t.k, t.v, prepared, entering, launched.scanned, options, launched.key, o),
        *(final_state if options.final_state else None, None, None),
        segments=launched.segments,
        borders=states.mT,
    )
    if launched.segments is None:
        scan()
    else:
        with beside(o.device) as aside:
            if counts.entering < counts.sequences:
                # Of sequences from elsewhere these are segments without a token: what they read meanwhile goes nowhere.
                scan(behind=False)
            with aside:
                if counts.entering:
                    S = carried(arrived(told), steps, call.V).flatten(0, 1)
                    entering[places.came] = S
                    states[places.entered] = S.mT
                call.fold(states, M, back=False)
                scan(behind=True)
    arrived(told)
    return o, final_state, entering, states


def _maps_back(*arguments: Any) -> tuple[Any, ...]:
    call = _Call(MapsBack, arguments)
    t, counts, places = call.t, call.counts, call.places
    do, leaving, M, kept = call.own
    prepared = unlisted(kept) if kept else call.prepare(backward=True, forward=False)
    c = leaving.new_empty(counts.borders, call.HV, call.V, call.K)
    if counts.borders:
        call.launched.summary_bwd(t.q, t.k, prepared, do, leaving, c)
    sent = leaving.new_empty(0, call.HV, call.K, call.V)
    if counts.entering:
        folded = c.clone()
        call.fold(folded, M, back=True, of=places.came)
        sent = folded[places.entered].mT.contiguous()
    return sent, c, [] if kept else listed(prepared)


@_waits
def _backward(*arguments: Any) -> list[Tensor]:
    call = _Call(Backward, arguments)
    t, options, counts, places = call.t, call.options, call.counts, call.places
    told, steps, tails, do, leaving, states, M, c, factors, needs = call.own
    launched, prepared, given = call.launched, unlisted(factors), _wanted(t, options, call.own)
    dS0, final, gradients = given.room(INITIAL_STATE), leaving.clone(), c.clone()
    borders = launched.stage("scan_bwd").token_borders(t.q, t.v, launched.scanned)
    scan_bwd = partial(
        call.stage("scan_bwd").scan_bwd,
        *(t.q, t.k, t.v, prepared, t.initial_state, do, final, launched.scanned, options, launched.key),
        *(dS0 if needs[INITIAL_STATE] else None, borders),
        segments=launched.segments,
        entering=states.mT,
        leaving=gradients.mT,
    )
    if launched.segments is None:
        scan_bwd()
    else:
        with beside(do.device) as aside:
            scan_bwd(half="forward")
            with aside:
                if counts.leaving:
                    dS = carried(arrived(told), steps, call.V).flatten(0, 1)
                    final[places.goes] = dS
                    if tails.numel():
                        dS = tails[..., call.V :].mT @ dS
                    gradients[places.exits] += dS.mT
                call.fold(gradients, M, back=True)
                scan_bwd(half="reverse")
    arrived(told)
    del scan_bwd, prepared
    factors.clear()  # the tokens' gradients may lie where they lay
    return given.rounded(token_gradients(launched, given, do, borders, dS0))


def _at_borders(t: DeltaTensors, counts: Counts) -> list[Tensor]:
    """Unwritten H and M."""
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    return [t.q.new_empty(counts.borders, HV, width, K, dtype=torch.float32) for width in (V, K)]


def _wanted(t: DeltaTensors, options: DeltaOptions, own: Backward) -> DeltaGradient:
    """The gradients that `_backward` is asked for."""
    return DeltaGradient(t, options, own.factors, own.do, own.leaving, own.needs)


# --- from metadata alone ---------------------------------------------------------------------------------------------


def _maps_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, _, options = _read(Maps, arguments)
    H, M = _at_borders(t, counts)
    factors = _factors(t, options, counts, backward=options.save and options.keep_factors)
    return H.new_empty(counts.leaving, t.v.shape[2], t.q.shape[3], t.v.shape[3] + t.q.shape[3]), H, M, factors


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, _, own, options = _read(Forward, arguments)
    entering: Tensor = t.initial_state  # type: ignore[assignment]
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    return t.v.new_empty(t.v.shape), final_state, entering.new_empty(entering.shape), torch.empty_like(own.H)


def _maps_back_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, own, options = _read(MapsBack, arguments)
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    factors = [] if own.kept else _factors(t, options, counts, backward=True, forward=False)
    sent, c = own.leaving.new_empty(counts.entering, HV, K, V), own.leaving.new_empty(counts.borders, HV, V, K)
    return sent, c, factors


def _backward_fake(*arguments: Any) -> list[Tensor]:
    t, _, own, options = _read(Backward, arguments)
    given = _wanted(t, options, own)
    return given.rounded(given.rooms())


def _factors(
    t: DeltaTensors, options: DeltaOptions, counts: Counts, *, backward: bool, forward: bool = True
) -> list[Tensor]:
    prepare = table.launches("prepare", options.backend)
    tiles, folded, C = counts.tiles * t.v.shape[2], prepare.reads_folded(t.g), options.chunk_size
    return listed(prepare.empty(t.q, t.g, tiles, C, folded=folded, backward=backward, forward=forward))


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
