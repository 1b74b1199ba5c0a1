"""Loads of the adjoint: rows and columns by sub-chunk, and both kinds of rows of a product interleaved.

Interleaved rows are one operand of 2 BT rows (`chunk_adjoint.interleaved_rows`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.columns.triton import erased_columns, erasing_rows, load_rows, scale_rows
from wyfold.tile.decay.channel.triton.chunk_adjoint import interleaved_rows
from wyfold.tile.decay.triton import NEAR


@triton.jit
def load_reads(
    p_X, p_do, s_do, i_tile, at, h, column, first: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    """Rows of X from row `first` on, then the rows before it, interleaved with the rows of do.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p = p_X + i_tile.to(tl.int64) * (BT * V) + ((o_r + first) % BT * V)[:, None] + o_v[None, :]
    b_X = tl.load(p, mask=(kind == 0)[:, None] & (o_v < V)[None, :], other=0.0)
    return _load_second(p_do, s_do, at, h, column, b_X, V, BT, BV)


@triton.jit
def load_writes(
    p_W, values, i_tile, at, h, column, TWO: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    """The rows of W, interleaved with those of the written values if they go along another column.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p = p_W + i_tile.to(tl.int64) * (BT * V) + (o_r * V)[:, None] + o_v[None, :]
    b_W = tl.load(p, mask=(kind == 0)[:, None] & (o_v < V)[None, :], other=0.0)
    if not TWO:
        return b_W
    elif values.w is None:
        return _load_second(values.v, values.s_v, at, h, column, b_W, V, BT, BV)
    else:
        none = tl.zeros((2 * BT, BV), tl.float32)
        b_v = _load_second(values.v, values.s_v, at, h, column, none, V, BT, BV)
        return b_W.to(tl.float32) + b_v * _load_second(values.w, values.s_w, at, h, column, none, V, BT, BV)


@triton.jit
def _load_second(p, s, at, h, column, b_x, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Load token rows into the second kind of rows of an interleaved b_x, which are zero there.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p_first = p + at.b * s[0] + at.t * s[1] + h * s[2]
    p_x = p_first + o_r.to(tl.int64)[:, None] * s[1] + o_v.to(tl.int64)[None, :] * s[3]
    mask = ((kind == 1) & (o_r < at.rows))[:, None] & (o_v < V)[None, :]
    if b_x.dtype == p.dtype.element_ty:
        return tl.load(p_x, mask=mask, other=b_x)
    else:
        return b_x.to(tl.float32) + tl.load(p_x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Load the columns of a chunk, for some channels; the second are zero if there is one kind."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    RULE: tl.constexpr = FLAGS.RULE
    b_b = erased_columns(tokens, at, heads, norms, column, opaque_zero, RULE, SIZES, BK, NEAR)
    b_k = tl.zeros_like(b_b)
    if RULE == "given":
        b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, opaque_zero, K, BT, BK, NEAR)
    return b_b, b_k


@triton.jit
def load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Load the erasing rows and queries of a chunk, for some channels."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    RULE: tl.constexpr = FLAGS.RULE
    b_q = load_rows(tokens.q, tokens.s_q, at, heads.k, column, opaque_zero, K, BT, BK, NEAR)
    if FLAGS.NORM:
        b_q = scale_rows(b_q, norms.q)
    b_a = erasing_rows(tokens, early, heads, norms.early, column, opaque_zero, RULE, SIZES, BK, NEAR)
    return b_a, b_q
