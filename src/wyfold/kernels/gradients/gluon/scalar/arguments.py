"""Arguments of the kernel, and what its functions share."""

from __future__ import annotations

from typing import Any, NamedTuple


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and do."""

    h_q: Any
    h_k: Any
    h_do: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED, WHOLE: Whether the batch is packed, and whether every chunk is full.
        SCALAR: Whether there is a gate.
        ACTIVATION, CLAMPED: The gate's activation, and whether a clamp is requested.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
    """

    PACKED: bool
    WHOLE: bool
    SCALAR: bool
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    LOGIT: bool


class Offsets(NamedTuple):
    """Numbers of the chunk's tokens, in three layouts.

    Attributes:
        row, column: Of the rows and the columns of an accumulator.
        one: Of numbers that are loaded from global memory.
    """

    row: Any
    column: Any
    one: Any


class TmaInputs(NamedTuple):
    """TMA descriptors, and this program's coordinates in them.

    Attributes:
        q, k, do, S, dS, e, X: Descriptors.
        token: First token of the chunk, over all buffer rows.
        tile: Number of the tile of the chunk and the value head.
        column_q, column_k, column_do: First column of the key head, and of the value head.
    """

    q: Any
    k: Any
    do: Any
    S: Any
    dS: Any
    e: Any
    X: Any
    token: Any
    tile: Any
    column_q: Any
    column_k: Any
    column_do: Any


class Smem(NamedTuple):
    """Shared memory tiles and their mbarriers.

    Attributes:
        q, k: [2, BT, K/2] halves of K.
        do, e, X: [BT, V].
        S, dS: [V, K/2], one half at a time.
        numbers: [2 * BT] numbers of tokens.
        barriers: The barriers.
        values_ready: Barrier of do and e.
        rows_ready: Barrier of X.
        tokens_ready: Barrier of q and k.
        states_ready: Barrier of S and dS, and of the reloaded q and k.
    """

    q: Any
    k: Any
    do: Any
    e: Any
    X: Any
    S: Any
    dS: Any
    numbers: Any
    barriers: Any
    values_ready: Any
    rows_ready: Any
    tokens_ready: Any
    states_ready: Any
