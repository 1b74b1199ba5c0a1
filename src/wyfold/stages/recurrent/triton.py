"""`recurrent` in Triton: one program per sequence, value head and tile of value rows; its state stays in registers.

A decoded token moves its state in and out once, and little else, so the tile is laid out among the threads as it lies
in memory: whole vectors come and go, every sum over K is taken inside a warp, and no part of the state passes through
shared memory. Norms, gate and write strength are made on the way. One token or a million run the same instructions: a
token's bits do not depend on how many come before it in the same call.

States lie in slots. A call of the differentiable operators has a slot per sequence, reads its initial states and
writes its final ones; a serving call reads and writes a pool by indices.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import dtype_word, tile_width, tuned
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.records import Shares, Slots, TokenGradients
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import (
    FLOOR,
    NEAR,
    gate_flags,
    gate_kind,
    gate_width,
    load_raw_gate,
    load_token_gate,
    load_token_parameters,
    log_gate_bwd,
    store_gate_gradient,
    token_decay,
)
from wyfold.tile.index.triton import (
    load_strength,
    load_token_number,
    load_token_row,
    load_tokens,
    store_token_row,
    store_token_scalars,
    store_tokens,
    strides,
)
from wyfold.tile.norm.triton import normalised, row_norm, row_norm_bwd
from wyfold.tile.state.triton import slot_offsets, token_step, token_step_bwd

CLEARED: tl.constexpr = tl.constexpr(16)
"""Rows of output that a program without a state zeroes at a time."""

ROUNDING = {"enable_fp_fusion": False}
"""Every rounding is written out: no compilation of these lines may round otherwise than another."""

WIDE = torch.float32
BLOCK, RUN = 64, 8
"""Tokens between the states the backward starts from, and between those it rebuilds from them first."""


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
        g: [B, T, HV] or [B, T, HV, K] or None, as the caller gave it.
        beta: [B, T, HV] or None (1), as the caller gave it.
        A_log, dt_bias: Gate parameters, contiguous, or None.
        slots: States in and out; the numbers of a head's state lie one after another.
        grid: The call's boundaries; its chunks are not looked at.
        options: Uses `scale`, `qk_l2norm`, `activation`, `lower_bound`, `clamp`, `beta_logit`, `beta_most`,
            `state_v_first`.
        o: [B, T, HV, V] written, zero where no sequence with a live slot has a token; None: not wanted.
        states: [rows, HV, K, V] or V-first, written with the states after every `every` tokens, or None.
        first_state: [N] int64 row in `states` of each sequence's first.
    """
    (H, K), (HV, V) = q.shape[2:], v.shape[2:]
    stored = next((x for x in (slots.entering, slots.leaving, states) if x is not None), None)
    if stored is None:
        stored = v.new_empty(1, dtype=options.state_dtype)
    config = tuned("recurrent.triton", launch_key(stored.dtype, K, V, g, v_first=options.state_v_first), q.device)
    BV = min(config.blocks["BV"], tile_width(V))
    head = HV * K * V, K * V
    target = slots.source if slots.each and slots.target is None else slots.target
    launched(
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
        # Where nothing enters, nothing is read from where it could lie: the tile lies in registers as ever.
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
        **{**config.options(), **ROUNDING},
    )


def launch_key(stored: torch.dtype, K: int, V: int, g: Tensor | None, *, v_first: bool) -> str:
    """What a launch configuration depends on: how states are stored, their widths, the gate's kind."""
    order = "VK" if v_first else "KV"
    return f"{dtype_word(stored)} K{K} V{V} {order} {gate_kind(g)}"


