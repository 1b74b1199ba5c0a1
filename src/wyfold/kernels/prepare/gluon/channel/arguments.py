"""Arguments of the kernel, and numbers that all its parts share."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental.gluon import language as gl

BK: gl.constexpr = gl.constexpr(32)
"""Channels of a slice."""


REACH: gl.constexpr = gl.constexpr(110.0)
"""Range of log2 decays that one anchor serves. With SHIFT, factors go from 2^-96 to 2^96, as in the Triton launch."""


SHIFT: gl.constexpr = gl.constexpr(14.0)
"""log2 of the factor moved from keys to rows inside a sub-chunk."""


NEAREST: gl.constexpr = gl.constexpr(0.000498066)
"""log2 of 1 + 2^-11.5: this factor adds about as much as TF32 truncates afterwards (`CUT_TO_NEAREST`)."""


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and the fields of `Prepared` that are written through pointers.

    Attributes:
        s_q, s_k: Strides of q and k.
        b, s_b: [B, T, HB, K] erase gate of the key channels, and its strides; None for 1.
        o, s_o: Output of the call, and its strides.
        rows, total, norms: See `Prepared`.
    """

    s_q: Any
    s_k: Any
    b: Any
    s_b: Any
    o: Any
    s_o: Any
    rows: Any
    total: Any
    norms: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles; HB heads of the erase gate."""

    H: int
    HV: int
    HB: int
    K: int
    V: int
    BT: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED, FULL: Whether the batch is packed, and whether every chunk is full.
        USE_TMA: Whether q, k and g are descriptors.
        ACTIVATION: The gate's activation.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
        ROWS: Whether erasing rows are -(b k), as of the low-rank rule "keys", instead of k. strength.erases is then -1.
        ERASES: Whether writes erase. Otherwise A is the identity: only decayed queries, E and F are computed.
    """

    PACKED: bool
    FULL: bool
    USE_TMA: bool
    ACTIVATION: str
    NORM: bool
    LOGIT: bool
    ROWS: bool
    ERASES: bool = True
