"""The short convolution over the ranks of a group: one autograd function, one all-gather in each direction.

The halo of a piece is the latest W-1 inputs of the pieces before it. Ranks gather the last inputs of their pieces, and
each rank composes its halos from them. Gradients of these inputs return the same way. The size of what is sent does not
depend on sequence lengths. Each direction is one registered operator, with its all-gather inside, so that the replay
cache repeats all of it.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from wyfold.autograd.conv import DIFFERENTIABLE, TENSORS_SCHEMA, ConvTensors, backward_op, forward_op
from wyfold.context_parallel.collectives import AllGather
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.partition import Piece, chains_of_numbers
from wyfold.runtime.differentiation import once_differentiable
from wyfold.runtime.torch_ops import call, register
from wyfold.tile.index.eager import wide


class ConvAcrossRanks(torch.autograd.Function):
    """The convolution of a rank's pieces, from the inputs before them on this or other ranks."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *given, output_final_state, activated, backend, context = arguments
        t = ConvTensors(*given)
        halos, starting = Halos.of(t.x, context), None
        if t.initial_state is not None:
            rows, dtype = halos.batch * halos.pieces, wide(t.x.dtype)
            starting = t.x.new_zeros(rows, *t.initial_state.shape[1:], dtype=dtype)
            starting[context.starting_pieces(halos.batch, t.x.device)] = t.initial_state.to(starting.dtype)
        packed, settings = _packed(t, starting, context), (output_final_state, activated, backend)
        y, latest, entering = call(_forward_op, *packed, *halos, *settings)
        ctx.set_materialize_grads(False)
        ctx.halos, ctx.context, ctx.partition, ctx.settings = halos, context, context.partition, settings
        ctx.save_for_backward(*given, entering)
        if output_final_state:
            stored = t.x if t.initial_state is None else t.initial_state
            latest = latest[context.ending_pieces(halos.batch, t.x.device)].to(stored.dtype)
        return y.view(t.x.shape), latest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
        *given, entering = ctx.saved_tensors
        t, halos, context, (final, *settings) = ConvTensors(*given), ctx.halos, ctx.context, ctx.settings
        context.require_partition("causal_conv1d", ctx.partition)
        needs = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        dlatest: Tensor | None = None
        if final and dfinal is not None:
            dlatest = torch.zeros_like(entering)
            dlatest[context.ending_pieces(halos.batch, t.x.device)] = dfinal.to(entering.dtype)
        packed, incoming = _packed(t, entering, context), (None if dy is None else _one_row(dy), dlatest)
        local = [*needs[:-1], True]  # a halo's gradient is computed even if this rank does not need it: others do
        *found, dentering = call(_backward_op, *packed, *halos, *incoming, local, *settings)
        rest = iter(found)
        # Gradients of one buffer are those of B rows, one after another.
        gradients = [next(rest).view_as(x) if need else None for need, x in zip(needs[:-1], given)]
        dstarting: Tensor | None = None
        if t.initial_state is not None and needs[-1]:
            dstarting = dentering[context.starting_pieces(halos.batch, t.x.device)].to(t.initial_state.dtype)
        return *gradients, dstarting, *[None] * (len(ctx.needs_input_grad) - DIFFERENTIABLE)


class Halos(NamedTuple):
    """How ranks exchange the halos of their pieces: fields of the registered operators' schema.

    Attributes:
        batch, tokens: B and T of this rank's x.
        pieces: Number of this rank's pieces.
        chains: `numbers_of_chains` of the partition.
        rank, world: This rank, and the number of ranks.
        group: Name of the process group.
    """

    batch: int
    tokens: int
    pieces: int
    chains: list[int]
    rank: int
    world: int
    group: str

    @classmethod
    def of(cls, x: Tensor, context: ContextParallel) -> Halos:
        (batch, tokens), pieces, chains = x.shape[:2], len(context.pieces), context.chain_numbers
        return cls(batch, tokens, pieces, chains, context.rank, context.world, context.group.group_name)


