"""Forward recurrence: one program per sequence, value head and tile of value rows, over all tokens in order."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.recurrent.triton.tokens import CLEARED, activate_token, launch_key, load_token
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import FLOOR, gate_kind, load_token_parameters
from wyfold.tile.index.triton import store_token_row, store_tokens, strides
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
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        g,
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        # Without initial states this pointer is never read. It is passed so that the tile has the same layout.
        stored,
        head if slots.entering is None else slots.entering.stride()[:2],
        slots.leaving,
        head if slots.leaving is None else slots.leaving.stride()[:2],
        states,
        first_state,
        slots.source,
        strides(slots.source),
        target,
        strides(target),
        slots.given,
        slots.accepted,
        o,
        strides(o),
        grid.cu,
        grid.sequences,
        grid.tokens,
        grid.sequences if slots.entering is None else slots.entering.shape[0],
        grid.sequences if slots.leaving is None else slots.leaving.shape[0],
        slots.pad,
        int(slots.entering is not None),
        1 if slots.source is None else slots.source.shape[1],
        options.scale,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        float(options.erases),
        every,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=tile_width(K),
        BV=BV,
        PACKED=grid.cu is not None,
        GATE=gate_kind(g),
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        V_FIRST=options.state_v_first,
        EACH=slots.each,
        **config.options(contract=False),
    )


NUMBERS = "N T slots slots_left pad given columns scale lower_bound clamp beta_most erases every".split()


@triton.jit(do_not_specialize=NUMBERS)
def wyfold_recurrent_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_g,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_S0,
    s_S0,
    p_ST,
    s_ST,
    p_states,
    p_first_state,
    p_source,
    s_source,
    p_target,
    s_target,
    p_given,
    p_accepted,
    p_o,
    s_o,
    p_cu,
    N,
    T,
    slots,
    slots_left,
    pad,
    given,
    columns,
    scale,
    lower_bound,
    clamp,
    beta_most,
    erases,
    every,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    V_FIRST: tl.constexpr,
    EACH: tl.constexpr,
):
    """One program runs BV value rows of one sequence's state, from the entering state to the final one."""
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
    if p_source is None:
        slot = i_n
        live = live & (i_n > pad) & (i_n < slots)
    else:
        entry = i_n * s_source[0]
        if p_accepted is not None:
            accepted = tl.load(p_accepted + i_n, mask=live, other=0).to(tl.int64)
            entry += tl.minimum(tl.maximum(accepted - 1, 0), columns - 1) * s_source[1]
        slot = tl.load(p_source + entry, mask=live, other=pad).to(tl.int64)
        live = live & (slot > pad) & (slot < slots)
    if not live:
        if p_o is not None:
            for row in range(0, length, CLEARED):
                rows = tl.minimum(length - row, CLEARED).to(tl.int32)
                zeros = tl.zeros((CLEARED, BV), tl.float32)
                store_tokens(p_o, s_o, b, t + row, i_hv, column, rows, zeros, V, CLEARED, BV)
        return

    has_state = given != 0
    if p_given is not None:
        has_state = has_state & (tl.load(p_given + i_n) != 0)
    o_S, m_S = slot_offsets(s_S0, slot, i_hv, column, K, V, BK, BV, V_FIRST)
    b_S = tl.load(p_S0 + o_S, mask=m_S & has_state, other=0.0).to(tl.float32)
    rate, bias = load_token_parameters(p_A_log, p_dt_bias, i_hv, GATE, ACTIVATION, K, BK)
    raw_q, raw_k, raw_v, x, raw_beta = load_token(
        p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t, i_h, i_hv, column, length > 0, K, V, BK, BV, GATE
    )
    for i in range(length):
        b_q, b_k, b_v, decay, beta = activate_token(
            raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most, GATE, ACTIVATION, NORM, LOGIT
        )
        raw_q, raw_k, raw_v, x, raw_beta = load_token(
            p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i + 1, i_h, i_hv, column, i + 1 < length,
            K, V, BK, BV, GATE,
        )  # fmt: skip
        b_S, b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, erases, V_FIRST)
        if p_o is not None:
            store_token_row(p_o, s_o, b, t + i, i_hv, column, b_o * scale, V, BV)
        if p_states is not None:
            if (i + 1) % every == 0:
                i_state = (i + 1) // every - 1 + tl.load(p_first_state + i_n)
                o_state, m_state = slot_offsets((HV * K * V, K * V), i_state, i_hv, column, K, V, BK, BV, V_FIRST)
                tl.store(p_states + o_state, b_S.to(p_states.dtype.element_ty), mask=m_state)
        if EACH:
            to = tl.load(p_target + i_n * s_target[0] + i * s_target[1], mask=i < columns, other=pad).to(tl.int64)
            o_S, m_S = slot_offsets(s_ST, to, i_hv, column, K, V, BK, BV, V_FIRST)
            tl.store(p_ST + o_S, b_S.to(p_ST.dtype.element_ty), mask=m_S & (to > pad) & (to < slots_left))
    if p_ST is not None and not EACH:
        to = slot
        if p_target is not None:
            to = tl.load(p_target + i_n * s_target[0]).to(tl.int64)
        o_S, m_S = slot_offsets(s_ST, to, i_hv, column, K, V, BK, BV, V_FIRST)
        tl.store(p_ST + o_S, b_S.to(p_ST.dtype.element_ty), mask=m_S & (to > pad) & (to < slots_left))
