"""Rows and columns of a diagonal-plus-low-rank transition in Triton, as `eager.columns` makes them.

RULE is "given", "keys" or "feedback". No chunked operator has the rule "rates".

A row that reads before its token's decay is a row of the token before: kernels load it one token early (`early_rows`),
and everything that they then do with it is what they do with a query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.index.triton import TokenRows, load_token_row, load_tokens
from wyfold.tile.index.triton.strength import load_strength
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks


class RuleRows(NamedTuple):
    """Kernel argument: tokens that a rule makes its rows and columns of, and their strides; None where it has none.

    Attributes:
        q, k, a: [B, T, H, K].
        b: [B, T, heads of b, K].
    """

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    a: Any
    s_a: Any
    b: Any
    s_b: Any
    end: None = None


class Values(NamedTuple):
    """Kernel argument: values [B, T, HV, V] and their factors, None for 1, with their strides."""

    v: Any
    s_v: Any
    w: Any
    s_w: Any
    end: None = None


class RowHeads(NamedTuple):
    """Heads of the tokens of one value head, inside kernels.

    Attributes:
        k: Of q, k and a.
        b: Of b.
    """

    k: Any
    b: Any


class RowFactors(NamedTuple):
    """Factors of rows, inside kernels, each [BT].

    Attributes:
        q, k, a: Reciprocal norms; ones without the l2 norm.
        early: Reciprocal norms of the erasing rows as `early_rows` loads them.
        beta: Write strength; zero in padding.
    """

    q: Any
    k: Any
    a: Any
    early: Any
    beta: Any


@triton.jit
def load_values(values, at, h, column, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Load the written values of a chunk: v, or w v.   [BT, BV]"""
    b_v = load_tokens(values.v, values.s_v, at, h, column, V, BT, BV)
    if values.w is None:
        return b_v
    else:
        return b_v.to(tl.float32) * load_tokens(values.w, values.s_w, at, h, column, V, BT, BV).to(tl.float32)


@triton.jit
def early_rows(at, BEFORE: tl.constexpr):
    """Rows from which erasing rows are loaded: one token later if they read before their token's decay.

    The chunk's first token is left out. Its row reads the entering state undecayed, and no row of its chunk.
    """
    if BEFORE:
        return TokenRows(at.b, at.t + 1, tl.maximum(at.rows - 1, 0), at.T)
    else:
        return at


@triton.jit
def load_rows(
    p, strides, at, h, column, opaque_zero, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BR: tl.constexpr
):
    """Load token rows as float32: in sub-chunks of BR rows, [BT / BR, BR, BK], or with BR 0 as a tile [BT, BK]."""
    if BR == 0:
        return load_tokens(p, strides, at, h, column, K, BT, BK).to(tl.float32)
    else:
        return load_sub_chunks(p, strides, at, h, column, opaque_zero, K, BT, BK, BR).to(tl.float32)


@triton.jit
def row_factors(tokens, at, heads, strength, i_hv, SIZES: tl.constexpr, NORM: tl.constexpr, BEFORE: tl.constexpr):
    """Reciprocal norms and write strengths of a chunk's rows."""
    BT: tl.constexpr = SIZES.BT
    b_beta = load_strength(strength, at, i_hv, False, BT)
    if NORM:
        b_rk = _reciprocal_norms(tokens.k, tokens.s_k, at, heads.k, SIZES)
        b_ra = b_rk
        if tokens.a is not None:
            b_ra = _reciprocal_norms(tokens.a, tokens.s_a, at, heads.k, SIZES)
        b_early = b_ra
        if BEFORE:
            b_early = tl.gather(b_ra, tl.minimum(tl.arange(0, BT) + 1, BT - 1), 0)
        return RowFactors(_reciprocal_norms(tokens.q, tokens.s_q, at, heads.k, SIZES), b_rk, b_ra, b_early, b_beta)
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return RowFactors(ones, ones, ones, ones, b_beta)


