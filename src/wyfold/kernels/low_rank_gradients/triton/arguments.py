"""Arguments of the kernel of `low_rank_gradients` as records."""

from __future__ import annotations

from typing import Any, NamedTuple


class Outputs(NamedTuple):
    """Kernel argument: receives gradients of tokens, each with its strides; None where one is not requested."""

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    a: Any
    s_a: Any
    b: Any
    s_b: Any
    beta: Any
    s_beta: Any
    s_slice: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles; HB heads of b."""

    H: int
    HV: int
    HB: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        RULE: How rows and columns are made; see `tile.columns`.
        ACTIVATION, CLAMPED: The gate's activation, and whether a clamp is requested.
        NORM: Whether q, k and a are normalised.
        GATE: "channel", or of the kernel of `token_gate`: "scalar", "none".
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    GATE: str
    OP: Any
    PRECISION: Any
    EXACT: str
