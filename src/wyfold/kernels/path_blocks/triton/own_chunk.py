"""Gradients of one chunk's own logits: of its queries and gates, then of its keys, values and factors."""

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
    map_slot,
    near_row,
    store_token_scalars,
    store_tokens,
)


class Tokens(NamedTuple):
    """Kernel argument: a call's tokens, factors, and what their softmax passes back."""

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    v: Any
    s_v: Any
    g: Any
    s_g: Any
    w: Any
    W: Any
    s_rows: Any
    E: Any
    s_E: Any
    do: Any
    s_do: Any
    lse: Any
    delta: Any
    s_lse: Any
    end: None = None


class Passed(NamedTuple):
    """Kernel argument: gradients from outside of the chunk; fields of `PathWorkspace`."""

    dq: Any
    s_dq: Any
    others: Any
    dend: Any
    dblock_end: Any
    dtotal: Any
    dblock_total: Any
    end: None = None


class Tiles(NamedTuple):
    """Kernel argument: tiles of a chunk [B, T, HQ, C]: weights, gradients of products, of q w^T, and q w^T itself."""

    p: Any
    dZ: Any
    dP: Any
    P: Any
    s: Any
    end: None = None


class QueryGradients(NamedTuple):
    """Kernel argument: gradients of queries and gates."""

    q: Any
    s_q: Any
    g: Any
    s_g: Any
    end: None = None


