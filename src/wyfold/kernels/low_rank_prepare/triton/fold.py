"""Grams of a chunk, from products of its rows and columns, and the factors that they are folded into."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm_exact, no_fma
from wyfold.tile.index.triton import interleave, separate, store_upper
from wyfold.tile.inverse.triton import inverse_transposed, inverse_transposed_whole


@triton.jit
def fold(
    factors, i_tile, b_APb, b_APk, b_reads, b_queries, backward,
    TWO: tl.constexpr, EARLY: tl.constexpr, WHOLE: tl.constexpr, EXACT: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """Store F, P and, for a backward, A and R of a chunk.

    Args:
        b_APb, b_APk: [2 BT, BT] products of the erasing rows and queries, interleaved, with the columns b and k.
        b_reads, b_queries: [BT, BT] factors of the products of erasing rows and of queries; None where they are in the
            rows and columns.
        backward: Whether A and R are stored.
        TWO: Whether there are two kinds of columns.
        EARLY: Whether erasing rows were loaded one token early.
        WHOLE: Whether the inverse is products of whole tiles.

    Returns:
        A^T, or interleaved with R^T the rows that multiply the columns b for E and K.
    """
    BT: tl.constexpr = b_APb.shape[1]
    b_A, b_P = separate(b_APb)
    b_L = -_erasing_gram(b_A, b_reads, EARLY)
    b_PbT = tl.trans(_query_gram(b_P, b_queries))
    # Only substitution reads the first, no tile product.
    if WHOLE:
        b_AT = inverse_transposed_whole(b_L, tl.trans(b_L), BT, EXACT, WARPS)
    else:
        b_AT = inverse_transposed(b_L, tl.trans(b_L), BT, EXACT, WARPS)
    store_upper(factors.F, i_tile, mm_exact(b_AT, b_PbT, None, EXACT), BT)
    if backward:
        store_upper(factors.A, i_tile, b_AT, BT)
    b_rows = b_AT
    if TWO:
        b_J, b_P = separate(b_APk)
        b_RT = mm_exact(tl.trans(_erasing_gram(b_J, b_reads, EARLY)), b_AT, None, EXACT)
        b_PkT = tl.trans(_query_gram(b_P, b_queries))
        store_upper(factors.P, i_tile, mm_exact(b_RT, b_PbT, b_PkT, EXACT), BT)
        if backward:
            store_upper(factors.R, i_tile, b_RT, BT)
        b_rows = interleave(b_AT, b_RT)
    return b_rows


@triton.jit
def _erasing_gram(b_A, b_factor, EARLY: tl.constexpr):
    """Gram of the erasing rows, strictly lower.   [BT, BT]

    Rows that were loaded one token early are moved to their place. A product with a factor is rounded, because later
    exact products split it into parts.
    """
    BT: tl.constexpr = b_A.shape[0]
    o_r, o_s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    if b_factor is not None:
        b_A = no_fma(b_A * b_factor)
    if EARLY:
        b_A = tl.gather(b_A, tl.broadcast_to(tl.maximum(o_r - 1, 0), (BT, BT)), 0)
    return tl.where(o_s < o_r, b_A, 0.0)


@triton.jit
def _query_gram(b_P, b_factor):
    """Gram of the queries, lower, with the same rounding.   [BT, BT]"""
    BT: tl.constexpr = b_P.shape[0]
    if b_factor is not None:
        b_P = no_fma(b_P * b_factor)
    return tl.where(tl.arange(0, BT)[None, :] <= tl.arange(0, BT)[:, None], b_P, 0.0)
