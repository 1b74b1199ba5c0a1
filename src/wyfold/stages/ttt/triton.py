"""`ttt` in Triton: walks over the mini-batches of a sequence, and what is parallel beside them.

    walk         forward, serial: one program per sequence and value head, its state transposed, [V, K], in registers
    replay       backward, parallel over segments of 64 tokens: X and r of the inner norm, dO, and dN's share of reading
    walk back    serial: the gradient of the state in registers, from tokens alone; leaves dZ and dY
    gradients    parallel over segments: dq, dk, dv, deta

A walk goes through its products alone: Z^T = S^T k^T + c in front of the inner norm, N^T behind it, and every product
takes the running value as its left operand. What the walk leaves for a backward, N of every token and the state at the
borders of segments, makes the rest parallel, since inside a segment

    S entering r's mini-batch = S of the border - sum over s before that mini-batch of e_s' k_s^T N_s

with e' the step that closed s's mini-batch; so a row that meets S is a masked product more. No launch keeps a state per
mini-batch. The backward walks forward again unless the forward left those.

A mini-batch is a chain of short steps, and where the sums over value rows lie decides its length: in the layout of a
product they cross the program's warps. So there products are twice as wide and their columns taken by turns, which
takes them out of that layout, to where a token's value rows are one warp's own: 13 barriers a step in place of 26.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import ChunkGrid
from wyfold.runtime.launch import Config, dtype_word, tile_width, tuned
from wyfold.stages.ttt import Borders, States, TokenGradients, Tokens
from wyfold.tile.dot.triton import mm, operand, precision, workspace
from wyfold.tile.index.triton import (
    chunk_span,
    load_tile,
    load_token_scalars,
    load_tokens,
    sequence_span,
    store_tile,
    store_token_scalars,
    store_tokens,
    strides,
)
from wyfold.tile.inner.triton import (
    attention,
    inner_gradient,
    inner_gradient_bwd,
    read_steps,
    residual_norm,
    residual_norm_bwd,
    sums_of_two,
)
from wyfold.tile.state.triton import load_state, store_state

SEGMENT = 64
"""Tokens between two borders: a whole number of mini-batches, and a chunk of the grid that launches are given."""


LAUNCHES = ("walk", "replay", "back", "gradients")


class _Replayed(NamedTuple):
    """What a backward's launches leave for each other.

    Attributes:
        X: [B, T, HV, D] normalised prediction; then its place is dZ's.
        E: [B, T, HV, D] its error, w X + u - (v - k).
        dO: [B, T, HV, D].
        dN: [B, T, HV, D] through what is read in the mini-batch; then its place is w dY's.
        r, y, xy, step: [B, T, HV] float32. Reciprocal deviation of Z, mean Y, mean X Y; <dS1^T k + dc1, N>.
        dS: [segments * HV, D, D] V-first, gradient of the state leaving a segment.
        dc: [segments * HV, SEGMENT / C, D] float32. Sum of dO over each mini-batch, before dO is rounded.
        read, stepped: [w and u, segments or N, HV, D] float32, shares of dw and du.
    """

    X: Tensor
    E: Tensor
    dO: Tensor
    dN: Tensor
    r: Tensor
    y: Tensor
    xy: Tensor
    step: Tensor
    dS: Tensor
    dc: Tensor
    read: Tensor
    stepped: Tensor


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
    config, fixed = _launch(x, grid, chunk_size, "walk")
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


def empty(q: Tensor, v: Tensor, segments: int) -> Borders:
    """Borders, unwritten."""
    HV, D = v.shape[2:]
    dtype = workspace(q.dtype)
    return Borders(
        v.new_empty(v.shape, dtype=dtype),
        v.new_empty(segments * HV, D, D, dtype=dtype),
        v.new_empty(segments * HV, D, dtype=torch.float32),
    )


def ttt_bwd(
    x: Tokens,
    borders: Borders,
    do: Tensor,
    dleaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    found: TokenGradients,
    dentering: States,
) -> None:
    """Gradients of tokens, parameters and entering states.

    Args:
        x, grid, chunk_size, scale, eps: As given to `ttt`.
        borders: As `ttt` left them.
        do: [B, T, HV, D].
        dleaving: Gradients of what `ttt` left.
        found: Written, zero past the last boundary.
        dentering: Written.
    """
    left = _replay(x, borders, do, grid, chunk_size, scale, eps)
    _walk_back(x, left, dleaving, grid, chunk_size, scale, found.col, dentering)
    for index, dx in enumerate((found.w, found.u)):
        torch.sum(left.read[index], 0, out=dx)
        dx.add_(left.stepped[index].sum(0))
    _gradients(x, borders, left, do if x.residual == "q" else None, grid, chunk_size, scale, found)


def launch_keys(dtype: torch.dtype, D: int, chunk_size: int) -> list[str]:
    """What the configurations of all launches depend on: the walk, of the backward again, back, and the gradients."""
    return [f"{dtype_word(dtype)} K{D} V{D} C{chunk_size} {launch}" for launch in LAUNCHES]


def _launch(x: Tokens, grid: ChunkGrid, chunk_size: int, launch: str) -> tuple[Config, dict[str, Any]]:
    """A launch's configuration, and the constexprs and options that all four have."""
    HV, D = x.v.shape[2:]
    key = launch_keys(x.q.dtype, D, chunk_size)[LAUNCHES.index(launch)]
    config = tuned("ttt.triton", key, x.q.device)
    return config, {
        "H": x.q.shape[2],
        "HV": HV,
        "D": D,
        "BT": chunk_size,
        "BD": max(config.blocks["BD"], tile_width(D)),
        "SEGMENT": SEGMENT,
        "PACKED": grid.cu is not None,
        "OP": operand(x.q.dtype),
        "PRECISION": precision(x.q.dtype),
        **config.options(),
    }