class KeyGradients(NamedTuple):
    """Kernel argument: gradients of keys and factors, which are added to, and of values.

    Attributes:
        dk, dW, dw: Fields of `PathWorkspace`, with the factors' strides.
        dE: [B, T, H, C] float32, with the strides of E.
        dv: Field of `PathWorkspace`.
        v: Gradient of the values.
    """

    dk: Any
    dW: Any
    dw: Any
    dE: Any
    dv: Any
    s_dv: Any
    v: Any
    s_v: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_own_logits_bwd_triton(
    x, passed, tiles, out, packing, N, T, per_sequence, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Gradients of the queries and gates of one chunk of one query head; tiles for those of its keys."""
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
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    at, o = TokenRows(b, t, rows), tl.arange(0, BT)
    below, seen = o[:, None] > o[None, :], o[:, None] >= o[None, :]
    b_v = load_tokens(x.v, x.s_v, at, i_h, 0, V, BT, BV)
    b_do = load_tokens(x.do, x.s_do, at, i_q, 0, V, BT, BV)
    b_ds = mm(b_do, tl.trans(b_v), None, OP, PRECISION)
    b_q = load_tokens(x.q, x.s_q, at, i_q, 0, K, BT, BK)
    b_k = load_tokens(x.k, x.s_k, at, i_h, 0, K, BT, BK)
    b_w = load_tokens(x.w, x.s_rows, at, i_h, 0, K, BT, BK)
    b_E = load_tokens(x.E, x.s_E, at, i_h, 0, BT, BT, BT)
    b_P = tl.where(seen, mm_exact(b_q, tl.trans(b_w), None, EXACT), 0.0)
    store_tokens(tiles.P, tiles.s, at, i_q, 0, b_P, BT)
    b_s = mm(b_q, tl.trans(b_k), None, OP, PRECISION) - mm_exact(b_P, b_E, None, EXACT)
    b_offset = -load_token_scalars(x.lse, x.s_lse, at, i_q, BT)[:, None]
    if x.g is not None:
        b_g = load_token_scalars(x.g, x.s_g, at, i_q, BT)
        b_offset = tl.fma(tl.cumsum(tl.where(below, b_g[:, None], 0.0), 0), factor.logit_gate, b_offset)
    b_p = tl.where(seen, tl.exp2(tl.fma(b_s, factor.logit_scale, b_offset)), 0.0)
    store_tokens(tiles.p, tiles.s, at, i_q, 0, b_p, BT)
    b_delta = load_token_scalars(x.delta, x.s_lse, at, i_q, BT)
    b_others = load_token_scalars(passed.others, x.s_lse, at, i_q, BT)
    b_ds = tl.where(below, b_p * (b_ds - b_delta[:, None]), 0.0)  # the own key's follows from all others
    if out.g is not None:
        b_later = tl.cumsum(b_ds, 0, reverse=True)  # sum over rows from l on
        b_dg = tl.sum(tl.where(below, b_later, 0.0), 1) + tl.cumsum(b_others, 0, reverse=True)
        b_dg = factor.gate * b_dg + before(passed.dend, x.s_lse, at, i_q, BT)
        place = i_s % BLOCK
        block_end = (BLOCK - place) * BT  # tokens from here to the block's end
        for i in range(1, tl.minimum((left + BT - 1) // BT, BLOCK - place)):
            queried = tl.minimum(left - i * BT, BT)
            near = near_row(b * T + t + i * BT, place + i, place, queried, BT, BLOCK)
            b_dg += tl.load(passed.dtotal + near * HQ + i_q)
        if left > block_end:
            b_dg += before(passed.dblock_end, x.s_lse, at, i_q, BT)
            for m in range(place):
                earlier = TokenRows(b, t - (m + 1) * BT, BT)
                b_dg += tl.sum(load_token_scalars(passed.dblock_end, x.s_lse, earlier, i_q, BT), 0)
            slot = map_slot(b, t - place * BT, T, BLOCK * BT)
            b_dg += tl.load(passed.dblock_total + slot * HQ + i_q)
        store_token_scalars(out.g, out.s_g, at, i_q, b_dg, BT)
    b_own = -(b_others + tl.sum(b_ds, 1))
    b_dZ = factor.scale * tl.where(o[:, None] == o[None, :], b_own[:, None], b_ds)
    store_tokens(tiles.dZ, tiles.s, at, i_q, 0, b_dZ, BT)
    b_dq = load_tokens(passed.dq, passed.s_dq, at, i_q, 0, K, BT, BK)
    b_W = load_tokens(x.W, x.s_rows, at, i_h, 0, K, BT, BK)
    b_dP = -(mm(b_dq, tl.trans(b_W), None, OP, PRECISION) + mm(b_dZ, tl.trans(b_E), None, OP, PRECISION))
    b_dP = tl.where(seen, b_dP, 0.0)
    store_tokens(tiles.dP, tiles.s, at, i_q, 0, b_dP, BT)
    b_dq = mm(b_dP, b_w, mm(b_dZ, b_k, b_dq, OP, PRECISION), OP, PRECISION)
    store_tokens(out.q, out.s_q, at, i_q, 0, b_dq, K)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_own_factors_bwd_triton(
    x, p_dq, s_dq, tiles, out, packing, N, T, per_sequence,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what one chunk's own logits pass on to the gradients of its keys, values and factors, for one key head."""
    H: tl.constexpr = SIZES.H
    G: tl.constexpr = SIZES.HQ // SIZES.H
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    at = TokenRows(b, t, rows)
    EV: tl.constexpr = BV if BV < 64 else 64  # columns at a time: all of them would need more registers than there are
    EK: tl.constexpr = 64
    for part in range(0, BV, EV):
        b_dv = load_tokens(out.dv, out.s_dv, at, i_h, part, V, BT, EV)
        for e in range(G):
            b_p = load_tokens(tiles.p, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
            b_do = load_tokens(x.do, x.s_do, at, i_h * G + e, part, V, BT, EV)
            b_dv = mm(tl.trans(b_p), b_do, b_dv, OP, PRECISION)
        store_tokens(out.v, out.s_v, at, i_h, part, b_dv, V)

    b_dE = tl.zeros((BT, BT), tl.float32)
    for part in range(0, BK, EK):
        b_w = load_tokens(x.w, x.s_rows, at, i_h, part, K, BT, EK)
        b_dk = load_tokens(out.dk, x.s_rows, at, i_h, part, K, BT, EK)  # of the keys at the chunk's end
        b_dE = mm(b_w, tl.trans(b_dk), b_dE, OP, PRECISION)
    for e in range(G):
        b_P = load_tokens(tiles.P, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
        b_dZ = load_tokens(tiles.dZ, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
        b_dE = mm(tl.trans(b_P), b_dZ, b_dE, OP, PRECISION)
    store_tokens(out.dE, x.s_E, at, i_h, 0, -b_dE, BT)

    for part in range(0, BK, EK):
        b_dk = load_tokens(out.dk, x.s_rows, at, i_h, part, K, BT, EK)
        b_E = load_tokens(x.E, x.s_E, at, i_h, 0, BT, BT, BT)
        b_dw = load_tokens(out.dw, x.s_rows, at, i_h, part, K, BT, EK) - mm(b_E, b_dk, None, OP, PRECISION)
        b_dW = tl.zeros((BT, EK), tl.float32)
        for e in range(G):
            b_q = load_tokens(x.q, x.s_q, at, i_h * G + e, part, K, BT, EK)
            b_dP = load_tokens(tiles.dP, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
            b_dw = mm(tl.trans(b_dP), b_q, b_dw, OP, PRECISION)
            b_dZ = load_tokens(tiles.dZ, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
            b_dk = mm(tl.trans(b_dZ), b_q, b_dk, OP, PRECISION)
            b_P = load_tokens(tiles.P, tiles.s, at, i_h * G + e, 0, BT, BT, BT)
            b_dq = load_tokens(p_dq, s_dq, at, i_h * G + e, part, K, BT, EK)
            b_dW = mm(tl.trans(b_P), b_dq, b_dW, OP, PRECISION)
        store_tokens(out.dw, x.s_rows, at, i_h, part, b_dw, K)
        store_tokens(out.dk, x.s_rows, at, i_h, part, b_dk, K)
        b_dW = load_tokens(out.dW, x.s_rows, at, i_h, part, K, BT, EK) - b_dW
        store_tokens(out.dW, x.s_rows, at, i_h, part, b_dW, K)


@triton.jit
def before(p, strides, at, h, BT: tl.constexpr):
    """Sums of a number per token over the earlier tokens of a chunk.   [BT]"""
    o = tl.arange(0, BT)
    offsets = at.b * strides[0] + (at.t + o.to(tl.int64) - 1) * strides[1] + h * strides[2]
    return tl.cumsum(tl.load(p + offsets, mask=(o > 0) & (o < at.rows), other=0.0), 0)
