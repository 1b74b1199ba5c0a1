"""Gradients between the chunks of one block: of the queries, far to near, then of the keys and factors."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    load_sums,
    to_columns,
    weights,
)
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_tokens,
)


class OwnRows(NamedTuple):
    """Kernel argument: gradients of queries inside their block; fields of `PathWorkspace`, contiguous.

    Attributes:
        dq, others: Gradients from all blocks before, then from all chunks before.
        dnear: [BLOCK - 1, B, T, HQ, K] gradients of the queries at the start of each earlier chunk of their block.
        dtotal: [BLOCK - 1, B, T, HQ] at a chunk's first token: gradients of the earlier chunks' sums of log gates.
    """

    dq: Any
    others: Any
    dnear: Any
    dtotal: Any


class OwnKeys(NamedTuple):
    """Kernel argument: gradients of keys and factors; fields of `PathWorkspace`. Factors' have their strides."""

    dk: Any
    dW: Any
    dw: Any
    dv: Any
    s_dv: Any
    dend: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "s_near"])
def wyfold_path_own_rows_triton(
    queries, s_near, keys, out, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of one chunk of one query head from the earlier chunks of its block."""
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
    place, at = i_s % BLOCK, TokenRows(b, t, rows)
    written = TokenRows(b, t, tl.where(i_s >= BLOCK, rows, 0))  # a first block has no gradients from others yet
    b_grad = load_tokens(out.dq, queries.s_x, written, i_q, 0, K, BT, BK)
    b_far = load_token_scalars(out.others, queries.s_lse, written, i_q, BT)
    b_do = load_tokens(queries.do, queries.s_do, at, i_q, 0, V, BT, BV)
    b_lse = load_token_scalars(queries.lse, queries.s_lse, at, i_q, BT)
    b_delta = load_token_scalars(queries.delta, queries.s_lse, at, i_q, BT)
    for c in range(place):
        first = TokenRows(b, t - (place - c) * BT, BT)
        p_near = c * s_near.to(tl.int64)
        store_tokens(out.dnear + p_near, queries.s_x, at, i_q, 0, b_grad, K)
        b_x = load_tokens(queries.near + p_near, queries.s_x, at, i_q, 0, K, BT, BK)
        b_k = load_tokens(keys.k, keys.s_rows, first, i_h, 0, K, BT, BK)
        b_v = load_tokens(keys.v, keys.s_v, first, i_h, 0, V, BT, BV)
        b_w = load_tokens(keys.w, keys.s_rows, first, i_h, 0, K, BT, BK)
        b_W = load_tokens(keys.W, keys.s_rows, first, i_h, 0, K, BT, BK)
        b_offset = -b_lse[:, None]
        if keys.g is not None:
            p_sums = c * (s_near // K).to(tl.int64)
            b_passed = load_token_scalars(queries.near_sums + p_sums, queries.s_lse, at, i_q, BT)
            b_after = b_passed[:, None] + load_sums(keys.stop, keys, b, first.t, i_q, BT)[None, :]
            b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            p_total = out.dtotal + p_sums + b * queries.s_lse[0] + t * queries.s_lse[1]
            tl.store(p_total + i_q * queries.s_lse[2], factor.gate * tl.sum(b_far, 0))
        b_s = mm(b_x, tl.trans(b_k), None, OP, PRECISION)
        b_dp = mm(b_do, tl.trans(b_v), None, OP, PRECISION)
        b_ds = weights(b_s, factor.logit_scale, b_offset) * (b_dp - b_delta[:, None])
        b_far += tl.sum(b_ds, 1)
        b_du = -mm(b_grad, tl.trans(b_W), None, OP, PRECISION)
        b_grad = mm(b_ds * factor.scale, b_k, b_grad, OP, PRECISION)
        b_grad = mm(b_du, b_w, b_grad, OP, PRECISION)
    store_tokens(out.dq, queries.s_x, at, i_q, 0, b_grad, K)
    store_token_scalars(out.others, queries.s_lse, at, i_q, b_far, BT)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "s_near"])
def wyfold_path_own_keys_triton(
    queries, s_near, keys, p_dnear, out, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the keys and factors of one chunk of one key head from the later chunks of its block."""
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, i_s, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    place, at = i_s % BLOCK, TokenRows(b, t, rows)
    p_near = place * s_near.to(tl.int64)
    later = tl.minimum((left + BT - 1) // BT, BLOCK - place)  # the chunk itself, and those after it
    followed = TokenRows(b, t, tl.where(left > (BLOCK - place) * BT, rows, 0))  # by another block
    b_dv = load_tokens(out.dv, out.s_dv, followed, i_h, 0, V, BT, BV)
    b_dk = tl.zeros((BT, BK), tl.float32)
    b_k = load_tokens(keys.k, keys.s_rows, at, i_h, 0, K, BT, BK)
    b_v = load_tokens(keys.v, keys.s_v, at, i_h, 0, V, BT, BV)
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        b_dend = tl.zeros((BT,), tl.float32)
        b_end = tl.zeros((BT,), tl.float32)
        if keys.g is not None:
            b_end = load_token_scalars(keys.stop, keys.s_sums, at, i_q, BT)
        for i in range(1, later):
            from_here = TokenRows(b, t + i * BT, tl.minimum(left - i * BT, BT).to(tl.int32))
            b_x = load_tokens(queries.near + p_near, queries.s_x, from_here, i_q, 0, K, BT, BK)
            b_do = load_tokens(queries.do, queries.s_do, from_here, i_q, 0, V, BT, BV)
            b_delta = to_columns(load_token_scalars(queries.delta, queries.s_lse, from_here, i_q, BT), BT)
            b_offset = -to_columns(load_token_scalars(queries.lse, queries.s_lse, from_here, i_q, BT), BT)[None, :]
            if keys.g is not None:
                p_sums = queries.near_sums + place * (s_near // K).to(tl.int64)
                b_passed = load_token_scalars(p_sums, queries.s_lse, from_here, i_q, BT)
                b_after = b_end[:, None] + to_columns(b_passed, BT)[None, :]
                b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            b_p = weights(mm(b_k, tl.trans(b_x), None, OP, PRECISION), factor.logit_scale, b_offset)
            b_dv = mm(b_p, b_do, b_dv, OP, PRECISION)
            b_ds = b_p * (mm(b_v, tl.trans(b_do), None, OP, PRECISION) - b_delta[None, :])
            b_dend += tl.sum(b_ds, 1)
            b_dk = mm(b_ds * factor.scale, b_x, b_dk, OP, PRECISION)
        if keys.g is not None:
            store_token_scalars(out.dend, queries.s_lse, at, i_q, factor.gate * b_dend, BT)
    store_tokens(out.dk, keys.s_rows, at, i_h, 0, b_dk, K)
    store_tokens(out.dv, out.s_dv, at, i_h, 0, b_dv, V)

    b_w = load_tokens(keys.w, keys.s_rows, at, i_h, 0, K, BT, BK)
    b_W = load_tokens(keys.W, keys.s_rows, at, i_h, 0, K, BT, BK)
    b_dW = tl.zeros((BT, BK), tl.float32)
    b_dw = tl.zeros((BT, BK), tl.float32)
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        for i in range(1, later):
            from_here = TokenRows(b, t + i * BT, tl.minimum(left - i * BT, BT).to(tl.int32))
            b_x = load_tokens(queries.near + p_near, queries.s_x, from_here, i_q, 0, K, BT, BK)
            b_grad = load_tokens(p_dnear + p_near, queries.s_x, from_here, i_q, 0, K, BT, BK)
            b_u = -mm(b_w, tl.trans(b_x), None, OP, PRECISION)
            b_dW = mm(b_u, b_grad, b_dW, OP, PRECISION)
            b_du = -mm(b_W, tl.trans(b_grad), None, OP, PRECISION)
            b_dw = mm(b_du, b_x, b_dw, OP, PRECISION)
    store_tokens(out.dW, keys.s_rows, at, i_h, 0, b_dW, K)
    store_tokens(out.dw, keys.s_rows, at, i_h, 0, b_dw, K)
