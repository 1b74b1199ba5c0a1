"""Arguments of the kernel of `prepare` as records."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        s_q, s_k: Strides of q and k.
        o, s_o: Output of the call, and its strides.
    """

    s_q: Any
    s_k: Any
    o: Any
    s_o: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BK, BE: Columns of a slice of K, for the grams and for E.
        BV: Width of a row of the output.
        WARPS, STAGES: Warps of a program, and slices in flight.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BE: int
    BV: int
    WARPS: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        USE_TMA: Whether q and k are descriptors.
        GATE, CHANNEL, ACTIVATION: Kind of the gate, and its activation; see `tile.decay`.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
        WHOLE: Whether a chunk is inverted as one block.
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    USE_TMA: bool
    GATE: str
    CHANNEL: bool
    ACTIVATION: str
    NORM: bool
    LOGIT: bool
    WHOLE: bool
    OP: Any
    PRECISION: Any
    EXACT: str
