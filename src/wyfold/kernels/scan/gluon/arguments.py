"""Arguments of the kernel of `scan` in Gluon."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        h_q, h_k, h_v: Distances between heads.
        o, s_o: Output, and its strides, for the partial chunk.
    """

    h_q: Any
    h_k: Any
    h_v: Any
    o: Any
    s_o: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [N, HV, K, V], each with its strides; None where the call has none.

    Attributes:
        S0, s_S0: Initial states.
        ST, s_ST: Final states, written.
    """

    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        OUT: Buffers per part for the output, or 0 (see above).
        STAGES: Chunks in flight.
        PACKED, CHANNEL, FOLDED: Whether the batch is packed, the gate is per channel, and E is read instead of W.
        ERASES: `DeltaOptions.erases`; without it the keys read no state, and R is V.
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
    ERASES: bool
