"""Arguments of the kernel of `scan_bwd` in Gluon."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k, v and do."""

    h_q: Any
    h_k: Any
    h_v: Any
    h_do: Any


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        OUT: Buffers per part for S or dS.
        STAGES: Chunks in flight.
        PACKED, CHANNEL, FOLDED: Whether the batch is packed, the gate is per channel, and E is read.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int
    PARTS: int
    OUT: int
    STAGES: int
    PACKED: bool
    CHANNEL: bool
    FOLDED: bool
