"""First launch of the backward, parallel over segments: recomputes O, then dO and the part of dN through O."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.arguments import Borders, Inputs, Scratch
from wyfold.kernels.ttt.triton.launch import SEGMENT, BackwardWorkspace, launch_options
from wyfold.kernels.ttt.triton.tiles import (
    gram_by_blocks,
    load_parameter,
    read_by_blocks,
    read_segment,
    segment_steps,
    store_partials,
)
from wyfold.kernels.ttt_records import SegmentBorders, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import Packing, TokenRows, chunk_span, load_tile, load_tokens, store_tokens, with_strides
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
        inputs=with_strides(Inputs, q=x.q, k=x.k, w=x.w, u=x.u, eta=x.eta),
        borders=Borders(N=borders.N, S=borders.S, c=borders.c),
        output=with_strides(OutputGradient, do=do),
        scratch=Scratch(
            dO=scratch.dO, dN=scratch.dN, s_tile=scratch.dO.stride(), dc=scratch.dc, partials=scratch.read_partials
        ),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        chunks=grid.chunks,
        scale=scale,
        eps=eps,
        BK=min(constexprs["BD"], config.blocks.get("BK", constexprs["BD"])),
        ON_Q=x.residual == "q",
        **constexprs,
    )
    return scratch


class OutputGradient(NamedTuple):
    """Kernel argument: gradient of the output, and its strides."""

    do: Any
    s_do: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "chunks", "scale", "eps"])
def wyfold_ttt_replay_triton(
    inputs,
    borders,
    output,
    scratch,
    packing,
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
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, SEGMENT)
    at = TokenRows(b, t, rows)
    if i_n == N:
        store_partials(
            scratch.partials, i_c, i_hv, chunks, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), HV, D, BD
        )
        return
    rows = rows.to(tl.int32)
    b_w, b_u = load_parameter(inputs.w, inputs.s_w, i_hv, D, BD), load_parameter(inputs.u, inputs.s_u, i_hv, D, BD)
    o_v = tl.arange(0, BD)
    b_c = tl.load(borders.c + pid * D + o_v, mask=o_v < D, other=0.0)
    b_N = load_tokens(borders.N, scratch.s_tile, at, i_hv, 0, D, SEGMENT, BD)
    b_k = load_tokens(inputs.k, inputs.s_k, at, i_h, 0, D, SEGMENT, BD)
    b_do = load_tokens(output.do, output.s_do, at, i_hv, 0, D, SEGMENT, BD)
    b_e, b_e_last = segment_steps(inputs.eta, inputs.s_eta, at, i_hv, BT, SEGMENT)
    b_steps, _ = read_steps(b_e, b_e_last, "r", BT)

    b_q = load_tokens(inputs.q, inputs.s_q, at, i_h, 0, D, SEGMENT, BD) if BK == BD else None
    if BK == BD:
        b_S = load_tile(borders.S, pid, 0, 0, D, D, BD, BD)
        b_O = read_segment(b_q, b_k, b_S, b_c, b_N, b_steps, scale, OP, PRECISION)
    else:
        b_gram, b_O = read_by_blocks(
            inputs.q, inputs.s_q, inputs.k, inputs.s_k, borders.S, pid, at, i_h, D, SEGMENT, BD, BK, OP, PRECISION
        )
        b_O = mm((b_gram * scale + 1.0) * -b_steps, b_N, b_O * scale + b_c[None, :], OP, PRECISION)
    b_mean = tl.sum(b_O, axis=1) * (1.0 / D)
    _, b_XO, b_rO = residual_norm(b_O, b_mean, b_w[None, :], b_u[None, :], None, eps, D, 1)
    b_do = b_do.to(tl.float32)
    b_dO = residual_norm_bwd(b_XO, b_rO, b_w[None, :], b_do, ON_Q, D, 1)
    store_tokens(scratch.dO, scratch.s_tile, at, i_hv, 0, b_dO, D)
    store_partials(scratch.partials, i_c, i_hv, chunks, tl.sum(b_do * b_XO, axis=0), tl.sum(b_do, axis=0), HV, D, BD)
    R: tl.constexpr = SEGMENT // BT
    b_sums = tl.sum(tl.reshape(b_dO, (R, BT, BD)), axis=1)
    o_sums = tl.arange(0, R)[:, None] * D + o_v[None, :]
    tl.store(scratch.dc + pid * (R * D) + o_sums, b_sums, mask=tl.broadcast_to((o_v < D)[None, :], (R, BD)))

    b_steps, b_closed = read_steps(b_e, b_e_last, "s", BT)
    if BK == BD:
        b_gram = mm(b_k, tl.trans(b_q), None, OP, PRECISION)
    else:
        b_gram = gram_by_blocks(inputs.k, inputs.s_k, inputs.q, inputs.s_q, at, i_h, D, SEGMENT, BK, OP, PRECISION)
    b_gram = (b_gram * scale + 1.0) * (b_closed - b_steps)
    b_dN = mm(b_gram, b_dO, None, OP, PRECISION)
    store_tokens(scratch.dN, scratch.s_tile, at, i_hv, 0, b_dN, D)
