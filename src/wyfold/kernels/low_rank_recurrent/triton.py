"""`low_rank_recurrent` in Triton: one program per sequence, value head and tile of value rows; its state stays in
registers.

As in `recurrent`, the tile's layout follows memory, and one token or a million run the same instructions. There is no
kernel for the adjoint: the backward runs the chunk form's.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows, Values
from wyfold.tile.decay.triton import Gate, load_token_gate, load_token_parameters, token_decay
from wyfold.tile.index.triton import (
    TokenRows,
    load_token_number,
    load_token_row,
    store_token_row,
    store_tokens,
    strides,
)
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.norm.triton import normalised, vector_sum
from wyfold.tile.state.triton import key_sum, slot_offsets

CLEARED: tl.constexpr = tl.constexpr(16)
"""Rows of output zeroed per store by a program without a state."""


def recurrent(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    v: Tensor,
    w: Tensor | None,
    slots: Slots,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    states: Tensor | None = None,
    first_state: Tensor | None = None,
) -> None:
    """Run every sequence from its entering state, token by token.

    Args:
        rows, gate, strength: As of `low_rank_prepare`.
        v, w: [B, T, HV, V] values and their factors, or None for 1.
        slots: Initial and final states, contiguous, or None; other fields are not used.
        grid: The call's boundaries; its chunks are not used.
        options: Uses `scale`, `qk_l2norm`, `activation`, `state_v_first`, `state_dtype`, `checkpoint_every`, `rule`.
        o: [B, T, HV, V] written.
        states: [rows, HV, K, V] or V-first, written with the state after every `checkpoint_every` tokens, or None.
        first_state: [N] int64 row in `states` of each sequence's first state.
    """
    (H, K), (HV, V) = rows.q.shape[2:], v.shape[2:]
    stored = next((x for x in (slots.entering, slots.leaving, states) if x is not None), None)
    if stored is None:
        stored = v.new_empty(1, dtype=options.state_dtype)
    config = tuned("low_rank_recurrent.triton", launch_key(stored.dtype, K, V), v.device)
    BV = min(config.blocks["BV"], tile_width(V))
    launch_kernel(
        wyfold_low_rank_recurrent_triton,
        (grid.sequences + (grid.cu is not None)) * HV * -(-V // BV),
        tokens=rows,
        values=Values(v=v, s_v=v.stride(), w=w, s_w=strides(w)),
        gate=gate,
        strength=strength,
        # Without initial states `stored` is never read. It is passed so that the tile has the same layout.
        states=States(S0=stored, ST=slots.leaving, kept=states, first_kept=first_state),
        o=o,
        s_o=o.stride(),
        p_cu=grid.cu,
        N=grid.sequences,
        T=grid.tokens,
        given=int(slots.entering is not None),
        scale=options.scale,
        every=max(1, options.checkpoint_every),
        SIZES=Sizes(H=H, HV=HV, HB=HV if rows.b is None else rows.b.shape[2], K=K, V=V, BK=tile_width(K), BV=BV),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            RULE=options.rule,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            V_FIRST=options.state_v_first,
        ),
        **config.options(contract=False),
    )


def launch_key(stored: torch.dtype, K: int, V: int) -> LaunchKey:
    """Launch configuration key: the states' dtype, and widths."""
    return LaunchKey(dtype_word(stored), K, V)


