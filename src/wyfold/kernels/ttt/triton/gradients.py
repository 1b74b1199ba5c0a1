"""Gradients of q, k, v and eta, parallel over segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt import SegmentBorders, TTTGradients, TTTInputs
from wyfold.kernels.ttt.triton.launch import BackwardWorkspace, launch_options
from wyfold.kernels.ttt.triton.tiles import gram_by_blocks, segment_steps
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    chunk_span,
    load_tile,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_tokens,
    strides,
)
from wyfold.tile.inner.triton import read_steps


def token_gradients(
    x: TTTInputs,
    borders: SegmentBorders,
    scratch: BackwardWorkspace,
    do: Tensor | None,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    found: TTTGradients,
) -> None:
    """Write the gradients of q, k, v and eta; zero past a packed batch's last boundary.

    `do` is the output's gradient where the residual is on q, else None.
    """
    H, HV = x.q.shape[2], x.v.shape[2]
    config, constexprs = launch_options(x, grid, chunk_size, "gradients")
    wide = [x.v.new_empty(x.v.shape, dtype=torch.float32) for _ in range(2)] if H < HV else None
    dq, dk = wide or (found.q, found.k)
    dv = None if scratch.dN is found.v else found.v
    launch_kernel(
        wyfold_ttt_gradients_triton,
        grid.chunks * HV,
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.eta,
        x.eta.stride(),
        scratch.dZ,
        borders.N,
        scratch.dO,
        scratch.dN,
        scratch.dZ.stride(),
        scratch.step,
        scratch.step.stride(),
        borders.S,
        scratch.dS,
        do,
        strides(do),
        dq,
        dq.stride(),
        dk,
        dk.stride(),
        dv,
        strides(dv),
        found.eta,
        found.eta.stride(),
        found.col,
        strides(found.col),
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        scale,
        BV=min(constexprs["BD"], config.blocks["BV"]),
        **constexprs,
    )
    if wide:
        for dx, heads in zip((found.q, found.k), wide, strict=True):
            dx.copy_(_grouped(heads, H))


def _grouped(heads: Tensor, H: int) -> Tensor:
    """Sum the heads of each group, always in the same order.   [B, T, HV, D] -> [B, T, H, D]"""
    first, *others = heads.unflatten(2, (H, -1)).unbind(3)
    for x in others:
        first.add_(x)
    return first


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale"])
def wyfold_ttt_gradients_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_eta,
    s_eta,
    p_dZ,
    p_N,
    p_dO,
    p_dN,
    s_tile,
    p_step,
    s_row,
    p_states,
    p_dstates,
    p_do,
    s_do,
    p_dq,
    s_dq,
    p_dk,
    s_dk,
    p_dv,
    s_dv,
    p_deta,
    s_deta,
    p_dcol,
    s_dcol,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program computes a segment of one value head.

    A = steps * dO N^T       B = steps of earlier mini-batches * dZ N^T        steps, e': see `read_steps`
    dq = s (dO S^T - A k), plus do if the residual is on q
    dk = dZ S^T - e' (N dS^T) - (B + B^T) k - s A^T q - dv        dv = -w dY, in place where dN shares its memory
    deta_r = -sum over s in r's mini-batch of (s q_r k_s + 1) <dO_r, N_s>; closing steps also get -sum of `step`
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, SEGMENT)
    b_dq, b_dk = tl.zeros((SEGMENT, BD), tl.float32), tl.zeros((SEGMENT, BD), tl.float32)
    o_t = tl.arange(0, SEGMENT)
    if i_n == N:
        if p_dv is None:
            store_tokens(p_dN, s_tile, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        else:
            store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        store_token_scalars(p_deta, s_deta, b, t, i_hv, rows, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        if p_dcol is not None:
            store_token_scalars(p_dcol, s_dcol, b, t, i_hv, rows, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        store_tokens(p_dq, s_dq, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        store_tokens(p_dk, s_dk, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        return

    b_e, b_e_last = segment_steps(p_eta, s_eta, b, t, i_hv, rows, BT, SEGMENT)
    b_q = load_tokens(p_q, s_q, b, t, i_h, 0, rows, D, SEGMENT, BD)
    b_k = load_tokens(p_k, s_k, b, t, i_h, 0, rows, D, SEGMENT, BD)
    # Tiles that fit are loaded once and reused by every product; larger ones are loaded again, BV columns at a time.
    WHOLE: tl.constexpr = BV == BD and OP == tl.bfloat16
    b_dO = load_tokens(p_dO, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD) if WHOLE else None
    b_N = load_tokens(p_N, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD) if WHOLE else None
    b_S = load_tile(p_states, pid, 0, 0, D, D, BD, BD) if WHOLE else None
    b_dZ = load_tokens(p_dZ, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD) if WHOLE else None
    if WHOLE:
        b_gram = mm(b_dO, tl.trans(b_N), None, OP, PRECISION)
    else:
        b_gram = gram_by_blocks(p_dO, s_tile, p_N, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_steps, b_before = read_steps(b_e, b_e_last, "r", BT)
    b_read = mm(b_q, tl.trans(b_k), None, OP, PRECISION) * scale + 1.0
    b_step = load_token_scalars(p_step, s_row, b, t, i_hv, rows, SEGMENT)
    m_own = o_t[:, None] // BT == o_t[None, :] // BT
    m_closing = (o_t % BT == BT - 1) | (o_t == rows - 1)
    b_de = tl.where(m_own & (o_t[None, :] <= o_t[:, None]), b_read * b_gram, 0.0)
    b_de += tl.where(m_own & m_closing[:, None], b_step[None, :], 0.0)
    store_token_scalars(p_deta, s_deta, b, t, i_hv, rows, -tl.sum(b_de, axis=1), SEGMENT)
    b_dq = mm(-b_steps * b_gram, b_k, b_dq, OP, PRECISION)
    if WHOLE:
        b_dq = mm(b_dO, b_S, b_dq, OP, PRECISION)
    else:
        for i_v in tl.range(0, D, BV):
            block_S = load_tile(p_states, pid, i_v, 0, D, D, BV, BD)
            block_dO = load_tokens(p_dO, s_tile, b, t, i_hv, i_v, rows, D, SEGMENT, BV)
            b_dq = mm(block_dO, block_S, b_dq, OP, PRECISION)
    b_dq *= scale
    if p_do is not None:
        b_dq += load_tokens(p_do, s_do, b, t, i_hv, 0, rows, D, SEGMENT, BD).to(tl.float32)
    # Stored here so that dk can reuse its registers.
    store_tokens(p_dq, s_dq, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)

    b_steps, b_after = read_steps(b_e, b_e_last, "s", BT)
    if WHOLE:
        b_gram = b_before * mm(b_dZ, tl.trans(b_N), None, OP, PRECISION)
        b_gram += b_after * mm(b_N, tl.trans(b_dZ), None, OP, PRECISION)
    else:
        b_gram = b_before * gram_by_blocks(p_dZ, s_tile, p_N, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
        b_gram += b_after * gram_by_blocks(p_N, s_tile, p_dZ, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_dk = mm(-b_gram, b_k, b_dk, OP, PRECISION)
    if WHOLE:
        b_gram = b_steps * mm(b_N, tl.trans(b_dO), None, OP, PRECISION)
    else:
        b_gram = b_steps * gram_by_blocks(p_N, s_tile, p_dO, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_dk = mm(b_gram * -scale, b_q, b_dk, OP, PRECISION)
    if WHOLE:
        b_dk = mm(b_dZ, b_S, b_dk, OP, PRECISION)
        b_dS = load_tile(p_dstates, pid, 0, 0, D, D, BD, BD)
        b_dk = mm(tl.cast(b_N, tl.float32) * -b_e_last[:, None], b_dS, b_dk, OP, PRECISION)
    else:
        for i_v in tl.range(0, D, BV):
            block_S = load_tile(p_states, pid, i_v, 0, D, D, BV, BD)
            block_dZ = load_tokens(p_dZ, s_tile, b, t, i_hv, i_v, rows, D, SEGMENT, BV)
            b_dk = mm(block_dZ, block_S, b_dk, OP, PRECISION)
            block_dS = load_tile(p_dstates, pid, i_v, 0, D, D, BV, BD)
            block_N = load_tokens(p_N, s_tile, b, t, i_hv, i_v, rows, D, SEGMENT, BV)
            b_dk = mm(block_N.to(tl.float32) * -b_e_last[:, None], block_dS, b_dk, OP, PRECISION)
    b_dv = load_tokens(p_dN, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD).to(tl.float32)
    if p_dv is not None:
        store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, b_dv, D, SEGMENT, BD)
    store_tokens(p_dk, s_dk, b, t, i_hv, 0, rows, b_dk - b_dv, D, SEGMENT, BD)
