"""Forward recurrence: one program per sequence, value head and tile of value rows, over all tokens in order."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.recurrent.triton.tokens import CLEARED, Inputs, activate_token, launch_key, load_token
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_argument, gate_kind, load_token_parameters
from wyfold.tile.index.triton import TokenRows, store_token_row, store_tokens, with_strides
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.state.triton import slot_offsets, token_step


def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    slots: Slots,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor | None,
    states: Tensor | None = None,
    first_state: Tensor | None = None,
    every: int = 1,
) -> None:
    """Run every sequence from its entering state, token by token.

    Args:
        q, k: [B, T, H, K], any strides.
        v: [B, T, HV, V].
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters, contiguous, or None.
        slots: Initial and final states; a head's state is contiguous.
        grid: The call's boundaries; its chunks are not used.
        options: Uses `scale`, `qk_l2norm`, `activation`, `lower_bound`, `clamp`, `beta_logit`, `beta_most`,
            `state_v_first`, `erases`.
        o: [B, T, HV, V] written, zero for tokens without a live slot; None to skip outputs.
        states: [rows, HV, K, V] or V-first, written with the state after every `every` tokens; None to skip.
        first_state: [N] int64 row in `states` of each sequence's first state.
        every: Tokens between stored states.
    """
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    stored = next((x for x in (slots.entering, slots.leaving, states) if x is not None), None)
    if stored is None:
        stored = v.new_empty(1, dtype=options.state_dtype)
    config = tuned("recurrent.triton", launch_key(stored.dtype, K, V, g, v_first=options.state_v_first), q.device)
    BV = min(config.blocks["BV"], tile_width(V))
    head = HV * K * V, K * V
    target = slots.source if slots.each and slots.target is None else slots.target
    launch_kernel(
        wyfold_recurrent_triton,
        (grid.sequences + (grid.cu is not None and o is not None)) * HV * -(-V // BV),
        inputs=with_strides(Inputs, q=q, k=k, v=v, o=o),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most, erases=float(options.erases)),
        # Without initial states `stored` is never read. It is passed so that the tile has the same layout.
        states=States(
            S0=stored,
            s_S0=head if slots.entering is None else slots.entering.stride()[:2],
            ST=slots.leaving,
            s_ST=head if slots.leaving is None else slots.leaving.stride()[:2],
            kept=states,
            first_kept=first_state,
        ),
        pool=with_strides(Pool, source=slots.source, target=target, given=slots.given, accepted=slots.accepted),
        p_cu=grid.cu,
        N=grid.sequences,
        T=grid.tokens,
        slots=grid.sequences if slots.entering is None else slots.entering.shape[0],
        slots_left=grid.sequences if slots.leaving is None else slots.leaving.shape[0],
        pad=slots.pad,
        given=int(slots.entering is not None),
        columns=1 if slots.source is None else slots.source.shape[1],
        scale=options.scale,
        every=every,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BK=tile_width(K), BV=BV),
        PACKED=grid.cu is not None,
        GATE=gate_kind(g),
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        V_FIRST=options.state_v_first,
        EACH=slots.each,
        **config.options(contract=False),
    )


NUMBERS = "N T slots slots_left pad given columns scale lower_bound clamp beta_most every".split()


class States(NamedTuple):
    """Kernel argument: states, with the strides of slots and heads; a head's state is contiguous.

    Attributes:
        S0, s_S0: Initial states. Without any, the pointer is never read, and has the dtype of the other states.
        ST, s_ST: Final states, written, or None.
        kept: [rows, HV, K, V] states after every `every` tokens, written, or None.
        first_kept: [N] first row in `kept` of each sequence.
    """

    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any
    kept: Any = None
    first_kept: Any = None
    end: None = None


class Pool(NamedTuple):
    """Kernel argument: slots of the states, as in `Slots`; each table with its strides, or None.

    Attributes:
        source, s_source, target, s_target: Slots of the initial and the final states.
        given, accepted: As in `Slots`.
    """

    source: Any
    s_source: Any
    target: Any
    s_target: Any
    given: Any
    accepted: Any = None
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BK: int
    BV: int


@triton.jit(do_not_specialize=["N", "T", "slots", "slots_left", "pad", "given", "columns", "scale", "every"])
def wyfold_recurrent_triton(
    inputs,
    gate,
    strength,
    states,
    pool,
    p_cu,
    N,
    T,
    slots,
    slots_left,
    pad,
    given,
    columns,
    scale,
    every,
    SIZES: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    V_FIRST: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program runs BV value rows of one sequence's state, from the entering state to the final one."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    b, t, length = i_n, i_n * 0, i_n * 0 + T
    live = i_n < N
    if PACKED:
        # One sequence more: the tokens past the last boundary.
        b, t = i_n * 0, tl.load(p_cu + i_n)
        length = tl.load(p_cu + i_n + 1) - t
    if pool.source is None:
        slot = i_n
        live = live & (i_n > pad) & (i_n < slots)
    else:
        entry = i_n * pool.s_source[0]
        if pool.accepted is not None:
            accepted = tl.load(pool.accepted + i_n, mask=live, other=0).to(tl.int64)
            entry += tl.minimum(tl.maximum(accepted - 1, 0), columns - 1) * pool.s_source[1]
        slot = tl.load(pool.source + entry, mask=live, other=pad).to(tl.int64)
        live = live & (slot > pad) & (slot < slots)
    if not live:
        if inputs.o is not None:
            for row in range(0, length, CLEARED):
                rows = tl.minimum(length - row, CLEARED).to(tl.int32)
                zeros = tl.zeros((CLEARED, BV), tl.float32)
                store_tokens(inputs.o, inputs.s_o, TokenRows(b, t + row, rows), i_hv, column, zeros, V)
        return

    has_state = given != 0
    if pool.given is not None:
        has_state = has_state & (tl.load(pool.given + i_n) != 0)
    o_S, m_S = slot_offsets(states.s_S0, slot, i_hv, column, K, V, BK, BV, V_FIRST)
    b_S = tl.load(states.S0 + o_S, mask=m_S & has_state, other=0.0).to(tl.float32)
    rate, bias = load_token_parameters(gate.A_log, gate.dt_bias, i_hv, GATE, ACTIVATION, K, BK)
    raw_q, raw_k, raw_v, x, raw_beta = load_token(
        inputs, gate, strength, b, t, i_h, i_hv, column, length > 0, K, V, BK, BV, GATE
    )
    for i in range(length):
        b_q, b_k, b_v, decay, beta = activate_token(
            raw_q, raw_k, raw_v, x, raw_beta, rate, bias, gate, strength, GATE, ACTIVATION, NORM, LOGIT
        )
        raw_q, raw_k, raw_v, x, raw_beta = load_token(
            inputs, gate, strength, b, t + i + 1, i_h, i_hv, column, i + 1 < length,
            K, V, BK, BV, GATE,
        )  # fmt: skip
        b_S, b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, strength.erases, V_FIRST)
        if inputs.o is not None:
            store_token_row(inputs.o, inputs.s_o, b, t + i, i_hv, column, b_o * scale, V, BV)
        if states.kept is not None:
            if (i + 1) % every == 0:
                i_state = (i + 1) // every - 1 + tl.load(states.first_kept + i_n)
                o_state, m_state = slot_offsets((HV * K * V, K * V), i_state, i_hv, column, K, V, BK, BV, V_FIRST)
                tl.store(states.kept + o_state, b_S.to(states.kept.dtype.element_ty), mask=m_state)
        if EACH:
            to = tl.load(pool.target + i_n * pool.s_target[0] + i * pool.s_target[1], mask=i < columns, other=pad).to(
                tl.int64
            )
            o_S, m_S = slot_offsets(states.s_ST, to, i_hv, column, K, V, BK, BV, V_FIRST)
            tl.store(states.ST + o_S, b_S.to(states.ST.dtype.element_ty), mask=m_S & (to > pad) & (to < slots_left))
    if states.ST is not None and not EACH:
        to = slot
        if pool.target is not None:
            to = tl.load(pool.target + i_n * pool.s_target[0]).to(tl.int64)
        o_S, m_S = slot_offsets(states.s_ST, to, i_hv, column, K, V, BK, BV, V_FIRST)
        tl.store(states.ST + o_S, b_S.to(states.ST.dtype.element_ty), mask=m_S & (to > pad) & (to < slots_left))
