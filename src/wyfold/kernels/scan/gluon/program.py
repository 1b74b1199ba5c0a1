"""What the partitions of a program share: shared memory, descriptors, pointers and coordinates."""

from __future__ import annotations

from typing import Any, NamedTuple


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        q, k: Tiles [BT, K].
        v: Value tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        write: E [BT, K] if folded, else W [BT, BT].
        F: [BT, BT] F if folded, else F beta.
        out: Output tiles until their TMA store has read them: OUT * PARTS buffers, or v with OUT 0.
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
        out_free: Barrier, with OUT 0: the output stored from the stage's v has been read.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    F: Any
    out: Any
    full: Any
    free: Any
    out_free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        q, k, v, rows, total, write, F: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_v: First column of the program's head in the tokens.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    F: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        x_o: TMA descriptor of the output.
        S0: Initial states, or None.
        borders: States at the borders of segments, or None.
        o: Output pointer, for the partial chunk.
        ST: Final states, or None.
    """

    total: Any
    x_o: Any
    S0: Any
    s_S0: Any
    borders: Any
    s_borders: Any
    o: Any
    s_o: Any
    ST: Any
    s_ST: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        tile: Number of the first chunk's tile.
        n: Index of the entering state: a sequence, or with slots and without segments a slot.
        to: Slot of the leaving state; None without slots, where it is n.
        border: Number of the border in front of the segment.
        begins: Whether the segment begins its sequence; with slots and without segments, whether slot n holds a state.
        exists: Whether the segment belongs to a sequence.
        ends: Whether the segment ends its sequence, and with slots, whether slot `to` is written.
        hv: Value head.
        b: Index in the batch.
        t: First token, in that row of the batch.
        token: First token, over all rows of the batch.
        column: First of the program's value rows.
        steps: Number of full chunks.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    tile: Any
    n: Any
    to: Any
    border: Any
    begins: Any
    exists: Any
    ends: Any
    hv: Any
    b: Any
    t: Any
    token: Any
    column: Any
    steps: Any
    tail_rows: Any
