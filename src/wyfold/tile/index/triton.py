"""Where tokens and tiles lie in memory: the only tile functions that load and store them.

Offsets are 64-bit. Rows past a chunk's last token, and columns past a tensor's width, are never touched: a load gives
zeros there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.activation.triton import sigmoid


@triton.jit
def chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED: tl.constexpr, BT: tl.constexpr):
    """Sequence of chunk i_c, its number there, its buffer row, its first token, and how many tokens it holds.

    Of a packed batch, chunks that no sequence needs are those of the pseudo-sequence N; past its end they hold <= 0
    tokens.
    """
    if PACKED:
        i_n = tl.load(p_sequence + i_c)
        i_s = i_c - tl.load(p_first + i_n)
        t = tl.load(p_cu + i_n) + i_s * BT
        return i_n, i_s, i_n * 0, t, tl.minimum(tl.load(p_cu + i_n + 1) - t, BT)
    else:
        i_n = i_c // per_sequence
        i_s = i_c - i_n * per_sequence
        t = i_s * BT
        return i_n, i_s, i_n, t, tl.minimum(T - t, BT)


@triton.jit
def sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED: tl.constexpr):
    """First chunk of sequence i_n, its buffer row, its first token, and its length."""
    if PACKED:
        t = tl.load(p_cu + i_n)
        return tl.load(p_first + i_n), i_n * 0, t, tl.load(p_cu + i_n + 1) - t
    else:
        return i_n * per_sequence, i_n, i_n * 0, i_n * 0 + T


@triton.jit
def token_offsets(strides, b, t, h, column, rows, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask of rows t.. of head h in a token tensor [B, T, H, W], columns column..   [BT, BW]"""
    o_r = tl.arange(0, BT)
    o_w = column + tl.arange(0, BW)
    first = b * strides[0] + t * strides[1] + h * strides[2]
    offsets = first + o_r.to(tl.int64)[:, None] * strides[1] + o_w.to(tl.int64)[None, :] * strides[3]
    return offsets, (o_r < rows)[:, None] & (o_w < W)[None, :]


@triton.jit
def load_tokens(p, strides, b, t, h, column, rows, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Rows of one head, zero where there is no token.   [BT, BW]"""
    offsets, mask = token_offsets(strides, b, t, h, column, rows, W, BT, BW)
    return tl.load(p + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(p, strides, b, t, h, column, rows, x, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Write x [BT, BW] to the rows that are tokens, rounding once."""
    offsets, mask = token_offsets(strides, b, t, h, column, rows, W, BT, BW)
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_token_scalars(p, strides, b, t, h, rows, BT: tl.constexpr):
    """One float32 per token of a tensor [B, T, H], zero where there is no token.   [BT]"""
    o_r = tl.arange(0, BT)
    offsets = b * strides[0] + (t + o_r.to(tl.int64)) * strides[1] + h * strides[2]
    return tl.load(p + offsets, mask=o_r < rows, other=0.0).to(tl.float32)


@triton.jit
def load_strength(p_beta, s_beta, b, t, h, rows, beta_most, LOGIT: tl.constexpr, BT: tl.constexpr):
    """beta of every row, zero in padding; 1 where the caller gave none.   [BT]"""
    o_r = tl.arange(0, BT)
    if p_beta is None:
        return tl.where(o_r < rows, 1.0, 0.0)
    b_beta = load_token_scalars(p_beta, s_beta, b, t, h, rows, BT)
    if LOGIT:
        b_beta = tl.where(o_r < rows, sigmoid(b_beta) * beta_most, 0.0)
    return b_beta


@triton.jit
def store_token_scalars(p, strides, b, t, h, rows, x, BT: tl.constexpr):
    """Write x [BT] to the rows that are tokens, rounding once."""
    o_r = tl.arange(0, BT)
    offsets = b * strides[0] + (t + o_r.to(tl.int64)) * strides[1] + h * strides[2]
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=o_r < rows)


@triton.jit
def tile_offsets(i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask inside tile i_tile of a contiguous [tiles, R, W], from (row, column) on.   [BR, BW]"""
    o_r = row + tl.arange(0, BR)
    o_w = column + tl.arange(0, BW)
    offsets = i_tile.to(tl.int64) * (R * W) + (o_r * W)[:, None] + o_w[None, :]
    return offsets, (o_r < R)[:, None] & (o_w < W)[None, :]


@triton.jit
def load_tile(p, i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Part of a tile of a contiguous [tiles, R, W], zero outside it.   [BR, BW]"""
    offsets, mask = tile_offsets(i_tile, row, column, R, W, BR, BW)
    return tl.load(p + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(p, i_tile, row, column, x, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Write part of a tile, rounding once."""
    offsets, mask = tile_offsets(i_tile, row, column, R, W, BR, BW)
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def fetch_tile(
    p, i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, TMA: tl.constexpr
):
    """`load_tile`, by the copy engine where p is a descriptor of the tiles' rows [tiles * R, W].   [BR, BW]

    R is then a multiple of BR: a box must not reach into the next tile.
    """
    if TMA:
        return p.load([(i_tile * R + row).to(tl.int32), column])
    else:
        return load_tile(p, i_tile, row, column, R, W, BR, BW)