@triton.jit
def _reciprocal_norms(p, s, at, h, SIZES: tl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of rows.   [BT]"""
    BT: tl.constexpr = SIZES.BT
    b_xx = tl.zeros((BT,), tl.float32)
    for column in range(0, SIZES.K, 64):
        b_x = load_rows(p, s, at, h, column, 0, SIZES.K, BT, 64, 0)
        b_xx += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_xx + 1e-6)


@triton.jit
def scale_rows(b_x, b_factor):
    """Multiply rows in either shape of `load_rows` by factors [BT]."""
    if len(b_x.shape) == 2:
        return b_x * b_factor[:, None]
    else:
        return b_x * b_factor.reshape(b_x.shape[0], b_x.shape[1], 1)


@triton.jit
def erasing_rows(
    rows,
    at,
    heads,
    b_ra,
    column,
    opaque_zero,
    RULE: tl.constexpr,
    SIZES: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """Load the erasing rows a of a rule, in the shape of `load_rows`. b_ra: their reciprocal norms, or None."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    if rows.a is None:
        b_x = load_rows(rows.k, rows.s_k, at, heads.k, column, opaque_zero, K, BT, BK, BR)
    else:
        b_x = load_rows(rows.a, rows.s_a, at, heads.k, column, opaque_zero, K, BT, BK, BR)
    if b_ra is not None:
        b_x = scale_rows(b_x, b_ra)
    if RULE == "given":
        return b_x
    elif rows.b is None:
        return -b_x
    else:
        return -(b_x * load_rows(rows.b, rows.s_b, at, heads.b, column, opaque_zero, K, BT, BK, BR))


@triton.jit
def erasing_row(rows, at, heads, b_ra, column, RULE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """The erasing row of a chunk's first token.   [BK]"""
    there = at.rows > 0
    if rows.a is None:
        b_x = load_token_row(rows.k, rows.s_k, at.b, at.t, heads.k, column, there, K, BK).to(tl.float32)
    else:
        b_x = load_token_row(rows.a, rows.s_a, at.b, at.t, heads.k, column, there, K, BK).to(tl.float32)
    if b_ra is not None:
        b_x *= tl.sum(tl.where(tl.arange(0, b_ra.shape[0]) == 0, b_ra, 0.0), axis=0)
    if RULE == "given":
        return b_x
    elif rows.b is None:
        return -b_x
    else:
        return -(b_x * load_token_row(rows.b, rows.s_b, at.b, at.t, heads.b, column, there, K, BK).to(tl.float32))


@triton.jit
def erased_columns(
    rows,
    at,
    heads,
    factors,
    column,
    opaque_zero,
    RULE: tl.constexpr,
    SIZES: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """Load the columns b that a rule erases along, in the shape of `load_rows`; "given" writes along others."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    if RULE != "given":
        b_x = load_rows(rows.k, rows.s_k, at, heads.k, column, opaque_zero, K, BT, BK, BR)
        return scale_rows(b_x, factors.k * factors.beta)
    else:
        return load_rows(rows.b, rows.s_b, at, heads.b, column, opaque_zero, K, BT, BK, BR)


@triton.jit
def raw_columns(rows, at, heads, column, RULE: tl.constexpr, SIZES: tl.constexpr, BK: tl.constexpr):
    """`erased_columns` as a tile, without norms and write strengths."""
    if RULE != "given":
        return load_rows(rows.k, rows.s_k, at, heads.k, column, 0, SIZES.K, SIZES.BT, BK, 0)
    else:
        return load_rows(rows.b, rows.s_b, at, heads.b, column, 0, SIZES.K, SIZES.BT, BK, 0)


@triton.jit
def keys_bwd(rows, at, heads, factors, column, opaque_zero, b_da, b_dc, SIZES: tl.constexpr, BR: tl.constexpr):
    """Adjoint of the rules "keys" and "feedback", `eager.columns_bwd`, for some channels.

    Args:
        b_da, b_dc: Gradients of the erasing rows and of the columns, in the shape of `load_rows`.

    Returns:
        Gradients of the normalised k and a and of b, zeros where the rule has none, and beta's terms, in that shape.
    """
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    b_k = scale_rows(load_rows(rows.k, rows.s_k, at, heads.k, column, opaque_zero, K, BT, BK, BR), factors.k)
    b_dp, b_db, b_p = -b_da, tl.zeros_like(b_da), b_k
    if rows.a is not None:
        b_p = scale_rows(load_rows(rows.a, rows.s_a, at, heads.k, column, opaque_zero, K, BT, BK, BR), factors.a)
    if rows.b is not None:
        b_db = b_dp * b_p
        b_dp *= load_rows(rows.b, rows.s_b, at, heads.b, column, opaque_zero, K, BT, BK, BR)
    b_dk = scale_rows(b_dc, factors.beta)
    if rows.a is None:
        b_dk += b_dp
    return b_dk, b_dp, b_db, b_dc * b_k
