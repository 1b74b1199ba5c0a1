"""Tokens and tiles as sub-chunks of a few rows, each of whose columns is in one thread."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_sub_chunks(
    p,
    strides,
    at,
    h,
    column,
    opaque_zero,
    W: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr = 16,
):
    """`load_tokens` in sub-chunks of BR rows.   [BT / BR, BR, BW]

    `opaque_zero` is 0, unknown to the compiler. It hides that addresses are multiples of more than BW / 32 elements. So
    32 neighbouring lanes load a row of a sub-chunk, and a thread holds all BR rows of its columns. Sums and selections
    along the rows of a sub-chunk then need no other thread.
    """
    offsets, o_i, o_n, o_w = _sub_chunk_offsets(strides[1], strides[3], column, opaque_zero, BT, BW, BR)
    p_tile = p + (at.b * strides[0] + at.t * strides[1] + h * strides[2])
    mask = o_i < at.rows - o_n
    if W % BW != 0:
        mask = mask & (o_w < W)
    return tl.load(p_tile + offsets, mask=mask, other=0.0)


@triton.jit
def store_token_sub_chunks(p, strides, at, h, column, x, opaque_zero, W: tl.constexpr):
    """`store_tokens` of sub-chunks x [BT / BR, BR, BW]."""
    BR: tl.constexpr = x.shape[1]
    BT: tl.constexpr = x.shape[0] * BR
    offsets, o_i, o_n, o_w = _sub_chunk_offsets(strides[1], strides[3], column, opaque_zero, BT, x.shape[2], BR)
    p_tile = p + (at.b * strides[0] + at.t * strides[1] + h * strides[2])
    tl.store(p_tile + offsets, x.to(p.dtype.element_ty), mask=(o_i < at.rows - o_n) & (o_w < W))


@triton.jit
def to_sub_chunks(x, p, opaque_zero, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Reshape x [BT, BW] float32 to sub-chunks, in the register layout of `load_sub_chunks`.

    The result of a matrix product has the MMA layout, which would spread to every tile it meets. Here x is the fallback
    of a fully masked load, so it takes the load's layout. p: any float32 pointer; it is never read.
    """
    offsets, _, _, _ = _sub_chunk_offsets(BW, 1, 0, opaque_zero, BT, BW, BR)
    return tl.load(
        p + offsets, mask=tl.full(offsets.shape, 0, tl.int32) + opaque_zero > 0, other=x.reshape(offsets.shape)
    )


@triton.jit
def load_tile_sub_chunks(
    p, i_tile, column, opaque_zero, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr
):
    """Load columns of a tile of a contiguous [tiles, BT, W] in sub-chunks.   [BT / BR, BR, BW]"""
    offsets, _, _, o_w = _sub_chunk_offsets(W, 1, column, opaque_zero, BT, BW, BR)
    p_tile = p + i_tile.to(tl.int64) * (BT * W)
    return tl.load(p_tile + offsets, mask=tl.broadcast_to(o_w < W, (BT // BR, BR, BW)), other=0.0)


@triton.jit
def store_sub_chunks(
    p, i_tile, column, x, opaque_zero, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr = 16
):
    """Store sub-chunks [BT / BR, BR, BW] as columns of a tile of a contiguous [tiles, BT, W], rounding once."""
    offsets, _, _, o_w = _sub_chunk_offsets(W, 1, column, opaque_zero, BT, BW, BR)
    p_tile = p + i_tile.to(tl.int64) * (BT * W)
    x = x.to(p.dtype.element_ty)
    if W % BW == 0:
        tl.store(p_tile + offsets, x)
    else:
        tl.store(p_tile + offsets, x, mask=tl.broadcast_to(o_w < W, (BT // BR, BR, BW)))


@triton.jit
def _sub_chunk_offsets(s_row, s_column, column, opaque_zero, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Offsets of the elements of sub-chunks, with the indices that masks need.

    Returns:
        Offsets, row inside the sub-chunk, first row of the sub-chunk, and column of each element.
    """
    o_i = tl.arange(0, BR)[None, :, None]
    o_n = BR * tl.arange(0, BT // BR)[:, None, None]
    o_w = column + tl.arange(0, BW)[None, None, :]
    unit: tl.constexpr = BW // 32 if BW > 32 else 1
    first = o_n.to(tl.int64) * s_row + o_w.to(tl.int64) * s_column + opaque_zero * unit
    return first + o_i.to(tl.int64) * s_row, o_i, o_n, o_w
