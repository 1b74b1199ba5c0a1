"""The walk back: the gradient of the state, from tokens alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import ChunkGrid
from wyfold.stages.ttt import States, Tokens
from wyfold.stages.ttt.triton.launch import Replayed, arranged
from wyfold.stages.ttt.triton.tiles import by_turns, enter, leave, load_in_turn, parameter, step_sizes, store_share
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    load_token_scalars,
    load_tokens,
    sequence_span,
    store_tile,
    store_token_scalars,
    store_tokens,
    strides,
)
from wyfold.tile.inner.triton import inner_gradient_bwd


def walk_back(
    x: Tokens,
    left: Replayed,
    dleaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    dcol: Tensor | None,
    dentering: States,
) -> None:
    """From the gradient of the states that leave to that of those that enter; `left`, `dcol` get what lies between."""
    HV = x.v.shape[2]
    config, fixed = arranged(x, grid, chunk_size, "back")
    launched(
        wyfold_ttt_bwd_triton,
        grid.sequences * HV,
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.w,
        x.w.stride(),
        x.eta,
        x.eta.stride(),
        x.col,
        strides(x.col),
        left.X,
        left.E,
        left.dO,
        left.dN,
        left.X.stride(),
        left.r,
        left.y,
        left.xy,
        left.step,
        left.r.stride(),
        left.dS,
        left.dc,
        left.stepped,
        dcol,
        strides(dcol),
        dleaving.S,
        strides(dleaving.S),
        dleaving.c,
        strides(dleaving.c),
        dentering.S,
        strides(dentering.S),
        dentering.c,
        strides(dentering.c),
        grid.cu,
        grid.first,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        scale,
        STAGES=config.stages,
        **fixed,
    )


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale"])
def wyfold_ttt_bwd_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_w,
    s_w,
    p_eta,
    s_eta,
    p_col,
    s_col,
    p_X,
    p_E,
    p_dO,
    p_dN,
    s_tile,
    p_r,
    p_y,
    p_xy,
    p_step,
    s_row,
    p_dstates,
    p_dc,
    p_share,
    p_dcol,
    s_dcol,
    p_dST,
    s_dST,
    p_dcT,
    s_dcT,
    p_dS0,
    s_dS0,
    p_dc0,
    s_dc0,
    p_cu,
    p_first,
    N,
    T,
    per_sequence,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns a sequence of one value head, and walks it back; of each mini-batch, with seen = dS1^T k + dc1:

    dN <- dN - e_n seen            deta_n gets -<seen, N>        dY, dZ, dcol: adjoint of the inner gradient
    dS0 = dS1 + s dO^T q + dZ^T k             dc0 = dc1 + sum(dO + dZ)
    """
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    steps = tl.cdiv(length, BT).to(tl.int32)
    b_w = parameter(p_w, s_w, i_hv, D, BD)
    b_dS, b_dc = enter(p_dST, s_dST, p_dcT, s_dcT, i_n, i_hv, D, BD)
    # Of few tokens 16 sums beside each other: no thread then has to give another one a number until the end.
    SUMS: tl.constexpr = 16 if BT == 16 else 1
    b_dw, b_du = tl.zeros((BD, SUMS), tl.float32), tl.zeros((BD, SUMS), tl.float32)
    o_t = tl.arange(0, BT)
    b_r, b_y, b_xy, b_sum, e_last = _left_by_the_walk(
        p_r, p_y, p_xy, s_row, p_dc, p_eta, s_eta, i_c, b, t, i_hv, length, steps - 1, HV, D, BT, BD, SEGMENT
    )
    if p_col is not None:
        ahead = tl.maximum(steps - 1, 0) * BT
        b_col = load_token_scalars(p_col, s_col, b, t + ahead, i_hv, length - ahead, BT)
    for j in tl.range(0, steps, num_stages=STAGES):
        i = steps - 1 - j
        t_i = t + i * BT
        rows = tl.minimum(length - i * BT, BT).to(tl.int32)
        b_k = load_tokens(p_k, s_k, b, t_i, i_h, 0, rows, D, BT, BD)
        b_q = load_tokens(p_q, s_q, b, t_i, i_h, 0, rows, D, BT, BD)
        b_E = tl.trans(load_tokens(p_E, s_tile, b, t_i, i_hv, 0, rows, D, BT, BD)).to(tl.float32)
        b_X = tl.trans(load_tokens(p_X, s_tile, b, t_i, i_hv, 0, rows, D, BT, BD)).to(tl.float32)
        b_dO = tl.trans(load_tokens(p_dO, s_tile, b, t_i, i_hv, 0, rows, D, BT, BD)).to(tl.float32)
        b_dN = tl.trans(load_tokens(p_dN, s_tile, b, t_i, i_hv, 0, rows, D, BT, BD)).to(tl.float32)
        b_next_r, b_next_y, b_next_xy, b_next_sum, next_e_last = _left_by_the_walk(
            p_r, p_y, p_xy, s_row, p_dc, p_eta, s_eta, i_c, b, t, i_hv, length, i - 1, HV, D, BT, BD, SEGMENT
        )
        if p_col is not None:
            b_next_col = load_token_scalars(p_col, s_col, b, t_i - BT, i_hv, tl.where(i > 0, BT, 0), BT)
        i_border = (i_c + i * BT // SEGMENT) * HV + i_hv
        if (j == 0) | ((i + 1) * BT % SEGMENT == 0):
            store_tile(p_dstates, i_border, 0, 0, b_dS, D, D, BD, BD)

        if BT == 16 or OP == tl.bfloat16:
            b_kq = load_in_turn(p_k, s_k, p_q, s_q, b, t_i, i_h, rows, D, BT, BD)
            b_seen, _ = by_turns(mm(b_dS, tl.trans(b_kq), None, OP, PRECISION))
        else:
            b_seen = mm(b_dS, tl.trans(b_k), None, OP, PRECISION)
        b_seen += b_dc[:, None]
        b_dN = tl.where((o_t < rows)[None, :], b_dN - b_seen * e_last, 0.0)
        b_dY, b_dZ, b_step, b_dcol = inner_gradient_bwd(
            b_X,
            b_r,
            b_w[:, None] * b_E,
            b_y,
            b_xy,
            b_w[:, None],
            b_dN,
            b_seen,
            b_col if p_col is not None else None,
            rows,
            D,
        )
        b_dS = mm(b_dO * scale, b_q, b_dS, OP, PRECISION)
        b_dS = mm(b_dZ, b_k, b_dS, OP, PRECISION)
        b_dc += b_sum + tl.sum(b_dZ, axis=1)
        store_tokens(p_X, s_tile, b, t_i, i_hv, 0, rows, tl.trans(b_dZ), D, BT, BD)
        store_tokens(p_dN, s_tile, b, t_i, i_hv, 0, rows, tl.trans(b_w[:, None] * b_dY), D, BT, BD)
        store_token_scalars(p_step, s_row, b, t_i, i_hv, rows, b_step, BT)
        if p_dcol is not None:
            store_token_scalars(p_dcol, s_dcol, b, t_i, i_hv, rows, b_dcol, BT)
            b_col = b_next_col
        b_dw += _added((b_w[:, None] * b_X + b_E) * b_dY, SUMS)
        b_du += _added(b_dY, SUMS)
        b_r, b_y, b_xy, b_sum, e_last = b_next_r, b_next_y, b_next_xy, b_next_sum, next_e_last
    leave(p_dS0, s_dS0, p_dc0, s_dc0, i_n, i_hv, b_dS, b_dc, D, BD)
    store_share(p_share, i_n, i_hv, N, tl.sum(b_dw, axis=1), tl.sum(b_du, axis=1) * b_w, HV, D, BD)


@triton.jit
def _left_by_the_walk(
    p_r,
    p_y,
    p_xy,
    s_row,
    p_dc,
    p_eta,
    s_eta,
    i_c,
    b,
    t,
    i_hv,
    length,
    i,
    HV: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """Numbers of mini-batch i for the walk back, zeros where i < 0: r, mean Y, mean X Y [BT], sum of dO [BD], and the
    closing step. They are loaded a mini-batch ahead."""
    first = tl.maximum(i, 0)
    rows = tl.where(i < 0, 0, length - i * BT)
    t += first * BT
    o_v = tl.arange(0, BD)
    i_sum = ((i_c + first * BT // SEGMENT) * HV + i_hv) * (SEGMENT // BT) + first % (SEGMENT // BT)
    b_sum = tl.load(p_dc + i_sum * D + o_v, mask=(o_v < D) & (rows > 0), other=0.0)
    _, e_last = step_sizes(p_eta, s_eta, b, t, i_hv, rows, BT)
    return (
        load_token_scalars(p_r, s_row, b, t, i_hv, rows, BT),
        load_token_scalars(p_y, s_row, b, t, i_hv, rows, BT),
        load_token_scalars(p_xy, s_row, b, t, i_hv, rows, BT),
        b_sum,
        e_last,
    )


@triton.jit
def _added(b_x, SUMS: tl.constexpr):
    """Columns of a tile added up, or as they are if that is what is asked for.   [BD, BT] -> [BD, SUMS]"""
    if SUMS == 1:
        return tl.sum(b_x, axis=1, keep_dims=True)
    else:
        return b_x
