"""Adjoint of a chunk's factors: through its inverse, then to its tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm, mm_exact
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_tokens,
)
from wyfold.tile.inverse.triton import inverse_transposed


class KeyTokens(NamedTuple):
    """Kernel argument: keys, directions and strengths of a call."""

    k: Any
    s_k: Any
    w: Any
    s_w: Any
    beta: Any
    s_beta: Any
    end: None = None


class Factors(NamedTuple):
    """Kernel argument: fields of `PathFactors`."""

    W: Any
    s_rows: Any
    E: Any
    s_E: Any
    end: None = None


class FactorGradients(NamedTuple):
    """Kernel argument: gradients of a chunk's factors, with the strides of `Factors`.

    The first launch replaces those of W and E by their products with A^T, the second reads them.
    """

    dk: Any
    dW: Any
    dw: Any
    dE: Any


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_solve_bwd_triton(
    x, factors, d, p_dbeta, s_dbeta, packing, N, T, per_sequence,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """X_W = A^T dW, X_E = A^T dE, and the gradient of the strengths, of one chunk of one key head.

    With B = (I + N diag(beta))^-1 = I - N A diag(beta): w - N W = B w and J - N E = B J.
    """
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    at, o = TokenRows(b, t, rows), tl.arange(0, BT)
    below = o[:, None] > o[None, :]
    b_w = load_tokens(x.w, x.s_w, at, i_h, 0, K, BT, BK).to(tl.float32)
    b_k = load_tokens(x.k, x.s_k, at, i_h, 0, K, BT, BK)
    b_J = tl.where(below, mm_exact(b_w, tl.trans(b_k), None, EXACT), 0.0)
    b_beta = load_token_scalars(x.beta, x.s_beta, at, i_h, BT)
    b_N = mm_exact(b_w, tl.trans(b_w), None, EXACT)
    b_LT = tl.where(o[:, None] < o[None, :], b_N * b_beta[None, :], 0.0)  # w w^T is symmetric
    b_N = tl.where(below, b_N, 0.0)
    b_AT = inverse_transposed(b_N * b_beta[:, None], b_LT, BT, EXACT, WARPS)
    b_B = tl.where(o[:, None] == o[None, :], 1.0, 0.0) - mm_exact(b_N, tl.trans(b_AT) * b_beta[None, :], None, EXACT)
    b_X = load_tokens(d.dE, factors.s_E, at, i_h, 0, BT, BT, BT)
    b_X = mm_exact(b_AT, b_X, None, EXACT)
    store_tokens(d.dE, factors.s_E, at, i_h, 0, b_X, BT)
    b_dbeta = tl.sum(b_X * mm_exact(b_B, b_J, None, EXACT), 1)
    b_X = load_tokens(d.dW, factors.s_rows, at, i_h, 0, K, BT, BK)
    b_X = mm_exact(b_AT, b_X, None, EXACT)
    store_tokens(d.dW, factors.s_rows, at, i_h, 0, b_X, K)
    b_dbeta += tl.sum(b_X * mm_exact(b_B, b_w, None, EXACT), 1)
    store_token_scalars(p_dbeta, s_dbeta, at, i_h, b_dbeta, BT)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_tokens_bwd_triton(
    x, factors, d, p_dk, s_dk, p_dw, s_dw, packing, N, T, per_sequence,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and directions of one chunk of one key head.

    dL is formed with its transpose from products, not by transposing a result.
    """
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    at, o = TokenRows(b, t, rows), tl.arange(0, BT)
    below, above = o[:, None] > o[None, :], o[:, None] < o[None, :]
    BE: tl.constexpr = 64  # columns at a time: all of them would need more registers than there are
    b_beta = load_token_scalars(x.beta, x.s_beta, at, i_h, BT)
    b_XE = load_tokens(d.dE, factors.s_E, at, i_h, 0, BT, BT, BT)
    b_E = load_tokens(factors.E, factors.s_E, at, i_h, 0, BT, BT, BT)
    b_dN = mm(b_XE, tl.trans(b_E), None, OP, PRECISION)
    b_other = mm(b_E, tl.trans(b_XE), None, OP, PRECISION)
    for part in range(0, BK, BE):
        b_XW = load_tokens(d.dW, factors.s_rows, at, i_h, part, K, BT, BE)
        b_W = load_tokens(factors.W, factors.s_rows, at, i_h, part, K, BT, BE)
        b_dN = mm(b_XW, tl.trans(b_W), b_dN, OP, PRECISION)
        b_other = mm(b_W, tl.trans(b_XW), b_other, OP, PRECISION)
    b_dN = tl.where(below, -b_dN * b_beta[:, None], tl.where(above, -b_other * b_beta[None, :], 0.0))
    b_dJ = tl.where(below, b_XE * b_beta[:, None], 0.0)
    b_dJT = tl.where(above, tl.trans(b_XE) * b_beta[None, :], 0.0)
    for part in range(0, BK, BE):
        b_w = load_tokens(x.w, x.s_w, at, i_h, part, K, BT, BE).to(tl.float32)
        b_XW = load_tokens(d.dW, factors.s_rows, at, i_h, part, K, BT, BE)
        b_dw = tl.fma(b_XW, b_beta[:, None], load_tokens(d.dw, factors.s_rows, at, i_h, part, K, BT, BE))
        b_dw = mm(b_dN, b_w, b_dw, OP, PRECISION)
        b_k = load_tokens(x.k, x.s_k, at, i_h, part, K, BT, BE)
        store_tokens(p_dw, s_dw, at, i_h, part, mm(b_dJ, b_k, b_dw, OP, PRECISION), K)
        b_dk = load_tokens(d.dk, factors.s_rows, at, i_h, part, K, BT, BE)
        store_tokens(p_dk, s_dk, at, i_h, part, mm(b_dJT, b_w, b_dk, OP, PRECISION), K)
