"""Stores of the adjoint: the gradients of a chunk, or zeros past the last boundary of a packed batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.low_rank_gradients.triton.loads import load_columns
from wyfold.tile.columns.triton import keys_bwd
from wyfold.tile.decay.channel.triton.adjoint import sum_over, sums_inside
from wyfold.tile.decay.channel.triton.near_pairs import sub_chunk_row
from wyfold.tile.decay.channel.triton.own_pairs import own_pairs_of_rows
from wyfold.tile.decay.triton import NEAR
from wyfold.tile.decay.triton.gradient import log_gate_bwd, store_gate_gradient
from wyfold.tile.index.triton import store_token_scalars, store_tokens
from wyfold.tile.index.triton.sub_chunks import store_token_sub_chunks


class Place(NamedTuple):
    """Where a program's gradients belong, inside kernels: tile, tokens, those of the erasing rows, heads, channels."""

    i_tile: Any
    at: Any
    early: Any
    i_hv: Any
    heads: Any
    i_k: Any
    column: Any


@triton.jit
def store(
    found, grams, b_written, b_over, b_x, tokens, norms, gate, outputs, dgate, place, unit, opaque_zero,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Store a chunk's gradients: `ChunkGradients`, and that of the gate from its terms.

    Args:
        grams: `GramGradients`, whose pairs of a token with itself are added to the rows' gradients.
        b_written: [NB, NEAR, BK] terms of the gate's gradient that belong to all later rows.
        b_over: [NB, BK] terms that belong to all rows of a sub-chunk, but for those of found.
        b_x: [NB, NEAR, BK] the gate as it was given.
    """
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    NB: tl.constexpr = BT // NEAR
    TWO: tl.constexpr = FLAGS.RULE == "given"
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    CLAMPED: tl.constexpr = FLAGS.CLAMPED
    i_n = tl.arange(0, NB)
    at, i_hv, column = place.at, place.i_hv, place.column
    b_over += sum_over(tl.sum(found.terms, axis=1), i_n + 1, i_n * 0 + NB, NB)
    b_dg = sums_inside(found.terms, b_written, b_over)
    b_dx, b_dA = log_gate_bwd(b_x, b_dg, gate, i_hv, column, CLAMPED, "channel", ACTIVATION, K, BK)
    store_gate_gradient(dgate, place.i_tile, at, i_hv, column, b_dx, b_dA, opaque_zero, "channel", K)
    b_db, b_dk = found.b, found.k
    columns = load_columns(tokens, at, place.heads, norms, column, opaque_zero, SIZES, FLAGS)
    b_da, b_dq = own_pairs_of_rows(found.a, found.q, grams, columns, FLAGS.RULE != "keys", TWO)
    if FLAGS.RULE != "keys" and outputs.a is not None:
        # The last early row is the chunk's first token, which reads undecayed, and reads no row of the chunk.
        o_n, o_k = tl.arange(0, NB)[:, None], (place.i_k * BK + tl.arange(0, BK))[None, :]
        p_first = outputs.a + at.b * outputs.s_a[0] + at.t * outputs.s_a[1] + i_hv * outputs.s_a[2]
        b_first = sub_chunk_row(found.undecayed, NEAR - 1) * unit
        if not TWO:
            b_first = -b_first  # a is minus the erasing row
        p_first += o_n * 0 + o_k.to(tl.int64) * outputs.s_a[3]
        tl.store(p_first, b_first.to(p_first.dtype.element_ty), mask=(o_n == NB - 1) & (o_k < K) & (at.rows > 0))
    if not TWO:
        b_dk, b_da, b_db, b_beta = keys_bwd(
            tokens, at, place.heads, norms, column, opaque_zero, b_da, b_db, SIZES, NEAR
        )
        if outputs.beta is not None:
            p_beta = outputs.beta + place.i_k * outputs.s_slice
            store_token_scalars(p_beta, outputs.s_beta, at, i_hv, tl.sum(b_beta, axis=2).reshape(BT), BT)
    if outputs.b is not None:
        store_token_sub_chunks(outputs.b, outputs.s_b, at, i_hv, column, b_db, opaque_zero, K)
    if outputs.k is not None:
        store_token_sub_chunks(outputs.k, outputs.s_k, at, i_hv, column, b_dk, opaque_zero, K)
    if outputs.q is not None:
        store_token_sub_chunks(outputs.q, outputs.s_q, at, i_hv, column, b_dq, opaque_zero, K)
    if outputs.a is not None:
        store_token_sub_chunks(outputs.a, outputs.s_a, place.early, i_hv, column, b_da, opaque_zero, K)


@triton.jit
def store_token_tiles(
    b_da, b_dq, b_db, b_dk, tokens, norms, outputs, at, i_hv, heads, i_k, SIZES: tl.constexpr, FLAGS: tl.constexpr
):
    """Store the gradients of erasing rows, queries and columns, tiles [BT, BK]. b_dk: If there are two columns."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    column = i_k * SIZES.BK
    if FLAGS.RULE != "given":
        b_dk, b_da, b_db, b_beta = keys_bwd(tokens, at, heads, norms, column, 0, b_da, b_db, SIZES, 0)
        if outputs.beta is not None:
            p_beta = outputs.beta + i_k * outputs.s_slice
            store_token_scalars(p_beta, outputs.s_beta, at, i_hv, tl.sum(b_beta, axis=1), BT)
    _store_wanted(b_dq, b_dk, b_da, b_db, outputs, at, i_hv, column, K)


@triton.jit
def _store_wanted(b_dq, b_dk, b_da, b_db, outputs, at, h, column, K: tl.constexpr):
    """Store those of the gradients of queries, second columns, erasing rows and columns that are wanted."""
    if outputs.q is not None:
        store_tokens(outputs.q, outputs.s_q, at, h, column, b_dq, K)
    if outputs.k is not None:
        store_tokens(outputs.k, outputs.s_k, at, h, column, b_dk, K)
    if outputs.a is not None:
        store_tokens(outputs.a, outputs.s_a, at, h, column, b_da, K)
    if outputs.b is not None:
        store_tokens(outputs.b, outputs.s_b, at, h, column, b_db, K)


@triton.jit
def clear(outputs, dgate, i_tile, at, h, i_k, opaque_zero, SIZES: tl.constexpr):
    """Zero the gradients of tokens past the last boundary, for some channels, with that of a gate per channel."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    clear_tokens(outputs, at, h, i_k, SIZES)
    b_none = tl.zeros((BT // NEAR, NEAR, BK), tl.float32)
    store_gate_gradient(dgate, i_tile, at, h, i_k * BK, b_none, b_none, opaque_zero, "channel", K)


@triton.jit
def clear_tokens(outputs, at, h, i_k, SIZES: tl.constexpr):
    """Zero the gradients of rows, columns and write strengths of tokens past the last boundary."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    zeros, column = tl.zeros((BT, BK), tl.float32), i_k * BK
    _store_wanted(zeros, zeros, zeros, zeros, outputs, at, h, column, K)
    if outputs.beta is not None:
        store_token_scalars(outputs.beta + i_k * outputs.s_slice, outputs.s_beta, at, h, tl.sum(zeros, axis=1), BT)
