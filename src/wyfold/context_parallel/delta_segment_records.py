"""What the operators of `delta_share_launches` are given, and what they find."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.rank_segments import SegmentCounts
from wyfold.runtime.options import DeltaOptions


class MapsInputs(NamedTuple):
    """What `maps` is given.

    Attributes:
        tails: [leaving, HV, K, V + K] H and M of the tokens behind a piece's last full chunk; of no elements if no
            piece has any.
        send_rows: Rows that every rank sends.
    """

    tails: Tensor
    send_rows: int


class ForwardInputs(NamedTuple):
    """What `forward` is given.

    Attributes:
        gathered: What all ranks send_buffer, maybe under way.
        routes: `chains.forward_routes`, on the device.
        H, M, factors: From `maps`.
    """

    gathered: Tensor
    routes: Tensor
    H: Tensor
    M: Tensor
    factors: list[Tensor]


class MapsBackInputs(NamedTuple):
    """What `maps_back` is given.

    Attributes:
        do: [1, B T, HV, V].
        leaving: [pieces, HV, K, V] gradients of final states, and zeros where a sequence goes on elsewhere.
        between: [entering, HV, K, K] maps of the pieces that began elsewhere.
        M: From `maps`.
        kept: Factors, if they were kept.
        send_rows: Rows that every rank sends.
    """

    do: Tensor
    leaving: Tensor
    between: Tensor
    M: Tensor
    kept: list[Tensor]
    send_rows: int


class ScanBackInputs(NamedTuple):
    """What `scan_back` is given.

    Attributes:
        gathered: What all ranks send_buffer, maybe under way.
        routes: `chains.backward_routes`, on the device.
        tails, do, leaving, M: As above.
        states: From `forward`.
        c, factors: From `maps_back`.
        need: Whether the gradient of the initial states is wanted.
    """

    gathered: Tensor
    routes: Tensor
    tails: Tensor
    do: Tensor
    leaving: Tensor
    states: Tensor
    M: Tensor
    c: Tensor
    factors: list[Tensor]
    need: bool


class TokensBackInputs(NamedTuple):
    """What `tokens_back` is given.

    Attributes:
        do: As above.
        states, tokens: From `scan_back`.
        needs: Of each differentiable tensor, whether its gradient is wanted.
    """

    do: Tensor
    states: Tensor
    tokens: Tensor
    needs: list[bool]


class PiecesCall(NamedTuple):
    """A call of all pieces as sequences of one buffer.

    Attributes:
        t: `initial_state` holds what enters the pieces; until ranks have told each other, zeros where that is theirs.
        options: Of that call.
        table, counts: From `ContextParallel.segments`.
    """

    t: DeltaTensors
    options: DeltaOptions
    table: Tensor
    counts: SegmentCounts


class MapsResult(NamedTuple):
    """What `maps` finds.

    Attributes:
        send_buffer: [send_rows, HV, K, V + K] H and M of the pieces that go on elsewhere, by piece and row, and zeros.
        H, M: [borders, HV, V, K] and [borders, HV, K, K] of the segment that ends at each border.
        factors: `Prepared`, listed.
    """

    send_buffer: Tensor
    H: Tensor
    M: Tensor
    factors: list[Tensor]


class ForwardResult(NamedTuple):
    """What `forward` finds.

    Attributes:
        o: [1, B T, HV, V] output.
        final_state: [pieces, HV, K, V], or no elements.
        entering: [pieces, HV, K, V] states that enter the pieces.
        states: [borders, HV, V, K] states at the borders.
    """

    o: Tensor
    final_state: Tensor
    entering: Tensor
    states: Tensor