def _packed(t: ConvTensors, states: Tensor | None, context: ContextParallel) -> ConvTensors:
    """The call with all pieces as sequences of one packed buffer, from these states."""
    residual = None if t.residual is None else _one_row(t.residual)
    at = context.boundaries(t.x.shape[0], t.x.device)
    return ConvTensors(_one_row(t.x), t.weight, t.bias, residual, states, at)


def _one_row(x: Tensor) -> Tensor:
    """[B, T, D] -> [1, B T, D]."""
    return x if x.shape[0] == 1 else x.reshape(1, x.shape[0] * x.shape[1], x.shape[2])


# --- registered operators ---------------------------------------------------------------------------------------------


class _Exchange:
    """Exchange of halos, [.., D, width] with the oldest input first, between a rank's pieces and other ranks."""

    def __init__(self, x: Tensor, weight: Tensor, halos: Halos):
        self.B, self.T, self.pieces, numbers, self.rank, self.world, self.group = halos
        self.chains, self.dtype = chains_of_numbers(numbers), wide(x.dtype)
        self.D, self.width = weight.shape[0], weight.shape[1] - 1
        every = [piece for chain in self.chains for piece in chain]
        self.outgoing = [piece for piece in every if piece.rank == self.rank and piece.outgoing >= 0]
        self.incoming = [piece for piece in every if piece.rank == self.rank and piece.incoming >= 0]
        self.most_outgoing = max((1 + piece.outgoing for piece in every), default=0)
        self.most_incoming = max((1 + piece.incoming for piece in every), default=0)

    def entering(self, x: Tensor, starting: Tensor | None) -> Tensor:
        """Gather the halos [B pieces, D, width] of this rank's pieces, from x and the states where sequences begin."""
        received = len(self.incoming) == self.pieces
        entering = self.states(x, self.B * self.pieces, written=received) if starting is None else starting.clone()
        full = all(piece.first or piece.length >= self.width for piece in self.outgoing)
        written = full and len(self.outgoing) == self.most_outgoing
        send_buffer = self.states(x, self.most_outgoing, self.B, written=written)
        for piece in self.outgoing:
            n, sent = self.own_inputs(piece), send_buffer[piece.outgoing]
            if piece.first and n < self.width:
                sent[..., : self.width - n] = self.of(entering, piece)[..., n:]
            sent[..., self.width - n :] = self.latest_inputs(x, piece)
        gathered = AllGather(send_buffer, self.world, self.group).wait()
        for chain in self.chains:
            latest = gathered[chain[0].rank, chain[0].outgoing]
            for before, piece in pairwise(chain):
                n, sent = self.own_inputs(before), gathered[before.rank, before.outgoing]
                # A first piece has sent the inputs before it too. A piece of `width` tokens or more needs none of them.
                whole = before.first or n == self.width
                latest = sent if whole else torch.cat([latest[..., n:], sent[..., self.width - n :]], -1)
                if piece.rank == self.rank:
                    self.of(entering, piece).copy_(latest)
        return entering

    def return_gradients(self, dentering: Tensor, dx: Tensor | None) -> None:
        """Gather the gradients of all halos, and add them to those of the inputs and states that they came from.

        Args:
            dentering: [B pieces, D, width] gradients of this rank's halos; updated in place.
            dx: [1, B T, D] gradient of this rank's x, updated in place; or None.
        """
        written = len(self.incoming) == self.most_incoming
        send_buffer = self.states(dentering, self.most_incoming, self.B, written=written)
        for piece in self.incoming:
            send_buffer[piece.incoming] = self.of(dentering, piece)
        gathered = AllGather(send_buffer, self.world, self.group).wait()
        for chain in self.chains:
            dlatest = gathered[chain[-1].rank, chain[-1].incoming]
            for later, piece in pairwise(reversed(chain)):
                n, received = self.own_inputs(later), gathered[later.rank, later.incoming]
                # Inputs before a piece reach past it only if it has fewer than `width` tokens.
                whole = later.last or n == self.width
                dlatest = received if whole else received + pad(dlatest[..., : self.width - n], (n, 0))
                if piece.rank != self.rank:
                    continue
                n = self.own_inputs(piece)
                if dx is not None:
                    self.latest_inputs(dx, piece).add_(dlatest[..., self.width - n :].to(dx.dtype))
                if piece.first and n < self.width:
                    self.of(dentering, piece)[..., n:].add_(dlatest[..., : self.width - n])

    def of(self, states: Tensor, piece: Piece) -> Tensor:
        """The states of one piece: B of the rows of all pieces."""
        return states[piece.number :: self.pieces]

    def own_inputs(self, piece: Piece) -> int:
        """Number of inputs of the piece among the latest `width` inputs at its end."""
        return min(piece.length, self.width)

    def latest_inputs(self, x: Tensor, piece: Piece) -> Tensor:
        """View [B, D, n] of the latest `own_inputs` of a piece."""
        end = piece.offset + piece.length
        return x.view(self.B, self.T, -1)[:, end - self.own_inputs(piece) : end].transpose(1, 2)

    def states(self, x: Tensor, *counts: int, written: bool) -> Tensor:
        """Allocate [*counts, D, width]: zeros, or uninitialized if all of it will be written."""
        make = x.new_empty if written else x.new_zeros
        return make(*counts, self.D, self.width, dtype=self.dtype)


