"""Forward scan over the mini-batches of a sequence: inner gradients N of every token, and the states."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.ttt.triton.arguments import Borders, Inputs, States
from wyfold.kernels.ttt.triton.launch import launch_options
from wyfold.kernels.ttt.triton.tiles import (
    add_update,
    broadcast_to_slabs,
    closing_step,
    first_column,
    load_inner_state,
    load_parameter,
    store_first_column,
    store_inner_state,
    store_row_stats,
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
    store_tokens,
    with_strides,
)
from wyfold.tile.inner.triton import inner_gradient


def forward_scan(
    x: TTTInputs,
    entering: StateViews,
    leaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    eps: float,
    borders: SegmentBorders,
) -> None:
    """Run every sequence from its initial state; writes the final states and the borders."""
    HV = x.v.shape[2]
    config, constexprs = launch_options(x, grid, chunk_size, "forward")
    launch_kernel(
        wyfold_ttt_triton,
        grid.sequences * HV,
        inputs=with_strides(Inputs, k=x.k, v=x.v, w=x.w, u=x.u, eta=x.eta, col=x.col),
        states=with_strides(States, S0=entering.S, c0=entering.c, ST=leaving.S, cT=leaving.c),
        borders=with_strides(Borders, N=borders.N, S=borders.S, c=borders.c, X=borders.X, rows=borders.rows),
        packing=Packing(cu=grid.cu, first=grid.first),
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        eps=eps,
        SLABS=min(config.warps, constexprs["BD"] // 16),
        **constexprs,
    )


@triton.jit(do_not_specialize=["T", "per_sequence", "eps"])
def wyfold_ttt_triton(
    inputs,
    states,
    borders,
    packing,
    T,
    per_sequence,
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
    SLABS: tl.constexpr,
):
    """One program scans a sequence of one value head. Per mini-batch:

    Z = k S + c        N = gradient of the inner loss        S <- S - e_n k^T N        c <- c - e_n sum(N)
    """
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    opaque_zero = tl.minimum(T, 0)
    steps = tl.cdiv(length, BT).to(tl.int32)
    b_w, b_u = load_parameter(inputs.w, inputs.s_w, i_hv, D, BD), load_parameter(inputs.u, inputs.s_u, i_hv, D, BD)
    b_S, b_c = load_inner_state(states.S0, states.s_S0, states.c0, states.s_c0, i_n, i_hv, D, BD)
    b_S = tl.reshape(b_S, (SLABS, BD // SLABS, BD))
    b_c = tl.reshape(tl.broadcast_to(b_c[:, None], (BD, BT)), (SLABS, BD // SLABS, BT))
    o_t = tl.arange(0, BT)
    # Loads of a mini-batch are issued while the one before it is computed.
    b_k = load_tokens(inputs.k, inputs.s_k, TokenRows(b, t, length), i_h, 0, D, BT, BD)
    b_v = load_tokens(inputs.v, inputs.s_v, TokenRows(b, t, length), i_hv, 0, D, BT, BD)
    e_last = closing_step(inputs.eta, inputs.s_eta, TokenRows(b, t, length), i_hv, BT)
    b_col = (
        None if inputs.col is None else load_token_scalars(inputs.col, inputs.s_col, TokenRows(b, t, length), i_hv, BT)
    )
    for i in tl.range(0, steps, num_stages=1):
        t_i = t + i * BT
        rows = tl.minimum(length - i * BT, BT).to(tl.int32)
        next_rows = tl.maximum(length - (i + 1) * BT, 0).to(tl.int32)
        b_next_k = load_tokens(inputs.k, inputs.s_k, TokenRows(b, t_i + BT, next_rows), i_h, 0, D, BT, BD)
        b_next_v = load_tokens(inputs.v, inputs.s_v, TokenRows(b, t_i + BT, next_rows), i_hv, 0, D, BT, BD)
        next_e_last = closing_step(inputs.eta, inputs.s_eta, TokenRows(b, t_i + BT, next_rows), i_hv, BT)
        b_factor = tl.where(o_t < rows, 1.0, 0.0)
        if inputs.col is not None:
            b_factor *= b_col
            b_col = load_token_scalars(inputs.col, inputs.s_col, TokenRows(b, t_i + BT, next_rows), i_hv, BT)
        if i * BT % SEGMENT == 0:
            i_border = (i_c + i * BT // SEGMENT) * HV + i_hv
            store_tile(borders.S, i_border, 0, 0, tl.reshape(b_S, (BD, BD)), D, D, BD, BD)
            store_first_column(borders.c, i_border, tl.reshape(b_c, (BD, BT)), D, BD)

        b_wt = b_w[None, :] * (b_u[None, :] - b_v.to(tl.float32) + b_k.to(tl.float32))
        b_Z = mm(b_S, broadcast_to_slabs(tl.trans(b_k), SLABS), b_c, OP, PRECISION)
        b_Z = to_row_layout(b_Z, borders.c, opaque_zero, BT, BD)
        b_N, b_X, b_r, b_y, b_xy = inner_gradient(b_Z, b_wt, (b_w * b_w)[None, :], b_factor, eps, D)
        store_tokens(borders.N, borders.s_N, TokenRows(b, t_i, rows), i_hv, 0, b_N, D)
        if borders.X is not None:
            store_tokens(borders.X, borders.s_N, TokenRows(b, t_i, rows), i_hv, 0, b_X, D)
            store_row_stats(borders.rows, borders.s_rows, b, t_i, i_hv, rows, b_r, b_xy, b_y, BT)
        b_S, b_c = add_update(b_S, b_c, b_N * -e_last, None, b_k, SLABS, OP, PRECISION)
        b_k, b_v, e_last = b_next_k, b_next_v, next_e_last
    b_S, b_c = tl.reshape(b_S, (BD, BD)), first_column(tl.reshape(b_c, (BD, BT)))
    store_inner_state(states.ST, states.s_ST, states.cT, states.s_cT, i_n, i_hv, b_S, b_c, D, BD)
