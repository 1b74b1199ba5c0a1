"""Inputs and results of the registered operators of `delta_segment_launches`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.rank_segments import SegmentCounts
from wyfold.runtime.options import DeltaOptions


class MapsInputs(NamedTuple):
    """Inputs of `maps`.

    Attributes:
        tails: [outgoing B, HV, K, V + K] H and M of the tokens after the last full chunk of each piece that continues
            on another rank; without elements if no piece has such tokens.
        send_rows: Rows of every rank's send buffer: `Partition.most_outgoing` times B.
    """

    tails: Tensor
    send_rows: int


class ForwardInputs(NamedTuple):
    """Inputs of `forward`.

    Attributes:
        gathered: [world, most_outgoing, B, HV, K, V + K] send buffers of all ranks, maybe still being gathered.
        routes: `routes.forward_routes`, on the device.
        H, M, factors: Results of `maps`.
    """

    gathered: Tensor
    routes: Tensor
    H: Tensor
    M: Tensor
    factors: list[Tensor]


class MapsBackInputs(NamedTuple):
    """Inputs of `maps_back`.

    Attributes:
        do: [1, B T, HV, V] gradient of the output.
        dleaving: [B pieces, HV, K, V] gradients of final states; zeros where a sequence continues on another rank.
        incoming_M: [incoming B, HV, K, K] maps M of the pieces that began on another rank.
        M: Result of `maps`.
        kept: Factors saved by the forward; [] if they were not.
        send_rows: Rows of every rank's send buffer: `Partition.most_incoming` times B.
    """

    do: Tensor
    dleaving: Tensor
    incoming_M: Tensor
    M: Tensor
    kept: list[Tensor]
    send_rows: int


class ScanBackInputs(NamedTuple):
    """Inputs of `scan_back`.

    Attributes:
        gathered: [world, most_incoming, B, HV, K, V + K] send buffers of all ranks, maybe still being gathered.
        routes: `routes.backward_routes`, on the device.
        tails, do, dleaving, M: As of the records above.
        states: Result of `forward`.
        c, factors: Results of `maps_back`.
        need: Whether the gradient of the initial states is needed.
    """

    gathered: Tensor
    routes: Tensor
    tails: Tensor
    do: Tensor
    dleaving: Tensor
    states: Tensor
    M: Tensor
    c: Tensor
    factors: list[Tensor]
    need: bool


class TokensBackInputs(NamedTuple):
    """Inputs of `tokens_back`.

    Attributes:
        do: [1, B T, HV, V] gradient of the output.
        states, tokens: Results of `scan_back`.
        needs: For each differentiable tensor, whether its gradient is needed.
    """

    do: Tensor
    states: Tensor
    tokens: Tensor
    needs: list[bool]


class PiecesCall(NamedTuple):
    """A call with all pieces as sequences of one packed buffer.

    Attributes:
        t: Tensors of the call. `initial_state` has the states that enter the pieces; before the all-gather, zeros for
            those that come from another rank.
        options: Options of the call.
        table, counts: Results of `ContextParallel.segments`.
    """

    t: DeltaTensors
    options: DeltaOptions
    table: Tensor
    counts: SegmentCounts


class MapsResult(NamedTuple):
    """Results of `maps`.

    Attributes:
        send_buffer: [`MapsInputs.send_rows`, HV, K, V + K] H and M of the pieces that continue on another rank, ordered
            by piece, then by batch row; padded with zeros.
        H, M: [borders, HV, V, K] and [borders, HV, K, K] of the segment that ends at each border.
        factors: `Prepared` as a list (`factors_to_list`).
    """

    send_buffer: Tensor
    H: Tensor
    M: Tensor
    factors: list[Tensor]


class ForwardResult(NamedTuple):
    """Results of `forward`.

    Attributes:
        o: [1, B T, HV, V] output.
        final_state: [B pieces, HV, K, V]; without elements if not requested.
        entering: [B pieces, HV, K, V] states that enter the pieces.
        states: [borders, HV, V, K] states at the borders.
    """

    o: Tensor
    final_state: Tensor
    entering: Tensor
    states: Tensor
