"""`gradients` in Triton: one program per chunk and key head, its value heads one after another."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import tuned
from wyfold.runtime.options import DeltaOptions
from wyfold.stages.records import TokenBorders, TokenGradients
from wyfold.tile.decay.triton import decayed_bwd, gate_kind, load_gate, log_gate_bwd, store_gate_gradient
from wyfold.tile.dot.triton import exact, mm, operand, precision
from wyfold.tile.index.triton import (
    chunk_span,
    load_strength,
    load_tile,
    load_tokens,
    store_token_scalars,
    store_tokens,
)
from wyfold.tile.norm.triton import l2norm_bwd, reciprocal_norm


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
    key: str,
    out: TokenGradients,
) -> None:
    """Gradients of every token and parameter.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator.
        do: [B, T, HV, V] gradient of the output, any strides.
        borders: From `scan_bwd`.
        grid: The call's chunk grid.
        options: As given to `prepare`.
        key: Of the launch configuration.
        out: Tokens of every gradient, zero past a packed batch's last boundary, and the parameters' sums; None where
            none is wanted.
    """
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    gate = gate_kind(g)
    dA_log = ddt_bias = None
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K if gate == "channel" else 1, dtype=torch.float32)
    config = tuned("gradients.triton", key, q.device)

    def strides(x: Tensor | None) -> tuple[int, ...] | None:
        return None if x is None else x.stride()

    wyfold_gradients_triton[(grid.chunks * H,)](
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
        do,
        do.stride(),
        *borders,
        out.q,
        strides(out.q),
        out.k,
        strides(out.k),
        out.v,
        strides(out.v),
        out.g,
        strides(out.g),
        out.beta,
        strides(out.beta),
        dA_log,
        ddt_bias,
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        options.lower_bound,
        options.clamp or -104.0,
        options.beta_most,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=max(16, triton.next_power_of_2(K)),
        BV=max(16, triton.next_power_of_2(V)),
        PACKED=grid.cu is not None,
        GATE=gate,
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
        EXACT=exact(q.dtype),
        num_warps=config.warps,
        num_stages=config.stages,
        enable_fp_fusion=True,
    )
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum(0).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "lower_bound", "clamp", "beta_most"])
def wyfold_gradients_triton(
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
    p_do,
    s_do,
    p_S,
    p_dS,
    p_e,
    p_X,
    p_dq,
    s_dq,
    p_dk,
    s_dk,
    p_dv,
    s_dv,
    p_dg,
    s_dg,
    p_dbeta,
    s_dbeta,
    p_dA_log,
    p_ddt_bias,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    scale,
    lower_bound,
    clamp,
    beta_most,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    CLAMPED: tl.constexpr,
    NORM: tl.constexpr,
    LOGIT: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program owns the rows of a chunk of one key head; dq and dk stay in registers across its value heads."""
    GR: tl.constexpr = HV // H
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    b_dq, b_dk = tl.zeros((BT, BK), tl.float32), tl.zeros((BT, BK), tl.float32)
    if i_n == N:
        zero = tl.zeros((BT,), tl.float32)
        for i_hv in range(i_h * GR, i_h * GR + GR):
            if p_dv is not None:
                store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, tl.zeros((BT, BV), tl.float32), V, BT, BV)
            if p_dbeta is not None:
                store_token_scalars(p_dbeta, s_dbeta, b, t, i_hv, rows, zero, BT)
            store_gate_gradient(
                p_dg, s_dg, p_dA_log, p_ddt_bias, i_c * HV + i_hv, b, t, i_hv, rows, zero, zero, GATE, K, BT, BK
            )
        if p_dq is not None:
            store_tokens(p_dq, s_dq, b, t, i_h, 0, rows, b_dq, K, BT, BK)
        if p_dk is not None:
            store_tokens(p_dk, s_dk, b, t, i_h, 0, rows, b_dk, K, BT, BK)
        return

    o_r = tl.arange(0, BT)
    earlier, later, same = o_r[:, None] < o_r[None, :], o_r[:, None] > o_r[None, :], o_r[:, None] == o_r[None, :]
    b_q = load_tokens(p_q, s_q, b, t, i_h, 0, rows, K, BT, BK)
    b_k = load_tokens(p_k, s_k, b, t, i_h, 0, rows, K, BT, BK)
    b_rq, b_rk = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
    if NORM:
        b_rq, b_rk = reciprocal_norm(b_q), reciprocal_norm(b_k)

    for i_hv in range(i_h * GR, i_h * GR + GR):
        i_tile = i_c * HV + i_hv
        b_e = load_tile(p_e, i_tile, 0, 0, BT, V, BT, BV)
        b_X = load_tile(p_X, i_tile, 0, 0, BT, V, BT, BV)
        b_do = load_tokens(p_do, s_do, b, t, i_hv, 0, rows, V, BT, BV)
        b_beta = load_strength(p_beta, s_beta, b, t, i_hv, rows, beta_most, LOGIT, BT)

        # Through the written values: dJ and dP, and their transposes as products of their own.
        b_dJ = tl.where(later, mm(b_X, tl.trans(b_e), None, OP, PRECISION), 0.0) * -b_beta[:, None] * b_beta[None, :]
        b_dJT = tl.where(earlier, mm(b_e, tl.trans(b_X), None, OP, PRECISION), 0.0) * -b_beta[:, None] * b_beta[None, :]
        b_dP = tl.where(earlier, 0.0, mm(b_do, tl.trans(b_e), None, OP, PRECISION)) * (scale * b_beta)[None, :]
        b_dPT = tl.where(earlier, mm(b_e, tl.trans(b_do), None, OP, PRECISION), 0.0) * (scale * b_beta)[:, None]
        b_dPT += tl.where(same, b_dP, 0.0)

        # Through the states: reads from the one that entered, writes to the one that leaves.
        b_S = load_tile(p_S, i_tile, 0, 0, V, K, BV, BK)
        b_dS = load_tile(p_dS, i_tile, 0, 0, V, K, BV, BK)
        b_dq_read = mm(b_do, b_S, None, OP, PRECISION) * scale
        b_dk_read = mm(b_X, b_S, None, OP, PRECISION) * -b_beta[:, None]
        b_dk_write = mm(b_e, b_dS, None, OP, PRECISION) * b_beta[:, None]
        b_carried = tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)

        b_raw, b_g = load_gate(
            p_g, s_g, p_A_log, p_dt_bias, b, t, i_hv, rows, lower_bound, clamp, GATE, ACTIVATION, K, BT, BK
        )
        b_dq_head, b_dk_head, b_dg = decayed_bwd(
            b_q,
            b_k,
            b_rq,
            b_rk,
            b_g,
            b_dJ,
            b_dJT,
            b_dP,
            b_dPT,
            b_dq_read,
            b_dk_read,
            b_dk_write,
            b_carried,
            GATE,
            BT,
            BK,
            OP,
            PRECISION,
            EXACT,
        )
        b_dq += b_dq_head
        b_dk += b_dk_head
        b_dx, b_dA = log_gate_bwd(
            b_raw, b_dg, p_A_log, p_dt_bias, i_hv, lower_bound, clamp, CLAMPED, GATE, ACTIVATION, K, BK
        )
        store_gate_gradient(p_dg, s_dg, p_dA_log, p_ddt_bias, i_tile, b, t, i_hv, rows, b_dx, b_dA, GATE, K, BT, BK)
        if p_dv is not None:
            store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, b_X.to(tl.float32) * b_beta[:, None], V, BT, BV)
        if p_dbeta is not None:
            b_dbeta = tl.sum(b_X.to(tl.float32) * b_e.to(tl.float32), axis=1)
            if LOGIT:
                b_dbeta *= b_beta * (1.0 - b_beta / beta_most)
            store_token_scalars(p_dbeta, s_dbeta, b, t, i_hv, rows, b_dbeta, BT)

    if NORM:
        b_dq = l2norm_bwd(b_q.to(tl.float32) * b_rq[:, None], b_rq, b_dq)
        b_dk = l2norm_bwd(b_k.to(tl.float32) * b_rk[:, None], b_rk, b_dk)
    if p_dq is not None:
        store_tokens(p_dq, s_dq, b, t, i_h, 0, rows, b_dq, K, BT, BK)
    if p_dk is not None:
        store_tokens(p_dk, s_dk, b, t, i_h, 0, rows, b_dk, K, BT, BK)
