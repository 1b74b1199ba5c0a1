"""DeltaNet, GDN and KDA over the ranks of a group: one autograd function, one collective in each direction.

What a rank holds of one sequence together, a piece, is an affine map of the state that enters it, S -> M S + H:

    H       final state of the piece entered with zeros, or with what the caller gave where the sequence begins
    M       final state of the same scan with values of zero, entered with the identity: K value columns more
    enter   S of the next piece = M S + H, folded from the sequence's first piece on
    replay  the ordinary call of all that the rank holds, from the states that enter its pieces

    c       gradient of the entering state if that of the leaving one is zero, or the caller's where the sequence ends
    leave   dS of the piece before = M^T dS + c, folded from the sequence's last piece back
    replay  the ordinary backward, from the gradients of the states that leave the rank's pieces

so no kernel is new, and autograd never sees M and H: the gradient of the whole is that of the replay with the right
gradients at its borders (docs/algorithm.md, section 9). Ranks tell each other [H | M], and [c | M^T], in the width
that states have inside, of the pieces that cross their edges: as many numbers however long the sequences are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.parallel.context import ContextParallel
from wyfold.parallel.exchange import after
from wyfold.parallel.shares import Piece
from wyfold.pipelines.delta import run, run_backward, walk
from wyfold.pipelines.delta_records import (
    DIFFERENTIABLE,
    INITIAL_STATE,
    TENSORS,
    DeltaGradient,
    DeltaResult,
    DeltaTensors,
    turned,
)
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.register import distinct, once_differentiable
from wyfold.tile.index.eager import wide

MOST_COLUMNS = 256  # value columns of one call


def delta_across(tensors: DeltaTensors, options: DeltaOptions, context: ContextParallel) -> DeltaResult:
    """Results of one call whose sequences go on over the ranks of a context.

    Initial states are those of the sequences that begin here, final states of those that end here.
    """
    o, final_state = DeltaAcross.apply(*distinct(tensors), options, context)
    return DeltaResult(o, final_state, o.new_empty(0))


class DeltaAcross(torch.autograd.Function):
    """The replay of a rank's pieces from the states that enter them."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, options, context = arguments
        t = DeltaTensors(*given)
        call = _Call(t, options, context)
        entering, maps = call.entering(t.initial_state)
        result, saved = run(call.packed(t, entering), call.inside)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.context = options, context
        ctx.save_for_backward(*given, entering, maps, *saved)
        final_state = result.final_state
        if options.final_state:
            ending = final_state[context.ending(call.B, t.q.device)]
            final_state = turned(ending, options).to(options.state_dtype)
        return result.o.view(t.v.shape), final_state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dST: Tensor | None) -> tuple[Tensor | None, ...]:
        kept = ctx.saved_tensors  # once: checkpointing refuses a second unpacking
        t, (entering, maps, *saved) = DeltaTensors(*kept[:TENSORS]), kept[TENSORS:]
        call = _Call(t, ctx.options, ctx.context)
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        dST = dST if call.options.final_state else None
        if do is None:
            do = t.v.new_zeros(()).expand(t.v.shape)
        leaving = call.leaving(do, dST, entering, maps)
        given = DeltaGradient(call.packed(t, entering), call.inside, saved, call.one_buffer(do), leaving, needs)
        found = run_backward(given)
        if needs[INITIAL_STATE] and t.initial_state is not None:
            begun = found[INITIAL_STATE][call.context.beginning(call.B, t.q.device)]
            found[INITIAL_STATE] = turned(begun, call.options).to(t.initial_state.dtype)
        none = (None,) * (TENSORS + 2 - DIFFERENTIABLE)
        # Gradients of one buffer are those of B rows, one after another.
        return *(dx.view_as(x) if need and x is not None else None for dx, x, need in zip(found, t, needs)), *none


