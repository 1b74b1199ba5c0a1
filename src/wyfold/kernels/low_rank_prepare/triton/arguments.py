"""Arguments of the kernel of `low_rank_prepare`, and those that several low-rank kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows
from wyfold.tile.decay.triton import FLOOR, Gate, as_channels
from wyfold.tile.index.triton import strides
from wyfold.tile.index.triton.strength import Strength


def call_arguments(
    tokens: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    heads: int,
    options: DeltaOptions,
) -> tuple[RuleRows, Gate, Strength]:
    """Kernel arguments that several stages take.

    Args:
        tokens: q, k, a and b.
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters or None.
        heads: HV.
        options: Uses `lower_bound`, `clamp`.
    """
    q, k, a, b = tokens
    g = as_channels(g, q, heads)
    rows = RuleRows(q, q.stride(), k, k.stride(), a, strides(a), b, strides(b))
    gate = Gate(g, g.stride(), A_log, dt_bias, options.lower_bound, options.clamp or FLOOR)
    return rows, gate, Strength(beta=beta, s_beta=strides(beta), most=1.0)


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles.

    Attributes:
        H, HV, HB, K, V, BT: Sizes of the call and of a chunk; HB heads of b.
        BK, BE: Columns of a slice of K, for the grams and for E and K.
        BV: Width of a row of the output.
        WARPS, STAGES: Warps of a program, and slices in flight.
    """

    H: int
    HV: int
    HB: int
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
        RULE: How rows and columns are made; see `tile.columns`.
        ACTIVATION: The gate's activation.
        NORM: Whether q, k and a are normalised.
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    NORM: bool
    OP: Any
    PRECISION: Any
    EXACT: str