def _replay(
    x: Tokens, borders: Borders, do: Tensor, grid: ChunkGrid, chunk_size: int, scale: float, eps: float
) -> _Replayed:
    HV, D = x.v.shape[2:]
    config, fixed = _launch(x, grid, chunk_size, "replay")
    tiles, wide = grid.chunks * HV, torch.float32
    X, E, dO, dN = (torch.empty_like(borders.N) for _ in range(4))
    r, y, xy, step = x.v.new_empty(4, *x.v.shape[:3], dtype=wide).unbind()
    dc = x.v.new_empty(tiles, SEGMENT // chunk_size, D, dtype=wide)
    read, stepped = (x.v.new_empty(2, count, HV, D, dtype=wide) for count in (grid.chunks, grid.sequences))
    left = _Replayed(X, E, dO, dN, r, y, xy, step, torch.empty_like(borders.S), dc, read, stepped)
    launched(
        wyfold_ttt_replay_triton,
        tiles,
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
        do,
        do.stride(),
        *borders,
        left.X,
        left.E,
        left.dO,
        left.dN,
        left.X.stride(),
        left.r,
        left.y,
        left.xy,
        left.r.stride(),
        left.dc,
        left.read,
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        grid.chunks,
        scale,
        eps,
        BK=min(fixed["BD"], config.blocks.get("BK", fixed["BD"])),
        ON_Q=x.residual == "q",
        **fixed,
    )
    return left


def _walk_back(
    x: Tokens,
    left: _Replayed,
    dleaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    dcol: Tensor | None,
    dentering: States,
) -> None:
    HV = x.v.shape[2]
    config, fixed = _launch(x, grid, chunk_size, "back")
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


def _gradients(
    x: Tokens,
    borders: Borders,
    left: _Replayed,
    do: Tensor | None,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    found: TokenGradients,
) -> None:
    H, HV = x.q.shape[2], x.v.shape[2]
    config, fixed = _launch(x, grid, chunk_size, "gradients")
    wide = [x.v.new_empty(x.v.shape, dtype=torch.float32) for _ in range(2)] if H < HV else None
    dq, dk = wide or (found.q, found.k)
    launched(
        wyfold_ttt_gradients_triton,
        grid.chunks * HV,
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.eta,
        x.eta.stride(),
        left.X,
        borders.N,
        left.dO,
        left.dN,
        left.X.stride(),
        left.step,
        left.step.stride(),
        borders.S,
        left.dS,
        do,
        strides(do),
        dq,
        dq.stride(),
        dk,
        dk.stride(),
        found.v,
        found.v.stride(),
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
        BV=min(fixed["BD"], config.blocks["BV"]),
        **fixed,
    )
    if wide:
        for dx, heads in zip((found.q, found.k), wide, strict=True):
            dx.copy_(_grouped(heads, H))


def _grouped(heads: Tensor, H: int) -> Tensor:
    """Sums of the heads of each group, in their order whatever the shape.   [B, T, HV, D] -> [B, T, H, D]"""
    first, *others = heads.unflatten(2, (H, -1)).unbind(3)
    for x in others:
        first.add_(x)
    return first


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

    b_w, b_u = _parameter(p_w, s_w, i_hv, D, BD), _parameter(p_u, s_u, i_hv, D, BD)
    b_S, b_c = _enter(p_S0, s_S0, p_c0, s_c0, i_n, i_hv, D, BD)
    b_e, e_last = _step_sizes(p_eta, s_eta, b, t, i_hv, length, BT)
    if p_col is not None:
        b_col = load_token_scalars(p_col, s_col, b, t, i_hv, length, BT)
    for i in tl.range(0, steps, num_stages=STAGES):
        t_i = t + i * BT
        rows = tl.minimum(length - i * BT, BT).to(tl.int32)
        b_k = load_tokens(p_k, s_k, b, t_i, i_h, 0, rows, D, BT, BD)
        b_v = load_tokens(p_v, s_v, b, t_i, i_hv, 0, rows, D, BT, BD)
        b_next_e, next_e_last = _step_sizes(p_eta, s_eta, b, t_i + BT, i_hv, length - (i + 1) * BT, BT)
        if p_col is not None:
            b_next_col = load_token_scalars(p_col, s_col, b, t_i + BT, i_hv, length - (i + 1) * BT, BT)
        if p_N is not None:
            if i * BT % SEGMENT == 0:
                i_border = (i_c + i * BT // SEGMENT) * HV + i_hv
                store_tile(p_S, i_border, 0, 0, b_S, D, D, BD, BD)
                _store_row(p_c, i_border, b_c, D, BD)

        b_t = b_u[:, None] - tl.trans(b_v).to(tl.float32) + tl.trans(b_k).to(tl.float32)
        if BT == 16 or OP == tl.bfloat16:
            b_kq = _load_in_turn(p_k, s_k, p_q, s_q, b, t_i, i_h, rows, D, BT, BD)
            b_Z, b_O = _by_turns(mm(b_S, tl.trans(b_kq), None, OP, PRECISION))
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
                b_read_N, _ = _by_turns(mm(b_N, b_read, None, OP, PRECISION))
            else:
                b_read_N = mm(b_N, b_read, None, OP, PRECISION)
            b_O -= b_read_N * b_e[None, :]
            b_raw = tl.trans(b_q) if ON_Q else None
            b_out, _, _ = residual_norm(b_O, b_mean_O, b_w[:, None], b_u[:, None], b_raw, eps, D, 0)
            store_tokens(p_o, s_o, b, t_i, i_hv, 0, rows, tl.trans(b_out), D, BT, BD)
        if p_N is not None:
            store_tokens(p_N, s_N, b, t_i, i_hv, 0, rows, tl.trans(b_N), D, BT, BD)
        b_e, e_last = b_next_e, next_e_last
    _leave(p_ST, s_ST, p_cT, s_cT, i_n, i_hv, b_S, b_c, D, BD)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "chunks", "scale", "eps"])
