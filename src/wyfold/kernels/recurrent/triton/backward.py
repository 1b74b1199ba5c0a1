"""Backward recurrence: recomputes states from stored ones, and visits tokens in reverse with the state's gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import PartialGradients
from wyfold.kernels.recurrent.triton.tokens import CLEARED, WIDE, Inputs, activate_token, launch_key_bwd, load_token
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_argument, gate_flags, gate_width, load_token_parameters
from wyfold.tile.index.triton import TokenRows, load_token_row, store_token_row, store_tokens, with_strides
from wyfold.tile.index.triton.strength import Strength
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
        inputs=with_strides(Inputs, q=q, k=k, v=v),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=with_strides(Strength, beta=beta, most=options.beta_most, erases=float(options.erases)),
        states=States(S0=initial_state, kept=states, first_kept=first_state, scratch=scratch),
        gradients=with_strides(Gradients, do=do, dST=dST, dv=dv, dS0=dS0),
        partials=partials,
        p_cu=grid.cu,
        N=grid.sequences,
        T=grid.tokens,
        tokens=B * T,
        scale=options.scale,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BK=BK, BV=BV, BLOCK=block, RUN=run),
        PACKED=grid.cu is not None,
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        V_FIRST=options.state_v_first,
        **gate_flags(g),
        **config.options(contract=False),
    )
    return partials


class States(NamedTuple):
    """Kernel argument: states, contiguous.

    Attributes:
        S0: [N, HV, K, V] initial states, or None.
        kept, first_kept: From `recurrent`: states after every BLOCK tokens, and each sequence's first row, or None.
        scratch: [programs, BLOCK / RUN + RUN, BV, BK] recomputed states.
    """

    S0: Any
    kept: Any
    first_kept: Any
    scratch: Any


class Gradients(NamedTuple):
    """Kernel argument: gradients that are read and written.

    Attributes:
        do, s_do: Gradient of the output, and its strides.
        dST: Gradient of the final states, contiguous, or None.
        dv, s_dv: Gradient of v, written, and its strides, or None.
        dS0: Gradient of the initial states, written, contiguous, or None.
    """

    do: Any
    s_do: Any
    dST: Any
    dv: Any
    s_dv: Any
    dS0: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles, tokens between stored states, and between recomputed ones."""

    H: int
    HV: int
    K: int
    V: int
    BK: int
    BV: int
    BLOCK: int
    RUN: int


