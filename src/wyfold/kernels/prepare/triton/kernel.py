"""The kernel of `prepare` in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton import (
    add_channel_grams,
    load_sub_chunk_gate,
    sub_chunk_sums,
    sums_after,
    sums_between,
)
from wyfold.tile.decay.triton import load_gate, running_sum, scalar_rows
from wyfold.tile.decay.triton.pairs import decayed_grams_transposed
from wyfold.tile.dot.triton import mm_exact
from wyfold.tile.index.triton import TokenRows, chunk_span, load_tokens, store_tile, store_tokens, store_upper
from wyfold.tile.index.triton.blocks import load_token_block
from wyfold.tile.index.triton.strength import load_strength
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks, store_sub_chunks
from wyfold.tile.inverse.triton import inverse_transposed, inverse_transposed_whole, nonzero_beta
from wyfold.tile.norm.triton import reciprocal_norm


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "clear", "with_w"])
def wyfold_prepare_triton(
    x_q,
    x_k,
    tokens,
    gate,
    strength,
    factors,
    packing,
    N,
    T,
    per_sequence,
    clear,
    with_w,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program computes the factors of a chunk of one value head.

    With strength.erases 0 the keys read no state, and A is the identity. Under a channel gate, W and decayed keys are
    then not computed.
    """
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BE: tl.constexpr = SIZES.BE
    BV: tl.constexpr = SIZES.BV
    WARPS: tl.constexpr = SIZES.WARPS
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = FLAGS.PACKED
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    GATE: tl.constexpr = FLAGS.GATE
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    NORM: tl.constexpr = FLAGS.NORM
    LOGIT: tl.constexpr = FLAGS.LOGIT
    WHOLE: tl.constexpr = FLAGS.WHOLE
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    ERASES: tl.constexpr = not (CHANNEL and factors.k is None)
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    i_h = i_hv // (HV // H)
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows, T)
    if PACKED:
        if i_n == N:
            if clear:
                store_tokens(tokens.o, tokens.s_o, at, i_hv, 0, tl.zeros((BT, BV), tl.float32), V)
            return

    o_r = tl.arange(0, BT)
    b_beta = load_strength(strength, at, i_hv, LOGIT, BT)
    # A 0 that the compiler cannot fold, for addresses in sub-chunks.
    opaque_zero = tl.minimum(T, 0)
    # Without a channel gate, the chunk's keys and gate stay in registers.
    b_keys, b_g = None, None
    if CHANNEL:
        b_rq, b_rk, b_qk = _row_products(x_q, tokens.s_q, x_k, tokens.s_k, at, i_h, K, BT, NORM)
        b_JT, b_PT = tl.zeros((BT // 16, BT, 16), tl.float32), tl.zeros((BT // 16, BT, 16), tl.float32)
        for column in tl.range(0, K, BK, num_stages=STAGES):
            b_q = load_sub_chunks(x_q, tokens.s_q, at, i_h, column, opaque_zero, K, BT, BK).to(tl.float32)
            b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BK).to(tl.float32)
            if NORM:
                b_q *= b_rq.reshape(BT // 16, 16, 1)
                b_k *= b_rk.reshape(BT // 16, 16, 1)
            b_P, b_first, b_rest = sub_chunk_sums(
                load_sub_chunk_gate(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BK)
            )
            b_between = sums_between(b_first, b_rest, BT // 16)
            b_JT, b_PT, b_qf, b_kf = add_channel_grams(b_JT, b_PT, b_q, b_k, b_k, b_P, b_rest, b_between, OP, PRECISION)
            i_i = tl.arange(0, BT // 16)[:, None, None]
            b_start = b_first + tl.sum(tl.where(i_i == 0, b_between, 0.0), axis=0)
            b_in = tl.exp2(b_start)[:, None]
            if ERASES:
                store_sub_chunks(factors.k, i_tile, column, b_kf * b_in, opaque_zero, K, BT, BK)
            store_sub_chunks(factors.q, i_tile, column, b_qf * b_in, opaque_zero, K, BT, BK)
            o_n, o_k = tl.arange(0, BT // 16)[:, None], column + tl.arange(0, BK)[None, :]
            last = (o_n == BT // 16 - 1) & (o_k < K)
            tl.store(factors.total + i_tile * K + (o_k + 0 * o_n), tl.exp2(b_start + b_rest), mask=last)
        b_JT, b_PT = b_JT.permute(1, 0, 2).reshape(BT, BT), b_PT.permute(1, 0, 2).reshape(BT, BT)
        before = o_r[:, None] < o_r[None, :]
        b_JT = tl.where(before, b_JT, 0.0)
        b_PT = tl.where(before, b_PT, tl.where(o_r[:, None] == o_r[None, :], b_qk[None, :], 0.0))
        # Only substitution reads it, no tile product.
        b_J = tl.trans(b_JT)
    else:
        b_q = load_token_block(x_q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
        b_keys = load_token_block(x_k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
        _, b_g = load_gate(gate, at, i_hv, 0, GATE, ACTIVATION, K, BT, BK)
        b_rq, b_rk = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
        if NORM:
            b_rq, b_rk = reciprocal_norm(b_q), reciprocal_norm(b_keys)
        b_J, b_JT, b_PT = decayed_grams_transposed(b_q, b_keys, b_rq, b_rk, b_g, GATE, BT, OP, PRECISION)

    if factors.norms is not None:
        tl.store(factors.norms + i_tile * (2 * BT) + o_r, b_rq)
        tl.store(factors.norms + i_tile * (2 * BT) + BT + o_r, b_rk)
    b_AT, b_FT = None, b_PT
    if ERASES:
        b_divisor = nonzero_beta(b_beta)
        b_AT = _inverse(b_J, b_JT, b_divisor * strength.erases, BT, EXACT, WARPS, WHOLE)
        if with_w:
            store_upper(factors.W, i_tile, b_AT * b_divisor[:, None] * (1.0 / b_divisor)[None, :], BT)
        b_FT = mm_exact(b_AT, b_PT, None, EXACT)
    if factors.F is not None:
        store_upper(factors.F, i_tile, b_FT, BT)
    if factors.FB is not None:
        store_upper(factors.FB, i_tile, b_FT * b_beta[:, None], BT)

    if CHANNEL:
        if factors.E is not None:
            for column in tl.range(0, K, BE, num_stages=STAGES):
                b_k = load_sub_chunks(x_k, tokens.s_k, at, i_h, column, opaque_zero, K, BT, BE).to(tl.float32)
                if NORM:
                    b_k *= b_rk.reshape(BT // 16, 16, 1)
                b_P, b_first, b_rest = sub_chunk_sums(
                    load_sub_chunk_gate(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BE)
                )
                b_end = b_rest + sums_after(b_first + b_rest, BT // 16)
                b_kt = (b_k * tl.exp2(b_end[:, None] - b_P)).reshape(BT, BE)
                if ERASES:
                    b_kt = mm_exact(b_AT, b_kt, None, EXACT)
                store_tile(factors.E, i_tile, 0, column, b_kt, BT, K, BT, BE)
        b_in, b_out = tl.full((BT,), 1.0, tl.float32), tl.full((BT,), 1.0, tl.float32)
        b_rk, b_rq = b_in, b_in
    else:
        b_in, b_out, total = scalar_rows(running_sum(b_g, GATE), GATE, BT)
        tl.store(factors.total + i_tile, total)
        if factors.E is not None:
            b_E = mm_exact(b_AT * (b_out * b_rk)[None, :], tl.cast(b_keys, tl.float32), None, EXACT)
            store_tile(factors.E, i_tile, 0, 0, b_E, BT, K, BT, BK)
    b_in_k, b_in_q, b_out = b_in * b_rk * strength.erases, b_in * b_rq, b_out * b_rk
    if factors.rows_bwd is not None:
        _store_rows(factors.rows_bwd, i_tile, b_in_k, b_in_q, b_out, b_beta, BT)
    if factors.FB is not None:
        b_out = b_beta * b_out
    _store_rows(factors.rows, i_tile, b_in_k, b_in_q, b_out, b_beta, BT)


@triton.jit
def _inverse(b_J, b_JT, b_weight, BT: tl.constexpr, EXACT: tl.constexpr, WARPS: tl.constexpr, WHOLE: tl.constexpr):
    """(I + diag(weight) J)^-1, transposed."""
    b_U, b_UT = b_J * b_weight[:, None], b_JT * b_weight[None, :]
    if WHOLE:
        return inverse_transposed_whole(b_U, b_UT, BT, EXACT, WARPS)
    else:
        return inverse_transposed(b_U, b_UT, BT, EXACT, WARPS)


@triton.jit
def _store_rows(p, i_tile, b_in_k, b_in_q, b_out, b_beta, BT: tl.constexpr):
    """Store a tile's four numbers per token, `Prepared.rows`."""
    p += i_tile * (4 * BT) + tl.arange(0, BT)
    tl.store(p, b_in_k)
    tl.store(p + BT, b_in_q)
    tl.store(p + 2 * BT, b_out)
    tl.store(p + 3 * BT, b_beta)


@triton.jit
def _row_products(x_q, s_q, x_k, s_k, at, h, K: tl.constexpr, BT: tl.constexpr, NORM: tl.constexpr):
    """Reciprocal norms of the rows of q and k (ones without NORM), and the normalised <q, k> of each row.   3 x [BT]"""
    BW: tl.constexpr = 64
    b_qq, b_kk, b_qk = tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    for column in range(0, K, BW):
        b_q = load_tokens(x_q, s_q, at, h, column, K, BT, BW).to(tl.float32)
        b_k = load_tokens(x_k, s_k, at, h, column, K, BT, BW).to(tl.float32)
        b_qk += tl.sum(b_q * b_k, axis=1)
        if NORM:
            b_qq += tl.sum(b_q * b_q, axis=1)
            b_kk += tl.sum(b_k * b_k, axis=1)
    if NORM:
        b_rq, b_rk = tl.rsqrt(b_qq + 1e-6), tl.rsqrt(b_kk + 1e-6)
        return b_rq, b_rk, b_qk * b_rq * b_rk
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return ones, ones, b_qk