def recurrent_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    dv: Tensor | None,
    dS0: Tensor | None,
) -> Shares:
    """Walk every sequence back from its last token; states are rebuilt from those after every BLOCK tokens.

    Args:
        q, k, v, g, beta, A_log, dt_bias, grid, options: As given to `recurrent`.
        initial_state: [N, HV, K, V] or V-first, contiguous, or None (zeros).
        states, first_state: From `recurrent`, every BLOCK tokens; None where no sequence is that long.
        do: [B, T, HV, V] gradient of the output, any strides.
        dST: Gradient of the final states, contiguous like initial_state, or None (zeros).
        dv: [B, T, HV, V] written, zero past a packed batch's last boundary, or None.
        dS0: Gradient of the initial states, written, or None.

    Returns:
        What every tile of value rows gives to the gradients of q, k, beta and g.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    key = launch_key(WIDE, K, V, g, v_first=options.state_v_first)
    config = tuned("recurrent.triton", f"{key} bwd", q.device)
    BK, BV = tile_width(K), min(config.blocks["BV"], tile_width(V))
    NV = -(-V // BV)
    programs = grid.sequences * HV * NV
    # States that a program keeps aside: before every run of a block, and at every token of one run.
    scratch = q.new_empty(programs, BLOCK // RUN + RUN, BV, BK, dtype=WIDE)
    shares = Shares(
        q=q.new_empty(NV, B * T, HV, K, dtype=WIDE),
        k=q.new_empty(NV, B * T, HV, K, dtype=WIDE),
        beta=q.new_empty(NV, B * T, HV, dtype=WIDE),
        g=None if g is None else q.new_empty(NV, B * T, HV, gate_width(g), dtype=WIDE),
    )
    launched(
        wyfold_recurrent_bwd_triton,
        programs + (grid.cu is not None) * HV * NV,
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
        initial_state,
        states,
        first_state,
        do,
        do.stride(),
        dST,
        scratch,
        *shares,
        dv,
        strides(dv),
        dS0,
        grid.cu,
        grid.sequences,
        grid.tokens,
        B * T,
        options.scale,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BK=BK,
        BV=BV,
        PACKED=grid.cu is not None,
        **gate_flags(g),
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        V_FIRST=options.state_v_first,
        BLOCK=BLOCK,
        RUN=RUN,
        **{**config.options(), **ROUNDING},
    )
    return shares


def gather(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    shares: Shares,
    grid: ChunkGrid,
    options: DeltaOptions,
    out: TokenGradients,
) -> None:
    """Gradients of tokens and parameters from the shares of value tiles and value heads, added up in their order.

    Args:
        q, k, g, beta, A_log, dt_bias, grid, options: As given to `recurrent`.
        shares: From `recurrent_bwd`.
        out: Tokens of every gradient but v's, zero past a packed batch's last boundary, and the parameters' sums; None
            where none is wanted.
    """
    (B, T, H, K), HV, gates = q.shape, shares.q.shape[2], gate_width(g)
    config = tuned("recurrent.triton", "gather", q.device)
    BT, BK = config.blocks["BT"], tile_width(K)
    tiles = B * -(-T // BT)
    dA_log = ddt_bias = None
    if out.A_log is not None:
        dA_log = q.new_empty(tiles, HV, 1, dtype=WIDE)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(tiles, HV, gates, dtype=WIDE)
    launched(
        wyfold_recurrent_gather_triton,
        tiles * H,
        q,
        q.stride(),
        k,
        k.stride(),
        g,
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        *shares,
        out.q,
        strides(out.q),
        out.k,
        strides(out.k),
        out.g,
        strides(out.g),
        out.beta,
        strides(out.beta),
        dA_log,
        ddt_bias,
        grid.cu,
        grid.sequences,
        grid.tokens,
        B * T,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        H=H,
        HV=HV,
        K=K,
        NV=shares.q.shape[0],
        BT=BT,
        BK=BK,
        PACKED=grid.cu is not None,
        **gate_flags(g),
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **{**config.options(), **ROUNDING},
    )
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


NUMBERS = "N T slots slots_left pad given columns scale lower_bound clamp beta_most every".split()


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
    """One program owns BV value rows of one state, from where it enters to where it is left."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    b, t, length = i_n, i_n * 0, i_n * 0 + T
    live = i_n < N
    if PACKED:
        # A sequence more: the tokens past the last boundary.
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

    there = given != 0
    if p_given is not None:
        there = there & (tl.load(p_given + i_n) != 0)
    o_S, m_S = slot_offsets(s_S0, slot, i_hv, column, K, V, BK, BV, V_FIRST)
    b_S = tl.load(p_S0 + o_S, mask=m_S & there, other=0.0).to(tl.float32)
    rate, bias = load_token_parameters(p_A_log, p_dt_bias, i_hv, GATE, ACTIVATION, K, BK)
    raw_q, raw_k, raw_v, x, raw_beta = _load_token(
        p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t, i_h, i_hv, column, length > 0, K, V, BK, BV, GATE
    )
    for i in range(length):
        b_q, b_k, b_v, decay, beta = _seen(
            raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most, GATE, ACTIVATION, NORM, LOGIT
        )
        raw_q, raw_k, raw_v, x, raw_beta = _load_token(
            p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i + 1, i_h, i_hv, column, i + 1 < length,
            K, V, BK, BV, GATE,
        )  # fmt: skip
        b_S, b_o = token_step(b_S, decay, b_q, b_k, b_v, beta)
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


