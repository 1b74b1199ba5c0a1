"""Records that the partitions of a program share."""

from __future__ import annotations

from typing import Any, NamedTuple

BW = 64
"""Channels of a slice of keys, and of a tile of values."""


class Ring(NamedTuple):
    """Shared memory of the stages, [STAGES, 64, 64] each, and its barriers.

    Attributes:
        do, e, X, S, dS: Tiles; S and dS also hold q and k for the norm's adjoint.
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: the consumer has read the stage.
    """

    do: Any
    e: Any
    X: Any
    S: Any
    dS: Any
    full: Any
    free: Any


class Smem(NamedTuple):
    """Shared memory beside the ring.

    Attributes:
        q, k: [slices, BT, 64] rows, then gradients.
        pair: [2, BT, BT] dv on its way out, the pair sums of a gate, then dP and dJ.
        numbers: [2 * BT] numbers of tokens.
        tokens_ready: Barrier of q and k.
    """

    q: Any
    k: Any
    pair: Any
    numbers: Any
    tokens_ready: Any


class Totals(NamedTuple):
    """Sums over channels, [BT] each.

    Attributes:
        read, write, traced: Parts of a scalar gate's gradient: reads from the state, writes to it, the state itself.
        dot_q, dot_k: Products of the rows with their gradients, for the norm's adjoint.
    """

    read: Any
    write: Any
    traced: Any
    dot_q: Any
    dot_k: Any
