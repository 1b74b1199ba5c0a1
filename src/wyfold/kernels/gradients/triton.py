"""`gradients` in Triton: one program per chunk and key head, which loops over the head's value heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.triton_support import interpreting
from wyfold.tile.decay.channel.triton import channel_bwd, store_near_pairs, sub_chunk_gate
from wyfold.tile.decay.triton import (
    FLOOR,
    NEAR,
    gate_flags,
    gate_width,
    interval_sum,
    load_gate,
    log_gate_bwd,
    pair_decay,
    running_sum,
    scalar_rows,
    state_gate_gradient,
    store_gate_gradient,
)
from wyfold.tile.dot.triton import NARROWEST, contracts, exact, mm, operand, precision, workspace
from wyfold.tile.index.triton import (
    all_or_none,
    chunk_span,
    has_tma,
    load_strength,
    load_sub_chunks,
    load_tile,
    load_tile_block,
    load_tile_sub_chunks,
    load_token_block,
    load_tokens,
    prefetch_tile,
    prefetch_tokens,
    store_sub_chunks,
    store_tile,
    store_token_block,
    store_token_scalars,
    store_token_sub_chunks,
    store_tokens,
    strength_bwd,
    strides,
    tile_descriptor,
    token_descriptor,
)


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator.
        do: [B, T, HV, V] gradient of the output, any strides.
        borders: From `scan_bwd`.
        grid: The call's chunk grid.
        options: As given to `prepare`.
        key: Launch configuration key.
        out: Receives the gradients; tokens past a packed batch's last boundary get zeros. None where a gradient is not
            requested.
    """
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    flags, gates = gate_flags(g), gate_width(g)
    config = tuned("gradients.triton", key, q.device)
    BK = min(config.blocks["BK"], max(NARROWEST, triton.next_power_of_2(K)))
    BV = min(config.blocks["BV"], max(NARROWEST, triton.next_power_of_2(V)))
    dA_log = ddt_bias = pairs = near = accumulators = None
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, -(-gates // BK), dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, gates, dtype=torch.float32)
    if flags["CHANNEL"]:
        pairs = q.new_empty(grid.chunks * HV, 3, C, C, dtype=workspace(q.dtype))
        near = q.new_empty(grid.chunks * HV, C, NEAR, 2, dtype=torch.float32)
    if HV > H or options.qk_l2norm:
        accumulators = q.new_empty(2, grid.chunks * H, C, K, dtype=torch.float32)
    use_tma = has_tma(q.device)
    border_descriptors = _descriptors(borders, C, BK, BV) if use_tma else None
    qk_descriptors = do_descriptors = out_descriptors = None
    if use_tma and not flags["CHANNEL"] and grid.cu is None and grid.tokens % C == 0:
        do_descriptors = _token_descriptors((do,), C, BV)
        if accumulators is None:
            out_descriptors = _token_descriptors((out.q, out.k, out.v), C, BK, BK, BV)
        if g is None and not options.qk_l2norm:
            # Row sums of q and k are reduced in the layout of the load. It differs between TMA and pointer loads, and
            # so would the bits.
            qk_descriptors = _token_descriptors((q, k), C, BK, BK)
    (x_do,), (x_q, x_k) = do_descriptors or (do,), qk_descriptors or (q, k)
    x_dq, x_dk, x_dv = out_descriptors or (out.q, out.k, out.v)
    launch_kernel(
        wyfold_gradients_triton,
        grid.chunks * H,
        x_q,
        q.stride(),
        x_k,
        k.stride(),
        g,
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        x_do,
        do.stride(),
        *(border_descriptors or borders),
        borders.S,
        borders.dS,
        x_dq,
        strides(out.q),
        x_dk,
        strides(out.k),
        x_dv,
        strides(out.v),
        out.g,
        strides(out.g),
        out.beta,
        strides(out.beta),
        dA_log,
        ddt_bias,
        pairs,
        near,
        None if accumulators is None else accumulators[0],
        None if accumulators is None else accumulators[1],
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        options.unit,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        options.unit * float(options.erases),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=BK,
        BV=BV,
        PACKED=grid.cu is not None,
        **flags,
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        USE_TMA_TILES=border_descriptors is not None,
        USE_TMA=qk_descriptors is not None,
        USE_TMA_DO=do_descriptors is not None,
        TMA_STORES=out_descriptors is not None,
        # Measured to help under a channel gate; not measured separately without a gate (docs/facts/hopper.md, H200-6).
        PREFETCH=g is not None and not interpreting(),
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
        EXACT=exact(q.dtype),
        # With a channel gate, one warp per sub-chunk.
        **{**config.options(contract=contracts(q.dtype)), "num_warps": C // NEAR if flags["CHANNEL"] else config.warps},
    )
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


def gradients_key(key: LaunchKey, q: Tensor, v: Tensor) -> LaunchKey:
    """Launch configuration key: the call's key, and the number of value heads per key head."""
    return key._replace(group=v.shape[2] // q.shape[2])


def _token_descriptors(given: tuple[Tensor | None, ...], C: int, *columns: int) -> Sequence[Any] | None:
    """TMA descriptors of full chunks of tokens; None if one of the tensors has none. Partial chunks have none."""
    return all_or_none(
        given, [None if x is None else token_descriptor(x, C, n) for x, n in zip(given, columns, strict=True)]
    )


def _descriptors(borders: TokenBorders, C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """TMA descriptors of the borders; None if one of the tensors has none."""
    states, rows = [(x, BV, BK) for x in (borders.S, borders.dS)], [(x, C, BV) for x in (borders.e, borders.X)]
    return all_or_none(borders, [tile_descriptor(*descriptor) for descriptor in states + rows])


@triton.jit(
    do_not_specialize=["N", "T", "per_sequence", "scale", "unit", "lower_bound", "clamp", "beta_most", "erased_unit"]
)
def wyfold_gradients_triton(
    x_q,
    s_q,
    x_k,
    s_k,
    p_g,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    x_do,
    s_do,
    p_S,
    p_dS,
    p_e,
    p_X,
    p_S_tiles,
    p_dS_tiles,
    x_dq,
    s_dq,
    x_dk,
    s_dk,
    x_dv,
    s_dv,
    p_dg,
    s_dg,
    p_dbeta,
    s_dbeta,
    p_dA_log,
    p_ddt_bias,
    p_pairs,
    p_near,
    p_dq_acc,
    p_dk_acc,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    scale,
    unit,
    lower_bound,
    clamp,
    beta_most,
    erased_unit,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    SCALAR: tl.constexpr,
    CHANNEL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    USE_TMA_TILES: tl.constexpr,
    USE_TMA: tl.constexpr,
    USE_TMA_DO: tl.constexpr,
    TMA_STORES: tl.constexpr,
    PREFETCH: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program computes the gradients of a chunk of one key head.

    For each value head it first computes the gradients of the two grams, then loops over K in slices of BK. Where a key
    head has several value heads, or rows are normalised here, dq and dk accumulate in float32 tiles in global memory.
    erased_unit: The unit, or 0 for writes that erase nothing: keys then get no gradient from what they would read.
    """
    GR: tl.constexpr = HV // H
    NK: tl.constexpr = (K + BK - 1) // BK
    NV: tl.constexpr = (V + BV - 1) // BV
    ACCUMULATED: tl.constexpr = NORM or GR > 1
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    o_r = tl.arange(0, BT)
    zero = tl.zeros((BT,), tl.float32)
    zeros = tl.zeros((BT, BK), tl.float32)
    # A 0 that the compiler cannot fold, for addresses in sub-chunks.
    opaque_zero = tl.minimum(T, 0)
    if PACKED:
        if i_n == N:
            for i_hv in range(i_h * GR, i_h * GR + GR):
                i_tile = i_c * HV + i_hv
                for i_v in tl.static_range(NV):
                    if x_dv is not None:
                        store_tokens(x_dv, s_dv, b, t, i_hv, i_v * BV, rows, tl.zeros((BT, BV), tl.float32), V, BT, BV)
                if p_dbeta is not None:
                    store_token_scalars(p_dbeta, s_dbeta, b, t, i_hv, rows, zero, BT)
                for i_k in tl.static_range(NK if CHANNEL else 1):
                    b_zero = zeros.reshape(BT // NEAR, NEAR, BK) if CHANNEL else zero
                    store_gate_gradient(
                        p_dg, s_dg, p_dA_log, p_ddt_bias, i_tile, b, t, i_hv, i_k * BK, rows, b_zero, b_zero,
                        opaque_zero, GATE, K, BT, BK,
                    )  # fmt: skip
            for i_k in tl.static_range(NK):
                if x_dq is not None:
                    store_tokens(x_dq, s_dq, b, t, i_h, i_k * BK, rows, zeros, K, BT, BK)
                if x_dk is not None:
                    store_tokens(x_dk, s_dk, b, t, i_h, i_k * BK, rows, zeros, K, BT, BK)
            return

    if PREFETCH:
        # Occupancy is too low for programs to hide each other's memory latency.
        prefetch_tokens(x_q, s_q, b, t, i_h, rows, K, BT)
        prefetch_tokens(x_k, s_k, b, t, i_h, rows, K, BT)
    upper, lower = o_r[:, None] < o_r[None, :], o_r[:, None] > o_r[None, :]
    b_rq, b_rk = zero + 1.0, zero + 1.0
    if NORM:
        b_rq = _reciprocal_norms(x_q, s_q, b, t, i_h, rows, K, BT, BK)
        b_rk = _reciprocal_norms(x_k, s_k, b, t, i_h, rows, K, BT, BK)
    # Where raw rows are operands of the grams' adjoints, their norms scale the other operand.
    b_nq, b_nk = zero + 1.0, zero + 1.0
    if not CHANNEL:
        b_nq, b_nk = b_rq, b_rk

    for i_hv in range(i_h * GR, i_h * GR + GR):
        i_tile = i_c * HV + i_hv
        if PREFETCH:
            prefetch_tile(p_S_tiles, i_tile, V * K)
            prefetch_tile(p_dS_tiles, i_tile, V * K)
            if CHANNEL:
                prefetch_tokens(p_g, s_g, b, t, i_hv, rows, K, BT)
        b_beta = load_strength(p_beta, s_beta, b, t, i_hv, rows, beta_most, LOGIT, BT)
        b_raw, b_g, b_dg = zero, zero, zero
        if not CHANNEL:
            b_raw, b_g = load_gate(
                p_g, s_g, p_A_log, p_dt_bias, b, t, i_hv, 0, rows, lower_bound, clamp, GATE, ACTIVATION, K, BT, BK
            )
        b_G = running_sum(b_g, GATE)
        b_in, b_out, total = scalar_rows(b_G, GATE, BT)

        # Gradients of the grams; with a channel gate, their transposes are computed as separate products.
        b_dJ, b_dP = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        b_dJT, b_dPT = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
        b_dbeta = zero
        for i_v in range(NV):
            b_e = load_tile_block(p_e, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
            b_X = load_tile_block(p_X, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
            b_do = load_token_block(x_do, s_do, b, t, i_hv, i_v * BV, rows, T, V, BT, BV, USE_TMA_DO, USE_TMA_DO)
            b_dJ = mm(b_X, tl.trans(b_e), b_dJ, OP, PRECISION)
            b_dP = mm(b_do, tl.trans(b_e), b_dP, OP, PRECISION)
            if CHANNEL:
                b_dJT = mm(b_e, tl.trans(b_X), b_dJT, OP, PRECISION)
                b_dPT = mm(b_e, tl.trans(b_do), b_dPT, OP, PRECISION)
            if OP != tl.bfloat16:
                b_dbeta += tl.sum(b_X.to(tl.float32) * b_e.to(tl.float32), axis=1)
            if x_dv is not None:
                b_dv = b_X.to(tl.float32) * (b_beta * unit)[:, None]
                store_token_block(x_dv, s_dv, b, t, i_hv, i_v * BV, rows, T, b_dv, V, BT, BV, TMA_STORES)
        if p_dbeta is not None:
            if OP == tl.bfloat16:  # products do not round bfloat16 operands
                b_dbeta = tl.sum(tl.where(upper | lower, 0.0, b_dJ), axis=1)
            b_dbeta *= unit
            if LOGIT:
                b_dbeta = strength_bwd(p_beta, s_beta, b, t, i_hv, rows, b_dbeta, beta_most, BT)
            store_token_scalars(p_dbeta, s_dbeta, b, t, i_hv, rows, b_dbeta, BT)
        b_decay = pair_decay(b_G, GATE, BT)
        b_dJ = tl.where(lower, b_dJ, 0.0) * (b_beta[None, :] * b_decay) * (-b_beta * erased_unit)[:, None]
        b_dP = tl.where(upper, 0.0, b_dP) * (b_beta[None, :] * b_decay) * scale
        # Contributions of later rows to keys: right operands, while the left ones are rows transposed in shared memory.
        b_dJr, b_dPr = (b_dJ * b_nk[:, None]).to(OP), (b_dP * b_nq[:, None]).to(OP)
        b_dJ, b_dP = b_dJ * b_nk[None, :], b_dP * b_nk[None, :]
        if SCALAR:
            b_qk, b_kk = _grams(x_q, s_q, x_k, s_k, b, t, i_h, rows, K, BT, BK, OP, PRECISION)
            b_dg = interval_sum(b_dP * b_qk * b_rq[:, None] + b_dJ * b_kk * b_rk[:, None], BT, EXACT)
        if CHANNEL:
            b_dJT = b_dJT * (b_beta[:, None] * b_decay) * (-b_beta * erased_unit * b_nk)[None, :]
            b_dPT = tl.where(lower, 0.0, b_dPT) * (b_beta[:, None] * b_decay) * (scale * b_nq)[None, :]
            store_near_pairs(p_near, i_tile, 0, b_dPT, BT)
            store_near_pairs(p_near, i_tile, 1, b_dJT, BT)
            store_tile(p_pairs, i_tile * 3, 0, 0, tl.where(upper, b_dJT, b_dJ).to(OP), BT, BT, BT, BT)
            store_tile(p_pairs, i_tile * 3 + 1, 0, 0, b_dP, BT, BT, BT, BT)
            store_tile(p_pairs, i_tile * 3 + 2, 0, 0, b_dPT, BT, BT, BT, BT)
            tl.debug_barrier()  # other threads may load what a thread stored
        b_dJ, b_dP = b_dJ.to(OP), b_dP.to(OP)

        b_read, b_write, carried = zero, zero, 0.0
        b_trace = tl.zeros((BV,), tl.float32)
        for i_k in range(NK):
            # Through the states: reads from the entering state, writes to the leaving one.
            b_dq, b_dk, b_dk_write = zeros, zeros, zeros
            b_carried, b_SdS = tl.zeros((BK,), tl.float32), tl.zeros((BV, BV), tl.float32)
            for i_v in range(NV):
                b_S = load_tile_block(p_S, i_tile, i_v * BV, i_k * BK, V, K, BV, BK, USE_TMA_TILES)
                b_dS = load_tile_block(p_dS, i_tile, i_v * BV, i_k * BK, V, K, BV, BK, USE_TMA_TILES)
                b_e = load_tile_block(p_e, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
                b_X = load_tile_block(p_X, i_tile, 0, i_v * BV, BT, V, BT, BV, USE_TMA_TILES)
                b_do = load_token_block(x_do, s_do, b, t, i_hv, i_v * BV, rows, T, V, BT, BV, USE_TMA_DO, USE_TMA_DO)
                b_dq = mm(b_do, b_S, b_dq, OP, PRECISION)
                b_dk = mm(b_X, b_S, b_dk, OP, PRECISION)
                b_dk_write = mm(b_e, b_dS, b_dk_write, OP, PRECISION)
                if SCALAR and OP == tl.bfloat16:  # products do not round bfloat16 operands
                    b_SdS = mm(b_S, tl.trans(b_dS), b_SdS, OP, PRECISION)
                else:
                    b_carried += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)
            b_carried *= unit
            if SCALAR and OP == tl.bfloat16:
                o_v = tl.arange(0, BV)
                b_trace += tl.sum(tl.where(o_v[:, None] == o_v[None, :], b_SdS, 0.0), axis=1)
            b_dq *= (scale * b_in)[:, None]
            b_dk *= (-b_beta * erased_unit * b_in)[:, None]
            b_dk_write *= (b_beta * unit * b_out)[:, None]
            if CHANNEL:
                b_q = load_sub_chunks(x_q, s_q, b, t, i_h, i_k * BK, rows, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_k = load_sub_chunks(x_k, s_k, b, t, i_h, i_k * BK, rows, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_x = load_sub_chunks(p_g, s_g, b, t, i_hv, i_k * BK, rows, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                if NORM:
                    b_q *= b_rq.reshape(BT // NEAR, NEAR, 1)
                    b_k *= b_rk.reshape(BT // NEAR, NEAR, 1)
                b_gate = sub_chunk_gate(
                    b_x, p_A_log, p_dt_bias, i_hv, i_k * BK, rows, lower_bound, clamp, ACTIVATION, K, BT, BK, NEAR
                )
                b_dq, b_dk, b_dgate = channel_bwd(
                    b_q, b_k, b_gate, p_pairs, p_near, i_tile, b_dq, b_dk, b_dk_write, b_carried, opaque_zero,
                    BT, BK, OP, PRECISION,
                )  # fmt: skip
                # Loaded again rather than kept in registers.
                b_x = load_sub_chunks(p_g, s_g, b, t, i_hv, i_k * BK, rows, opaque_zero, K, BT, BK, NEAR).to(tl.float32)
                b_dx, b_dA = log_gate_bwd(
                    b_x, b_dgate, p_A_log, p_dt_bias, i_hv, i_k * BK, lower_bound, clamp,
                    CLAMPED, GATE, ACTIVATION, K, BK,
                )  # fmt: skip
                store_gate_gradient(
                    p_dg, s_dg, p_dA_log, p_ddt_bias, i_tile, b, t, i_hv, i_k * BK, rows, b_dx, b_dA, opaque_zero,
                    GATE, K, BT, BK,
                )  # fmt: skip
            else:
                b_q = load_token_block(x_q, s_q, b, t, i_h, i_k * BK, rows, T, K, BT, BK, USE_TMA, USE_TMA)
                b_k = load_token_block(x_k, s_k, b, t, i_h, i_k * BK, rows, T, K, BT, BK, USE_TMA, USE_TMA)
                if SCALAR:
                    if NORM:
                        b_read += b_rq * tl.sum(b_q * b_dq, axis=1) + b_rk * tl.sum(b_k * b_dk, axis=1)
                    else:
                        b_read += tl.sum(tl.fma(b_q.to(tl.float32), b_dq, b_k * b_dk), axis=1)
                    b_write += b_rk * tl.sum(b_k * b_dk_write, axis=1)
                    carried += tl.sum(b_carried, axis=0)
                b_dq = mm(b_dP, b_k, b_dq, OP, PRECISION)
                b_dk = mm(b_dJ, b_k, b_dk + b_dk_write, OP, PRECISION)
                b_dkT = mm(tl.trans(b_k), b_dJr, None, OP, PRECISION)
                b_dk += tl.trans(mm(tl.trans(b_q), b_dPr, b_dkT, OP, PRECISION))
            if ACCUMULATED:
                if CHANNEL:
                    if i_hv > i_h * GR:
                        b_dq += load_tile_sub_chunks(p_dq_acc, pid, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                        b_dk += load_tile_sub_chunks(p_dk_acc, pid, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                    store_sub_chunks(p_dq_acc, pid, i_k * BK, b_dq, opaque_zero, K, BT, BK, NEAR)
                    store_sub_chunks(p_dk_acc, pid, i_k * BK, b_dk, opaque_zero, K, BT, BK, NEAR)
                else:
                    if i_hv > i_h * GR:
                        b_dq += load_tile(p_dq_acc, pid, 0, i_k * BK, BT, K, BT, BK)
                        b_dk += load_tile(p_dk_acc, pid, 0, i_k * BK, BT, K, BT, BK)
                    store_tile(p_dq_acc, pid, 0, i_k * BK, b_dq, BT, K, BT, BK)
                    store_tile(p_dk_acc, pid, 0, i_k * BK, b_dk, BT, K, BT, BK)
            elif CHANNEL:
                if x_dq is not None:
                    store_token_sub_chunks(x_dq, s_dq, b, t, i_h, i_k * BK, rows, b_dq, opaque_zero, K, BT, BK, NEAR)
                if x_dk is not None:
                    store_token_sub_chunks(x_dk, s_dk, b, t, i_h, i_k * BK, rows, b_dk, opaque_zero, K, BT, BK, NEAR)
            else:
                if x_dq is not None:
                    store_token_block(x_dq, s_dq, b, t, i_h, i_k * BK, rows, T, b_dq, K, BT, BK, TMA_STORES)
                if x_dk is not None:
                    store_token_block(x_dk, s_dk, b, t, i_h, i_k * BK, rows, T, b_dk, K, BT, BK, TMA_STORES)
        if SCALAR:
            if OP == tl.bfloat16:
                # Summed as a tile's row: for sm_100, Triton 3.6 fails to compile a one-dimensional sum of a product.
                carried = tl.sum(b_trace[None, :], axis=1) * unit
            b_dg += state_gate_gradient(b_read, b_write, carried * total, BT)
            b_dx, b_dA = log_gate_bwd(
                b_raw, b_dg, p_A_log, p_dt_bias, i_hv, 0, lower_bound, clamp, CLAMPED, GATE, ACTIVATION, K, BK
            )
            store_gate_gradient(
                p_dg, s_dg, p_dA_log, p_ddt_bias, i_tile, b, t, i_hv, 0, rows, b_dx, b_dA, opaque_zero, GATE, K, BT, BK
            )
        if ACCUMULATED:
            tl.debug_barrier()  # other threads may load what a thread stored

    if ACCUMULATED:
        if x_dq is not None:
            _store_accumulated(x_q, s_q, p_dq_acc, x_dq, s_dq, pid, b, t, i_h, rows, b_rq, NORM, K, BT, BK)
        if x_dk is not None:
            _store_accumulated(x_k, s_k, p_dk_acc, x_dk, s_dk, pid, b, t, i_h, rows, b_rk, NORM, K, BT, BK)


@triton.jit
def _reciprocal_norms(
    p_x, s_x, b, t, h, rows, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, eps: tl.constexpr = 1e-6
):
    """(sum x^2 + eps)^(-1/2) of rows, loaded in slices of BK.   [BT]"""
    b_square = tl.zeros((BT,), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_x = load_tokens(p_x, s_x, b, t, h, i_k * BK, rows, K, BT, BK).to(tl.float32)
        b_square += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_square + eps)


@triton.jit
def _grams(
    p_q,
    s_q,
    p_k,
    s_k,
    b,
    t,
    h,
    rows,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q k^T and k k^T of a chunk's raw rows, loaded in slices of BK.   2 x [BT, BT]"""
    b_qk, b_kk = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BT), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        b_q = load_tokens(p_q, s_q, b, t, h, i_k * BK, rows, K, BT, BK)
        b_k = load_tokens(p_k, s_k, b, t, h, i_k * BK, rows, K, BT, BK)
        b_qk = mm(b_q, tl.trans(b_k), b_qk, OP, PRECISION)
        b_kk = mm(b_k, tl.trans(b_k), b_kk, OP, PRECISION)
    return b_qk, b_kk


@triton.jit
def _store_accumulated(
    p_x,
    s_x,
    p_acc,
    p_dx,
    s_dx,
    i_tile,
    b,
    t,
    h,
    rows,
    b_r,
    NORM: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Store an accumulated gradient to its tokens; with NORM, dx = r (dy - y <y, dy>), y = x r."""
    NK: tl.constexpr = (K + BK - 1) // BK
    b_dot = tl.zeros((BT,), tl.float32)
    if NORM:
        for i_k in range(NK):
            b_y = load_tokens(p_x, s_x, b, t, h, i_k * BK, rows, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dot += tl.sum(b_y * load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK), axis=1)
    for i_k in range(NK):
        b_dx = load_tile(p_acc, i_tile, 0, i_k * BK, BT, K, BT, BK)
        if NORM:
            b_y = load_tokens(p_x, s_x, b, t, h, i_k * BK, rows, K, BT, BK).to(tl.float32) * b_r[:, None]
            b_dx = b_r[:, None] * (b_dx - b_y * b_dot[:, None])
        store_tokens(p_dx, s_dx, b, t, h, i_k * BK, rows, b_dx, K, BT, BK)
