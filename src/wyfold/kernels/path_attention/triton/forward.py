"""Softmax of PaTH attention in Triton: one program per chunk of queries and query head."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.path_attention.triton.arguments import (
    Own,
    keys_argument,
    load_block_map,
    load_numbers,
    load_rows,
    load_sums,
    load_total,
    moved,
    own_products,
    products_with_directions,
    seen,
    sums_inside,
    weights,
)
from wyfold.kernels.path_records import CHUNK, PathFactors, PathSizes, PathSums, path_scales
from wyfold.kernels.path_widths import key_width
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, mm, mm_exact, operand, summing, summing_exact
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_tokens,
    map_slot,
    strides,
    token_offsets,
)


class PathPastTokens(NamedTuple):
    """Keys of earlier calls, as the operator's `past`.

    Attributes:
        k, v: [N, S, H, K] and [N, S, H, V], any strides.
        g: [N, S, HQ]; None without a gate.
        counts: [N].
    """

    k: Tensor | None
    v: Tensor | None
    g: Tensor | None
    counts: Tensor | None


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    factors: PathFactors,
    sums: PathSums | None,
    past: PathPastTokens,
    grid: ChunkGrid,
    scale: float,
    gate: float,
    block: int,
    o: Tensor,
    lse: Tensor,
    rest: Tensor | None,
) -> None:
    """Write the outputs, and the logarithms to base 2 of the sums of exponentials of their logits.

    Args:
        q: [B, Q, HQ, K] queries of the last Q tokens, any strides.
        k: [B, T, H, K], any strides.
        v: [B, T, H, V], contiguous.
        g: [B, T, HQ] log gates, contiguous; None without a gate.
        factors: Result of `path_factors`.
        sums: Result of `path_sums`.
        past: Keys of earlier calls; its fields may be None.
        grid: Chunks of CHUNK tokens.
        scale, gate: Factors of products and of sums of log gates.
        block: Chunks of a block.
        o: [B, Q, HQ, V], any strides.
        lse: [B, Q, HQ] float32.
        rest: What the rounding of the outputs leaves, like o; None if it is not wanted.
    """
    (H, K), (HQ, V), dtype = k.shape[2:], (q.shape[2], v.shape[3]), q.dtype
    config = tuned("path_attention.triton", launch_key(dtype, K, V), q.device)
    launch_kernel(
        wyfold_path_attention_triton,
        grid.chunks * HQ,
        own=Own(q, q.stride(), k, k.stride(), factors.E),
        keys=keys_argument(factors, v, g, sums),
        past=Past(past.k, strides(past.k), past.v, strides(past.v), past.g, strides(past.g), past.counts),
        out=Results(o, o.stride(), lse, lse.stride(), rest),
        packing=Packing(grid.cu, grid.first, grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        skipped=k.shape[1] - q.shape[1],
        S=0 if past.k is None else past.k.shape[1],
        factor=path_scales(scale, gate),
        SIZES=PathSizes(H, HQ, K, V, CHUNK, key_width(K), key_width(V), block),
        PACKED=grid.cu is not None,
        OP=operand(dtype),
        PRECISION=summing(dtype),
        EXACT=summing_exact(dtype),
        **config.options(contract=contracts(dtype)),
    )


def launch_key(dtype: torch.dtype, K: int, V: int, launch: str | None = None) -> LaunchKey:
    """Launch configuration key; of the forward, or of a launch of the backward."""
    return LaunchKey(dtype_word(dtype), K, V, launch=launch)


class Past(NamedTuple):
    """Kernel argument: keys of earlier calls, as `PathPastTokens`; all None if there are none."""

    k: Any
    s_k: Any
    v: Any
    s_v: Any
    g: Any
    s_g: Any
    counts: Any
    end: None = None


class Results(NamedTuple):
    """Kernel argument: results of the last Q tokens.

    Attributes:
        o: [B, Q, HQ, V] outputs.
        lse: [B, Q, HQ] logarithms to base 2 of the sums of exponentials.
        rest: What the rounding of o leaves, with the strides of o; None if it is not wanted.
    """

    o: Any
    s_o: Any
    lse: Any
    s_lse: Any
    rest: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "skipped", "S"])
def wyfold_path_attention_triton(
    own, keys, past, out, packing, N, T, per_sequence, skipped, S, factor,
    SIZES: tl.constexpr, PACKED: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Outputs of one chunk of one query head.

    Programs of a head follow each other, so that the GPU's cache holds its keys, and begin with the last chunk, which
    has the most keys.
    """
    H: tl.constexpr = SIZES.H
    HQ: tl.constexpr = SIZES.HQ
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BLOCK: tl.constexpr = SIZES.BLOCK
    chunks = tl.num_programs(0) // HQ
    i_tile = tl.program_id(0)
    i_q, i_c = (i_tile // chunks).to(tl.int64), (chunks - 1 - i_tile % chunks).to(tl.int64)
    i_h = i_q // (HQ // H)
    i_n, i_s, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    if t + rows <= skipped:
        return
    at, o_r = TokenRows(b, t, rows), tl.arange(0, BT)
    queried = t + o_r >= skipped
    offsets, mask = token_offsets(own.s_q, TokenRows(b, t - skipped, rows), i_q, 0, K, BT, BK)
    b_q = tl.load(own.q + offsets, mask=mask & queried[:, None], other=0.0)
    b_x = b_q.to(tl.float32)

    if keys.g is None:  # the factor is left to be multiplied together with the subtraction of the largest logit
        left = factor.logit_scale
    else:
        left = 1.0

    # The chunk itself.
    token = b * T + t
    b_own = load_tokens(own.k, own.s_k, at, i_h, 0, K, BT, BK)
    b_E = load_rows(own.E, token, i_h, rows, H, BT, BT, BT)
    b_P = products_with_directions(b_q, load_rows(keys.w, token, i_h, rows, H, K, BT, BK), EXACT)
    b_s = own_products(b_q, b_own, b_P, b_E, OP, PRECISION, EXACT)
    b_passed = tl.zeros((BT,), tl.float32)  # sum of log gates from the start of the keys that were met last
    if keys.g is not None:
        b_g = load_numbers(keys.g, token, i_q, rows, HQ, BT)
        b_passed = tl.cumsum(b_g, 0)
        b_s = gated(b_s, sums_inside(b_g, BT), factor)
    b_s = tl.where(seen(BT), b_s, float("-inf"))
    b_most = tl.max(b_s, 1) * left
    b_p = weights(b_s, left, -b_most[:, None])
    b_sum = tl.sum(b_p, 1)
    b_o = mm(b_p, load_rows(keys.v, token, i_h, rows, H, V, BT, BV), None, OP, PRECISION)
    b_x -= mm_exact(b_P, load_rows(keys.W, token, i_h, rows, H, K, BT, BK), None, EXACT)

    # The chunks before it in its block.
    for near in tl.range(i_s % BLOCK, num_stages=1):
        first = token - (near + 1) * BT
        b_k = load_rows(keys.k, first, i_h, BT, H, K, BT, BK)
        b_v = load_rows(keys.v, first, i_h, BT, H, V, BT, BV)
        b_s = mm(b_x, tl.trans(b_k), None, OP, PRECISION)
        if keys.g is not None:
            b_s = gated(b_s, b_passed[:, None] + load_sums(keys.stop, first, i_q, HQ, BT)[None, :], factor)
            b_passed += load_total(keys.start, first, i_q, HQ, BT)
        b_o, b_most, b_sum = add_keys(b_o, b_most, b_sum, b_s, left, b_v, OP, PRECISION)
        b_w = load_rows(keys.w, first, i_h, BT, H, K, BT, BK)
        b_W = load_rows(keys.W, first, i_h, BT, H, K, BT, BK)
        b_x -= mm(mm(b_x, tl.trans(b_w), None, OP, PRECISION), b_W, None, OP, PRECISION)

    # Whole blocks.
    blocks, start = i_s // BLOCK, t - i_s * BT
    for n in range(blocks):
        first = start + (blocks - 1 - n) * (BLOCK * BT)
        for c in range(BLOCK):
            last = b * T + first + (BLOCK - 1 - c) * BT
            b_k = load_rows(keys.blocks, last, i_h, BT, H, K, BT, BK)
            b_v = load_rows(keys.v, last, i_h, BT, H, V, BT, BV)
            b_s = mm(b_x, tl.trans(b_k), None, OP, PRECISION)
            if keys.g is not None:
                b_s = gated(b_s, b_passed[:, None] + load_sums(keys.block_stop, last, i_q, HQ, BT)[None, :], factor)
            b_o, b_most, b_sum = add_keys(b_o, b_most, b_sum, b_s, left, b_v, OP, PRECISION)
        if keys.g is not None:
            b_passed += load_total(keys.block_start, b * T + first, i_q, HQ, BLOCK * BT)
        b_M = load_block_map(keys.M, map_slot(b, first, T, BLOCK * BT) * H + i_h, K, BK)
        b_x = moved(b_x, b_M, OP, PRECISION)

    # Keys of earlier calls, whole tiles counted from the last one.
    if past.k is not None:
        count = tl.load(past.counts + b).to(tl.int32)
        for far in tl.range((S + BT - 1) // BT, num_stages=1):
            place = S - (far + 1) * BT
            held = (place + o_r >= S - count) & (place + o_r >= 0)
            b_past_k = load_past(past.k, past.s_k, b, place, held, i_h, K, BT, BK)
            b_past_v = load_past(past.v, past.s_v, b, place, held, i_h, V, BT, BV)
            b_s = mm(b_x, tl.trans(b_past_k), None, OP, PRECISION)
            if past.g is not None:
                p_tile = past.g + b * past.s_g[0] + i_q * past.s_g[2]
                later = (place + o_r + 1).to(tl.int64) * past.s_g[1]
                b_after = tl.load(p_tile + later, mask=held & (o_r < BT - 1), other=0.0).to(tl.float32)
                b_s = gated(b_s, b_passed[:, None] + tl.cumsum(b_after, 0, reverse=True)[None, :], factor)
                b_past_g = tl.load(p_tile + (place + o_r).to(tl.int64) * past.s_g[1], mask=held, other=0.0)
                b_passed += tl.sum(b_past_g.to(tl.float32), 0)
            b_s = tl.where(held[None, :], b_s, float("-inf"))
            b_o, b_most, b_sum = add_keys(b_o, b_most, b_sum, b_s, left, b_past_v, OP, PRECISION)

    at = TokenRows(b, t - skipped, rows)
    offsets, mask = token_offsets(out.s_o, at, i_q, 0, V, BT, BV)
    b_o /= b_sum[:, None]
    b_rounded = b_o.to(out.o.dtype.element_ty)
    tl.store(out.o + offsets, b_rounded, mask=mask & queried[:, None])
    if out.rest is not None:
        b_rest = (b_o - b_rounded.to(tl.float32)).to(out.o.dtype.element_ty)
        tl.store(out.rest + offsets, b_rest, mask=mask & queried[:, None])
    o_lse = b * out.s_lse[0] + (t - skipped + o_r).to(tl.int64) * out.s_lse[1] + i_q * out.s_lse[2]
    tl.store(out.lse + o_lse, b_most + tl.log2(b_sum), mask=queried & (o_r < rows))


@triton.jit
def load_past(p, s, b, place, held, i_h, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Load a tile of keys or values of earlier calls; zero where there is none.   [BT, BW]"""
    offsets, mask = token_offsets(s, TokenRows(b, place, BT), i_h, 0, W, BT, BW)
    return tl.load(p + offsets, mask=mask & held[:, None], other=0.0)


@triton.jit
def gated(b_products, b_sums, factor):
    """Logits to base 2 of products and sums of log gates."""
    return tl.fma(b_products, factor.logit_scale, factor.logit_gate * b_sums)


@triton.jit
def add_keys(b_o, b_most, b_sum, b_s, left, b_v, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Add a tile of keys to a softmax: weighted sum of values, largest logit, and sum of exponentials."""
    b_new = tl.maximum(b_most, tl.max(b_s, 1) * left)
    b_shrink, b_p = tl.exp2(b_most - b_new), weights(b_s, left, -b_new[:, None])
    b_o = mm(b_p, b_v, b_o * b_shrink[:, None], OP, PRECISION)
    return b_o, b_new, tl.fma(b_sum, b_shrink, tl.sum(b_p, 1))
