"""Sizes and coordinates of a program, the tiles that it loads, and its ring."""

from __future__ import annotations

from typing import Any, NamedTuple


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS consumers share.
        STAGES: Stages of the ring: chunks in flight.
        PACKED, CHANNEL, FOLDED: Whether the batch is packed, the gate is per channel, and E is read.
        ERASES: `DeltaOptions.erases`; without it the keys read no state, and R is V.
        OUT: Buffers per part for what TMA stores.
        IN_PLACE: Whether TMA stores from the stage's values, which `x_free` then frees.
        ADDS: Whether erasing rows are negative, as those of the low-rank rules: what they read is added, unscaled.
        EVEN: Whether sequences are `EvenSegments`.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int
    PARTS: int
    STAGES: int
    PACKED: bool
    CHANNEL: bool
    FOLDED: bool
    ERASES: bool = True
    OUT: int = 0
    IN_PLACE: bool = False
    ADDS: bool = False
    EVEN: bool = False


class Span(NamedTuple):
    """Chunks of a program: those of a sequence or a segment, for some value rows of a head.

    Attributes:
        hv: Value head.
        column: First of the program's value rows.
        tile: Number of the first chunk's tile.
        b: Row of the batch.
        t: First token, in that row.
        token: First token, over all rows of the batch.
        length: Number of tokens.
        steps: Number of full chunks; 0 if the program computes nothing.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    hv: Any
    column: Any
    tile: Any
    b: Any
    t: Any
    token: Any
    length: Any
    steps: Any
    tail_rows: Any


class Ends(NamedTuple):
    """Where the states of a program come from and go to.

    Attributes:
        n: Index of the entering state: a sequence, or with slots and without segments a slot.
        border: Number of the border at the segment's end.
        exists: Whether the segment belongs to a sequence.
        begins: Whether it begins its sequence; with slots and without segments, whether slot n holds a state. None:
            always.
        ends: Whether it ends its sequence, and with slots, whether slot `to` is written. None: always.
        to: Slot of the leaving state; None without slots, where it is n.
    """

    n: Any
    border: Any
    exists: Any
    begins: Any
    ends: Any
    to: Any = None


class ChunkInputs(NamedTuple):
    """Tiles that the producer loads: coordinates, and TMA descriptors, None where the kernel loads no such tile.

    Attributes:
        tile, token: The first chunk's tile, and its first token over all rows of the batch.
        column_q, column_k, column_x: First column of the program in the tokens.
        q, k: Rows [BT, K], of the tokens, or with a channel gate of tiles.
        x: [BT, BW] of v or do.
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay over the chunk, [K] with a channel gate; otherwise not loaded.
        write: E [BT, K] if folded, else an upper triangular [BT, BT].
        square: Upper triangular [BT, BT].
        w: [BT, BW] factors of v, in the columns of x.
    """

    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_x: Any
    q: Any
    k: Any
    x: Any
    rows: Any
    total: Any
    write: Any
    square: Any
    w: Any = None


class Ring(NamedTuple):
    """Shared memory of the stages, [STAGES, ..] unless noted, and its barriers. A tile that is not loaded is another.

    Attributes:
        q, k, x, rows, total, write, square, w: As in `ChunkInputs`; x and w are [STAGES * PARTS, BT, BW].
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
        x_free: Barrier, with IN_PLACE: what was stored from the stage's x has been read.
    """

    q: Any
    k: Any
    x: Any
    rows: Any
    total: Any
    write: Any
    square: Any
    full: Any
    free: Any
    x_free: Any
    w: Any
