"""Launches of `delta_by_segments` in both directions, and the all-gather between them. The host knows the layout.

    forward     prepare, segment_summary, segment_fold, rank_send: [H | M] of pieces that continue on another rank
                all-gather
                rank_carry, segment_fold, scan
    backward    prepare (unless its factors were saved), segment_summary, segment_fold, rank_send: c of pieces that
                began on another rank
                all-gather
                rank_carry, segment_fold, scan_bwd, gradients

Segments that begin a sequence, and the states that the backward recomputes, run during the all-gather.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.delta_chunk import token_gradients
from wyfold.autograd.delta_records import INITIAL_STATE, DeltaBackwardInputs, DeltaTensors
from wyfold.autograd.kernel_call import KernelCall, backward_factors, factors_from_list
from wyfold.autograd.row_alignment import contiguous_for_tma
from wyfold.context_parallel.collectives import AllGather
from wyfold.context_parallel.delta_rank import Exchange
from wyfold.context_parallel.rank_segments import RankSegments
from wyfold.kernels import table
from wyfold.kernels.records import Prepared, StateRows
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.side_stream import fork_side_stream


class SegmentsCall:
    """A call with all pieces as sequences of one packed buffer, cut into segments.

    Attributes:
        kernel_call: Call of the chunk kernels on the pieces' chunk grid.
        places: Tables of the rank's segments.
        tails: [outgoing, HV, K, V + K] H and M of the tokens after the last full chunk of each piece that continues on
            another rank; None if no piece has such tokens.
        exchange: What this rank exchanges.
        t, options: Tensors and options of the call.
        HV, K, V: Sizes.
    """

    def __init__(
        self, t: DeltaTensors, options: DeltaOptions, places: RankSegments, tails: Tensor | None, exchange: Exchange
    ):
        grid = places.grid(options.chunk_size, t.v.shape[1])
        self.kernel_call = kernel_call = KernelCall(t, options._replace(segment_chunks=0, segments=1))
        kernel_call.grid, kernel_call.segments = grid, places.segments(grid) if places.borders else None
        self.places, self.tails, self.exchange = places, tails, exchange
        self.t, self.options = kernel_call.t, options
        self.HV, self.K, self.V = t.v.shape[2], t.q.shape[3], t.v.shape[3]

    def new_states(self, given: Tensor | None) -> Tensor:
        """Allocate [pieces, HV, K, V] states: a copy of those given, or zeros."""
        if given is not None:
            return given.clone()
        return self.t.q.new_zeros(self.places.pieces, self.HV, self.K, self.V, dtype=torch.float32)

    def at_borders(self, columns: int) -> Tensor:
        """Allocate [borders, HV, columns, K] of numbers at borders, uninitialized."""
        return self.t.q.new_empty(self.places.borders, self.HV, columns, self.K, dtype=torch.float32)

    def send_buffer(self, most: int, written: int) -> Tensor:
        """Allocate [most B, HV, K, V + K] with zeros after its first `written` rows."""
        rows, width = most * self.exchange.batch, self.V + self.K
        send_buffer = self.t.q.new_empty(rows, self.HV, self.K, width, dtype=torch.float32)
        if written < rows:
            send_buffer[written:].zero_()
        return send_buffer

    def all_gather(self, send_buffer: Tensor) -> AllGather:
        """Launch the all-gather of [world, most, B, HV, K, V + K]."""
        batch, _, _, world, group = self.exchange
        return AllGather(send_buffer.unflatten(0, (-1, batch)), world, group)

    def rank_send(self, states: Tensor, borders: Tensor, tails: Tensor | None, send_buffer: Tensor) -> None:
        """Pack the K-last states that leave at borders."""
        send = self.stage("rank_carry").rank_send
        send(StateRows(states.mT, borders), tails, send_buffer, dtype=self.t.k.dtype)

    def rank_carry(
        self, gathering: AllGather, routes: Tensor, outer: StateRows, borders: StateRows, *, reverse: bool
    ) -> None:
        """Wait for the other ranks, and write the states at the ends of the routes to where they enter."""
        carry, tails = self.stage("rank_carry").rank_carry, self.tails if reverse else None
        carry(gathering.wait(), routes, outer, borders, tails, reverse=reverse, dtype=self.t.k.dtype)

    def stage(self, name: str) -> Any:
        return table.selected_module(name, self.options.backend, self.kernel_call.key, self.t.q.device)


class Saved(NamedTuple):
    """Results of the forward that the backward reads.

    Attributes:
        entering: [B pieces, HV, K, V] states that enter the pieces; `t.initial_state` of the backward's call.
        states: [borders, HV, V, K] states at the borders.
        M: [borders, HV, K, K] maps of the segments before the borders.
        sent: [most_outgoing B, HV, K, V + K] send buffer, whose maps M the backward sends again.
        factors: Factors that the backward reads, as a list; [] if they are not kept.
    """

    entering: Tensor
    states: Tensor
    M: Tensor
    sent: Tensor
    factors: list[Tensor]


def forward(call: SegmentsCall) -> tuple[Tensor, Tensor, Saved]:
    """Scan all pieces from the caller's states, `t.initial_state`, and those that other ranks send.

    Returns:
        [1, B T, HV, V] output; [B pieces, HV, K, V] final states, without elements if not requested; what is saved.
    """
    t, options, places, kernel_call = call.t, call.options, call.places, call.kernel_call
    keep = options.save and options.keep_factors
    entering, M = call.new_states(t.initial_state), call.at_borders(call.K)
    prepared = kernel_call.prepare(t.v, backward=keep, forward=True, clear=False)
    states, sent = _maps(call, prepared, entering, M)
    o = t.v.new_empty(t.v.shape)
    if places.tokens < o.shape[1]:
        o[:, places.tokens :].zero_()
    final_state = entering.new_empty(entering.shape if options.final_state else 0)
    scan = partial(
        call.stage("scan").scan,
        *(t.q, t.k, t.v, prepared, entering, kernel_call.scan_grid, options, kernel_call.key, o),
        final_state if options.final_state else None,
        states=None,
        first_state=None,
        segments=kernel_call.segments,
        borders=states.mT,
    )
    with call.all_gather(sent) as gathering:
        if kernel_call.segments is None:
            scan()
        else:
            outer, borders = StateRows(entering, places.incoming_piece), StateRows(states.mT, places.incoming_border)
            with fork_side_stream(o.device) as on_side:
                if places.incoming < places.pieces:
                    # A piece from another rank begins with an empty segment. The state that it reads is not used, so
                    # the side stream may write that state meanwhile.
                    scan(from_borders=False)
                with on_side:
                    if places.incoming:
                        call.rank_carry(gathering, places.forward_routes, outer, borders, reverse=False)
                    kernel_call.fold(states, M, reverse=False)
                    scan(from_borders=True)
    return o, final_state, Saved(entering, states, M, sent, _kept_factors(call, prepared) if keep else [])


def _maps(call: SegmentsCall, prepared: Prepared, entering: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """Summarize the segments, and fold the summaries into the maps of the pieces that continue on another rank.

    Args:
        call, prepared: The call, and its factors.
        entering: States of sequences that begin here.
        M: [borders, HV, K, K] maps of the segments before the borders, written.

    Returns:
        [borders, HV, V, K] H of these segments; the send buffer.
    """
    t, places, kernel_call, V = call.t, call.places, call.kernel_call, call.V
    sent = call.send_buffer(call.exchange.most_outgoing, places.outgoing)
    if not places.outgoing:
        H = call.at_borders(V)
        if places.borders:
            kernel_call.summary(t.k, t.v, prepared, entering, H, M)
        return H, sent
    both = t.q.new_zeros(places.borders, call.HV, V + call.K, call.K, dtype=torch.float32)
    kernel_call.summary(t.k, t.v, prepared, entering, both[:, :, :V], M)
    H = both[:, :, :V].clone(memory_format=torch.contiguous_format)
    if places.incoming:  # the map of a piece that began on another rank is folded from the identity
        both[:, :, V:].diagonal(dim1=2, dim2=3).index_fill_(0, places.incoming_border, 1)
    kernel_call.fold(both, M, reverse=False, divided=places.outgoing_piece)
    call.rank_send(both, places.outgoing_border, call.tails, sent)
    return H, sent


def _kept_factors(call: SegmentsCall, prepared: Prepared) -> list[Tensor]:
    """The factors that the backward reads; zeros in tiles without a token, which `prepare` does not write."""
    factors, chunks = backward_factors(prepared), call.places.chunks
    for x in factors if chunks < call.kernel_call.grid.chunks else ():
        x[chunks * call.HV :].zero_()
    return factors


def backward(
    call: SegmentsCall, saved: Saved, do: Tensor | None, dleaving: Tensor | None, needs: list[bool]
) -> list[Tensor]:
    """Compute every needed gradient.

    Args:
        call, saved: The call, and what its forward saved.
        do: [1, B T, HV, V] gradient of the output; None for zeros.
        dleaving: [B pieces, HV, K, V] gradients of final states, zeros where a sequence continues on another rank; None
            for zeros.
        needs: For each differentiable tensor, whether its gradient is needed.
    """
    t, options, places, kernel_call = call.t, call.options, call.places, call.kernel_call
    entering, states, M, sent, factors = saved
    do = t.v.new_zeros(()).expand(t.v.shape) if do is None else do
    if kernel_call.uses_tma:
        do = contiguous_for_tma(do)
    leaving, c = call.new_states(dleaving), call.at_borders(call.V)
    given = DeltaBackwardInputs(t, options, [], do, None, needs)
    dS0 = given.empty_grad(INITIAL_STATE)
    prepared = (
        factors_from_list(factors) if factors else kernel_call.prepare(t.v, backward=True, forward=False, clear=False)
    )
    if places.borders:
        kernel_call.summary_bwd(t.q, t.k, prepared, do, leaving, c)
    send_buffer = call.send_buffer(call.exchange.most_incoming, places.incoming)
    if places.incoming:
        gradients = c.clone()
        kernel_call.fold(gradients, M, reverse=True, divided=places.incoming_piece)
        call.rank_send(gradients, places.incoming_border, None, send_buffer)
        for incoming, outgoing in places.through:  # no rank reads the map of a sequence's last piece
            rows, before = (slice(n * call.exchange.batch, (n + 1) * call.exchange.batch) for n in (incoming, outgoing))
            send_buffer[rows, ..., call.V :].copy_(sent[before, ..., call.V :].mT)
    borders = kernel_call.stage("scan_bwd").token_borders(t.q, t.v, kernel_call.scan_grid)
    borders = borders._replace(norms=prepared.norms)
    scan_bwd = partial(
        call.stage("scan_bwd").scan_bwd,
        *(t.q, t.k, t.v, prepared, entering, do, leaving, kernel_call.scan_grid, options, kernel_call.key),
        dS0 if needs[INITIAL_STATE] else None,
        borders,
        segments=kernel_call.segments,
        entering=states.mT,
        leaving=c.mT,
    )
    with call.all_gather(send_buffer) as gathering:
        if kernel_call.segments is None:
            scan_bwd()
        else:
            with fork_side_stream(do.device) as on_side:
                scan_bwd(half="forward")
                with on_side:
                    if places.outgoing:
                        outer, at = StateRows(leaving, places.outgoing_piece), StateRows(c.mT, places.outgoing_border)
                        call.rank_carry(gathering, places.backward_routes, outer, at, reverse=True)
                    kernel_call.fold(c, M, reverse=True)
                    scan_bwd(half="reverse")
    del scan_bwd, prepared  # frees the factors, whose memory the tokens' gradients may reuse
    return given.to_input_dtypes(token_gradients(kernel_call, given, do, borders, dS0))