def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, halos, settings = _read(arguments)
    entering = _Exchange(t.x, t.weight, halos).entering(t.x, t.initial_state)
    y, latest = call(forward_op, *t._replace(initial_state=entering), *settings)
    return y, latest, entering


def _forward_fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    t, halos, (output_final_state, *_) = _read(arguments)
    shape = halos.batch * halos.pieces, t.weight.shape[0], t.weight.shape[1] - 1
    entering = t.x.new_empty(shape, dtype=wide(t.x.dtype))
    latest = torch.empty_like(entering) if output_final_state else t.x.new_empty(0)
    return t.x.new_empty(t.x.shape), latest, entering


def _backward(*arguments: Any) -> list[Tensor]:
    t, halos, (dy, dlatest, needs, *settings) = _read(arguments)
    found: list[Tensor] = call(backward_op, *t, dy, dlatest, needs, *settings)
    _Exchange(t.x, t.weight, halos).return_gradients(found[-1], found[0] if needs[0] else None)
    return found


def _backward_fake(*arguments: Any) -> list[Tensor]:
    t, _, (_, _, needs, *_) = _read(arguments)
    return [x.new_empty(x.shape) for x, need in zip(t, needs) if need and x is not None]


def _read(arguments: tuple[Any, ...]) -> tuple[ConvTensors, Halos, tuple[Any, ...]]:
    """An operator's tensors, how halos are exchanged, and its other arguments."""
    tensors, rest = arguments[: DIFFERENTIABLE + 1], arguments[DIFFERENTIABLE + 1 :]
    count = len(Halos._fields)
    return ConvTensors(*tensors), Halos(*rest[:count]), rest[count:]


_HALOS = "int batch, int tokens, int pieces, int[] chains, int rank, int world, str group"

_forward_op = register(
    f"conv_rank_fwd({TENSORS_SCHEMA}, {_HALOS}, bool output_final_state, bool activated, str backend) "
    "-> (Tensor y, Tensor final_state, Tensor entering)",
    _forward,
    _forward_fake,
    lengths=("chains",),
)
_backward_op = register(
    f"conv_rank_bwd({TENSORS_SCHEMA}, {_HALOS}, Tensor? dy, Tensor? dlatest, bool[] needs, bool activated, "
    "str backend) -> Tensor[]",
    _backward,
    _backward_fake,
    lengths=("chains",),
)
