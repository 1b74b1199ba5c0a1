"""Backward recurrence: recomputes states from stored ones, and visits tokens in reverse with the state's gradient."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import PartialGradients
from wyfold.kernels.recurrent.triton.tokens import CLEARED, WIDE, activate_token, launch_key_bwd, load_token
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import FLOOR, gate_flags, gate_width, load_token_parameters
from wyfold.tile.index.triton import load_token_row, store_token_row, store_tokens, strides
from wyfold.tile.state.triton import slot_offsets, token_step, token_step_bwd


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
    block: int,
    run: int,
) -> PartialGradients:
    """Run the backward over every sequence; states are recomputed from those stored every `block` tokens.

    Args:
        q, k, v, g, beta, A_log, dt_bias, grid, options: As given to `recurrent`.
        initial_state: [N, HV, K, V] or V-first, contiguous, or None (zeros).
        states, first_state: From `recurrent` with `every=block`; None where no sequence is that long.
        do: [B, T, HV, V] gradient of the output, any strides.
        dST: Gradient of the final states, contiguous like initial_state, or None (zeros).
        dv: [B, T, HV, V] written, zero past a packed batch's last boundary, or None.
        dS0: Gradient of the initial states, written, or None.
        block: Tokens between the stored states.
        run: Tokens between the states that are recomputed first.

    Returns:
        Partial gradients of q, k, beta and g, one per tile of value rows.
    """
    (B, T, H, K), (HV, V) = q.shape, v.shape[2:]
    config = tuned("recurrent.triton", launch_key_bwd(K, V), q.device)
    BK, BV = tile_width(K), min(config.blocks["BV"], tile_width(V))
    NV = -(-V // BV)
    programs = grid.sequences * HV * NV
    # Recomputed states of a program: before every run of a block, and at every token of one run.
    scratch = q.new_empty(programs, block // run + run, BV, BK, dtype=WIDE)
    partials = PartialGradients(
        q=q.new_empty(NV, B * T, HV, K, dtype=WIDE),
        k=q.new_empty(NV, B * T, HV, K, dtype=WIDE),
        beta=q.new_empty(NV, B * T, HV, dtype=WIDE),
        g=None if g is None else q.new_empty(NV, B * T, HV, gate_width(g), dtype=WIDE),
    )
    launch_kernel(
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
        *partials,
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
        float(options.erases),
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
        BLOCK=block,
        RUN=run,
        **config.options(contract=False),
    )
    return partials


@triton.jit(do_not_specialize=["N", "T", "tokens", "scale", "lower_bound", "clamp", "beta_most", "erases"])
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
    erases,
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
    """One program runs BV value rows of one state and of its gradient, from the last token to the first."""
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
    # Scratch states have the layout of the caller's states, so that a tile keeps one register layout throughout.
    o_saved, _m_saved = slot_offsets((BK * BV, BK * BV), 0, 0, 0, BK, BV, BK, BV, V_FIRST)
    p_saved = p_scratch + pid * ((BLOCK // RUN + RUN) * BV * BK) + o_saved
    p_run = p_saved + (BLOCK // RUN) * BV * BK
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
                tl.store(p_saved + (i - begin) // RUN * (BV * BK), b_S)
            raw_q, raw_k, raw_v, x, raw_beta = load_token(
                p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                K, V, BK, BV, GATE,
            )  # fmt: skip
            b_q, b_k, b_v, decay, beta = activate_token(
                raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                GATE, ACTIVATION, NORM, LOGIT,
            )  # fmt: skip
            b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, erases, V_FIRST)
        tl.debug_barrier()  # other threads may load what a thread stored
        for i_run_back in range(tl.cdiv(end - begin, RUN)):
            i_run = tl.cdiv(end - begin, RUN) - 1 - i_run_back
            first = begin + i_run * RUN
            last = tl.minimum(first + RUN, end)
            b_S = tl.load(p_saved + i_run * (BV * BK))
            for i in range(first, last):
                tl.store(p_run + (i - first) * (BV * BK), b_S)
                raw_q, raw_k, raw_v, x, raw_beta = load_token(
                    p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = activate_token(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, erases, V_FIRST)
            tl.debug_barrier()
            for i_token_back in range(last - first):
                i = last - 1 - i_token_back
                raw_q, raw_k, raw_v, x, raw_beta = load_token(
                    p_q, s_q, p_k, s_k, p_v, s_v, p_g, s_g, p_beta, s_beta, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = activate_token(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, lower_bound, clamp, beta_most,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_do = load_token_row(p_do, s_do, b, t + i, i_hv, column, i < length, V, BV).to(tl.float32) * scale
                b_S = tl.load(p_run + (i - first) * (BV * BK)) * decay
                b_dS, b_dq, b_dk, b_dv, dbeta, b_SdS = token_step_bwd(b_S, b_dS, b_q, b_k, b_v, b_do, beta, erases)
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
