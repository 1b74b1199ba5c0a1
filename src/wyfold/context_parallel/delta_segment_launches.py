"""Launches of `delta_by_segments`: before and after the all-gather of each direction, as registered operators.

    forward     prepare, segment_summary, segment_fold, rank_send: [H | M] of pieces that continue on another rank
                all-gather
                rank_carry, segment_fold, scan
    backward    prepare (unless its factors were saved), segment_summary, segment_fold, rank_send: c of pieces that
                began on another rank
                all-gather
                rank_carry, segment_fold, scan_bwd, gradients

Launches that do not depend on other ranks run during the all-gather: the segments that begin a sequence, and the states
that the backward recomputes. The host knows the layout of chunks and segments (`rank_segments`). The replay cache
replays each operator of a call whose metadata equal an earlier call's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from wyfold.autograd.delta import TENSORS_SCHEMA
from wyfold.autograd.delta_chunk import KernelCall, factors_from_list, factors_to_list, token_gradients
from wyfold.autograd.delta_records import INITIAL_STATE, TENSORS, DeltaBackwardInputs, DeltaTensors
from wyfold.context_parallel.collectives import wait_gathered
from wyfold.context_parallel.delta_segment_records import (
    ForwardInputs,
    ForwardResult,
    MapsBackInputs,
    MapsInputs,
    MapsResult,
    PiecesCall,
    ScanBackInputs,
    TokensBackInputs,
)
from wyfold.context_parallel.rank_segments import RankSegments, SegmentCounts
from wyfold.kernels import table
from wyfold.kernels.records import Prepared, StateRows, TokenBorders
from wyfold.runtime.options import DELTA_SCHEMA, DeltaOptions
from wyfold.runtime.replay_cache import Lengths, replayed
from wyfold.runtime.side_stream import fork_side_stream
from wyfold.runtime.torch_ops import call as call_operator
from wyfold.runtime.torch_ops import register

OperatorInputs = TypeVar(
    "OperatorInputs", bound="MapsInputs | ForwardInputs | MapsBackInputs | ScanBackInputs | TokensBackInputs"
)


def maps(pieces_call: PiecesCall, inputs: MapsInputs) -> MapsResult:
    """Compute H and M of the pieces that continue on another rank."""
    send_buffer, H, M, *factors = _run("delta_rank maps", _maps_op, pieces_call, inputs)
    return MapsResult(send_buffer, H, M, factors)


def forward(pieces_call: PiecesCall, inputs: ForwardInputs) -> ForwardResult:
    """Scan all pieces from the states that other ranks sent."""
    return ForwardResult(*_run("delta_rank forward", _forward_op, pieces_call, inputs))


def maps_back(pieces_call: PiecesCall, inputs: MapsBackInputs) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Compute c of the pieces that began on another rank.

    Returns:
        [`inputs.send_rows`, HV, K, V + K] c and M^T of these pieces, padded with zeros; [borders, HV, V, K] c of the
        segment that begins at each border; the factors, or [] if the forward saved them.
    """
    send_buffer, c, *factors = _run("delta_rank maps_back", _maps_back_op, pieces_call, inputs)
    return send_buffer, c, factors


