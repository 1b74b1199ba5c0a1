"""Adjoint of the pairs of a token with itself, in Triton. No gate decays them, so they are multiplied unrounded."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton.chunk_adjoint import interleaved_rows
from wyfold.tile.decay.triton import NEAR


@triton.jit
def own_pairs(b_D, meets, factor):
    """Gradients of the pairs of a token with itself, times a row's factor.

    Args:
        b_D: [2 BT, 2 BT] gradients of all pairs, interleaved.
        meets: [2 BT] whether a row meets the columns of its token.
        factor: [2 BT].

    Returns:
        `GramGradients.ab`, `ak`, `qb` and `qk`.
    """
    o_r, _ = interleaved_rows(b_D.shape[0] // 2)
    own = (o_r[:, None] == o_r[None, :]) & meets[:, None]
    _, column = interleaved_rows(b_D.shape[1] // 2)
    b_b = tl.sum(tl.where(own & (column == 0)[None, :], b_D, 0.0), axis=1) * factor
    b_k = tl.sum(tl.where(own & (column == 1)[None, :], b_D, 0.0), axis=1) * factor
    b_ab, b_qb = _separate_rows(b_b)
    b_ak, b_qk = _separate_rows(b_k)
    return b_ab, b_ak, b_qb, b_qk


@triton.jit
def _separate_rows(x):
    """Numbers of both kinds of rows of an interleaved tile.   [2 BT] -> 2 x [NB, NEAR, 1]"""
    x, y = x.reshape(x.shape[0] // (2 * NEAR), 2, NEAR).permute(0, 2, 1).split()
    return x[:, :, None], y[:, :, None]


@triton.jit
def own_pairs_of_columns(b_db, b_dk, grams, reading, BEFORE: tl.constexpr, TWO: tl.constexpr):
    """Add the pairs of a token with itself to the gradients of columns; no gate decays them.

    Args:
        reading: Erasing rows and queries, [NB, NEAR, BK] each, as they are.
        BEFORE: Whether erasing rows, one token early, meet the columns of their row.
        TWO: Whether there are two kinds of columns.
    """
    b_a, b_q = reading
    b_db = tl.fma(b_q, _spread(grams.qb, b_q), b_db)
    if BEFORE:
        b_db = tl.fma(b_a, _spread(grams.ab, b_a), b_db)
    if TWO:
        b_dk = tl.fma(b_a, _spread(grams.ak, b_a), tl.fma(b_q, _spread(grams.qk, b_q), b_dk))
    return b_db, b_dk


@triton.jit
def own_pairs_of_rows(b_da, b_dq, grams, columns, BEFORE: tl.constexpr, TWO: tl.constexpr):
    """Add the pairs of a token with itself to the gradients of erasing rows and queries.

    Args:
        columns: b and k, [NB, NEAR, BK] each, as they are.
        BEFORE, TWO: As of `own_pairs_of_columns`.
    """
    b_b, b_k = columns
    b_dq = tl.fma(b_b, _spread(grams.qb, b_b), b_dq)
    if BEFORE:
        b_da = tl.fma(b_b, _spread(grams.ab, b_b), b_da)
    if TWO:
        b_da = tl.fma(b_k, _spread(grams.ak, b_k), b_da)
        b_dq = tl.fma(b_k, _spread(grams.qk, b_k), b_dq)
    return b_da, b_dq


@triton.jit
def _spread(x, like):
    """Numbers of rows [NB, NEAR, 1] for every channel."""
    return tl.broadcast_to(x, like.shape)
