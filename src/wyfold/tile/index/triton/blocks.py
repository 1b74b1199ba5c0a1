"""Blocks of tokens and tiles through a TMA descriptor or a pointer."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.index.triton import load_tile, load_tokens, store_tile, store_tokens


@triton.jit
def load_token_block(
    x, strides, at, h, column,
    W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """`load_tokens` through a descriptor or a pointer.

    Args:
        FULL: All rows are tokens. Otherwise rows of other sequences are replaced by zeros here, before any product:
            zero times NaN is NaN.
    """
    if USE_TMA:
        b_x = x.load([(at.b * at.T + at.t).to(tl.int32), (h * strides[2]).to(tl.int32) + column])
        if FULL:
            return b_x
        else:
            return tl.where((tl.arange(0, BT) < at.rows)[:, None], b_x, tl.zeros((BT, BW), b_x.dtype))
    else:
        return load_tokens(x, strides, at, h, column, W, BT, BW)


@triton.jit
def store_token_block(x, strides, at, h, column, b_x, W: tl.constexpr, USE_TMA: tl.constexpr):
    """`store_tokens` through a descriptor, if all rows of the block are tokens, or a pointer."""
    if USE_TMA:
        x.store([(at.b * at.T + at.t).to(tl.int32), (h * strides[2]).to(tl.int32) + column], b_x.to(x.dtype))
    else:
        store_tokens(x, strides, at, h, column, b_x, W)


@triton.jit
def load_tile_block(
    p, i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr
):
    """`load_tile` through a descriptor of the tiles' rows [tiles * R, W], or a pointer.   [BR, BW]

    With a descriptor, R is a multiple of BR: a block must not reach into the next tile.
    """
    if USE_TMA:
        return p.load([(i_tile * R + row).to(tl.int32), column])
    else:
        return load_tile(p, i_tile, row, column, R, W, BR, BW)


@triton.jit
def store_tile_block(
    x,
    i_tile,
    row,
    column,
    b_x,
    R: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """`store_tile` through a descriptor or a pointer."""
    if USE_TMA:
        x.store([(i_tile * R).to(tl.int32) + row, column], b_x.to(x.dtype))
    else:
        store_tile(x, i_tile, row, column, b_x, R, W, BR, BW)


@triton.jit
def load_row_factors(x, i_tile, BT: tl.constexpr, USE_TMA: tl.constexpr):
    """Load the row factors of a tile that `prepare` stored: decays in for k and q, decay out, beta.   [BT] each

    One block holds all four. It is split in registers without an exchange between threads.
    """
    if USE_TMA:
        b_x = x.load([(i_tile * 4).to(tl.int32), 0])
        b_even, b_odd = tl.split(tl.reshape(tl.trans(b_x), (BT, 2, 2)))
        b_in_k, b_out = tl.split(b_even)
        b_in_q, b_beta = tl.split(b_odd)
    else:
        p_row = x + i_tile.to(tl.int64) * (4 * BT) + tl.arange(0, BT)
        b_in_k, b_in_q, b_out, b_beta = (
            tl.load(p_row),
            tl.load(p_row + BT),
            tl.load(p_row + 2 * BT),
            tl.load(p_row + 3 * BT),
        )
    return b_in_k, b_in_q, b_out, b_beta
