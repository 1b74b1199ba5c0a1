"""Arguments of the kernel of `segment_summary_bwd` in Gluon, and what the partitions of a program share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and do."""

    h_q: Any
    h_k: Any
    h_do: Any


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        CHANNEL, FOLDED: Whether the gate is per channel, and E is read.
        STAGES: Chunks in flight.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int
    PARTS: int
    CHANNEL: bool
    FOLDED: bool
    STAGES: int


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        q, k: Tiles [BT, K].
        do: Tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        F: [BT, BT].
        write: E [BT, K], or W [BT, BT].
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
    """

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    F: Any
    write: Any
    full: Any
    free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the last chunk.

    Attributes:
        q, k, do, rows, total, F, write: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_do: First column of the program's head in the tokens.
    """

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    F: Any
    write: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_do: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        dST: Gradients of the final states, or None.
        c: Results.
    """

    total: Any
    dST: Any
    s_dST: Any
    c: Any
    s_c: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        needed: 1 if the segment has a c, else 0.
        tile: First tile.
        n: Sequence.
        border: Border at which the segment begins.
        ends: The sequence ends in this segment.
        hv: Value head.
        column: First value row.
        count: Number of chunks.
        tail_rows: Tokens of the last chunk if it is partial, or 0.
    """

    needed: Any
    tile: Any
    n: Any
    border: Any
    ends: Any
    hv: Any
    column: Any
    count: Any
    tail_rows: Any