class _Call(NamedTuple):
    """One rank's part of a call.

    Attributes:
        tensors: [B, T, ...] this rank's share.
        options: As the caller asked.
        context: Who holds what.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    context: ContextParallel

    @property
    def B(self) -> int:
        return self.tensors.v.shape[0]

    @property
    def T(self) -> int:
        return self.tensors.v.shape[1]

    @property
    def inside(self) -> DeltaOptions:
        """The options of local calls: states as wide as they are between chunks, [.., K, V]."""
        return self.options._replace(state_v_first=False, state_dtype=wide(self.tensors.q.dtype))

    def states(self, count: int, columns: int) -> Tensor:
        """Zeros [count, HV, K, columns]."""
        t = self.tensors
        return t.q.new_zeros(count, t.v.shape[2], t.q.shape[3], columns, dtype=wide(t.q.dtype))

    def one_buffer(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, B T, ...]."""
        return x if self.B == 1 else x.reshape(1, self.B * self.T, *x.shape[2:])

    def packed(self, t: DeltaTensors, entering: Tensor) -> DeltaTensors:
        """The call of all pieces as sequences of one buffer."""
        q, k, v, g, beta = (None if x is None else self.one_buffer(x) for x in t[:INITIAL_STATE])
        at = self.context.boundaries(self.B, t.q.device)
        on_cpu = self.context.boundaries(self.B, torch.device("cpu"))
        return DeltaTensors(q, k, v, g, beta, entering, t.A_log, t.dt_bias, at, on_cpu)  # type: ignore[arg-type]

    def alone(self, piece: Piece, initial_state: Tensor) -> DeltaTensors:
        """The call of one piece, its B rows dense."""
        t = self.tensors
        tokens = t[:INITIAL_STATE]
        q, k, v, g, beta = (None if x is None else x.narrow(1, piece.offset, piece.length) for x in tokens)
        return DeltaTensors(q, k, v, g, beta, initial_state, t.A_log, t.dt_bias, None, None)  # type: ignore[arg-type]

    def rows(self, piece: Piece) -> slice:
        """A piece's rows among the states of all pieces."""
        return slice(piece.number, None, len(self.context.pieces))

    # --- forward -----------------------------------------------------------------------------------------------------

    def entering(self, initial_state: Tensor | None) -> tuple[Tensor, Tensor]:
        """[B pieces, HV, K, V] states entering this rank's pieces, and [pieces, B, HV, K, K] maps M of those that have
        a piece before them and one behind them, zeros elsewhere, for the backward."""
        t, shares, pieces = self.tensors, self.context.shares, self.context.pieces
        K, V = t.q.shape[3], t.v.shape[3]
        entering = self.states(self.B * len(pieces), V)
        if initial_state is not None:
            begun = turned(initial_state, self.options).to(entering.dtype)
            entering[self.context.beginning(self.B, t.q.device)] = begun
        sent = self.states(shares.most_leaving * self.B, V + K).unflatten(0, (shares.most_leaving, self.B))
        for piece in pieces:
            if piece.leaving >= 0:
                sent[piece.leaving] = self._summary(piece, entering[self.rows(piece)])
        crossing = [piece for piece in pieces if piece.leaving >= 0 and piece.entering >= 0]
        kept = shares.most_entering if self.options.save else 0
        maps = self.states(kept * self.B, K).unflatten(0, (kept, self.B))
        if self.options.save:
            for piece in crossing:
                maps[piece.entering] = sent[piece.leaving, ..., V:]
        told = self.context.gather(sent)
        entering = after(entering, told)
        for chain in shares.chains:
            here = [piece.rank == self.context.rank for piece in chain]
            if not any(here[1:]):
                continue
            S = told[chain[0].rank, chain[0].leaving, ..., :V]
            for before, piece in pairwise(chain):
                if not before.first:
                    H, M = told[before.rank, before.leaving].split([V, K], dim=-1)
                    S = H + M @ S
                if piece.rank == self.context.rank:
                    entering[self.rows(piece)] = S
        return entering, maps

    def _summary(self, piece: Piece, S: Tensor) -> Tensor:
        """[B, HV, K, V + K] H and M of a piece; M stays zero where the sequence begins, whose S is the caller's."""
        options = self.inside._replace(final_state=True, save=False, keep_factors=False)
        t = self.alone(piece, S)
        K, V = t.q.shape[3], t.v.shape[3]
        if piece.first:
            H = run(t, options)[0].final_state
            return torch.cat([H, H.new_zeros(*H.shape[:-1], K)], dim=-1)
        identity = torch.eye(K, dtype=S.dtype, device=S.device).expand(*S.shape[:2], K, K)
        nothing = t.v.new_zeros(()).expand(*t.v.shape[:-1], K)
        if V + K <= MOST_COLUMNS:
            both = t._replace(v=torch.cat([t.v, nothing], dim=-1), initial_state=torch.cat([S, identity], dim=-1))
            return run(both, options)[0].final_state
        H = run(t, options)[0].final_state
        M = run(t._replace(v=nothing, initial_state=identity.contiguous()), options)[0].final_state
        return torch.cat([H, M], dim=-1)

    # --- backward ----------------------------------------------------------------------------------------------------

    def leaving(self, do: Tensor, dST: Tensor | None, entering: Tensor, maps: Tensor) -> Tensor:
        """[B pieces, HV, K, V] gradients of the states that leave this rank's pieces."""
        t, shares, pieces = self.tensors, self.context.shares, self.context.pieces
        K, V = t.q.shape[3], t.v.shape[3]
        leaving = self.states(self.B * len(pieces), V)
        if dST is not None:
            leaving[self.context.ending(self.B, t.q.device)] = turned(dST, self.options).to(leaving.dtype)
        sent = self.states(shares.most_entering * self.B, V + K).unflatten(0, (shares.most_entering, self.B))
        for piece in pieces:
            if piece.entering >= 0:
                rows = self.rows(piece)
                sent[piece.entering, ..., :V] = self._summary_back(piece, entering[rows], do, leaving[rows])
                if not piece.last:
                    sent[piece.entering, ..., V:] = maps[piece.entering].mT
        told = self.context.gather(after(sent, do, dST))
        leaving = after(leaving, told)
        for chain in shares.chains:
            here = [piece.rank == self.context.rank for piece in chain]
            if not any(here[:-1]):
                continue
            dS = told[chain[-1].rank, chain[-1].entering, ..., :V]
            for behind, piece in pairwise(reversed(chain)):
                if not behind.last:
                    c, MT = told[behind.rank, behind.entering].split([V, K], dim=-1)
                    dS = c + MT @ dS
                if piece.rank == self.context.rank:
                    leaving[self.rows(piece)] = dS
        return leaving

    def _summary_back(self, piece: Piece, S: Tensor, do: Tensor, dS: Tensor) -> Tensor:
        """[B, HV, K, V] gradient of the state that enters a piece, if that of the leaving one is dS."""
        # A piece in segments would need their maps, which its forward alone makes.
        options = self.inside._replace(final_state=True, keep_factors=False, segment_chunks=0, segments=1)
        t = self.alone(piece, S)
        needs = [index == INITIAL_STATE for index in range(DIFFERENTIABLE)]
        room = walk(options).saved(t, options)  # states of the forward, which this does not depend on
        d_out = do.narrow(1, piece.offset, piece.length)
        return run_backward(DeltaGradient(t, options, room, d_out, dS, needs))[INITIAL_STATE]
