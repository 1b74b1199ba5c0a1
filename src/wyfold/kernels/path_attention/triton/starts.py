"""Queries on their way back through the chunks of their block."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import load_total
from wyfold.tile.dot.triton import mm, mm_exact
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_tokens,
)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "s_near"])
def wyfold_path_starts_triton(
    p_q, s_q, p_o, s_o, queries, s_near, keys,
    packing, N, T, per_sequence,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Queries of one chunk and query head at the end of each earlier chunk and at their block's start; <do, o>."""
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_q = i_tile // HQ, i_tile % HQ
    i_h = i_q // (HQ // H)
    i_n, i_s, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    at = TokenRows(b, t, rows)
    b_o = load_tokens(p_o, s_o, at, i_q, 0, V, BT, BV).to(tl.float32)
    b_do = load_tokens(queries.do, queries.s_do, at, i_q, 0, V, BT, BV).to(tl.float32)
    store_token_scalars(queries.delta, queries.s_lse, at, i_q, tl.sum(b_o * b_do, 1), BT)
    b_q = load_tokens(p_q, s_q, at, i_q, 0, K, BT, BK)
    b_x = queries_at_start(b_q, keys, at, i_h, SIZES, EXACT)
    place = i_s % BLOCK
    b_passed = tl.zeros((BT,), tl.float32)
    if keys.g is not None:
        b_passed = load_token_scalars(keys.start, keys.s_sums, at, i_q, BT)
    for i in range(place):
        before = TokenRows(b, t - (i + 1) * BT, BT)
        store_tokens(queries.near + (place - 1 - i) * s_near.to(tl.int64), queries.s_x, at, i_q, 0, b_x, K)
        if keys.g is not None:
            p_sums = queries.near_sums + (place - 1 - i) * (s_near // K).to(tl.int64)
            store_token_scalars(p_sums, queries.s_lse, at, i_q, b_passed, BT)
            b_passed += load_total(keys.start, keys, b, before.t, i_q, BT)
        b_w = load_tokens(keys.w, keys.s_rows, before, i_h, 0, K, BT, BK)
        b_W = load_tokens(keys.W, keys.s_rows, before, i_h, 0, K, BT, BK)
        b_x -= mm(mm(b_x, tl.trans(b_w), None, OP, PRECISION), b_W, None, OP, PRECISION)
    store_tokens(queries.x, queries.s_x, at, i_q, 0, b_x, K)


@triton.jit
def queries_at_start(b_q, keys, at, i_h, SIZES: tl.constexpr, EXACT: tl.constexpr):
    """Queries of a chunk at its start.   [BT, BK] float32"""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    o_r = tl.arange(0, BT)
    b_w = load_tokens(keys.w, keys.s_rows, at, i_h, 0, K, BT, BK)
    b_W = load_tokens(keys.W, keys.s_rows, at, i_h, 0, K, BT, BK)
    b_P = tl.where(o_r[:, None] >= o_r[None, :], mm_exact(b_q, tl.trans(b_w), None, EXACT), 0.0)
    return b_q.to(tl.float32) - mm_exact(b_P, b_W, None, EXACT)