class States(NamedTuple):
    """Kernel argument: contiguous states [.., HV, K, V] or V-first, each None where the call has none.

    Attributes:
        S0: Initial states. Without any, the pointer is never read, and has the dtype of the other states.
        ST: Final states, written.
        kept: States after every `every` tokens, written.
        first_kept: [N] first row in `kept` of each sequence.
    """

    S0: Any
    ST: Any
    kept: Any
    first_kept: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles; HB heads of b."""

    H: int
    HV: int
    HB: int
    K: int
    V: int
    BK: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        RULE: How rows and columns are made; see `tile.columns`.
        ACTIVATION: The gate's activation.
        NORM: Whether q, k and a are normalised.
        V_FIRST: Whether states are [V, K].
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    NORM: bool
    V_FIRST: bool


@triton.jit(do_not_specialize=["N", "T", "given", "scale", "every"])
def wyfold_low_rank_recurrent_triton(
    tokens,
    values,
    gate,
    strength,
    states,
    o,
    s_o,
    p_cu,
    N,
    T,
    given,
    scale,
    every,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program runs BV value rows of one sequence's state, from the entering state to the final one."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    V_FIRST: tl.constexpr = FLAGS.V_FIRST
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    column = (i_v * BV).to(tl.int32)
    b, t, length = i_n, i_n * 0, i_n * 0 + T
    if FLAGS.PACKED:
        # One sequence more: the tokens past the last boundary.
        b, t = i_n * 0, tl.load(p_cu + i_n)
        length = tl.load(p_cu + i_n + 1) - t
        if i_n == N:
            for row in range(0, length, CLEARED):
                rows = tl.minimum(length - row, CLEARED).to(tl.int32)
                zeros = tl.zeros((CLEARED, BV), tl.float32)
                store_tokens(o, s_o, TokenRows(b, t + row, rows), i_hv, column, zeros, V)
            return
    o_S, m_S = slot_offsets((HV * K * V, K * V), i_n, i_hv, column, K, V, BK, BV, V_FIRST)
    b_S = tl.load(states.S0 + o_S, mask=m_S & (given != 0), other=0.0).to(tl.float32)
    rate, bias = load_token_parameters(gate.A_log, gate.dt_bias, i_hv, "channel", ACTIVATION, K, BK)
    raw_q, raw_k, raw_a, raw_b, raw_v, raw_w, x, beta = _load_token(
        tokens, values, gate, strength, b, t, i_hv, column, length > 0, SIZES
    )
    for i in range(length):
        b_q, b_a, b_b, b_k, b_v = _activate_token(
            RawToken(raw_q, raw_k, raw_a, raw_b, raw_v, raw_w, beta), tokens, values, FLAGS
        )
        decay = token_decay(x, rate, bias, gate.lower_bound, gate.clamp, "channel", ACTIVATION)
        raw_q, raw_k, raw_a, raw_b, raw_v, raw_w, x, beta = _load_token(
            tokens, values, gate, strength, b, t + i + 1, i_hv, column, i + 1 < length, SIZES
        )
        b_S, b_o = _step(b_S, decay, b_q, b_a, b_b, b_k, b_v, FLAGS)
        store_token_row(o, s_o, b, t + i, i_hv, column, b_o * scale, V, BV)
        if states.kept is not None:
            if (i + 1) % every == 0:
                i_state = (i + 1) // every - 1 + tl.load(states.first_kept + i_n)
                o_state, m_state = slot_offsets((HV * K * V, K * V), i_state, i_hv, column, K, V, BK, BV, V_FIRST)
                tl.store(states.kept + o_state, b_S.to(states.kept.dtype.element_ty), mask=m_state)
    if states.ST is not None:
        tl.store(states.ST + o_S, b_S.to(states.ST.dtype.element_ty), mask=m_S)


class RawToken(NamedTuple):
    """One token as the caller gave it, inside the kernel; k or v stands for an argument that the rule does not have."""

    q: Any
    k: Any
    a: Any
    b: Any
    v: Any
    w: Any
    beta: Any


@triton.jit
def _load_token(tokens, values, gate, strength, b, t, i_hv, column, exists, SIZES: tl.constexpr):
    """Load one token of one value head; all loads are issued before any is used. Nothing is read unless `exists`."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    i_h, i_hb = i_hv // (SIZES.HV // SIZES.H), i_hv // (SIZES.HV // SIZES.HB)
    b_k = load_token_row(tokens.k, tokens.s_k, b, t, i_h, 0, exists, K, BK).to(tl.float32)
    b_q = load_token_row(tokens.q, tokens.s_q, b, t, i_h, 0, exists, K, BK).to(tl.float32)
    b_v = load_token_row(values.v, values.s_v, b, t, i_hv, column, exists, V, BV).to(tl.float32)
    b_a, b_b, b_w, beta = b_k, b_k, b_v, 1.0
    if tokens.a is not None:
        b_a = load_token_row(tokens.a, tokens.s_a, b, t, i_h, 0, exists, K, BK).to(tl.float32)
    if tokens.b is not None:
        b_b = load_token_row(tokens.b, tokens.s_b, b, t, i_hb, 0, exists, K, BK).to(tl.float32)
    if values.w is not None:
        b_w = load_token_row(values.w, values.s_w, b, t, i_hv, column, exists, V, BV).to(tl.float32)
    if strength.beta is not None:
        beta = load_token_number(strength.beta, strength.s_beta, b, t, i_hv, exists)
    x = load_token_gate(gate.g, gate.s_g, b, t, i_hv, exists, "channel", K, BK)
    return b_q, b_k, b_a, b_b, b_v, b_w, x, beta


@triton.jit
def _activate_token(raw, tokens, values, FLAGS: tl.constexpr):
    """Query, erasing row, erased column, written column and written value of a token: `tile.columns.eager.columns`."""
    b_q, b_k, b_a, b_b, b_v = raw.q, raw.k, raw.a, raw.b, raw.v
    if FLAGS.NORM:
        b_q, b_k, b_a = normalised(b_q), normalised(b_k), normalised(b_a)
    if values.w is not None:
        b_v = b_v * raw.w
    if FLAGS.RULE == "keys" or FLAGS.RULE == "feedback":
        if tokens.b is not None:
            b_a = b_a * b_b
        b_k = b_k * raw.beta
        return b_q, -b_a, b_k, b_k, b_v
    elif FLAGS.RULE == "rates":
        return b_q, -b_a, b_a * b_b, b_k, b_v
    else:
        return b_q, b_a, b_b, b_k, b_v


@triton.jit
def _step(b_S, decay, b_q, b_a, b_b, b_k, b_v, FLAGS: tl.constexpr):
    """One token: the state after it [BV, BK], and the output before scale [BV].

        r = S^T a        S^T <- decay S^T        o = S^T q + (q.b) r + (q.k) v        S^T <- S^T + r b^T + v k^T

    With "keys" a reads the decayed state. Both products use one state and neither waits for the other.
    """
    V_FIRST: tl.constexpr = FLAGS.V_FIRST
    b_decayed = b_S * decay
    b_Sq = key_sum(b_decayed * b_q[None, :], V_FIRST)
    qk = vector_sum(b_q * b_k)
    if FLAGS.RULE == "keys":
        b_v = b_v + key_sum(b_decayed * b_a[None, :], V_FIRST)
        return tl.fma(b_v[:, None], b_k[None, :], b_decayed), tl.fma(b_v, qk, b_Sq)
    else:
        b_r = key_sum(b_S * b_a[None, :], V_FIRST)
        b_decayed = tl.fma(b_r[:, None], b_b[None, :], b_decayed)
        b_o = tl.fma(b_r, vector_sum(b_q * b_b), b_Sq)
        return tl.fma(b_v[:, None], b_k[None, :], b_decayed), tl.fma(b_v, qk, b_o)
