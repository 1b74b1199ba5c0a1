"""Arguments of the kernel of `low_rank_prepare`, and those that several low-rank kernels take."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tuned
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows
from wyfold.tile.decay.triton import FLOOR, Gate, as_channels, gate_kind
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
        options: Uses `lower_bound`, `clamp`, `recurrent`, `chunk_size`.
    """
    q, k, a, b = tokens
    if token_gate_kind(q, g, options) is None:
        g = as_channels(g, q, heads)
    rows = RuleRows(q, q.stride(), k, k.stride(), a, strides(a), b, strides(b))
    gate = Gate(g, strides(g), A_log, dt_bias, options.lower_bound, options.clamp or FLOOR)
    return rows, gate, Strength(beta=beta, s_beta=strides(beta), most=1.0)


def token_gate_kind(q: Tensor, g: Tensor | None, options: DeltaOptions) -> str | None:
    """Kind of the gate for the chunk kernels whose gate is one number a token, or None where others serve the call.

    They serve it where TOKEN_GATE is set in the configuration of `low_rank_prepare`.
    """
    kind = gate_kind(g)
    if options.recurrent or options.activation != "given" or kind == "channel":
        return None
    key = LaunchKey(dtype_word(q.dtype), q.shape[3], C=options.chunk_size, gate=kind)
    return kind if tuned("low_rank_prepare.triton", key, q.device).blocks.get("TOKEN_GATE") else None


def prepare_key(key: LaunchKey, q: Tensor, g: Tensor | None, options: DeltaOptions) -> LaunchKey:
    """Launch key of `low_rank_prepare`, given that of the call: with the gate where kernels of one kind exist.

    A call of the rule "keys" with a gate per channel is GDN-2, which has no rows a and no write strengths. Rules with
    two columns have a kernel for tiles of 128 channels, of one head or more, without norms.
    """
    kind, channels = gate_kind(g), 0 if g is None else g.shape[2] * q.shape[3]
    of_channels = not options.recurrent and kind == "channel"
    if of_channels and options.rule == "keys":
        return key._replace(gate=kind)
    if of_channels and options.rule == "given" and not options.qk_l2norm and channels % 128 == 0:
        return key._replace(gate=kind, launch="two")
    return key._replace(gate=token_gate_kind(q, g, options))


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
        GATE: "channel", or of the kernel of `token_gate`: "scalar", "none".
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    NORM: bool
    GATE: str
    OP: Any
    PRECISION: Any
    EXACT: str