@triton.jit(do_not_specialize=["N", "T", "tokens", "scale", "lower_bound", "clamp", "beta_most"])
def wyfold_recurrent_bwd_triton(
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
    p_states,
    p_first_state,
    p_do,
    s_do,
    p_dST,
    p_scratch,
    p_dq,
    p_dk,
    p_dbeta,
    p_dg,
    p_dv,
    s_dv,
    p_dS0,
    p_cu,
    N,
    T,
    tokens,
    scale,
    lower_bound,
    clamp,
    beta_most,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    V_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
    RUN: tl.constexpr,
):
    """One program owns BV value rows of one state and of its gradient, from the last token to the first."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    b, t, length = i_n, i_n * 0, i_n * 0 + T
    if PACKED:
        b, t = i_n * 0, tl.load(p_cu + i_n)
        length = tl.load(p_cu + i_n + 1) - t
        if i_n == N:
            if p_dv is not None:
                for row in range(0, length, CLEARED):
                    rows = tl.minimum(length - row, CLEARED).to(tl.int32)
                    zeros = tl.zeros((CLEARED, BV), tl.float32)
                    store_tokens(p_dv, s_dv, b, t + row, i_hv, column, rows, zeros, V, CLEARED, BV)
            return

    heads = (HV * K * V, K * V)
    o_S, m_S = slot_offsets(heads, i_n, i_hv, column, K, V, BK, BV, V_FIRST)
    # Kept aside as states lie, so that a tile is laid out among the threads in one way throughout.
    o_kept, _m_kept = slot_offsets((BK * BV, BK * BV), 0, 0, 0, BK, BV, BK, BV, V_FIRST)
    p_kept = p_scratch + pid * ((BLOCK // RUN + RUN) * BV * BK) + o_kept
    p_run = p_kept + (BLOCK // RUN) * BV * BK
    rate, bias = load_token_parameters(p_A_log, p_dt_bias, i_hv, GATE, ACTIVATION, K, BK)
    o_k = tl.arange(0, BK)
    b_dS = tl.zeros((BV, BK), tl.float32)
    if p_dST is not None:
        b_dS = tl.load(p_dST + o_S, mask=m_S, other=0.0).to(tl.float32)
    for i_back in range(tl.cdiv(length, BLOCK)):
        i_block = tl.cdiv(length, BLOCK) - 1 - i_back
        begin = i_block * BLOCK
        end = tl.minimum(begin + BLOCK, length)
        b_S = tl.zeros((BV, BK), tl.float32)
        if p_S0 is not None:
            b_S = tl.load(p_S0 + o_S, mask=m_S & (i_block == 0), other=0.0).to(tl.float32)
        if p_states is not None:
            i_state = tl.load(p_first_state + i_n) + i_block - 1
            o_B, m_B = slot_offsets(heads, i_state, i_hv, column, K, V, BK, BV, V_FIRST)
            b_S += tl.load(p_states + o_B, mask=m_B & (i_block > 0), other=0.0)
        for i in range(begin, end):
            if i % RUN == 0:
                tl.store(p_kept + (i - begin) // RUN * (BV * BK), b_S)
            raw_q, raw_k, raw_v, x, raw_beta = _load_token(
                p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                K, V, BK, BV, GATE,
            )  # fmt: skip
            b_q, b_k, b_v, decay, beta = _seen(
                raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                GATE, ACTIVATION, NORM, LOGIT,
            )  # fmt: skip
            b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta)
        tl.debug_barrier()  # what one thread stored another may load
        for i_run_back in range(tl.cdiv(end - begin, RUN)):
            i_run = tl.cdiv(end - begin, RUN) - 1 - i_run_back
            first = begin + i_run * RUN
            last = tl.minimum(first + RUN, end)
            b_S = tl.load(p_kept + i_run * (BV * BK))
            for i in range(first, last):
                tl.store(p_run + (i - first) * (BV * BK), b_S)
                raw_q, raw_k, raw_v, x, raw_beta = _load_token(
                    p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = _seen(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta)
            tl.debug_barrier()
            for i_token_back in range(last - first):
                i = last - 1 - i_token_back
                raw_q, raw_k, raw_v, x, raw_beta = _load_token(
                    p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = _seen(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_do = load_token_row(p_do, s_do, b, t + i, i_hv, column, i < length, V, BV).to(tl.float32) * scale
                b_S = tl.load(p_run + (i - first) * (BV * BK)) * decay
                b_dS, b_dq, b_dk, b_dv, dbeta, b_SdS = token_step_bwd(b_S, b_dS, b_q, b_k, b_v, b_do, beta)
                i_row = (i_v * tokens + b * T + t + i) * HV + i_hv
                tl.store(p_dq + i_row * K + o_k, b_dq, mask=o_k < K)
                tl.store(p_dk + i_row * K + o_k, b_dk, mask=o_k < K)
                tl.store(p_dbeta + i_row, dbeta)
                if CHANNEL:
                    tl.store(p_dg + i_row * K + o_k, b_SdS, mask=o_k < K)
                if SCALAR:
                    tl.store(p_dg + i_row, tl.sum(b_SdS, axis=0))
                if p_dv is not None:
                    store_token_row(p_dv, s_dv, b, t + i, i_hv, column, b_dv, V, BV)
                b_dS *= decay
            tl.debug_barrier()
    if p_dS0 is not None:
        tl.store(p_dS0 + o_S, b_dS, mask=m_S)


@triton.jit(do_not_specialize=["N", "T", "tokens", "lower_bound", "clamp", "beta_most"])
def wyfold_recurrent_gather_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_g,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_dq_shares,
    p_dk_shares,
    p_dbeta_shares,
    p_dg_shares,
    p_dq,
    s_dq,
    p_dk,
    s_dk,
    p_dg,
    s_dg,
    p_dbeta,
    s_dbeta,
    p_dA_log,
    p_ddt_bias,
    p_cu,
    N,
    T,
    tokens,
    lower_bound,
    clamp,
    beta_most,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    NV: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
):
    """One program owns BT tokens of one key head, and of its value heads one after another."""
    GR: tl.constexpr = HV // H
    pid = tl.program_id(0).to(tl.int64)
    i_tile, i_h = pid // H, pid % H
    per_row = tl.cdiv(T, BT)
    b, t = i_tile // per_row, (i_tile % per_row) * BT
    rows = tl.minimum(T - t, BT).to(tl.int32)
    real = rows
    if PACKED:
        real = tl.maximum(tl.minimum(tl.load(p_cu + N) - t, rows), 0).to(tl.int32)
    i_row = b * T + t
    b_dq, b_dk = tl.zeros((BT, BK), tl.float32), tl.zeros((BT, BK), tl.float32)
    for i_hv in range(i_h * GR, i_h * GR + GR):
        b_dq += _shared(p_dq_shares, i_row, i_hv, tokens, real, HV, K, NV, BT, BK)
        b_dk += _shared(p_dk_shares, i_row, i_hv, tokens, real, HV, K, NV, BT, BK)
        if p_dbeta is not None:
            b_dbeta = tl.sum(_shared(p_dbeta_shares, i_row, i_hv, tokens, real, HV, 1, NV, BT, 1), axis=1)
            if LOGIT:
                b_beta = load_strength(p_beta, s_beta, b, t, i_hv, real, beta_most, LOGIT, BT)
                b_dbeta = b_dbeta * b_beta * (1.0 - b_beta / beta_most)
            store_token_scalars(p_dbeta, s_dbeta, b, t, i_hv, rows, b_dbeta, BT)
        if SCALAR or CHANNEL:
            b_dg = _shared(
                p_dg_shares, i_row, i_hv, tokens, real, HV, K if CHANNEL else 1, NV, BT, BK if CHANNEL else 1
            )
            if SCALAR:
                b_dg = tl.sum(b_dg, axis=1)
            b_x = load_raw_gate(p_g, s_g, b, t, i_hv, 0, real, GATE, K, BT, BK)
            b_dx, b_dA = log_gate_bwd(
                b_x, b_dg, p_A_log, p_dt_bias, i_hv, 0, lower_bound, clamp, CLAMPED, GATE, ACTIVATION, K, BK
            )
            if CHANNEL:
                b_dx, b_dA = b_dx.reshape(BT // NEAR, NEAR, BK), b_dA.reshape(BT // NEAR, NEAR, BK)
            store_gate_gradient(
                p_dg, s_dg, p_dA_log, p_ddt_bias, i_tile * HV + i_hv, b, t, i_hv, 0, rows, b_dx, b_dA, tl.minimum(T, 0),
                GATE, K, BT, BK,
            )  # fmt: skip
    if p_dq is not None:
        if NORM:
            b_y, b_r = row_norm(load_tokens(p_q, s_q, b, t, i_h, 0, real, K, BT, BK).to(tl.float32), 1e-6, 1)
            b_dq = row_norm_bwd(b_y, b_r, b_dq, 1)
        store_tokens(p_dq, s_dq, b, t, i_h, 0, rows, b_dq, K, BT, BK)
    if p_dk is not None:
        if NORM:
            b_y, b_r = row_norm(load_tokens(p_k, s_k, b, t, i_h, 0, real, K, BT, BK).to(tl.float32), 1e-6, 1)
            b_dk = row_norm_bwd(b_y, b_r, b_dk, 1)
        store_tokens(p_dk, s_dk, b, t, i_h, 0, rows, b_dk, K, BT, BK)


@triton.jit
def _shared(
    p,
    i_row,
    i_hv,
    tokens,
    rows,
    HV: tl.constexpr,
    W: tl.constexpr,
    NV: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
):
    """Sum of the shares [NV, tokens, HV, W] of one value head in some tokens, zero in others.   [BT, BW]"""
    o_r, o_w = tl.arange(0, BT)[:, None], tl.arange(0, BW)[None, :]
    mask = (o_r < rows) & (o_w < W)
    b_x = tl.zeros((BT, BW), tl.float32)
    for i_v in tl.static_range(NV):
        b_x += tl.load(p + ((i_v * tokens + i_row + o_r) * HV + i_hv) * W + o_w, mask=mask, other=0.0)
    return b_x


@triton.jit
def _load_token(
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
    b,
    t,
    i_h,
    i_hv,
    column,
    here,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
):
    """One token as it lies in memory, all of it asked for before anything waits: q, k [BK], v [BV], gate, strength.

    Unless it is here, nothing is read.
    """
    b_k = load_token_row(p_k, s_k, b, t, i_h, 0, here, K, BK)
    b_q = load_token_row(p_q, s_q, b, t, i_h, 0, here, K, BK)
    b_v = load_token_row(p_v, s_v, b, t, i_hv, column, here, V, BV)
    x = load_token_gate(p_g, s_g, b, t, i_hv, here, GATE, K, BK)
    beta = 1.0
    if p_beta is not None:
        beta = load_token_number(p_beta, s_beta, b, t, i_hv, here)
    return b_q, b_k, b_v, x, beta


@triton.jit
def _seen(
    b_q,
    b_k,
    b_v,
    x,
    beta,
    rate,
    bias,
    lower_bound,
    clamp,
    beta_most,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
):
    """A token as the recurrence sees it: q and k normalised, v, decay of the state, write strength; float32."""
    b_q, b_k, b_v = b_q.to(tl.float32), b_k.to(tl.float32), b_v.to(tl.float32)
    if NORM:
        b_k, b_q = normalised(b_k), normalised(b_q)
    if LOGIT:
        beta = sigmoid(beta) * beta_most
    return b_q, b_k, b_v, token_decay(x, rate, bias, lower_bound, clamp, GATE, ACTIVATION), beta