def wyfold_ttt_replay_triton(
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
    p_do,
    s_do,
    p_N,
    p_S,
    p_c,
    p_X,
    p_E,
    p_dO,
    p_dN,
    s_tile,
    p_r,
    p_y,
    p_xy,
    s_row,
    p_dc,
    p_share,
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
    """One program owns the tokens of a segment of one value head. Products over keys go BK channels at a time.

    Z = k S + c - (closed steps * (k k^T + 1)) N           O = s q S + c - (steps * (s q k^T + 1)) N
    dO = adjoint of the residual norm of O                 dN = -(own steps * (s q k^T + 1))^T dO
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, SEGMENT)
    if i_n == N:
        _store_share(p_share, i_c, i_hv, chunks, tl.zeros((BD,), tl.float32), tl.zeros((BD,), tl.float32), HV, D, BD)
        return
    rows = rows.to(tl.int32)
    b_w, b_u = _parameter(p_w, s_w, i_hv, D, BD), _parameter(p_u, s_u, i_hv, D, BD)
    o_v = tl.arange(0, BD)
    b_c = tl.load(p_c + pid * D + o_v, mask=o_v < D, other=0.0)
    b_N = load_tokens(p_N, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD)
    b_k = load_tokens(p_k, s_k, b, t, i_h, 0, rows, D, SEGMENT, BD)
    b_v = load_tokens(p_v, s_v, b, t, i_hv, 0, rows, D, SEGMENT, BD)
    b_e, b_e_last = _segment_steps(p_eta, s_eta, b, t, i_hv, rows, BT, SEGMENT)
    b_steps, b_closed = read_steps(b_e, b_e_last, "r", BT)

    if BK == BD:
        b_q = load_tokens(p_q, s_q, b, t, i_h, 0, rows, D, SEGMENT, BD)
        b_S = load_tile(p_S, pid, 0, 0, D, D, BD, BD)
        b_pairs, b_Z = mm(b_k, tl.trans(b_k), None, OP, PRECISION), mm(b_k, tl.trans(b_S), None, OP, PRECISION)
    else:
        b_pairs = _pairs(p_k, s_k, p_k, s_k, b, t, i_h, rows, D, SEGMENT, BK, OP, PRECISION)
        b_Z = _rows_of_state(p_k, s_k, p_S, pid, b, t, i_h, rows, D, SEGMENT, BD, BK, OP, PRECISION)
    b_pairs = (b_pairs + 1.0) * -b_closed
    b_Z += b_c[None, :]
    b_Z = mm(b_pairs, b_N, b_Z, OP, PRECISION)
    b_t = b_u[None, :] - b_v.to(tl.float32) + b_k.to(tl.float32)
    b_mean = tl.sum(b_Z, axis=1) * (1.0 / D)
    _, b_X, b_r, b_y, b_xy = inner_gradient(b_Z, b_mean, b_t, b_w[None, :], rows, eps, D, 1)
    store_tokens(p_X, s_tile, b, t, i_hv, 0, rows, b_X, D, SEGMENT, BD)
    store_tokens(p_E, s_tile, b, t, i_hv, 0, rows, b_w[None, :] * b_X + b_t, D, SEGMENT, BD)
    store_token_scalars(p_r, s_row, b, t, i_hv, rows, b_r, SEGMENT)
    store_token_scalars(p_y, s_row, b, t, i_hv, rows, b_y, SEGMENT)
    store_token_scalars(p_xy, s_row, b, t, i_hv, rows, b_xy, SEGMENT)

    if BK == BD:
        b_pairs, b_O = mm(b_q, tl.trans(b_k), None, OP, PRECISION), mm(b_q, tl.trans(b_S), None, OP, PRECISION)
    else:
        b_pairs = _pairs(p_q, s_q, p_k, s_k, b, t, i_h, rows, D, SEGMENT, BK, OP, PRECISION)
        b_O = _rows_of_state(p_q, s_q, p_S, pid, b, t, i_h, rows, D, SEGMENT, BD, BK, OP, PRECISION)
    b_pairs = (b_pairs * scale + 1.0) * -b_steps
    b_O = b_O * scale + b_c[None, :]
    b_O = mm(b_pairs, b_N, b_O, OP, PRECISION)
    b_mean = tl.sum(b_O, axis=1) * (1.0 / D)
    _, b_XO, b_rO = residual_norm(b_O, b_mean, b_w[None, :], b_u[None, :], None, eps, D, 1)
    b_do = load_tokens(p_do, s_do, b, t, i_hv, 0, rows, D, SEGMENT, BD).to(tl.float32)
    b_dO = residual_norm_bwd(b_XO, b_rO, b_w[None, :], b_do, ON_Q, D, 1)
    store_tokens(p_dO, s_tile, b, t, i_hv, 0, rows, b_dO, D, SEGMENT, BD)
    _store_share(p_share, i_c, i_hv, chunks, tl.sum(b_do * b_XO, axis=0), tl.sum(b_do, axis=0), HV, D, BD)
    R: tl.constexpr = SEGMENT // BT
    b_sums = tl.sum(tl.reshape(b_dO, (R, BT, BD)), axis=1)
    o_sums = tl.arange(0, R)[:, None] * D + o_v[None, :]
    tl.store(p_dc + pid * (R * D) + o_sums, b_sums, mask=tl.broadcast_to((o_v < D)[None, :], (R, BD)))

    b_steps, b_closed = read_steps(b_e, b_e_last, "s", BT)
    if BK == BD:
        b_pairs = mm(b_k, tl.trans(b_q), None, OP, PRECISION)
    else:
        b_pairs = _pairs(p_k, s_k, p_q, s_q, b, t, i_h, rows, D, SEGMENT, BK, OP, PRECISION)
    b_pairs = (b_pairs * scale + 1.0) * (b_closed - b_steps)
    b_dN = mm(b_pairs, b_dO, None, OP, PRECISION)
    store_tokens(p_dN, s_tile, b, t, i_hv, 0, rows, b_dN, D, SEGMENT, BD)


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
    b_w = _parameter(p_w, s_w, i_hv, D, BD)
    b_dS, b_dc = _enter(p_dST, s_dST, p_dcT, s_dcT, i_n, i_hv, D, BD)
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
            b_kq = _load_in_turn(p_k, s_k, p_q, s_q, b, t_i, i_h, rows, D, BT, BD)
            b_seen, _ = _by_turns(mm(b_dS, tl.trans(b_kq), None, OP, PRECISION))
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
    _leave(p_dS0, s_dS0, p_dc0, s_dc0, i_n, i_hv, b_dS, b_dc, D, BD)
    _store_share(p_share, i_n, i_hv, N, tl.sum(b_dw, axis=1), tl.sum(b_du, axis=1) * b_w, HV, D, BD)


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
    p_dY,
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
    """One program owns the tokens of a segment of one value head.

    A = steps * dO N^T       B = steps of earlier mini-batches * dZ N^T        steps, e': see `read_steps`
    dq = s (dO S^T - A k), and do if q is the residual
    dk = w dY + dZ S^T - e' (N dS^T) - (B + B^T) k - s A^T q        dv = -w dY
    deta_r = -sum over s in r's mini-batch of (s q_r k_s + 1) <dO_r, N_s>, and of closing steps all of the walk back's
    """
    pid = tl.program_id(0).to(tl.int64)
    i_c, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, SEGMENT)
    NV: tl.constexpr = (D + BV - 1) // BV
    b_dq, b_dk = tl.zeros((SEGMENT, BD), tl.float32), tl.zeros((SEGMENT, BD), tl.float32)
    o_t = tl.arange(0, SEGMENT)
    if i_n == N:
        store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        store_token_scalars(p_deta, s_deta, b, t, i_hv, rows, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        if p_dcol is not None:
            store_token_scalars(p_dcol, s_dcol, b, t, i_hv, rows, tl.zeros((SEGMENT,), tl.float32), SEGMENT)
        store_tokens(p_dq, s_dq, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        store_tokens(p_dk, s_dk, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)
        return

    b_q = load_tokens(p_q, s_q, b, t, i_h, 0, rows, D, SEGMENT, BD)
    b_k = load_tokens(p_k, s_k, b, t, i_h, 0, rows, D, SEGMENT, BD)
    b_e, b_e_last = _segment_steps(p_eta, s_eta, b, t, i_hv, rows, BT, SEGMENT)

    b_pairs = _pairs(p_dO, s_tile, p_N, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_steps, b_before = read_steps(b_e, b_e_last, "r", BT)
    b_read = mm(b_q, tl.trans(b_k), None, OP, PRECISION) * scale + 1.0
    b_step = load_token_scalars(p_step, s_row, b, t, i_hv, rows, SEGMENT)
    m_own = o_t[:, None] // BT == o_t[None, :] // BT
    m_closing = (o_t % BT == BT - 1) | (o_t == rows - 1)
    b_de = tl.where(m_own & (o_t[None, :] <= o_t[:, None]), b_read * b_pairs, 0.0)
    b_de += tl.where(m_own & m_closing[:, None], b_step[None, :], 0.0)
    store_token_scalars(p_deta, s_deta, b, t, i_hv, rows, -tl.sum(b_de, axis=1), SEGMENT)
    b_dq = mm(-b_steps * b_pairs, b_k, b_dq, OP, PRECISION)
    for i_v in tl.static_range(NV):
        b_S = load_tile(p_states, pid, i_v * BV, 0, D, D, BV, BD)
        b_dO = load_tokens(p_dO, s_tile, b, t, i_hv, i_v * BV, rows, D, SEGMENT, BV)
        b_dq = mm(b_dO, b_S, b_dq, OP, PRECISION)
    b_dq *= scale
    if p_do is not None:
        b_dq += load_tokens(p_do, s_do, b, t, i_hv, 0, rows, D, SEGMENT, BD).to(tl.float32)
    # Now, so that its registers are dk's.
    store_tokens(p_dq, s_dq, b, t, i_hv, 0, rows, b_dq, D, SEGMENT, BD)

    b_pairs = b_before * _pairs(p_dZ, s_tile, p_N, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_steps, b_before = read_steps(b_e, b_e_last, "s", BT)
    b_pairs += b_before * _pairs(p_N, s_tile, p_dZ, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_dk = mm(-b_pairs, b_k, b_dk, OP, PRECISION)
    b_pairs = b_steps * _pairs(p_N, s_tile, p_dO, s_tile, b, t, i_hv, rows, D, SEGMENT, BV, OP, PRECISION)
    b_dk = mm(b_pairs * -scale, b_q, b_dk, OP, PRECISION)
    for i_v in tl.static_range(NV):
        b_S = load_tile(p_states, pid, i_v * BV, 0, D, D, BV, BD)
        b_dZ = load_tokens(p_dZ, s_tile, b, t, i_hv, i_v * BV, rows, D, SEGMENT, BV)
        b_dk = mm(b_dZ, b_S, b_dk, OP, PRECISION)
        b_dS = load_tile(p_dstates, pid, i_v * BV, 0, D, D, BV, BD)
        b_N = load_tokens(p_N, s_tile, b, t, i_hv, i_v * BV, rows, D, SEGMENT, BV)
        b_dk = mm(b_N.to(tl.float32) * -b_e_last[:, None], b_dS, b_dk, OP, PRECISION)
    b_dY = load_tokens(p_dY, s_tile, b, t, i_hv, 0, rows, D, SEGMENT, BD).to(tl.float32)
    store_tokens(p_dv, s_dv, b, t, i_hv, 0, rows, -b_dY, D, SEGMENT, BD)
    store_tokens(p_dk, s_dk, b, t, i_hv, 0, rows, b_dk + b_dY, D, SEGMENT, BD)


@triton.jit
def _pairs(
    p_left,
    s_left,
    p_right,
    s_right,
    b,
    t,
    i_head,
    rows,
    D: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left right^T of two tensors' rows, BW channels at a time.   [BT, BT]"""
    b_pairs = tl.zeros((BT, BT), tl.float32)
    for i_w in tl.static_range((D + BW - 1) // BW):
        b_left = load_tokens(p_left, s_left, b, t, i_head, i_w * BW, rows, D, BT, BW)
        b_right = load_tokens(p_right, s_right, b, t, i_head, i_w * BW, rows, D, BT, BW)
        b_pairs = mm(b_left, tl.trans(b_right), b_pairs, OP, PRECISION)
    return b_pairs


@triton.jit
def _rows_of_state(
    p_x,
    s_x,
    p_S,
    i_S,
    b,
    t,
    i_h,
    rows,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x S^T of rows of keys or queries and a stored state [V, K], BK channels at a time.   [BT, BD]"""
    b_read = tl.zeros((BT, BD), tl.float32)
    for i_k in tl.static_range((D + BK - 1) // BK):
        b_x = load_tokens(p_x, s_x, b, t, i_h, i_k * BK, rows, D, BT, BK)
        b_S = load_tile(p_S, i_S, 0, i_k * BK, D, D, BD, BK)
        b_read = mm(b_x, tl.trans(b_S), b_read, OP, PRECISION)
    return b_read


@triton.jit
def _parameter(p, strides, i_hv, D: tl.constexpr, BD: tl.constexpr):
    """A head's row of a parameter [HV, D].   [BD] float32"""
    o_v = tl.arange(0, BD)
    return tl.load(p + i_hv * strides[0] + o_v * strides[1], mask=o_v < D, other=0.0).to(tl.float32)


@triton.jit
def _step_sizes(p_eta, s_eta, b, t, i_hv, rows, BT: tl.constexpr):
    """Of a mini-batch's tokens, and of its last. They are loaded a mini-batch ahead."""
    last = t + tl.minimum(rows, BT) - 1
    e_last = tl.load(p_eta + b * s_eta[0] + last * s_eta[1] + i_hv * s_eta[2], mask=rows > 0, other=0.0)
    return load_token_scalars(p_eta, s_eta, b, t, i_hv, rows, BT), e_last.to(tl.float32)


@triton.jit
def _load_in_turn(p_k, s_k, p_q, s_q, b, t, i_h, rows, D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """Rows of k and of q by turns: one product of the state with both.   [2 BT, BD]"""
    o_r = tl.arange(0, 2 * BT)
    m_k, o_t = (o_r % 2 == 0)[:, None], (o_r // 2).to(tl.int64)[:, None]
    o_w = tl.arange(0, BD).to(tl.int64)[None, :]
    p_k += b * s_k[0] + t * s_k[1] + i_h * s_k[2]
    p_q += b * s_q[0] + t * s_q[1] + i_h * s_q[2]
    p = tl.where(m_k, p_k + o_t * s_k[1] + o_w * s_k[3], p_q + o_t * s_q[1] + o_w * s_q[3])
    return tl.load(p, mask=(o_t < rows) & (o_w < D), other=0.0)


@triton.jit
def _by_turns(b_x):
    """Even and odd columns of a tile.   [BD, 2 BT] -> [BD, BT] twice"""
    return tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))


@triton.jit
def _enter(p_S, s_S, p_c, s_c, i_n, i_hv, D: tl.constexpr, BD: tl.constexpr):
    """A state, zero where none was given.   [BD, BD] V-first and [BD]"""
    b_S, b_c = tl.zeros((BD, BD), tl.float32), tl.zeros((BD,), tl.float32)
    if p_S is not None:
        b_S = load_state(p_S, s_S, i_n, i_hv, 0, D, D, BD, BD)
    if p_c is not None:
        o_v = tl.arange(0, BD)
        p_head = p_c + i_n * s_c[0] + i_hv * s_c[1]
        b_c = tl.load(p_head + o_v * s_c[3], mask=o_v < D, other=0.0).to(tl.float32)
    return b_S, b_c


@triton.jit
def _leave(p_S, s_S, p_c, s_c, i_n, i_hv, b_S, b_c, D: tl.constexpr, BD: tl.constexpr):
    """Write a state where it is wanted, rounding once."""
    if p_S is not None:
        store_state(p_S, s_S, i_n, i_hv, 0, b_S, D, D, BD, BD)
    if p_c is not None:
        o_v = tl.arange(0, BD)
        p_head = p_c + i_n * s_c[0] + i_hv * s_c[1]
        tl.store(p_head + o_v * s_c[3], b_c.to(p_c.dtype.element_ty), mask=o_v < D)


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
    _, e_last = _step_sizes(p_eta, s_eta, b, t, i_hv, rows, BT)
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


@triton.jit
def _store_row(p, i, b_x, D: tl.constexpr, BD: tl.constexpr):
    """Write row i of a contiguous [rows, D]."""
    o_v = tl.arange(0, BD)
    tl.store(p + i * D + o_v, b_x, mask=o_v < D)


@triton.jit
def _store_share(p_share, i, i_hv, count, b_dw, b_du, HV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """What a sequence or a segment gives to dw and du.   [2, count, HV, D]"""
    _store_row(p_share, i * HV + i_hv, b_dw, D, BD)
    _store_row(p_share, (count + i) * HV + i_hv, b_du, D, BD)


@triton.jit
def _segment_steps(p_eta, s_eta, b, t, i_hv, rows, BT: tl.constexpr, SEGMENT: tl.constexpr):
    """Step sizes of a segment's tokens, and those that close their mini-batches.   [SEGMENT] each"""
    o_t = tl.arange(0, SEGMENT)
    o_last = t + tl.minimum((o_t // BT + 1) * BT, rows) - 1
    p_last = p_eta + b * s_eta[0] + o_last * s_eta[1] + i_hv * s_eta[2]
    b_e = load_token_scalars(p_eta, s_eta, b, t, i_hv, rows, SEGMENT)
    return b_e, tl.load(p_last, mask=o_t < rows, other=0.0).to(tl.float32)