@triton.jit(do_not_specialize=["N", "T", "tokens", "scale"])
def wyfold_recurrent_bwd_triton(
    inputs,
    gate,
    strength,
    states,
    gradients,
    partials,
    p_cu,
    N,
    T,
    tokens,
    scale,
    SIZES: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """One program runs BV value rows of one state and of its gradient, from the last token to the first."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    RUN: tl.constexpr = SIZES.RUN
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
            if gradients.dv is not None:
                for row in range(0, length, CLEARED):
                    rows = tl.minimum(length - row, CLEARED).to(tl.int32)
                    zeros = tl.zeros((CLEARED, BV), tl.float32)
                    store_tokens(gradients.dv, gradients.s_dv, TokenRows(b, t + row, rows), i_hv, column, zeros, V)
            return

    heads = (HV * K * V, K * V)
    o_S, m_S = slot_offsets(heads, i_n, i_hv, column, K, V, BK, BV, V_FIRST)
    # Scratch states have the layout of the caller's states, so that a tile keeps one register layout throughout.
    o_saved, _m_saved = slot_offsets((BK * BV, BK * BV), 0, 0, 0, BK, BV, BK, BV, V_FIRST)
    p_saved = states.scratch + pid * ((BLOCK // RUN + RUN) * BV * BK) + o_saved
    p_run = p_saved + (BLOCK // RUN) * BV * BK
    rate, bias = load_token_parameters(gate.A_log, gate.dt_bias, i_hv, GATE, ACTIVATION, K, BK)
    o_k = tl.arange(0, BK)
    b_dS = tl.zeros((BV, BK), tl.float32)
    if gradients.dST is not None:
        b_dS = tl.load(gradients.dST + o_S, mask=m_S, other=0.0).to(tl.float32)
    for i_back in range(tl.cdiv(length, BLOCK)):
        i_block = tl.cdiv(length, BLOCK) - 1 - i_back
        begin = i_block * BLOCK
        end = tl.minimum(begin + BLOCK, length)
        b_S = tl.zeros((BV, BK), tl.float32)
        if states.S0 is not None:
            b_S = tl.load(states.S0 + o_S, mask=m_S & (i_block == 0), other=0.0).to(tl.float32)
        if states.kept is not None:
            i_state = tl.load(states.first_kept + i_n) + i_block - 1
            o_B, m_B = slot_offsets(heads, i_state, i_hv, column, K, V, BK, BV, V_FIRST)
            b_S += tl.load(states.kept + o_B, mask=m_B & (i_block > 0), other=0.0)
        for i in range(begin, end):
            if i % RUN == 0:
                tl.store(p_saved + (i - begin) // RUN * (BV * BK), b_S)
            raw_q, raw_k, raw_v, x, raw_beta = load_token(
                inputs, gate, strength, b, t + i, i_h, i_hv, column, i < length,
                K, V, BK, BV, GATE,
            )  # fmt: skip
            b_q, b_k, b_v, decay, beta = activate_token(
                raw_q, raw_k, raw_v, x, raw_beta, rate, bias, gate, strength,
                GATE, ACTIVATION, NORM, LOGIT,
            )  # fmt: skip
            b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, strength.erases, V_FIRST)
        tl.debug_barrier()  # other threads may load what a thread stored
        for i_run_back in range(tl.cdiv(end - begin, RUN)):
            i_run = tl.cdiv(end - begin, RUN) - 1 - i_run_back
            first = begin + i_run * RUN
            last = tl.minimum(first + RUN, end)
            b_S = tl.load(p_saved + i_run * (BV * BK))
            for i in range(first, last):
                tl.store(p_run + (i - first) * (BV * BK), b_S)
                raw_q, raw_k, raw_v, x, raw_beta = load_token(
                    inputs, gate, strength, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = activate_token(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, gate, strength,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_S, _b_o = token_step(b_S, decay, b_q, b_k, b_v, beta, strength.erases, V_FIRST)
            tl.debug_barrier()
            for i_token_back in range(last - first):
                i = last - 1 - i_token_back
                raw_q, raw_k, raw_v, x, raw_beta = load_token(
                    inputs, gate, strength, b, t + i, i_h, i_hv, column, i < length,
                    K, V, BK, BV, GATE,
                )  # fmt: skip
                b_q, b_k, b_v, decay, beta = activate_token(
                    raw_q, raw_k, raw_v, x, raw_beta, rate, bias, gate, strength,
                    GATE, ACTIVATION, NORM, LOGIT,
                )  # fmt: skip
                b_do = (
                    load_token_row(gradients.do, gradients.s_do, b, t + i, i_hv, column, i < length, V, BV).to(
                        tl.float32
                    )
                    * scale
                )
                b_S = tl.load(p_run + (i - first) * (BV * BK)) * decay
                b_dS, b_dq, b_dk, b_dv, dbeta, b_SdS = token_step_bwd(
                    b_S, b_dS, b_q, b_k, b_v, b_do, beta, strength.erases
                )
                i_row = (i_v * tokens + b * T + t + i) * HV + i_hv
                tl.store(partials.q + i_row * K + o_k, b_dq, mask=o_k < K)
                tl.store(partials.k + i_row * K + o_k, b_dk, mask=o_k < K)
                tl.store(partials.beta + i_row, dbeta)
                if CHANNEL:
                    tl.store(partials.g + i_row * K + o_k, b_SdS, mask=o_k < K)
                if SCALAR:
                    tl.store(partials.g + i_row, tl.sum(b_SdS, axis=0))
                if gradients.dv is not None:
                    store_token_row(gradients.dv, gradients.s_dv, b, t + i, i_hv, column, b_dv, V, BV)
                b_dS *= decay
            tl.debug_barrier()
    if gradients.dS0 is not None:
        tl.store(gradients.dS0 + o_S, b_dS, mask=m_S)
