"""TTT-Linear over the ranks of a group: states pass from rank to rank, and their gradients back.

The inner model's step is not affine in its state, so a piece has no summary that could be computed before its state is
known. The pieces of a rank run in waves by depth, the number of earlier pieces of their sequence. After each wave the
ranks all-gather the final (S, c). Context parallelism splits the memory of one sequence, but not its time; different
sequences run in parallel.

    forward     for d = 0, 1, ..: run the pieces of depth d; all-gather (S, c)
    backward    for d = .., 1, 0: all-gather (dS, dc); run the backward of the pieces

One autograd function holds all waves, so that every rank takes part in every handover of both directions, whichever
pieces it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.ttt import run, run_backward
from wyfold.autograd.ttt_records import DIFFERENTIABLE, TENSORS, TTTOptions, TTTResult, TTTTensors, transpose_if_v_first
from wyfold.context_parallel.collectives import after
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.partition import Handover, Piece
from wyfold.context_parallel.waves import Wave, waves
from wyfold.kernels.ttt_records import State
from wyfold.runtime.differentiation import apply, once_differentiable
from wyfold.tile.index.eager import wide

TOKENS = ("q", "k", "v", "eta", "eta_col")


def ttt_across_ranks(tensors: TTTTensors, options: TTTOptions, context: ContextParallel) -> TTTResult:
    """Run one call whose sequences span the ranks of a context.

    Initial states are those of the sequences that begin on this rank, final states those of the sequences that end on
    it.
    """
    o, state, bias = apply(options.operator, TTTAcrossRanks, *tensors, options, context)
    none = o.new_empty(0)
    return TTTResult(o, state, bias, none, none, none)


class TTTAcrossRanks(torch.autograd.Function):
    """Waves of pieces, with a handover of states after each."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        *given, options, context = arguments
        t = TTTTensors(*given)
        call = TTTRankCall(t, options, context)
        states, o, kept = call.initial_states(), t.v.new_zeros(t.v.shape), []
        left = call.states()
        gathered: Tensor | None = None
        for wave in call.waves():
            if wave.pieces:
                result, saved = run(call.tensors_of(wave, states), call.inside)
                wave.put(o, result.o)
                for whole, part in zip(left, (result.state, result.bias), strict=True):
                    whole[wave.states] = part
                kept.append(saved)
            gathered = call.gather_states(wave.forward, left, gathered, forward=True)
            for handover, S, c in call.received(wave.forward, gathered, forward=True):
                states.S[call.rows(handover.target)], states.c[call.rows(handover.target)] = S, c
        o = after(o, gathered)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.context, ctx.kept = options, context, [len(saved) for saved in kept]
        ctx.partition = context.partition
        ctx.save_for_backward(*given, *states, *(x for saved in kept for x in saved))
        if not options.final_state:
            return o, o.new_empty(0), o.new_empty(0)
        ended = context.ending_pieces(call.B, t.q.device)
        S, c = transpose_if_v_first(left.S[ended], options), left.c[ended]
        return o, S.to(options.state_dtype), c.to(options.state_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dS: Tensor | None, dc: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.context.require_partition(ctx.options.operator, ctx.partition)
        given = list(ctx.saved_tensors)  # read once: checkpointing refuses a second unpacking
        t, (S, c, *saved) = TTTTensors(*given[:TENSORS]), given[TENSORS:]
        states = State(S, c)
        call = TTTRankCall(t, ctx.options, ctx.context)
        dleft, dentered = call.states(), call.states()
        ended = ctx.context.ending_pieces(call.B, t.q.device)
        if ctx.options.final_state:
            for whole, part in zip(
                dleft, (None if dS is None else transpose_if_v_first(dS, ctx.options), dc), strict=True
            ):
                if part is not None:
                    whole[ended] = part.to(whole.dtype)
        found: list[Tensor | None] = [None if x is None else x.new_zeros(x.shape) for x in t[:DIFFERENTIABLE]]
        kept = []
        for count in ctx.kept:
            kept.append(saved[:count])
            saved = saved[count:]
        gathered: Tensor | None = after(dleft.S[:0], do, dS, dc)
        for wave in reversed(call.waves()):
            gathered = call.gather_states(wave.forward, dentered, gathered, forward=False)
            for handover, matrix, bias in call.received(wave.forward, gathered, forward=False):
                dleft.S[call.rows(handover.source)], dleft.c[call.rows(handover.source)] = matrix, bias
            if not wave.pieces:
                continue
            d_out = None if do is None else wave.take(do)
            incoming = d_out, dleft.S[wave.states], dleft.c[wave.states], None, None
            gradients = run_backward(call.tensors_of(wave, states), kept.pop(), incoming, call.inside)
            for name, dx, part in zip(TTTTensors._fields, found, gradients):
                if dx is not None and name in TOKENS:
                    wave.put(dx, part)
                elif dx is not None and name in ("w", "b"):
                    dx += part
            dentered.S[wave.states], dentered.c[wave.states] = gradients[-2:]
        found = [None if dx is None else after(dx, gathered) for dx in found]
        initial_states = ctx.context.starting_pieces(call.B, t.q.device)
        if t.state is not None:
            found[-2] = transpose_if_v_first(dentered.S[initial_states], ctx.options).to(t.state.dtype)
        if t.bias is not None:
            found[-1] = dentered.c[initial_states].to(t.bias.dtype)
        needs = ctx.needs_input_grad[:DIFFERENTIABLE]
        none = (None,) * (TENSORS + 2 - DIFFERENTIABLE)
        return *(dx if need else None for dx, need in zip(found, needs, strict=True)), *none


class TTTRankCall(NamedTuple):
    """One rank's part of a call.

    Attributes:
        tensors: [B, T, ...] tensors of this rank's shard.
        options: Options of the call.
        context: Partition of the tokens over ranks.
    """

    tensors: TTTTensors
    options: TTTOptions
    context: ContextParallel

    @property
    def B(self) -> int:
        return self.tensors.v.shape[0]

    @property
    def inside(self) -> TTTOptions:
        """Options of the local calls: wide states [.., K, V], always returned."""
        dtype = wide(self.tensors.q.dtype)
        return self.options._replace(state_v_first=False, state_dtype=dtype, final_state=True)

    def states(self) -> State:
        """Allocate wide states of zeros for every piece."""
        HV, D = self.tensors.v.shape[2:]
        rows = self.B * len(self.context.pieces)
        return State(*(self.tensors.v.new_zeros(rows, HV, n, D, dtype=wide(self.tensors.q.dtype)) for n in (D, 1)))

    def initial_states(self) -> State:
        """States that enter every piece: the caller's initial states where sequences begin, zeros elsewhere."""
        t, found, first = self.tensors, self.states(), self.context.starting_pieces(self.B, self.tensors.q.device)
        if t.state is not None:
            found.S[first] = transpose_if_v_first(t.state, self.options).to(found.S.dtype)
        if t.bias is not None:
            found.c[first] = t.bias.to(found.c.dtype)
        return found

    def rows(self, piece: Piece) -> slice:
        """Slice of the states of all pieces that belongs to one piece: B rows."""
        return slice(piece.number, None, len(self.context.pieces))

    def waves(self) -> list[Wave]:
        """Return one wave for every depth that any rank has."""
        return waves(self.context.partition, self.context.rank, self.B, self.tensors.q.device)

    def tensors_of(self, wave: Wave, states: State) -> TTTTensors:
        """The local call of a wave, from the states that enter its pieces."""
        t = self.tensors
        col = None if t.eta_col is None else wave.take(t.eta_col)
        S, c = states.S[wave.states], states.c[wave.states]
        tokens = t._replace(q=wave.take(t.q), k=wave.take(t.k), v=wave.take(t.v), eta=wave.take(t.eta), eta_col=col)
        return tokens._replace(state=S, bias=c, cu_seqlens=wave.cu_seqlens)

    def gather_states(
        self, handovers: Sequence[Handover], states: State, before: Tensor | None, *, forward: bool
    ) -> Tensor | None:
        """All-gather the states of the sending pieces of some handovers.

        Args:
            handovers: Handovers of one depth, of all ranks; without any there is no collective.
            states: States (or their gradients) of all pieces of this rank.
            before: Result of the previous `gather_states`, after which a compiler must keep this collective; or None.
            forward: Whether states pass from source to target, or gradients from target to source.

        Returns:
            [world, rows, B, HV, D + 1, D], c below S; `before` without handovers.
        """
        if not handovers:
            return before
        HV, D = self.tensors.v.shape[2:]
        placed = _placed(handovers, forward)
        send_buffer = states.S.new_zeros(1 + max(place for _, _, place in placed), self.B, HV, D + 1, D)
        for source, _, place in placed:
            if source.rank == self.context.rank:
                send_buffer[place] = torch.cat([states.S[self.rows(source)], states.c[self.rows(source)]], dim=2)
        return self.context.all_gather(after(send_buffer, before))

    def received(
        self, handovers: Sequence[Handover], gathered: Tensor | None, *, forward: bool
    ) -> Iterator[tuple[Handover, Tensor, Tensor]]:
        """Yield the handovers that this rank receives, each with the gathered S and c, [B, HV, ..]."""
        for one, (source, target, place) in zip(handovers, _placed(handovers, forward), strict=True):
            if gathered is not None and target.rank == self.context.rank:
                S, c = gathered[source.rank, place].split([gathered.shape[-1], 1], dim=2)
                yield one, S, c


def _placed(handovers: Sequence[Handover], forward: bool) -> list[tuple[Piece, Piece, int]]:
    """For each handover: the sending piece, the receiving piece, and the row in the sender's buffer."""
    counts: dict[int, int] = {}
    found = []
    for one in handovers:
        source, target = (one.source, one.target) if forward else (one.target, one.source)
        place = counts.get(source.rank, 0)
        counts[source.rank] = place + 1
        found.append((source, target, place))
    return found
