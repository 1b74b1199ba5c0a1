"""Records of `scan_bwd` in Gluon: an argument, and what the partitions of a program share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k, v and do."""

    h_q: Any
    h_k: Any
    h_v: Any
    h_do: Any


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        q, k: Tiles [BT, K].
        x: Tiles [BT, BW] of v, or of do in the reverse half, [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        square: [BT, BT]: W, or F in the reverse half.
        write: E [BT, K], or W [BT, BT] in the reverse half.
        state: [OUT * PARTS, BW, K] S or dS until their TMA store has read them.
        tokens: [PARTS, BT, BW] e or X, likewise.
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
    """

    q: Any
    k: Any
    x: Any
    rows: Any
    total: Any
    square: Any
    write: Any
    state: Any
    tokens: Any
    full: Any
    free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        q, k, v, do, rows, total, E, F, W: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_v, column_do: First column of the program's head in the tokens.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any
    total: Any
    E: Any
    F: Any
    W: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_v: Any
    column_do: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves.

    Attributes:
        total: Decays of a scalar gate.
        S, dS, e, X: TMA descriptors of a chunk's results.
        states, segments: Arguments of the kernel.
    """

    total: Any
    S: Any
    dS: Any
    e: Any
    X: Any
    states: Any
    segments: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        back: 1 in the reverse half, else 0.
        tile: First tile.
        n: Sequence.
        border: Border behind the segment.
        begins: The sequence begins in this segment.
        exists: The segment belongs to a sequence.
        ends: The sequence ends in this segment.
        hv: Value head.
        column: First value row.
        steps: Number of full chunks.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    back: Any
    tile: Any
    n: Any
    border: Any
    begins: Any
    exists: Any
    ends: Any
    hv: Any
    column: Any
    steps: Any
    tail_rows: Any
