"""Gradients of q, k, v and eta, parallel over segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.arguments import Borders, Inputs, Scratch
from wyfold.kernels.ttt.triton.launch import BackwardWorkspace, launch_options
from wyfold.kernels.ttt.triton.tiles import gram_by_blocks, segment_steps
from wyfold.kernels.ttt_records import SegmentBorders, TTTGradients, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_tile,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_tokens,
    with_strides,
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
        inputs=with_strides(Inputs, q=x.q, k=x.k, eta=x.eta),
        borders=Borders(N=borders.N, S=borders.S),
        scratch=Scratch(
            dO=scratch.dO,
            dN=scratch.dN,
            dZ=scratch.dZ,
            s_tile=scratch.dZ.stride(),
            step=scratch.step,
            s_row=scratch.step.stride(),
            dS=scratch.dS,
        ),
        gradients=with_strides(Gradients, do=do, dq=dq, dk=dk, dv=dv, deta=found.eta, dcol=found.col),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=scale,
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


class Gradients(NamedTuple):
    """Kernel argument: gradients of tokens, each with its strides.

    Attributes:
        do, s_do: Gradient of the output, where the residual is on q, else None.
        dq, s_dq, dk, s_dk: Gradients of q and k per value head, written.
        dv, s_dv: Gradient of v, written; None where it is in the memory of dN.
        deta, s_deta: Gradient of eta, written.
        dcol, s_dcol: Gradient of col, which is written only past the last boundary.
    """

    do: Any
    s_do: Any
    dq: Any
    s_dq: Any
    dk: Any
    s_dk: Any
    dv: Any
    s_dv: Any
    deta: Any
    s_deta: Any
    dcol: Any
    s_dcol: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale"])
def wyfold_ttt_gradients_triton(
    inputs,
    borders,
    scratch,
    gradients,
    packing,
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
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, SEGMENT)
    at = TokenRows(b, t, rows)
    b_dq, b_dk = tl.zeros((SEGMENT, BD), tl.float32), tl.zeros((SEGMENT, BD), tl.float32)
    o_t = tl.arange(0, SEGMENT)
    if i_n == N:
        if gradients.dv is None:
            store_tokens(scratch.dN, scratch.s_tile, at, i_hv, 0, b_dq, D)
        else:
            store_tokens(gradients.dv, gradients.s_dv, at, i_hv, 0, b_dq, D)
        store_token_scalars(gradients.deta, gradients.s_deta, at, i_hv, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        if gradients.dcol is not None:
            store_token_scalars(gradients.dcol, gradients.s_dcol, at, i_hv, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        store_tokens(gradients.dq, gradients.s_dq, at, i_hv, 0, b_dq, D)
        store_tokens(gradients.dk, gradients.s_dk, at, i_hv, 0, b_dq, D)
        return

    b_e, b_e_last = segment_steps(inputs.eta, inputs.s_eta, at, i_hv, BT, SEGMENT)
    b_q = load_tokens(inputs.q, inputs.s_q, at, i_h, 0, D, SEGMENT, BD)
    b_k = load_tokens(inputs.k, inputs.s_k, at, i_h, 0, D, SEGMENT, BD)
    # Tiles that fit are loaded once and reused by every product; larger ones are loaded again, BV columns at a time.
    WHOLE: tl.constexpr = BV == BD and OP == tl.bfloat16
    b_dO = load_tokens(scratch.dO, scratch.s_tile, at, i_hv, 0, D, SEGMENT, BD) if WHOLE else None
    b_N = load_tokens(borders.N, scratch.s_tile, at, i_hv, 0, D, SEGMENT, BD) if WHOLE else None
    b_S = load_tile(borders.S, pid, 0, 0, D, D, BD, BD) if WHOLE else None
    b_dZ = load_tokens(scratch.dZ, scratch.s_tile, at, i_hv, 0, D, SEGMENT, BD) if WHOLE else None
    if WHOLE:
        b_gram = mm(b_dO, tl.trans(b_N), None, OP, PRECISION)
    else:
        b_gram = gram_by_blocks(
            scratch.dO, scratch.s_tile, borders.N, scratch.s_tile, at, i_hv, D, SEGMENT, BV, OP, PRECISION
        )
    b_steps, b_before = read_steps(b_e, b_e_last, "r", BT)
    b_read = mm(b_q, tl.trans(b_k), None, OP, PRECISION) * scale + 1.0
    b_step = load_token_scalars(scratch.step, scratch.s_row, at, i_hv, SEGMENT)
    m_own = o_t[:, None] // BT == o_t[None, :] // BT
    m_closing = (o_t % BT == BT - 1) | (o_t == rows - 1)
    b_de = tl.where(m_own & (o_t[None, :] <= o_t[:, None]), b_read * b_gram, 0.0)
    b_de += tl.where(m_own & m_closing[:, None], b_step[None, :], 0.0)
    store_token_scalars(gradients.deta, gradients.s_deta, at, i_hv, -tl.sum(b_de, axis=1), SEGMENT)
    b_dq = mm(-b_steps * b_gram, b_k, b_dq, OP, PRECISION)
    if WHOLE:
        b_dq = mm(b_dO, b_S, b_dq, OP, PRECISION)
    else:
        for i_v in tl.range(0, D, BV):
            block_S = load_tile(borders.S, pid, i_v, 0, D, D, BV, BD)
            block_dO = load_tokens(scratch.dO, scratch.s_tile, at, i_hv, i_v, D, SEGMENT, BV)
            b_dq = mm(block_dO, block_S, b_dq, OP, PRECISION)
    b_dq *= scale
    if gradients.do is not None:
        b_dq += load_tokens(gradients.do, gradients.s_do, at, i_hv, 0, D, SEGMENT, BD).to(tl.float32)
    # Stored here so that dk can reuse its registers.
    store_tokens(gradients.dq, gradients.s_dq, at, i_hv, 0, b_dq, D)

    b_steps, b_after = read_steps(b_e, b_e_last, "s", BT)
    if WHOLE:
        b_gram = b_before * mm(b_dZ, tl.trans(b_N), None, OP, PRECISION)
        b_gram += b_after * mm(b_N, tl.trans(b_dZ), None, OP, PRECISION)
    else:
        b_gram = b_before * gram_by_blocks(
            scratch.dZ, scratch.s_tile, borders.N, scratch.s_tile, at, i_hv, D, SEGMENT, BV, OP, PRECISION
        )
        b_gram += b_after * gram_by_blocks(
            borders.N, scratch.s_tile, scratch.dZ, scratch.s_tile, at, i_hv, D, SEGMENT, BV, OP, PRECISION
        )
    b_dk = mm(-b_gram, b_k, b_dk, OP, PRECISION)
    if WHOLE:
        b_gram = b_steps * mm(b_N, tl.trans(b_dO), None, OP, PRECISION)
    else:
        b_gram = b_steps * gram_by_blocks(
            borders.N, scratch.s_tile, scratch.dO, scratch.s_tile, at, i_hv, D, SEGMENT, BV, OP, PRECISION
        )
    b_dk = mm(b_gram * -scale, b_q, b_dk, OP, PRECISION)
    if WHOLE:
        b_dk = mm(b_dZ, b_S, b_dk, OP, PRECISION)
        b_dS = load_tile(scratch.dS, pid, 0, 0, D, D, BD, BD)
        b_dk = mm(tl.cast(b_N, tl.float32) * -b_e_last[:, None], b_dS, b_dk, OP, PRECISION)
    else:
        for i_v in tl.range(0, D, BV):
            block_S = load_tile(borders.S, pid, i_v, 0, D, D, BV, BD)
            block_dZ = load_tokens(scratch.dZ, scratch.s_tile, at, i_hv, i_v, D, SEGMENT, BV)
            b_dk = mm(block_dZ, block_S, b_dk, OP, PRECISION)
            block_dS = load_tile(scratch.dS, pid, i_v, 0, D, D, BV, BD)
            block_N = load_tokens(borders.N, scratch.s_tile, at, i_hv, i_v, D, SEGMENT, BV)
            b_dk = mm(block_N.to(tl.float32) * -b_e_last[:, None], block_dS, b_dk, OP, PRECISION)
    b_dv = load_tokens(scratch.dN, scratch.s_tile, at, i_hv, 0, D, SEGMENT, BD).to(tl.float32)
    if gradients.dv is not None:
        store_tokens(gradients.dv, gradients.s_dv, at, i_hv, 0, b_dv, D)
    store_tokens(gradients.dk, gradients.s_dk, at, i_hv, 0, b_dk - b_dv, D)