def scan_back(pieces_call: PiecesCall, inputs: ScanBackInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Scan all pieces in reverse from the gradients that other ranks sent.

    Returns:
        [B pieces, HV, K, V] gradients of the states that enter the pieces, without elements if not needed; the two
        tensors of `TokenBorders`.
    """
    dS0, states, tokens = _run("delta_rank scan_back", _scan_back_op, pieces_call, inputs)
    return dS0, states, tokens


def tokens_back(pieces_call: PiecesCall, inputs: TokensBackInputs) -> list[Tensor]:
    """Compute every needed gradient except that of the initial states, which has no elements here."""
    return [*_run("delta_rank tokens_back", _tokens_back_op, pieces_call, inputs)]


def _run(
    name: str, operator: Callable[..., Any], pieces_call: PiecesCall, inputs: OperatorInputs
) -> tuple[Tensor, ...]:
    """Run an operator, or replay it from the cache; return its results as one flat tuple."""

    def run() -> tuple[Tensor, ...]:
        found = call_operator(
            operator, *pieces_call.t, pieces_call.table, [*pieces_call.counts], *inputs, *pieces_call.options
        )
        parts = (x if isinstance(x, list) else [x] for x in (found if isinstance(found, tuple) else (found,)))
        return tuple([x for part in parts for x in part])

    tensors: list[Tensor | None] = [*pieces_call.t, pieces_call.table]
    lengths: list[int] = [*pieces_call.counts]
    values: list[Any] = [name, *pieces_call.options]
    for x in inputs:
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, list) and x and isinstance(x[0], Tensor):
            tensors += x
            values.append(len(x))
        elif type(x) is int:
            lengths.append(x)
        else:
            values.append(tuple(x) if isinstance(x, list) else x)
    return replayed(tuple(tensors), (*values, Lengths(lengths)), run)


# --- registered operators ---------------------------------------------------------------------------------------------


class OperatorCall(Generic[OperatorInputs]):
    """A registered operator's arguments as a kernel call with segments.

    Attributes:
        kernel_call: Call of the chunk kernels on the pieces' chunk grid.
        places, counts: Tables of the rank's segments, and their lengths.
        inputs: Record of the operator's own inputs.
        t, options: Tensors and options of the call.
        HV, K, V: Sizes.
    """

    def __init__(self, kind: type[OperatorInputs], arguments: tuple[Any, ...]):
        t, counts, self.inputs, options = _read(kind, arguments)
        self.places = RankSegments.of(arguments[TENSORS], counts)
        grid = self.places.grid(options.chunk_size, t.v.shape[1])
        self.kernel_call = KernelCall(t, options._replace(segment_chunks=0, segments=1), grid)
        self.kernel_call.segments = self.places.segments(grid) if counts.borders else None
        self.t, self.options, self.counts = self.kernel_call.t, options, counts
        self.HV, self.K, self.V = t.v.shape[2], t.q.shape[3], t.v.shape[3]

    def prepare(self, *, backward: bool, forward: bool = True) -> Prepared:
        """Run `prepare`; factors without a chunk are zeroed.

        A registered operator must not return uninitialized memory.
        """
        prepared = self.kernel_call.prepare(self.t.v, backward=backward, forward=forward, clear=False)
        self.clear(*(x for x in prepared if x is not None))
        return prepared

    def clear(self, *tiles: Tensor) -> None:
        """Zero the tiles that belong to no chunk with a token."""
        if self.counts.chunks < self.counts.tiles:
            for x in tiles:
                x[self.counts.chunks * self.HV :].zero_()

    def send_buffer(self, rows: int, written: int) -> Tensor:
        """Allocate a send buffer [rows, HV, K, V + K] with zeros after its first `written` rows."""
        send_buffer = _empty_send_buffer(self.t, rows)
        if written < rows:
            send_buffer[written:].zero_()
        return send_buffer

    def stage(self, name: str) -> Any:
        return table.selected_module(name, self.options.backend, self.kernel_call.key, self.t.q.device)


class OperatorArguments(NamedTuple, Generic[OperatorInputs]):
    """Parsed arguments of a registered operator: the call's tensors, its counts, the operator's inputs, the options."""

    tensors: DeltaTensors
    counts: SegmentCounts
    inputs: OperatorInputs
    options: DeltaOptions


def _read(kind: type[OperatorInputs], arguments: tuple[Any, ...]) -> OperatorArguments[OperatorInputs]:
    rest = arguments[TENSORS + 2 :]
    inputs: OperatorInputs = kind(*rest[: len(kind._fields)])
    counts = SegmentCounts(*arguments[TENSORS + 1])
    return OperatorArguments(DeltaTensors(*arguments[:TENSORS]), counts, inputs, DeltaOptions(*rest[len(inputs) :]))


def _maps(*arguments: Any) -> tuple[Any, ...]:
    call = OperatorCall(MapsInputs, arguments)
    t, counts, places = call.t, call.counts, call.places
    HV, K, V, (tails, send_rows) = call.HV, call.K, call.V, call.inputs
    prepared = call.prepare(backward=call.options.save and call.options.keep_factors)
    H, M = _empty_summaries(t, counts)
    if counts.borders:
        call.kernel_call.summary(t.k, t.v, prepared, t.initial_state, H, M)
    send_buffer = call.send_buffer(send_rows, counts.outgoing)
    if counts.outgoing:
        both = H.new_zeros(counts.borders, HV, V + K, K)
        both[:, :, :V].copy_(H)
        if counts.incoming:
            identity = torch.eye(K, dtype=H.dtype, device=H.device).expand(counts.incoming, HV, K, K)
            both[:, :, V:].index_copy_(0, places.incoming_border, identity)
        call.kernel_call.fold(both, M, reverse=False, divided=places.outgoing_piece)
        call.stage("rank_carry").rank_send(
            StateRows(both.mT, places.outgoing_border), none_if_empty(tails), send_buffer, dtype=t.k.dtype
        )
    return send_buffer, H, M, factors_to_list(prepared)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = OperatorCall(ForwardInputs, arguments)
    t, options, counts, places = call.t, call.options, call.counts, call.places
    gathered, routes, H, M, factors = call.inputs
    kernel_call, prepared = call.kernel_call, factors_from_list(factors)
    initial: Tensor = t.initial_state  # type: ignore[assignment]
    o, entering, states = t.v.new_empty(t.v.shape), initial.clone(), H.clone()
    if counts.tokens < o.shape[1]:
        o[:, counts.tokens :].zero_()
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    scan = partial(
        call.stage("scan").scan,
        t.q,
        t.k,
        t.v,
        prepared,
        initial_state=entering,
        grid=kernel_call.scan_grid,
        options=options,
        key=kernel_call.key,
        o=o,
        final_state=final_state if options.final_state else None,
        states=None,
        first_state=None,
        segments=kernel_call.segments,
        borders=states.mT,
    )
    if kernel_call.segments is None:
        scan()
    else:
        outer, borders = StateRows(entering, places.incoming_piece), StateRows(states.mT, places.incoming_border)
        with fork_side_stream(o.device) as on_side:
            if counts.incoming < counts.pieces:
                # A piece from another rank begins with an empty segment. The state that it reads is not used, so
                # the side stream may write that state meanwhile.
                scan(from_borders=False)
            with on_side:
                if counts.incoming:
                    wait_gathered(gathered)
                    call.stage("rank_carry").rank_carry(
                        gathered, routes, outer, borders, None, reverse=False, dtype=t.k.dtype
                    )
                kernel_call.fold(states, M, reverse=False)
                scan(from_borders=True)
    return o, final_state, entering, states


def _maps_back(*arguments: Any) -> tuple[Any, ...]:
    call = OperatorCall(MapsBackInputs, arguments)
    t, counts, places = call.t, call.counts, call.places
    do, dleaving, incoming_M, M, kept, send_rows = call.inputs
    prepared = factors_from_list(kept) if kept else call.prepare(backward=True, forward=False)
    c = dleaving.new_empty(counts.borders, call.HV, call.V, call.K)
    if counts.borders:
        call.kernel_call.summary_bwd(t.q, t.k, prepared, do, dleaving, c)
    send_buffer = call.send_buffer(send_rows, counts.incoming)
    if counts.incoming:
        gradients = c.clone()
        call.kernel_call.fold(gradients, M, reverse=True, divided=places.incoming_piece)
        call.stage("rank_carry").rank_send(
            StateRows(gradients.mT, places.incoming_border), None, send_buffer, dtype=t.k.dtype
        )
        send_buffer[: counts.incoming, ..., call.V :].copy_(incoming_M.mT)
    return send_buffer, c, [] if kept else factors_to_list(prepared)


def _scan_back(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = OperatorCall(ScanBackInputs, arguments)
    t, options, counts, places = call.t, call.options, call.counts, call.places
    gathered, routes, tails, do, dleaving, states, M, c, factors, need = call.inputs
    kernel_call, prepared = call.kernel_call, factors_from_list(factors)
    initial: Tensor = t.initial_state  # type: ignore[assignment]
    final, gradients = dleaving.clone(), c.clone()
    dS0 = initial.new_empty(initial.shape if need else 0)
    pairs = kernel_call.stage("scan_bwd").border_pairs(t.q, t.v, kernel_call.scan_grid)
    call.clear(*(x for pair in pairs for x in pair.unbind()))
    scan_bwd = partial(
        call.stage("scan_bwd").scan_bwd,
        t.q,
        t.k,
        t.v,
        prepared,
        initial_state=initial,
        do=do,
        dST=final,
        grid=kernel_call.scan_grid,
        options=options,
        key=kernel_call.key,
        dS0=dS0 if need else None,
        borders=TokenBorders.of(*pairs),
        segments=kernel_call.segments,
        entering=states.mT,
        leaving=gradients.mT,
    )
    if kernel_call.segments is None:
        scan_bwd()
    else:
        outer, borders = StateRows(final, places.outgoing_piece), StateRows(gradients.mT, places.outgoing_border)
        with fork_side_stream(do.device) as on_side:
            scan_bwd(half="forward")
            with on_side:
                if counts.outgoing:
                    wait_gathered(gathered)
                    carry = call.stage("rank_carry").rank_carry
                    carry(gathered, routes, outer, borders, none_if_empty(tails), reverse=True, dtype=t.k.dtype)
                kernel_call.fold(gradients, M, reverse=True)
                scan_bwd(half="reverse")
    return dS0, *pairs


def _tokens_back(*arguments: Any) -> list[Tensor]:
    call = OperatorCall(TokensBackInputs, arguments)
    given = _backward_inputs(call.t, call.options, call.inputs)
    borders, dS0 = TokenBorders.of(call.inputs.states, call.inputs.tokens), given.empty_grad(INITIAL_STATE)
    return given.to_input_dtypes(token_gradients(call.kernel_call, given, call.inputs.do, borders, dS0))


def none_if_empty(x: Tensor) -> Tensor | None:
    """Return x; None if it has no elements."""
    return x if x.numel() else None


def _empty_summaries(t: DeltaTensors, counts: SegmentCounts) -> list[Tensor]:
    """Allocate H and M of the segments before borders, uninitialized."""
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    return [t.q.new_empty(counts.borders, HV, width, K, dtype=torch.float32) for width in (V, K)]


def _backward_inputs(t: DeltaTensors, options: DeltaOptions, inputs: TokensBackInputs) -> DeltaBackwardInputs:
    """The backward inputs of `_tokens_back`: every needed gradient except that of the initial states."""
    needs = [*inputs.needs]
    needs[INITIAL_STATE] = False
    return DeltaBackwardInputs(t, options, [], inputs.do, None, needs)


# --- fake implementations, from metadata alone ------------------------------------------------------------------------


def _maps_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, inputs, options = _read(MapsInputs, arguments)
    H, M = _empty_summaries(t, counts)
    factors = _factors(t, options, counts, backward=options.save and options.keep_factors)
    return _empty_send_buffer(t, inputs.send_rows), H, M, factors


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    t, _, inputs, options = _read(ForwardInputs, arguments)
    entering: Tensor = t.initial_state  # type: ignore[assignment]
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    return t.v.new_empty(t.v.shape), final_state, entering.new_empty(entering.shape), torch.empty_like(inputs.H)


def _maps_back_fake(*arguments: Any) -> tuple[Any, ...]:
    t, counts, inputs, options = _read(MapsBackInputs, arguments)
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    factors = [] if inputs.kept else _factors(t, options, counts, backward=True, forward=False)
    return _empty_send_buffer(t, inputs.send_rows), inputs.dleaving.new_empty(counts.borders, HV, V, K), factors


def _scan_back_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, counts, inputs, options = _read(ScanBackInputs, arguments)
    initial: Tensor = t.initial_state  # type: ignore[assignment]
    grid = RankSegments.of(arguments[TENSORS], counts).grid(options.chunk_size, t.v.shape[1])
    pairs = table.kernel_module("scan_bwd", options.backend).border_pairs(t.q, t.v, grid)
    return initial.new_empty(initial.shape if inputs.need else 0), *pairs


def _tokens_back_fake(*arguments: Any) -> list[Tensor]:
    t, _, inputs, options = _read(TokensBackInputs, arguments)
    given = _backward_inputs(t, options, inputs)
    return given.to_input_dtypes(given.empty_grads())


def _empty_send_buffer(t: DeltaTensors, rows: int) -> Tensor:
    """Allocate a send buffer [rows, HV, K, V + K], uninitialized."""
    HV, K, V = t.v.shape[2], t.q.shape[3], t.v.shape[3]
    return t.q.new_empty(rows, HV, K, V + K, dtype=torch.float32)


def _factors(
    t: DeltaTensors, options: DeltaOptions, counts: SegmentCounts, *, backward: bool, forward: bool = True
) -> list[Tensor]:
    prepare = table.kernel_module("prepare", options.backend)
    tiles, folded, C = counts.tiles * t.v.shape[2], prepare.reads_folded(t.g), options.chunk_size
    return factors_to_list(prepare.empty(t.q, t.g, tiles, C, folded=folded, backward=backward, forward=forward))


_CALL = f"{TENSORS_SCHEMA}, Tensor table, int[] counts"

_maps_op = register(
    f"delta_rank_maps({_CALL}, Tensor tails, int send_rows, {DELTA_SCHEMA}) "
    "-> (Tensor send_buffer, Tensor H, Tensor M, Tensor[] factors)",
    _maps,
    _maps_fake,
)
_forward_op = register(
    f"delta_rank_fwd({_CALL}, Tensor gathered, Tensor routes, Tensor H, Tensor M, Tensor[] factors, {DELTA_SCHEMA}) "
    "-> (Tensor o, Tensor final_state, Tensor entering, Tensor states)",
    _forward,
    _forward_fake,
)
_maps_back_op = register(
    f"delta_rank_maps_bwd({_CALL}, Tensor do, Tensor dleaving, Tensor incoming_M, Tensor M, Tensor[] kept, "
    f"int send_rows, {DELTA_SCHEMA}) -> (Tensor send_buffer, Tensor c, Tensor[] factors)",
    _maps_back,
    _maps_back_fake,
)
_scan_back_op = register(
    f"delta_rank_scan_bwd({_CALL}, Tensor gathered, Tensor routes, Tensor tails, Tensor do, Tensor dleaving, "
    f"Tensor states, Tensor M, Tensor c, Tensor[] factors, bool need, {DELTA_SCHEMA}) "
    "-> (Tensor dS0, Tensor states, Tensor tokens)",
    _scan_back,
    _scan_back_fake,
)
_tokens_back_op = register(
    f"delta_rank_gradients({_CALL}, Tensor do, Tensor states, Tensor tokens, bool[] needs, {DELTA_SCHEMA}) -> Tensor[]",
    _tokens_back,
    _tokens_back_fake,
)
