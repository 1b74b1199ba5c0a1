"""Queries on their way back through the chunks of their block."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    average,
    load_numbers,
    load_rows,
    load_sums,
    load_total,
    own_products,
    products_with_directions,
    seen,
    store_numbers,
    store_rows,
    sums_inside,
    weights,
)
from wyfold.tile.dot.triton import mm, mm_exact
from wyfold.tile.index.triton import TokenRows, chunk_span, load_tokens, near_row


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_starts_triton(
    own, p_o, s_o, p_rest, queries, keys, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
    SUMS: tl.constexpr,
):  # fmt: skip
    """Queries of one chunk and query head at the end of each earlier chunk and at their block's start; <do, o>.

    The last is computed from o and what its rounding left. With SUMS it is the sum over the keys, here those of the
    own block: then the errors of the gradients of a query's weights cancel in their weighted sum.
    """
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
    at, token = TokenRows(b, t, rows), b * T + t
    b_do = load_rows(queries.do, token, i_q, rows, HQ, V, BT, BV)
    b_q = load_tokens(own.q, own.s_q, at, i_q, 0, K, BT, BK)
    b_w = load_rows(keys.w, token, i_h, rows, H, K, BT, BK)
    b_W = load_rows(keys.W, token, i_h, rows, H, K, BT, BK)
    b_P = products_with_directions(b_q, b_w, EXACT)
    b_x = b_q.to(tl.float32) - mm_exact(b_P, b_W, None, EXACT)
    b_lse = tl.zeros((BT,), tl.float32)
    if SUMS:
        b_lse = load_numbers(queries.lse, token, i_q, rows, HQ, BT)
        b_own = load_tokens(own.k, own.s_k, at, i_h, 0, K, BT, BK)
        b_s = own_products(b_q, b_own, b_P, load_rows(own.E, token, i_h, rows, H, BT, BT, BT), OP, PRECISION, EXACT)
        b_offset = -b_lse[:, None]
        if keys.g is not None:
            b_offset = tl.fma(
                sums_inside(load_numbers(keys.g, token, i_q, rows, HQ, BT), BT), factor.logit_gate, b_offset
            )
        b_p = tl.where(seen(BT), weights(b_s, factor.logit_scale, b_offset), 0.0)
        b_v = load_rows(keys.v, token, i_h, rows, H, V, BT, BV)
        b_delta = tl.sum(b_p * mm(b_do, tl.trans(b_v), None, OP, PRECISION), 1)
    else:
        b_o = load_tokens(p_o, s_o, at, i_q, 0, V, BT, BV).to(tl.float32)
        b_o += load_tokens(p_rest, s_o, at, i_q, 0, V, BT, BV).to(tl.float32)
        b_delta = tl.sum(b_o * b_do.to(tl.float32), 1)
    place = i_s % BLOCK
    b_passed = tl.zeros((BT,), tl.float32)
    if keys.g is not None:
        b_passed = load_numbers(keys.start, token, i_q, rows, HQ, BT)
    for i in range(place):
        before = token - (i + 1) * BT
        near = near_row(token, place, place - 1 - i, rows, BT, BLOCK)
        store_rows(queries.near, near, i_q, rows, b_x, HQ, K)
        b_offset = -b_lse[:, None]
        if keys.g is not None:
            store_numbers(queries.near_sums, near, i_q, rows, b_passed, HQ, BT)
            b_after = b_passed[:, None] + load_sums(keys.stop, before, i_q, HQ, BT)[None, :]
            b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            b_passed += load_total(keys.start, before, i_q, HQ, BT)
        if SUMS:
            b_k = load_rows(keys.k, before, i_h, BT, H, K, BT, BK)
            b_v = load_rows(keys.v, before, i_h, BT, H, V, BT, BV)
            b_delta += average(b_x, b_do, b_k, b_v, b_offset, factor, OP, PRECISION)
        b_w = load_rows(keys.w, before, i_h, BT, H, K, BT, BK)
        b_W = load_rows(keys.W, before, i_h, BT, H, K, BT, BK)
        b_x -= mm(mm(b_x, tl.trans(b_w), None, OP, PRECISION), b_W, None, OP, PRECISION)
    store_rows(queries.x, token, i_q, rows, b_x, HQ, K)
    store_numbers(queries.delta, token, i_q, rows, b_delta, HQ, BT)
