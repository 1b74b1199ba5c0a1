"""Arguments of the kernel under a channel gate."""

from __future__ import annotations

from typing import Any, NamedTuple


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and what is accessed through pointers.

    Attributes:
        h_q, h_k, h_do, h_g: Distances between heads.
        X, norms: [tiles, BT, V] and [tiles, 2, BT], of `TokenBorders`.
        norm_dots: [chunks and key heads, 2, 2, BT] products of rows and gradients, written for
            `wyfold_gradients_norm_gluon`; None without a norm.
    """

    h_q: Any
    h_k: Any
    h_do: Any
    h_g: Any
    X: Any
    norms: Any
    norm_dots: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel; see the kernel for scalar gates.

    Attributes:
        ERASES: Whether writes erase. Otherwise the gram J does not exist: no keys are rows of pairs.
    """

    PACKED: bool
    WHOLE: bool
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    LOGIT: bool
    ERASES: bool = True


class GateActivation(NamedTuple):
    """Parameters of the gate's activation.

    Attributes:
        rate: exp(A_log), or 1.
        lower_bound: Lower bound of a bounded gate.
        clamp: Smallest log gate.
    """

    rate: Any
    lower_bound: Any
    clamp: Any
