"""The walk over the mini-batches of a sequence: its output, and its states."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import ChunkGrid
from wyfold.stages.ttt import Borders, States, Tokens
from wyfold.stages.ttt.triton.launch import arranged
from wyfold.stages.ttt.triton.tiles import by_turns, enter, leave, load_in_turn, parameter, step_sizes, store_row
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import load_token_scalars, load_tokens, sequence_span, store_tile, store_tokens, strides
from wyfold.tile.inner.triton import attention, inner_gradient, residual_norm, sums_of_two


def ttt(
    x: Tokens,
    entering: States,
    leaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    o: Tensor | None,
    borders: Borders | None,
) -> None:
    """Run every sequence from its entering state.

    Args:
        x: The call's tokens.
        entering: Any strides and float dtypes.
        leaving: Written.
        grid: The call's grid of segments.
        chunk_size: Tokens of a mini-batch.
        scale: Multiplies q.
        eps: Of both norms.
        o: [B, T, HV, D] written, zero past the last boundary; or None.
        borders: From `empty`, written for `ttt_bwd`; or None.
    """
    HV = x.v.shape[2]
    config, fixed = arranged(x, grid, chunk_size, "walk")
    # Tokens past the last boundary are a sequence of their own, whose output is cleared.
    sequences = grid.sequences + (grid.cu is not None and o is not None)
    launched(
        wyfold_ttt_triton,
        sequences * HV,
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.v,
        x.v.stride(),
        x.w,
        x.w.stride(),
        x.u,
        x.u.stride(),
        x.eta,
        x.eta.stride(),
        x.col,
        strides(x.col),
        entering.S,
        strides(entering.S),
        entering.c,
        strides(entering.c),
        leaving.S,
        strides(leaving.S),
        leaving.c,
        strides(leaving.c),
        o,
        strides(o),
        *((None,) * 4 if borders is None else (borders.N, borders.N.stride(), borders.S, borders.c)),
        grid.cu,
        grid.first,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        scale,
        eps,
        ON_Q=x.residual == "q",
        STAGES=config.stages,
        **fixed,
    )


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "eps"])
def wyfold_ttt_triton(
    p_q,
    s_q,
    p_k,
    s_k,
    p_v,
    s_v,
    p_w,
    s_w,
    p_u,
    s_u,
    p_eta,
    s_eta,
    p_col,
    s_col,
    p_S0,
    s_S0,
    p_c0,
    s_c0,
    p_ST,
    s_ST,
    p_cT,
    s_cT,
    p_o,
    s_o,
    p_N,
    s_N,
    p_S,
    p_c,
    p_cu,
    p_first,
    N,
    T,
    per_sequence,
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
    ON_Q: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns a sequence of one value head."""
    pid = tl.program_id(0).to(tl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    steps = tl.cdiv(length, BT).to(tl.int32)
    if PACKED and p_o is not None:
        if i_n == N:
            for i in tl.range(0, steps):
                b_none = tl.zeros((BT, BD), tl.float32)
                store_tokens(p_o, s_o, b, t + i * BT, i_hv, 0, length - i * BT, b_none, D, BT, BD)
            return

    b_w, b_u = parameter(p_w, s_w, i_hv, D, BD), parameter(p_u, s_u, i_hv, D, BD)
    b_S, b_c = enter(p_S0, s_S0, p_c0, s_c0, i_n, i_hv, D, BD)
    b_e, e_last = step_sizes(p_eta, s_eta, b, t, i_hv, length, BT)
    if p_col is not None:
        b_col = load_token_scalars(p_col, s_col, b, t, i_hv, length, BT)
    for i in tl.range(0, steps, num_stages=STAGES):
        t_i = t + i * BT
        rows = tl.minimum(length - i * BT, BT).to(tl.int32)
        b_k = load_tokens(p_k, s_k, b, t_i, i_h, 0, rows, D, BT, BD)
        b_v = load_tokens(p_v, s_v, b, t_i, i_hv, 0, rows, D, BT, BD)
        b_next_e, next_e_last = step_sizes(p_eta, s_eta, b, t_i + BT, i_hv, length - (i + 1) * BT, BT)
        if p_col is not None:
            b_next_col = load_token_scalars(p_col, s_col, b, t_i + BT, i_hv, length - (i + 1) * BT, BT)
        if p_N is not None:
            if i * BT % SEGMENT == 0:
                i_border = (i_c + i * BT // SEGMENT) * HV + i_hv
                store_tile(p_S, i_border, 0, 0, b_S, D, D, BD, BD)
                store_row(p_c, i_border, b_c, D, BD)

        b_t = b_u[:, None] - tl.trans(b_v).to(tl.float32) + tl.trans(b_k).to(tl.float32)
        if BT == 16 or OP == tl.bfloat16:
            b_kq = load_in_turn(p_k, s_k, p_q, s_q, b, t_i, i_h, rows, D, BT, BD)
            b_Z, b_O = by_turns(mm(b_S, tl.trans(b_kq), None, OP, PRECISION))
        else:
            b_q = load_tokens(p_q, s_q, b, t_i, i_h, 0, rows, D, BT, BD)
            b_Z = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
            b_O = mm(b_S, tl.trans(b_q), None, OP, PRECISION)
        b_Z += b_c[:, None]
        b_O = b_O * scale + b_c[:, None]
        b_mean, b_mean_O = sums_of_two(b_Z, b_O, 0)
        b_mean, b_mean_O = b_mean * (1.0 / D), b_mean_O * (1.0 / D)
        b_N, _, _, _, _ = inner_gradient(b_Z, b_mean, b_t, b_w[:, None], rows, eps, D, 0)
        if p_col is not None:
            b_N *= b_col[None, :]
            b_col = b_next_col
        b_S = mm(b_N * -e_last, b_k, b_S, OP, PRECISION)
        b_c -= tl.sum(b_N, axis=1) * e_last
        if p_o is not None:
            # N's mean is zero but for rounding, so O's is what it was before N.
            if BT == 16 or OP == tl.bfloat16:
                b_q = load_tokens(p_q, s_q, b, t_i, i_h, 0, rows, D, BT, BD)
            b_read = attention(mm(b_k.to(tl.float32) * scale, tl.trans(b_q), None, OP, PRECISION))
            if OP == tl.bfloat16:  # of other operands, 128 wide, Triton 3.6 fails to compile it
                b_read = tl.reshape(tl.join(b_read, b_read), (BT, 2 * BT))
                b_read_N, _ = by_turns(mm(b_N, b_read, None, OP, PRECISION))
            else:
                b_read_N = mm(b_N, b_read, None, OP, PRECISION)
            b_O -= b_read_N * b_e[None, :]
            b_raw = tl.trans(b_q) if ON_Q else None
            b_out, _, _ = residual_norm(b_O, b_mean_O, b_w[:, None], b_u[:, None], b_raw, eps, D, 0)
            store_tokens(p_o, s_o, b, t_i, i_hv, 0, rows, tl.trans(b_out), D, BT, BD)
        if p_N is not None:
            store_tokens(p_N, s_N, b, t_i, i_hv, 0, rows, tl.trans(b_N), D, BT, BD)
        b_e, e_last = b_next_e, next_e_last
    leave(p_ST, s_ST, p_cT, s_cT, i_n, i_hv, b_S, b_c, D, BD)
