"""Kernel arguments of the softmax of PaTH attention, and functions that load numbers of tokens.

Exponentials are powers of 2: the factors of logits contain log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.index.triton import TokenRows, load_token_number, load_token_scalars


class Keys(NamedTuple):
    """Kernel argument: what queries meet. Factors have the strides s_rows.

    Attributes:
        w, W, k, blocks, M: Fields of `PathFactors`.
        v: [B, T, H, V] values.
        g: [B, T, HQ] log gates; None without a gate.
        start, stop, block_start, block_stop: Fields of `PathSums`; None without a gate.
    """

    w: Any
    W: Any
    k: Any
    blocks: Any
    s_rows: Any
    M: Any
    v: Any
    s_v: Any
    g: Any
    s_g: Any
    start: Any
    stop: Any
    block_start: Any
    block_stop: Any
    s_sums: Any
    end: None = None


class Queries(NamedTuple):
    """Kernel argument: rows of queries on their way back, and what their softmax passes back.

    Attributes:
        x: [B, T, HQ, K] queries at the start of their block.
        near: [BLOCK - 1, B, T, HQ, K] queries at the end of each earlier chunk of their block, by its place in the
            block. Each of these tensors has the strides of x, and `s_near` elements.
        near_sums: [BLOCK - 1, B, T, HQ] sums of log gates from there to each query. Each has the strides of lse.
        do: [B, T, HQ, V] gradient of the output.
        lse, delta: [B, T, HQ] logarithms to base 2 of the sums of exponentials, and <do, o>.
    """

    x: Any
    s_x: Any
    near: Any
    near_sums: Any
    do: Any
    s_do: Any
    lse: Any
    delta: Any
    s_lse: Any
    end: None = None


@triton.jit
def load_gates(keys, at, i_q, BT: tl.constexpr):
    """Load log gates of a chunk; zero past its last token.   [BT] float32"""
    return load_token_scalars(keys.g, keys.s_g, at, i_q, BT)


@triton.jit
def load_sums(p, keys, b, t, i_q, BT: tl.constexpr):
    """Load sums of log gates of a whole chunk, to be broadcast along the columns of a product.   [BT]"""
    return to_columns(load_token_scalars(p, keys.s_sums, TokenRows(b, t, BT), i_q, BT), BT)


@triton.jit
def load_total(p_start, keys, b, t, i_q, S: tl.constexpr):
    """Sum of the log gates of S tokens, from their sums up to each token."""
    return load_token_number(p_start, keys.s_sums, b, t + S - 1, i_q, True)


@triton.jit
def weights(b_products, scale, b_offset):
    """2 ** (scale products + offset), for a scale to base 2."""
    return tl.exp2(tl.fma(b_products, scale, b_offset))


@triton.jit
def to_columns(b_x, BT: tl.constexpr):
    """x itself, to be broadcast along the columns of a product.   [BT]

    Otherwise each thread would load the sixteen or more numbers of its columns by itself, and keep their addresses.
    """
    return tl.gather(b_x, tl.arange(0, BT), 0)
