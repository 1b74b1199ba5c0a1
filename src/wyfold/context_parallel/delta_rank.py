"""One rank's part of a delta-family call, and the local calls on its pieces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.delta import run
from wyfold.autograd.delta_records import DeltaTensors, transpose_if_v_first
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.partition import Piece
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.eager import wide

MAX_COLUMNS = 256  # value columns of one local call


class RankCall(NamedTuple):
    """One rank's part of a call.

    Attributes:
        tensors: [B, T, ...] tensors of this rank's shard.
        options: Options of the call.
        context: Partition of the tokens over ranks.
    """

    tensors: DeltaTensors
    options: DeltaOptions
    context: ContextParallel

    @property
    def exchange(self) -> Exchange:
        partition, group = self.context.partition, self.context.group.group_name
        return Exchange(self.B, partition.most_outgoing, partition.most_incoming, self.context.world, group)

    @property
    def B(self) -> int:
        return self.tensors.v.shape[0]

    @property
    def T(self) -> int:
        return self.tensors.v.shape[1]

    @property
    def K(self) -> int:
        return self.tensors.q.shape[3]

    @property
    def V(self) -> int:
        return self.tensors.v.shape[3]

    @property
    def inside(self) -> DeltaOptions:
        """Options of the local calls: wide states [.., K, V]."""
        return self.options._replace(state_v_first=False, state_dtype=wide(self.tensors.q.dtype))

    def states(self, count: int, columns: int) -> Tensor:
        """Allocate wide states [count, HV, K, columns] of zeros."""
        t = self.tensors
        return t.q.new_zeros(count, t.v.shape[2], self.K, columns, dtype=wide(t.q.dtype))

    def one_buffer(self, x: Tensor) -> Tensor:
        """[B, T, ...] -> [1, B T, ...]."""
        return x if self.B == 1 else x.reshape(1, self.B * self.T, *x.shape[2:])

    def packed(self, entering: Tensor | None) -> DeltaTensors:
        """The call with all pieces as sequences of one packed buffer, from these initial states."""
        t = self.tensors.map_tokens(self.one_buffer)
        at = self.context.boundaries(self.B, t.q.device)
        on_cpu = self.context.boundaries(self.B, torch.device("cpu"))
        return t._replace(initial_state=entering, cu_seqlens=at, cu_seqlens_cpu=on_cpu)

    def alone(self, piece: Piece, initial_state: Tensor, start: int = 0) -> DeltaTensors:
        """The call of one piece, from its token `start` on, as a dense batch of B rows."""
        t = self.tensors.map_tokens(lambda x: x.narrow(1, piece.offset + start, piece.length - start))
        return t._replace(initial_state=initial_state, cu_seqlens=None, cu_seqlens_cpu=None)

    def rows(self, piece: Piece) -> slice:
        """Slice of the states of all pieces that belongs to one piece: B rows."""
        return slice(piece.number, None, len(self.context.pieces))

    def states_at_pieces(self, given: Tensor | None, numbers: Tensor) -> Tensor | None:
        """Scatter the caller's states, or gradients of states, to pieces.

        Args:
            given: [len(numbers), HV, K, V] in the caller's layout, or None.
            numbers: Rows of the result.

        Returns:
            [B pieces, HV, K, V] wide states, zeros at the other pieces; None for None.
        """
        if given is None:
            return None
        found = self.states(self.B * len(self.context.pieces), self.V)
        found[numbers] = transpose_if_v_first(given, self.options).to(found.dtype)
        return found

    def affine_map(self, piece: Piece, S: Tensor, start: int = 0) -> Tensor:
        """Compute [B, HV, K, V + K], H (from the state S) and M of a piece from its token `start` on."""
        options = self.inside._replace(final_state=True, save=False, keep_factors=False)
        t = self.alone(piece, S, start)
        K, V = t.q.shape[3], t.v.shape[3]
        identity = torch.eye(K, dtype=S.dtype, device=S.device).expand(*S.shape[:2], K, K)
        zero_values = t.v.new_zeros(()).expand(*t.v.shape[:-1], K)
        if len(map_widths(K, V)) == 1:
            w = None if t.w is None else torch.cat([t.w, zero_values.to(t.w.dtype)], dim=-1)
            v, state = torch.cat([t.v, zero_values], dim=-1), torch.cat([S, identity], dim=-1)
            both = t._replace(v=v, w=w, initial_state=state)
            return run(both, options)[0].final_state
        H = run(t, options)[0].final_state
        M = run(t._replace(v=zero_values, w=None, initial_state=identity.contiguous()), options)[0].final_state
        return torch.cat([H, M], dim=-1)


def map_widths(K: int, V: int) -> tuple[int, ...]:
    """Value columns of the local calls that compute a piece's H and M: one call, or two if it were too wide."""
    return (V + K,) if V + K <= MAX_COLUMNS else (V, K)


class Exchange(NamedTuple):
    """What a rank exchanges with the others: the size of the send buffers, and the group.

    Attributes:
        batch: B, the rows of each piece.
        most_outgoing, most_incoming: As in `Partition`.
        world: Number of ranks.
        group: Name of the process group.
    """

    batch: int
    most_outgoing: int
    most_incoming: int
    world: int
    group: str


class RankBackwardInputs(NamedTuple):
    """Inputs of the backward of a rank's call.

    Attributes:
        do: [B, T, HV, V] gradient of the output; None for zeros.
        dleaving: [B pieces, HV, K, V] gradients of the final states of sequences that end here, zeros elsewhere; None
            for zeros.
        saved: Tensors that the forward saved.
        needs: For each differentiable tensor, whether its gradient is needed.
    """

    do: Tensor | None
    dleaving: Tensor | None
    saved: list[Tensor]
    needs: list[bool]
