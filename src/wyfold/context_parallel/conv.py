"""The short convolution over the ranks of a group: one autograd function, one all-gather in each direction.

The halo of a piece is the latest W-1 inputs of the pieces before it. Ranks gather the last inputs of their pieces, and
each rank composes its halos from them. Gradients of these inputs return the same way. The size of what is sent does not
depend on sequence lengths.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from wyfold.autograd.conv import DIFFERENTIABLE, ConvTensors, backward_op, forward_op
from wyfold.context_parallel.collectives import after
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.partition import Piece
from wyfold.runtime.torch_ops import once_differentiable
from wyfold.tile.index.eager import wide


class ConvAcrossRanks(torch.autograd.Function):
    """The convolution of a rank's pieces, from the inputs before them on this or other ranks."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, output_final_state, activated, backend, context = arguments
        t = ConvTensors(*given)
        halo = _Halo(t.x, t.weight.shape[1] - 1, context)
        entering = halo.entering(t.x, t.initial_state)
        y, latest = forward_op(*halo.packed(t, entering), output_final_state, activated, backend)
        ctx.set_materialize_grads(False)
        ctx.halo, ctx.final_state, ctx.options = halo, output_final_state, (activated, backend)
        ctx.save_for_backward(*given, entering)
        if output_final_state:
            stored = t.x if t.initial_state is None else t.initial_state
            latest = latest[context.ending_pieces(halo.B, t.x.device)].to(stored.dtype)
        return y.view(t.x.shape), latest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, entering = ctx.saved_tensors
        t, halo = ConvTensors(*given), ctx.halo
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        dlatest = None
        if ctx.final_state and dfinal is not None:
            dlatest = torch.zeros_like(entering)
            dlatest[halo.context.ending_pieces(halo.B, t.x.device)] = dfinal.to(entering.dtype)
        dy = None if dy is None else halo.one_buffer(dy)
        # The halo's gradient is computed even if this rank does not need it: other ranks do.
        local = [*needs[:-1], True]
        found = iter(backward_op(*halo.packed(t, entering), dy, dlatest, local, *ctx.options))
        gradients = [next(found) if need else None for need in local]
        dentering: Any = gradients.pop()
        gathered = halo.gather_gradients(dentering)
        gradients, dentering = (
            [None if dx is None else after(dx, gathered) for dx in gradients],
            after(dentering, gathered),
        )
        halo.add_received(gathered, dentering, gradients[0])
        gradients[0] = None if gradients[0] is None else gradients[0].view(t.x.shape)
        dstarting: Tensor | None = None
        if t.initial_state is not None and needs[-1]:
            dstarting = dentering[halo.context.starting_pieces(halo.B, dentering.device)].to(t.initial_state.dtype)
        gradients.append(dstarting)
        residual = DIFFERENTIABLE - 2
        if (dresidual := gradients[residual]) is not None:
            gradients[residual] = dresidual.view(t.x.shape)
        return *gradients, *[None] * (len(ctx.needs_input_grad) - DIFFERENTIABLE)


class _Halo:
    """Halos of a rank's pieces: the latest `width` inputs before each, [.., D, width], oldest first."""

    def __init__(self, x: Tensor, width: int, context: ContextParallel):
        self.B, self.T, self.D = x.shape
        self.width, self.context, self.dtype = width, context, wide(x.dtype)

    def one_buffer(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [1, B T, D]."""
        return x if self.B == 1 else x.reshape(1, self.B * self.T, self.D)

    def packed(self, t: ConvTensors, entering: Tensor) -> ConvTensors:
        """The call with all pieces as sequences of one packed buffer."""
        residual = None if t.residual is None else self.one_buffer(t.residual)
        at = self.context.boundaries(self.B, t.x.device)
        return ConvTensors(self.one_buffer(t.x), t.weight, t.bias, residual, entering, at)

    def rows(self, piece: Piece) -> slice:
        """Slice of the states of all pieces that belongs to one piece: B rows."""
        return slice(piece.number, None, len(self.context.pieces))

    def zeros(self, x: Tensor, *counts: int) -> Tensor:
        return x.new_zeros(*counts, self.D, self.width, dtype=self.dtype)

    def own_inputs(self, piece: Piece) -> int:
        """Number of inputs of the piece among the latest `width` inputs at its end."""
        return min(piece.length, self.width)

    def entering(self, x: Tensor, initial_state: Tensor | None) -> Tensor:
        """Gather the halos [B pieces, D, width] of this rank's pieces; one collective if a sequence spans ranks."""
        partition, pieces = self.context.partition, self.context.pieces
        entering = self.zeros(x, self.B * len(pieces))
        if initial_state is not None:
            entering[self.context.starting_pieces(self.B, x.device)] = initial_state.to(self.dtype)
        send_buffer = self.zeros(x, partition.most_outgoing, self.B)
        for piece in pieces:
            if piece.outgoing >= 0:
                n, end = self.own_inputs(piece), piece.offset + piece.length
                if piece.first and n < self.width:
                    send_buffer[piece.outgoing, ..., : self.width - n] = entering[self.rows(piece)][..., n:]
                send_buffer[piece.outgoing, ..., self.width - n :] = x[:, end - n : end].transpose(1, 2)
        gathered = self.context.all_gather(send_buffer)
        entering = after(entering, gathered)
        for chain in partition.chains:
            latest = gathered[chain[0].rank, chain[0].outgoing]
            for before, piece in pairwise(chain):
                n, sent = self.own_inputs(before), gathered[before.rank, before.outgoing]
                # A first piece has sent the inputs before it too. A piece of `width` tokens or more needs none of them.
                whole = before.first or n == self.width
                latest = sent if whole else torch.cat([latest[..., n:], sent[..., self.width - n :]], -1)
                if piece.rank == self.context.rank:
                    entering[self.rows(piece)] = latest
        return entering

    def gather_gradients(self, dentering: Tensor) -> Tensor:
        """All-gather the gradients [B pieces, D, width] of all halos; one collective if a sequence spans ranks.

        Returns:
            [world, rows, B, D, width].
        """
        send_buffer = self.zeros(dentering, self.context.partition.most_incoming, self.B)
        for piece in self.context.pieces:
            if piece.incoming >= 0:
                send_buffer[piece.incoming] = dentering[self.rows(piece)]
        return self.context.all_gather(after(send_buffer, dentering))

    def add_received(self, gathered: Tensor, dentering: Tensor, dx: Tensor | None) -> None:
        """Add the gathered gradients of halos to the gradients of this rank's inputs and initial states.

        Args:
            gathered: Result of `gather_gradients`.
            dentering: [B pieces, D, width] gradients of this rank's halos; updated in place.
            dx: [1, B T, D] gradient of this rank's x, updated in place; or None.
        """
        for chain in self.context.partition.chains:
            dlatest = gathered[chain[-1].rank, chain[-1].incoming]
            for later, piece in pairwise(reversed(chain)):
                n, received = self.own_inputs(later), gathered[later.rank, later.incoming]
                # Inputs before a piece reach past it only if it has fewer than `width` tokens.
                whole = later.last or n == self.width
                dlatest = received if whole else received + pad(dlatest[..., : self.width - n], (n, 0))
                if piece.rank != self.context.rank:
                    continue
                n, end = self.own_inputs(piece), piece.offset + piece.length
                if dx is not None:
                    rows = dx.view(self.B, self.T, self.D)[:, end - n : end]
                    rows += dlatest[..., self.width - n :].transpose(1, 2).to(dx.dtype)
                if piece.first and n < self.width:
                    dentering[self.rows(piece)][..., n:] += dlatest[..., : self.width - n]
