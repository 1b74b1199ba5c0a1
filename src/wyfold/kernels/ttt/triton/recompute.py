"""First launch of the backward, parallel over segments: recomputes O, then dO and the part of dN through O."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt import SegmentBorders, TTTInputs
from wyfold.kernels.ttt.triton.launch import SEGMENT, BackwardWorkspace, launch_options
from wyfold.kernels.ttt.triton.tiles import (
    gram_by_blocks,
    load_parameter,
    read_by_blocks,
    read_segment,
    segment_steps,
    store_partials,
)
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import chunk_span, load_tile, load_tokens, store_tokens
from wyfold.tile.inner.triton import read_steps, residual_norm, residual_norm_bwd


def recompute(
    x: TTTInputs,
    borders: SegmentBorders,
    do: Tensor,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    dv: Tensor,
) -> BackwardWorkspace:
    """Allocate the backward workspace and fill dO, dN, dc and `read_partials`.

    The memory of dv serves as dN where its dtype and strides fit.
    """
    HV, D = x.v.shape[2:]
    config, constexprs = launch_options(x, grid, chunk_size, "recompute")
    tiles, wide = grid.chunks * HV, torch.float32
    dO, dZ = torch.empty_like(borders.N), torch.empty_like(borders.N)
    dN = dv if (dv.dtype, dv.stride()) == (dO.dtype, dO.stride()) else torch.empty_like(dO)
    step = x.v.new_empty(x.v.shape[:3], dtype=wide)
    dc = x.v.new_empty(tiles, SEGMENT // chunk_size, D, dtype=wide)
    read_partials, step_partials = (
        x.v.new_empty(2, count, HV, D, dtype=wide) for count in (grid.chunks, grid.sequences)
    )
    scratch = BackwardWorkspace(dO, dN, dZ, step, torch.empty_like(borders.S), dc, read_partials, step_partials)
    launch_kernel(
        wyfold_ttt_replay_triton,
        tiles,
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.w,
        x.w.stride(),
        x.u,
        x.u.stride(),
        x.eta,
        x.eta.stride(),
        do,
        do.stride(),
        borders.N,
        borders.S,
        borders.c,
        scratch.dO,
        scratch.dN,
        scratch.dO.stride(),
        scratch.dc,
        scratch.read_partials,
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        grid.chunks,
        scale,
        eps,
        BK=min(constexprs["BD"], config.blocks.get("BK", constexprs["BD"])),
        ON_Q=x.residual == "q",
        **constexprs,
    )
    return scratch


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "chunks", "scale", "eps"])
def wyfold_ttt_replay_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_w,
    s_w,
    p_u,
    s_u,
    p_eta,
    s_eta,
    p_do,
    s_do,
    p_N,
    p_S,
    p_c,
    p_dO,
    p_dN,
    s_tile,
    p_dc,
    p_partials,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    chunks,
    scale,
    eps,
    H: tl.constexpr,
    HV: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    BK: tl.constexpr,
    ON_Q: tl.constexpr,
):
    """One program computes a segment of one value head. Products over keys take BK channels at a time.

    O = s q S + c - (steps * (s q k^T + 1)) N
    dO = adjoint of the residual norm of O                 dN = -(own steps * (s q k^T + 1))^T dO
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, SEGMENT)
    if i_n == N:
        store_partials(
            p_partials, i_c, i_hv, chunks, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), HV, D, BD
        )
        return
    rows = rows.to(tl.int32)
    b_w, b_u = load_parameter(p_w, s_w, i_hv, D, BD), load_parameter(p_u, s_u, i_hv, D, BD)
    o_v = tl.arange(0, BD)
    b_c = tl.load(p_c + pid * D + o_v, mask=o_v < D, other=0.0)
    b_N = load_tokens(p_N, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD)
    b_k = load_tokens(p_k, s_k, b, t, i_h, 0, rows, D, SEGMENT, BD)
    b_do = load_tokens(p_do, s_do, b, t, i_hv, 0, rows, D, SEGMENT, BD)
    b_e, b_e_last = segment_steps(p_eta, s_eta, b, t, i_hv, rows, BT, SEGMENT)
    b_steps, _ = read_steps(b_e, b_e_last, "r", BT)

    b_q = load_tokens(p_q, s_q, b, t, i_h, 0, rows, D, SEGMENT, BD) if BK == BD else None
    if BK == BD:
        b_S = load_tile(p_S, pid, 0, 0, D, D, BD, BD)
        b_O = read_segment(b_q, b_k, b_S, b_c, b_N, b_steps, scale, OP, PRECISION)
    else:
        b_gram, b_O = read_by_blocks(p_q, s_q, p_k, s_k, p_S, pid, b, t, i_h, rows, D, SEGMENT, BD, BK, OP, PRECISION)
        b_O = mm((b_gram * scale + 1.0) * -b_steps, b_N, b_O * scale + b_c[None, :], OP, PRECISION)
    b_mean = tl.sum(b_O, axis=1) * (1.0 / D)
    _, b_XO, b_rO = residual_norm(b_O, b_mean, b_w[None, :], b_u[None, :], None, eps, D, 1)
    b_do = b_do.to(tl.float32)
    b_dO = residual_norm_bwd(b_XO, b_rO, b_w[None, :], b_do, ON_Q, D, 1)
    store_tokens(p_dO, s_tile, b, t, i_hv, 0, rows, b_dO, D, SEGMENT, BD)
    store_partials(p_partials, i_c, i_hv, chunks, tl.sum(b_do * b_XO, axis=0), tl.sum(b_do, axis=0), HV, D, BD)
    R: tl.constexpr = SEGMENT // BT
    b_sums = tl.sum(tl.reshape(b_dO, (R, BT, BD)), axis=1)
    o_sums = tl.arange(0, R)[:, None] * D + o_v[None, :]
    tl.store(p_dc + pid * (R * D) + o_sums, b_sums, mask=tl.broadcast_to((o_v < D)[None, :], (R, BD)))

    b_steps, b_closed = read_steps(b_e, b_e_last, "s", BT)
    if BK == BD:
        b_gram = mm(b_k, tl.trans(b_q), None, OP, PRECISION)
    else:
        b_gram = gram_by_blocks(p_k, s_k, p_q, s_q, b, t, i_h, rows, D, SEGMENT, BK, OP, PRECISION)
    b_gram = (b_gram * scale + 1.0) * (b_closed - b_steps)
    b_dN = mm(b_gram, b_dO, None, OP, PRECISION)
    store_tokens(p_dN, s_tile, b, t, i_hv, 0, rows, b_dN, D, SEGMENT, BD)
