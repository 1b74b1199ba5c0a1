"""Gradients between the chunks of one block: of the queries, far to near, then of the keys and factors."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.kernels.path_attention.triton.arguments import (
    load_numbers,
    load_rows,
    load_sums,
    store_numbers,
    store_rows,
    to_columns,
    weights,
)
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import chunk_span, near_row


class OwnRows(NamedTuple):
    """Kernel argument: gradients of queries inside their block; fields of `PathWorkspace`, contiguous.

    Attributes:
        dq, others: Gradients from all blocks before, then from all chunks before.
        dnear: [near rows, HQ, K] gradients of the queries at the start of each earlier chunk of their block.
        dtotal: [near rows, HQ] at a chunk's first row: gradients of the earlier chunks' sums of log gates.
    """

    dq: Any
    others: Any
    dnear: Any
    dtotal: Any


class OwnKeys(NamedTuple):
    """Kernel argument: gradients of keys and factors; fields of `PathWorkspace`, contiguous."""

    dk: Any
    dW: Any
    dw: Any
    dv: Any
    dend: Any


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_own_rows_triton(
    queries, keys, out, packing, N, T, per_sequence, factor,
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
    place, token = i_s % BLOCK, b * T + t
    written = tl.where(i_s >= BLOCK, rows, 0)  # a first block has no gradients from others yet
    b_grad = load_rows(out.dq, token, i_q, written, HQ, K, BT, BK)
    b_far = load_numbers(out.others, token, i_q, written, HQ, BT)
    b_do = load_rows(queries.do, token, i_q, rows, HQ, V, BT, BV)
    b_lse = load_numbers(queries.lse, token, i_q, rows, HQ, BT)
    b_delta = load_numbers(queries.delta, token, i_q, rows, HQ, BT)
    for c in range(place):
        first = token - (place - c) * BT
        near = near_row(token, place, c, rows, BT, BLOCK)
        store_rows(out.dnear, near, i_q, rows, b_grad, HQ, K)
        # Each tile is loaded where it is needed: all of them at once would need the registers of their sums.
        b_W = load_rows(keys.W, first, i_h, BT, H, K, BT, BK)
        b_du = -mm(b_grad, tl.trans(b_W), None, OP, PRECISION)
        b_offset = -b_lse[:, None]
        if keys.g is not None:
            b_passed = load_numbers(queries.near_sums, near, i_q, rows, HQ, BT)
            b_after = b_passed[:, None] + load_sums(keys.stop, first, i_q, HQ, BT)[None, :]
            b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            tl.store(out.dtotal + (near * HQ + i_q), factor.gate * tl.sum(b_far, 0))
        b_x = load_rows(queries.near, near, i_q, rows, HQ, K, BT, BK)
        b_k = load_rows(keys.k, first, i_h, BT, H, K, BT, BK)
        b_s = mm(b_x, tl.trans(b_k), None, OP, PRECISION)
        b_v = load_rows(keys.v, first, i_h, BT, H, V, BT, BV)
        b_dp = mm(b_do, tl.trans(b_v), None, OP, PRECISION)
        b_ds = weights(b_s, factor.logit_scale, b_offset) * (b_dp - b_delta[:, None])
        b_far += tl.sum(b_ds, 1)
        b_grad = mm(b_ds * factor.scale, b_k, b_grad, OP, PRECISION)
        b_w = load_rows(keys.w, first, i_h, BT, H, K, BT, BK)
        b_grad = mm(b_du, b_w, b_grad, OP, PRECISION)
    store_rows(out.dq, token, i_q, rows, b_grad, HQ, K)
    store_numbers(out.others, token, i_q, rows, b_far, HQ, BT)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_own_keys_triton(
    queries, keys, p_dnear, out, packing, N, T, per_sequence, factor,
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
    place, token = i_s % BLOCK, b * T + t
    later = tl.minimum((left + BT - 1) // BT, BLOCK - place)  # the chunk itself, and those after it
    followed = tl.where(left > (BLOCK - place) * BT, rows, 0)  # by another block
    b_dv = load_rows(out.dv, token, i_h, followed, H, V, BT, BV)
    b_dk = tl.zeros((BT, BK), tl.float32)
    b_k = load_rows(keys.k, token, i_h, rows, H, K, BT, BK)
    b_v = load_rows(keys.v, token, i_h, rows, H, V, BT, BV)
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        b_dend = tl.zeros((BT,), tl.float32)
        b_end = tl.zeros((BT,), tl.float32)
        if keys.g is not None:
            b_end = load_numbers(keys.stop, token, i_q, rows, HQ, BT)
        for i in range(1, later):
            from_here, queried = token + i * BT, tl.minimum(left - i * BT, BT).to(tl.int32)
            near = near_row(from_here, place + i, place, queried, BT, BLOCK)
            b_x = load_rows(queries.near, near, i_q, queried, HQ, K, BT, BK)
            b_do = load_rows(queries.do, from_here, i_q, queried, HQ, V, BT, BV)
            b_delta = to_columns(load_numbers(queries.delta, from_here, i_q, queried, HQ, BT), BT)
            b_offset = -to_columns(load_numbers(queries.lse, from_here, i_q, queried, HQ, BT), BT)[None, :]
            if keys.g is not None:
                b_passed = load_numbers(queries.near_sums, near, i_q, queried, HQ, BT)
                b_after = b_end[:, None] + to_columns(b_passed, BT)[None, :]
                b_offset = tl.fma(b_after, factor.logit_gate, b_offset)
            b_p = weights(mm(b_k, tl.trans(b_x), None, OP, PRECISION), factor.logit_scale, b_offset)
            b_dv = mm(b_p, b_do, b_dv, OP, PRECISION)
            b_ds = b_p * (mm(b_v, tl.trans(b_do), None, OP, PRECISION) - b_delta[None, :])
            b_dend += tl.sum(b_ds, 1)
            b_dk = mm(b_ds * factor.scale, b_x, b_dk, OP, PRECISION)
        if keys.g is not None:
            store_numbers(out.dend, token, i_q, rows, factor.gate * b_dend, HQ, BT)
    store_rows(out.dk, token, i_h, rows, b_dk, H, K)
    store_rows(out.dv, token, i_h, rows, b_dv, H, V)

    b_w = load_rows(keys.w, token, i_h, rows, H, K, BT, BK)
    b_W = load_rows(keys.W, token, i_h, rows, H, K, BT, BK)
    b_dW = tl.zeros((BT, BK), tl.float32)
    b_dw = tl.zeros((BT, BK), tl.float32)
    for e in range(HQ // H):
        i_q = i_h * (HQ // H) + e
        for i in range(1, later):
            from_here, queried = token + i * BT, tl.minimum(left - i * BT, BT).to(tl.int32)
            near = near_row(from_here, place + i, place, queried, BT, BLOCK)
            b_x = load_rows(queries.near, near, i_q, queried, HQ, K, BT, BK)
            b_grad = load_rows(p_dnear, near, i_q, queried, HQ, K, BT, BK)
            b_u = -mm(b_w, tl.trans(b_x), None, OP, PRECISION)
            b_dW = mm(b_u, b_grad, b_dW, OP, PRECISION)
            b_du = -mm(b_W, tl.trans(b_grad), None, OP, PRECISION)
            b_dw = mm(b_du, b_x, b_dw, OP, PRECISION)
    store_rows(out.dW, token, i_h, rows, b_dW, H, K)
    store_rows(out.dw, token, i_h, rows, b_dw, H, K)
