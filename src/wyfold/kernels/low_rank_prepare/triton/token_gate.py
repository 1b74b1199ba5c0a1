"""Kernel of `low_rank_prepare` where the gate is one number for each token, or none: decays are outside of the grams.

Grams are products of the rows as they were given. Write strengths, norms and decays multiply pairs of rows afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.low_rank_prepare.triton.fold import fold
from wyfold.tile.columns.triton import RowHeads, erasing_rows, load_rows, raw_columns, row_factors
from wyfold.tile.decay.triton import load_gate, running_sum
from wyfold.tile.decay.triton.pairs import decay_to_end, interval_decay
from wyfold.tile.dot.triton import mm, mm_exact, no_fma
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    interleave,
    separate,
    store_tile,
    store_tokens,
)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "clear", "backward"])
def wyfold_low_rank_prepare_token_gate_triton(
    tokens, gate, strength, factors, packing, o, s_o, N, T, per_sequence, clear, backward,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program computes the factors of a chunk of one value head."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BE: tl.constexpr = SIZES.BE
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    RULE: tl.constexpr = FLAGS.RULE
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    TWO: tl.constexpr = FLAGS.RULE == "given"
    # A product of two tokens has more bits than one.
    OP: tl.constexpr = tl.float32 if RULE == "keys" and tokens.b is not None else FLAGS.OP
    GATE: tl.constexpr = FLAGS.GATE
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    heads = RowHeads(i_hv // (HV // SIZES.H), i_hv // (HV // SIZES.HB))
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    at = TokenRows(b, t, rows, T)
    if FLAGS.PACKED:
        if i_n == N:
            if clear:
                store_tokens(o, s_o, at, i_hv, 0, tl.zeros((BT, BV), tl.float32), SIZES.V)
            return
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, False)
    _, b_g = load_gate(gate, at, i_hv, 0, GATE, "given", K, BT, BK)
    b_in, b_read, b_out, total = token_decays(b_g, GATE, BEFORE, BT)
    b_column = norms.k * norms.beta
    b_in *= norms.q
    b_read *= norms.a
    # Rows of the grams are the erasing rows, then the queries: with 64, Hopper's matrix unit reads shared memory.
    b_APb, b_APk = tl.zeros((2 * BT, BT), tl.float32), tl.zeros((2 * BT, BT), tl.float32)
    for column in tl.range(0, K, BK, num_stages=STAGES):
        b_q = load_rows(tokens.q, tokens.s_q, at, heads.k, column, 0, K, BT, BK, 0)
        b_a = erasing_rows(tokens, at, heads, None, column, 0, RULE, SIZES, BK, 0)
        store_tile(factors.q, i_tile, 0, column, b_q * b_in[:, None], BT, K, BT, BK)
        store_tile(factors.rows, i_tile, 0, column, b_a * b_read[:, None], BT, K, BT, BK)
        o_k = column + tl.arange(0, BK)
        tl.store(factors.total + i_tile * K + o_k, tl.zeros((BK,), tl.float32) + total, mask=o_k < K)
        b_rows = interleave(b_a.to(OP), b_q.to(OP))
        b_c = raw_columns(tokens, at, heads, column, RULE, SIZES, BK)
        b_APb = mm(b_rows, tl.trans(b_c), b_APb, OP, PRECISION)
        if TWO:
            b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BK, 0)
            b_APk = mm(b_rows, tl.trans(b_k), b_APk, OP, PRECISION)

    b_reads, b_queries = pair_factors(b_g, norms, b_column, TWO, BEFORE, BT)
    b_rows = fold(factors, i_tile, b_APb, b_APk, b_reads, b_queries, backward, TWO, False, False, EXACT, SIZES.WARPS)
    if not TWO:
        b_out *= b_column
    b_rows = no_fma(b_rows * b_out[None, :])
    for column in tl.range(0, K, BE, num_stages=STAGES):
        b_c = raw_columns(tokens, at, heads, column, RULE, SIZES, BE).to(FLAGS.OP)
        b_E = mm_exact(b_rows, b_c, None, EXACT)
        if TWO:
            b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BE, 0)
            b_E, b_K = separate(b_E)
            store_tile(factors.K, i_tile, 0, column, b_K + b_k * b_out[:, None], BT, K, BT, BE)
        store_tile(factors.E, i_tile, 0, column, b_E, BT, K, BT, BE)


@triton.jit
def token_decays(b_g, GATE: tl.constexpr, BEFORE: tl.constexpr, BT: tl.constexpr):
    """Decays from the chunk's start to each query and to each erasing row, from each row to the end, and of the chunk.

    The last is one number, the others are [BT].
    """
    b_G = running_sum(b_g, GATE)
    b_H = b_G
    if BEFORE:
        b_H = tl.where(tl.arange(0, BT) > 0, row_before(b_G), 0.0)
    last = tl.sum(tl.where(tl.arange(0, BT) == BT - 1, b_G, 0.0), axis=0)
    return tl.exp(b_G), tl.exp(b_H), decay_to_end(b_g, GATE, BT), tl.exp(last)


@triton.jit
def pair_factors(b_g, norms, b_column, TWO: tl.constexpr, BEFORE: tl.constexpr, BT: tl.constexpr):
    """What multiplies the products of erasing rows, and of queries, with columns: decays, norms and strengths.

    Undefined where a row does not meet a column.   2 x [BT, BT]
    """
    b_pairs = interval_decay(b_g, BT)
    b_read = b_pairs
    if BEFORE:
        o_before = tl.maximum(tl.arange(0, BT)[:, None] - 1, 0)
        b_read = tl.gather(b_pairs, tl.broadcast_to(o_before, (BT, BT)), 0)
    b_read, b_pairs = b_read * norms.a[:, None], b_pairs * norms.q[:, None]
    if not TWO:
        b_read *= b_column[None, :]
        b_pairs *= b_column[None, :]
    return b_read, b_pairs


@triton.jit
def row_before(x):
    """Every entry's predecessor; the first is its own.   [BT]"""
    return tl.gather(x, tl.maximum(tl.arange(0, x.shape[0]) - 1, 0), 0)


@triton.jit
def row_after(x):
    """Every entry's successor; zero after the last.   [BT]"""
    BT: tl.constexpr = x.shape[0]
    o = tl.arange(0, BT) + 1
    return tl.where(o < BT, tl.gather(x, tl.minimum(o, BT - 1), 0), 0.0)
