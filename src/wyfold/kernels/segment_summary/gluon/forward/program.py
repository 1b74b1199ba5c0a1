"""Arguments of the kernel of `segment_summary` in Gluon, and what the partitions of a program share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument: distances between heads of k and v."""

    h_k: Any
    h_v: Any


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        CHANNEL, FOLDED: Whether the gate is per channel, and E is read.
        ERASES: `DeltaOptions.erases`; without it the keys read no state, and R is V.
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
    ERASES: bool
    STAGES: int


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        k: Tiles [BT, K].
        v: Value tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        write: E [BT, K], or W [BT, BT].
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
        map_is_zero: [PARTS, 1] flags: the part's rows of M are zeros.
        count: [1] number of chunks to load; reduced once all flags are set.
    """

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    full: Any
    free: Any
    map_is_zero: Any
    count: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        k, v, rows, total, write: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_k, column_v: First column of the program's head in the tokens.
    """

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    tile: Any
    token: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        S0: Initial states, or None.
        H, M: Results.
    """

    total: Any
    S0: Any
    s_S0: Any
    H: Any
    s_H: Any
    M: Any
    s_M: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        of_H: 1 if the program computes H, 0 if M.
        needed: 1 if the segment ends at a border, else 0.
        tile: First tile.
        n: Sequence.
        border: Border at which the segment ends.
        begins: The sequence begins in this segment; of H with its initial state, of M with zeros.
        hv: Value head.
        column: First value row of H or of M.
        steps: Number of chunks.
    """

    of_H: Any
    needed: Any
    tile: Any
    n: Any
    border: Any
    begins: Any
    hv: Any
    column: Any
    steps: Any
