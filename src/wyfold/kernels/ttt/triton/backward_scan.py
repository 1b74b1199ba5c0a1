"""Backward scan over the mini-batches of a sequence: the gradient of the state, computed from tokens alone."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.ttt.triton.arguments import Borders, Inputs, ScanGradients, Scratch
from wyfold.kernels.ttt.triton.launch import BackwardWorkspace, launch_options
from wyfold.kernels.ttt.triton.tiles import (
    add_update,
    broadcast_to_slabs,
    closing_step,
    first_column,
    load_inner_state,
    load_parameter,
    store_inner_state,
    store_partials,
    to_row_layout,
)
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    load_token_scalars,
    load_tokens,
    sequence_span,
    store_tile,
    store_token_scalars,
    store_tokens,
    with_strides,
)
from wyfold.tile.inner.triton import InnerStep, inner_gradient_bwd


def backward_scan(
    x: TTTInputs,
    borders: SegmentBorders,
    scratch: BackwardWorkspace,
    dleaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    dcol: Tensor | None,
    dentering: StateViews,
) -> None:
    """Propagate the final states' gradients to the initial states; writes `scratch` and `dcol` on the way."""
    HV = x.v.shape[2]
    config, constexprs = launch_options(x, grid, chunk_size, "backward")
    launch_kernel(
        wyfold_ttt_bwd_triton,
        grid.sequences * HV,
        inputs=with_strides(Inputs, q=x.q, k=x.k, v=x.v, w=x.w, u=x.u, eta=x.eta, col=x.col),
        borders=with_strides(Borders, X=borders.X, rows=borders.rows),
        scratch=Scratch(
            dO=scratch.dO,
            dN=scratch.dN,
            dZ=scratch.dZ,
            s_tile=scratch.dZ.stride(),
            step=scratch.step,
            s_row=scratch.step.stride(),
            dS=scratch.dS,
            dc=scratch.dc,
            partials=scratch.step_partials,
        ),
        gradients=with_strides(
            ScanGradients, dcol=dcol, dST=dleaving.S, dcT=dleaving.c, dS0=dentering.S, dc0=dentering.c
        ),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=scale,
        SLABS=min(config.warps, constexprs["BD"] // 16),
        **constexprs,
    )


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale"])
def wyfold_ttt_bwd_triton(
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
    SEGMENT: tl.constexpr,
    PACKED: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    SLABS: tl.constexpr,
):
    """One program scans a sequence of one value head backwards. Per mini-batch, with dwrite = dS1^T k + dc1:

    dN <- dN - e_n dwrite          deta_n gets -<dwrite, N>      dY, dZ, dcol: adjoint of the inner gradient
    dS0 = dS1 + s dO^T q + dZ^T k             dc0 = dc1 + sum(dO + dZ)
    """
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    opaque_zero = tl.minimum(T, 0)
    steps = tl.cdiv(length, BT).to(tl.int32)
    b_w, b_u = load_parameter(inputs.w, inputs.s_w, i_hv, D, BD), load_parameter(inputs.u, inputs.s_u, i_hv, D, BD)
    b_ww = (b_w * b_w)[None, :]
    ww = tl.sum(b_w * b_w) * (1.0 / D)
    b_dS, b_dc = load_inner_state(gradients.dST, gradients.s_dST, gradients.dcT, gradients.s_dcT, i_n, i_hv, D, BD)
    b_dS = tl.reshape(b_dS, (SLABS, BD // SLABS, BD))
    b_dc = tl.reshape(tl.broadcast_to(b_dc[:, None], (BD, BT)), (SLABS, BD // SLABS, BT))
    # One sum per row of a mini-batch: threads exchange partial sums only once, at the end.
    b_dw, b_du = tl.zeros((BT, BD), tl.float32), tl.zeros((BT, BD), tl.float32)
    o_t = tl.arange(0, BT)
    # Loads of a mini-batch are issued while the one after it in the sequence is computed.
    t_i, rows = t + tl.maximum(steps - 1, 0) * BT, tl.minimum(length - (steps - 1) * BT, BT).to(tl.int32)
    b_k = load_tokens(inputs.k, inputs.s_k, TokenRows(b, t_i, rows), i_h, 0, D, BT, BD)
    b_v = load_tokens(inputs.v, inputs.s_v, TokenRows(b, t_i, rows), i_hv, 0, D, BT, BD)
    b_q = load_tokens(inputs.q, inputs.s_q, TokenRows(b, t_i, rows), i_h, 0, D, BT, BD)
    b_dO = load_tokens(scratch.dO, scratch.s_tile, TokenRows(b, t_i, rows), i_hv, 0, D, BT, BD)
    b_X = load_tokens(borders.X, scratch.s_tile, TokenRows(b, t_i, rows), i_hv, 0, D, BT, BD)
    b_dN = load_tokens(scratch.dN, scratch.s_tile, TokenRows(b, t_i, rows), i_hv, 0, D, BT, BD)
    b_r, b_y, b_xy, b_sum, e_last = _load_forward_stats(
        borders.rows,
        borders.s_rows,
        scratch.dc,
        inputs.eta,
        inputs.s_eta,
        i_c,
        b,
        t,
        i_hv,
        length,
        steps - 1,
        HV,
        D,
        BT,
        BD,
        SEGMENT,
    )
    b_col = (
        None if inputs.col is None else load_token_scalars(inputs.col, inputs.s_col, TokenRows(b, t_i, rows), i_hv, BT)
    )
    for j in tl.range(0, steps, num_stages=1):
        i = steps - 1 - j
        t_i = t + i * BT
        rows = tl.minimum(length - i * BT, BT).to(tl.int32)
        next_rows = tl.where(i > 0, BT, 0)
        t_next = t_i - next_rows
        b_next_k = load_tokens(inputs.k, inputs.s_k, TokenRows(b, t_next, next_rows), i_h, 0, D, BT, BD)
        b_next_v = load_tokens(inputs.v, inputs.s_v, TokenRows(b, t_next, next_rows), i_hv, 0, D, BT, BD)
        b_next_q = load_tokens(inputs.q, inputs.s_q, TokenRows(b, t_next, next_rows), i_h, 0, D, BT, BD)
        b_next_dO = load_tokens(scratch.dO, scratch.s_tile, TokenRows(b, t_next, next_rows), i_hv, 0, D, BT, BD)
        b_next_X = load_tokens(borders.X, scratch.s_tile, TokenRows(b, t_next, next_rows), i_hv, 0, D, BT, BD)
        b_next_dN = load_tokens(scratch.dN, scratch.s_tile, TokenRows(b, t_next, next_rows), i_hv, 0, D, BT, BD)
        b_next_r, b_next_y, b_next_xy, b_next_sum, next_e_last = _load_forward_stats(
            borders.rows,
            borders.s_rows,
            scratch.dc,
            inputs.eta,
            inputs.s_eta,
            i_c,
            b,
            t,
            i_hv,
            length,
            i - 1,
            HV,
            D,
            BT,
            BD,
            SEGMENT,
        )
        if (j == 0) | ((i + 1) * BT % SEGMENT == 0):
            i_border = (i_c + i * BT // SEGMENT) * HV + i_hv
            store_tile(scratch.dS, i_border, 0, 0, tl.reshape(b_dS, (BD, BD)), D, D, BD, BD)

        b_dwrite = to_row_layout(
            mm(b_dS, broadcast_to_slabs(tl.trans(b_k), SLABS), b_dc, OP, PRECISION), scratch.dc, opaque_zero, BT, BD
        )
        b_X = b_X.to(tl.float32)
        b_E = b_w[None, :] * b_X + (b_u[None, :] - b_v.to(tl.float32) + b_k.to(tl.float32))
        b_dN = tl.where((o_t < rows)[:, None], b_dN.to(tl.float32) - b_dwrite * e_last, 0.0)
        step = InnerStep(b_X, b_w[None, :] * b_E, b_r, b_y, b_xy)
        b_dY, b_dZ, b_step, b_dcol = inner_gradient_bwd(step, b_ww, ww, b_dN, b_dwrite, b_col, D)
        b_dS = mm(
            tl.reshape(tl.trans(b_dO.to(tl.float32) * scale), (SLABS, BD // SLABS, BT)),
            broadcast_to_slabs(b_q, SLABS),
            b_dS,
            OP,
            PRECISION,
        )
        b_dS, b_dc = add_update(b_dS, b_dc, b_dZ, b_sum, b_k, SLABS, OP, PRECISION)
        store_tokens(scratch.dZ, scratch.s_tile, TokenRows(b, t_i, rows), i_hv, 0, b_dZ, D)
        store_tokens(scratch.dN, scratch.s_tile, TokenRows(b, t_i, rows), i_hv, 0, b_w[None, :] * -b_dY, D)
        store_token_scalars(scratch.step, scratch.s_row, TokenRows(b, t_i, rows), i_hv, b_step, BT)
        if gradients.dcol is not None:
            store_token_scalars(gradients.dcol, gradients.s_dcol, TokenRows(b, t_i, rows), i_hv, b_dcol, BT)
            b_col = load_token_scalars(inputs.col, inputs.s_col, TokenRows(b, t_next, next_rows), i_hv, BT)
        b_dw += (b_w[None, :] * b_X + b_E) * b_dY
        b_du += b_dY
        b_k, b_q, b_v, b_X, b_dO, b_dN = b_next_k, b_next_q, b_next_v, b_next_X, b_next_dO, b_next_dN
        b_r, b_y, b_xy, b_sum, e_last = b_next_r, b_next_y, b_next_xy, b_next_sum, next_e_last
    b_dS, b_dc = tl.reshape(b_dS, (BD, BD)), first_column(tl.reshape(b_dc, (BD, BT)))
    store_inner_state(gradients.dS0, gradients.s_dS0, gradients.dc0, gradients.s_dc0, i_n, i_hv, b_dS, b_dc, D, BD)
    store_partials(scratch.partials, i_n, i_hv, N, tl.sum(b_dw, axis=0), tl.sum(b_du, axis=0) * b_w, HV, D, BD)


@triton.jit
def _load_forward_stats(
    p_rows,
    s_rows,
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
    """Statistics that earlier launches stored for mini-batch i, zeros where i < 0; loaded one mini-batch ahead.

    Returns:
        r, mean Y and mean X Y [BT], the sum of dO [BD], and the closing step.
    """
    first = tl.maximum(i, 0)
    rows = tl.where(i < 0, 0, length - i * BT)
    t += first * BT
    o_v = tl.arange(0, BD)
    i_sum = ((i_c + first * BT // SEGMENT) * HV + i_hv) * (SEGMENT // BT) + first % (SEGMENT // BT)
    b_sum = tl.load(p_dc + i_sum * D + o_v, mask=(o_v < D) & (rows > 0), other=0.0)
    at = TokenRows(b, t, rows)
    e_last = closing_step(p_eta, s_eta, at, i_hv, BT)
    return (
        load_token_scalars(p_rows, s_rows, at, i_hv, BT),
        load_token_scalars(p_rows + 2, s_rows, at, i_hv, BT),
        load_token_scalars(p_rows + 1, s_rows, at, i_hv, BT),
        b_sum,
        e_last,
    )
