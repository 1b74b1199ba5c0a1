"""Arguments of the kernel of `gradients` as records."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and what is prefetched through pointers.

    Attributes:
        s_q, s_k, s_do: Strides of q, k and do.
        S, dS: States of `TokenBorders`.
    """

    s_q: Any
    s_k: Any
    s_do: Any
    S: Any
    dS: Any
    end: None = None


class Outputs(NamedTuple):
    """Kernel argument: how the gradients that are written lie in memory; None where one is not requested.

    Attributes:
        s_dq, s_dk, s_dv: Strides of the gradients of q, k and v.
        dbeta, s_dbeta: Gradient of the write strength, and its strides.
    """

    s_dq: Any
    s_dk: Any
    s_dv: Any
    dbeta: Any
    s_dbeta: Any
    end: None = None


class Scratch(NamedTuple):
    """Kernel argument: workspace of a program.

    Attributes:
        pairs, near: Gradients of pairs of rows, as in `PairMemory`; None without a channel gate.
        dq, dk: [chunks * H, BT, K] float32 sums over value heads; None where each is written once.
    """

    pairs: Any
    near: Any
    dq: Any
    dk: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        GATE, SCALAR, CHANNEL: Kind of the gate; see `tile.decay`.
        ACTIVATION, CLAMPED: The gate's activation, and whether a clamp is requested.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
        USE_TMA_TILES, USE_TMA, USE_TMA_DO, TMA_STORES: Whether S, dS, e and X, q and k, do, and the gradients of tokens
            are descriptors.
        PREFETCH: Whether rows are prefetched into L2.
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    GATE: str
    SCALAR: bool
    CHANNEL: bool
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    LOGIT: bool
    USE_TMA_TILES: bool
    USE_TMA: bool
    USE_TMA_DO: bool
    TMA_STORES: bool
    PREFETCH: bool
    OP: Any
    PRECISION: Any
    EXACT: str


class Factors(NamedTuple):
    """Kernel argument: numbers that gradients are multiplied by.

    Attributes:
        scale: Of the output.
        unit: Of the gradients of states.
        erased_unit: The unit, or 0 for writes that erase nothing: keys then get no gradient from what they would read.
    """

    scale: Any
    unit: Any
    erased_unit: Any
