"""Loads, products and stores shared by the `ttt` kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import bf16_parts, mm
from wyfold.tile.index.triton import load_tile, load_token_scalars, load_tokens
from wyfold.tile.state.triton import load_state, store_state


@triton.jit
def gram_by_blocks(
    p_left,
    s_left,
    p_right,
    s_right,
    at,
    i_head,
    D: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """left right^T of two tensors' token rows, accumulated over blocks of BW channels.   [BT, BT]"""
    b_gram = tl.zeros((BT, BT), tl.float32)
    for i_w in tl.static_range((D + BW - 1) // BW):
        b_left = load_tokens(p_left, s_left, at, i_head, i_w * BW, D, BT, BW)
        b_right = load_tokens(p_right, s_right, at, i_head, i_w * BW, D, BT, BW)
        b_gram = mm(b_left, tl.trans(b_right), b_gram, OP, PRECISION)
    return b_gram


@triton.jit
def read_by_blocks(
    p_q,
    s_q,
    p_k,
    s_k,
    p_S,
    i_S,
    at,
    i_h,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """q k^T and q S^T of tokens and a stored state [V, K], over blocks of BK channels.   [BT, BT] and [BT, BD]

    The loop lets loads go straight to shared memory, past the registers. Whole tiles of 128 channels would need more
    registers than a multiprocessor has for two programs.
    """
    b_gram, b_read = tl.zeros((BT, BT), tl.float32), tl.zeros((BT, BD), tl.float32)
    for i_k in tl.range(0, D, BK):
        b_q = load_tokens(p_q, s_q, at, i_h, i_k, D, BT, BK)
        b_k = load_tokens(p_k, s_k, at, i_h, i_k, D, BT, BK)
        b_S = load_tile(p_S, i_S, 0, i_k, D, D, BD, BK)
        b_gram = mm(b_q, tl.trans(b_k), b_gram, OP, PRECISION)
        b_read = mm(b_q, tl.trans(b_S), b_read, OP, PRECISION)
    return b_gram, b_read


@triton.jit
def load_parameter(p, strides, i_hv, D: tl.constexpr, BD: tl.constexpr):
    """Load one head's row of a parameter [HV, D].   [BD] float32"""
    o_v = tl.arange(0, BD)
    return tl.load(p + i_hv * strides[0] + o_v * strides[1], mask=o_v < D, other=0.0).to(tl.float32)


@triton.jit
def closing_step(p_eta, s_eta, at, i_hv, BT: tl.constexpr):
    """Step size of a mini-batch's last token; zero where the mini-batch has no tokens."""
    last = at.t + tl.minimum(at.rows, BT) - 1
    e_last = tl.load(p_eta + at.b * s_eta[0] + last * s_eta[1] + i_hv * s_eta[2], mask=at.rows > 0, other=0.0)
    return e_last.to(tl.float32)


@triton.jit
def segment_steps(p_eta, s_eta, at, i_hv, BT: tl.constexpr, SEGMENT: tl.constexpr):
    """Step sizes of a segment's tokens, and the closing steps of their mini-batches.   [SEGMENT] each"""
    o_t = tl.arange(0, SEGMENT)
    o_last = at.t + tl.minimum((o_t // BT + 1) * BT, at.rows) - 1
    p_last = p_eta + at.b * s_eta[0] + o_last * s_eta[1] + i_hv * s_eta[2]
    b_e = load_token_scalars(p_eta, s_eta, at, i_hv, SEGMENT)
    return b_e, tl.load(p_last, mask=o_t < at.rows, other=0.0).to(tl.float32)


@triton.jit
def load_inner_state(p_S, s_S, p_c, s_c, i_n, i_hv, D: tl.constexpr, BD: tl.constexpr):
    """Load S and c; zeros where None.   [BD, BD] V-first and [BD]"""
    b_S, b_c = tl.zeros((BD, BD), tl.float32), tl.zeros((BD,), tl.float32)
    if p_S is not None:
        b_S = load_state(p_S, s_S, i_n, i_hv, 0, D, D, BD, BD)
    if p_c is not None:
        o_v = tl.arange(0, BD)
        p_head = p_c + i_n * s_c[0] + i_hv * s_c[1]
        b_c = tl.load(p_head + o_v * s_c[3], mask=o_v < D, other=0.0).to(tl.float32)
    return b_S, b_c


@triton.jit
def store_inner_state(p_S, s_S, p_c, s_c, i_n, i_hv, b_S, b_c, D: tl.constexpr, BD: tl.constexpr):
    """Store S and c where they are not None, rounded once."""
    if p_S is not None:
        store_state(p_S, s_S, i_n, i_hv, 0, b_S, D, D, BD, BD)
    if p_c is not None:
        o_v = tl.arange(0, BD)
        p_head = p_c + i_n * s_c[0] + i_hv * s_c[1]
        tl.store(p_head + o_v * s_c[3], b_c.to(p_c.dtype.element_ty), mask=o_v < D)


@triton.jit
def store_row(p, i, b_x, D: tl.constexpr, BD: tl.constexpr):
    """Store row i of a contiguous [rows, D]."""
    o_v = tl.arange(0, BD)
    tl.store(p + i * D + o_v, b_x, mask=o_v < D)


@triton.jit
def store_partials(p_partials, i, i_hv, count, b_dw, b_du, HV: tl.constexpr, D: tl.constexpr, BD: tl.constexpr):
    """Store one sequence's or segment's partial sums of dw and du.   [2, count, HV, D]"""
    store_row(p_partials, i * HV + i_hv, b_dw, D, BD)
    store_row(p_partials, (count + i) * HV + i_hv, b_du, D, BD)


@triton.jit
def store_row_stats(p, strides, b, t, h, rows, b_x, b_y, b_z, BT: tl.constexpr):
    """Store three numbers per token, each [BT], to a contiguous [B, T, HV, 4] with one pass through shared memory."""
    b_all = tl.join(tl.join(b_x, b_z), tl.join(b_y, b_y))
    o_t, o_i, o_j = tl.arange(0, BT)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    offsets = b * strides[0] + (t + o_t.to(tl.int64)) * strides[1] + h * strides[2] + o_i * 2 + o_j
    tl.store(p + offsets, b_all, mask=tl.broadcast_to(o_t < rows, (BT, 2, 2)))


@triton.jit
def store_first_column(p, i, b_x, D: tl.constexpr, BD: tl.constexpr):
    """Store the first column of a tile [BD, n] as row i of a contiguous [rows, D]."""
    o_v, o_t = tl.arange(0, BD)[:, None], tl.arange(0, b_x.shape[1])[None, :]
    tl.store(p + i * D + o_v + o_t * 0, b_x, mask=(o_v < D) & (o_t == 0))


@triton.jit
def first_column(b_x):
    """First column of a tile.   [BD, n] -> [BD]"""
    return tl.sum(tl.where(tl.arange(0, b_x.shape[1])[None, :] == 0, b_x, 0.0), axis=1)


@triton.jit
def broadcast_to_slabs(b_x, SLABS: tl.constexpr):
    """Broadcast a tile to the right operand of a batched product with the state's slabs.   [SLABS, n, m]"""
    return tl.broadcast_to(b_x[None, :, :], (SLABS, b_x.shape[0], b_x.shape[1]))


@triton.jit
def to_row_layout(b_x, p, opaque_zero, BT: tl.constexpr, BD: tl.constexpr):
    """Convert a product with the state's slabs, [SLABS, BD / SLABS, BT], to rows in a load's layout.   [BT, BD]

    A product's result has the matrix unit's layout, in which row sums cross warps, and every tile combined with it
    would get that layout. Here the result is the `other` value of a fully masked load, so the compiler converts it to
    the load's layout, in which a few lanes of one warp hold a row.

    Args:
        b_x: Result of the product.
        p: Any float32 pointer; never read.
        opaque_zero: A 0 that the compiler cannot fold.
    """
    b_x = tl.reshape(tl.permute(b_x, (2, 0, 1)), (BT, BD))
    offsets = tl.arange(0, BT)[:, None] * BD + tl.arange(0, BD)[None, :]
    return tl.load(p + offsets, mask=tl.full((BT, BD), 0, tl.int32) + opaque_zero > 0, other=b_x)


@triton.jit
def add_update(b_S, b_c, b_N, b_more, b_k, SLABS: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """S + N^T k and c + sum(N) + more, with the state in slabs: S [SLABS, R, BD], c [SLABS, R, BT] with equal columns.

    The sum over tokens is a product with ones: its result has the layout of c and needs no exchange. With bfloat16
    operands the summands are split into a high and a low part, since c must be more precise than an operand. `more` is
    [BD], or None.
    """
    R: tl.constexpr = b_S.shape[1]
    BT: tl.constexpr = b_N.shape[0]
    b_ones = tl.full((SLABS, BT, BT), 1.0, OP)
    b_added = b_N
    if b_more is not None:
        b_added = b_N + tl.where((tl.arange(0, BT) == 0)[:, None], b_more[None, :], 0.0)
    if OP == tl.bfloat16:
        b_high, b_low = bf16_parts(b_added)
        b_high = tl.reshape(tl.trans(b_high), (SLABS, R, BT))
        b_low = tl.reshape(tl.trans(b_low), (SLABS, R, BT))
        b_c = tl.dot(b_low, b_ones, tl.dot(b_high, b_ones, b_c))
        if b_more is not None:
            b_high = tl.reshape(tl.trans(b_N.to(tl.bfloat16)), (SLABS, R, BT))
    else:
        b_high = tl.reshape(tl.trans(b_added), (SLABS, R, BT))
        b_c = mm(b_high, b_ones, b_c, OP, PRECISION)
        if b_more is not None:
            b_high = tl.reshape(tl.trans(b_N), (SLABS, R, BT))
    return mm(b_high, broadcast_to_slabs(b_k, SLABS), b_S, OP, PRECISION), b_c


@triton.jit
def read_segment(
    b_q,
    b_k,
    b_S,
    b_c,
    b_N,
    b_steps,
    scale,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Reads of a segment's tokens, s q S + c - (steps * (s q k^T + 1)) N, from whole tiles.   [SEGMENT, BD]"""
    b_gram, b_O = mm(b_q, tl.trans(b_k), None, OP, PRECISION), mm(b_q, tl.trans(b_S), None, OP, PRECISION)
    return mm((b_gram * scale + 1.0) * -b_steps, b_N, b_O * scale + b_c[None, :], OP, PRECISION)
