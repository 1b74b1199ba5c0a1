"""Kernel arguments of the softmax of PaTH attention, and functions that load tokens.

Exponentials are powers of 2: the factors of logits contain log2(e).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.path_records import PathFactors, PathSums
from wyfold.runtime.triton_support import interpreting
from wyfold.tile.dot.triton import mm, mm_exact


class Keys(NamedTuple):
    """Kernel argument: what queries meet, contiguous.

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
    M: Any
    v: Any
    g: Any
    start: Any
    stop: Any
    block_start: Any
    block_stop: Any


def keys_argument(f: PathFactors, v: Tensor, g: Tensor | None, sums: PathSums | None) -> Keys:
    """The factors, values and gates of a call as a kernel argument."""
    return Keys(f.w, f.W, f.k, f.blocks, f.M, v, g, *((None,) * 4 if sums is None else sums))


class Own(NamedTuple):
    """Kernel argument: queries, and what they meet in their own chunk.

    Attributes:
        q: [B, Q, HQ, K] queries of the last Q tokens.
        k: [B, T, H, K] keys.
        E: Field of `PathFactors`.
    """

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    E: Any
    end: None = None


class Queries(NamedTuple):
    """Kernel argument: rows of queries on their way back, and what their softmax passes back; contiguous.

    Attributes:
        x: [B, T, HQ, K] queries at the start of their block.
        near: [near rows, HQ, K] queries at the end of each earlier chunk of their block (`near_row`).
        near_sums: [near rows, HQ] sums of log gates from there to each query; None without a gate.
        do: [B, T, HQ, V] gradient of the output.
        lse, delta: [B, T, HQ] logarithms to base 2 of the sums of exponentials, and <do, o>.
    """

    x: Any
    near: Any
    near_sums: Any
    do: Any
    lse: Any
    delta: Any


@triton.jit
def load_rows(p, token, i_h, rows, HEADS: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Load rows of one head of a contiguous [tokens, HEADS, W]; rows past the last token are zero.   [BT, BW]"""
    offsets, mask = _row_offsets(rows, HEADS, W, BT, BW)
    return tl.load(_tile(p, token, i_h, HEADS, W) + offsets, mask=mask, other=0.0)


@triton.jit
def store_rows(p, token, i_h, rows, b_x, HEADS: tl.constexpr, W: tl.constexpr):
    """Store b_x [BT, BW] to the rows of one head that are tokens, rounding once."""
    offsets, mask = _row_offsets(rows, HEADS, W, b_x.shape[0], b_x.shape[1])
    tl.store(_tile(p, token, i_h, HEADS, W) + offsets, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def _tile(p, token, i_h, HEADS: tl.constexpr, W: tl.constexpr):
    """Address of a tile's first row, a multiple of 16 bytes: W is a multiple of 8, and so is the tensor's address."""
    p_tile = p + (token * (HEADS * W) + i_h * W)
    return tl.multiple_of(_opaque(p_tile.to(tl.int64)).to(p.dtype), 16)


if interpreting() or torch.version.hip:

    @triton.jit
    def _opaque(address):
        return address

else:

    @triton.jit
    def _opaque(address):
        """The address itself. The compiler would otherwise add each thread's offsets to p before a loop, and keep an
        address for every row of every tensor."""
        return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [address], dtype=tl.int64, is_pure=True, pack=1)


@triton.jit
def _row_offsets(rows, HEADS: tl.constexpr, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    o_r, o_w = tl.arange(0, BT), tl.arange(0, BW)
    offsets = (o_r * (HEADS * W))[:, None] + o_w[None, :]
    # Not W % BW: BW may be from a tile's shape, a constexpr in the interpreter, which has no such operation.
    if W // BW * BW == W:
        return offsets, tl.broadcast_to((o_r < rows)[:, None], (BT, BW))
    else:
        return offsets, (o_r < rows)[:, None] & (o_w < W)[None, :]


@triton.jit
def load_block_map(p_M, i, K: tl.constexpr, BK: tl.constexpr):
    """Load the i-th map of a contiguous [maps, K, K], zero past the width.   [BK, BK]"""
    return load_rows(p_M, i * K, 0, K, 1, K, BK, BK)


@triton.jit
def load_numbers(p, token, i_q, rows, HEADS: tl.constexpr, BT: tl.constexpr):
    """Load one number per token of a contiguous [tokens, HEADS] as float32; zero past the last token.   [BT]"""
    o_r = tl.arange(0, BT)
    return tl.load(p + (token * HEADS + i_q) + o_r * HEADS, mask=o_r < rows, other=0.0).to(tl.float32)


@triton.jit
def store_numbers(p, token, i_q, rows, b_x, HEADS: tl.constexpr, BT: tl.constexpr):
    """Store one number per row that is a token."""
    o_r = tl.arange(0, BT)
    tl.store(p + (token * HEADS + i_q) + o_r * HEADS, b_x, mask=o_r < rows)


@triton.jit
def load_sums(p, token, i_q, HEADS: tl.constexpr, BT: tl.constexpr):
    """Load sums of log gates of a whole chunk, to be broadcast along the columns of a product.   [BT]"""
    return to_columns(load_numbers(p, token, i_q, BT, HEADS, BT), BT)


@triton.jit
def load_total(p_start, token, i_q, HEADS: tl.constexpr, S: tl.constexpr):
    """Sum of the log gates of S tokens, from their sums up to each token."""
    return tl.load(p_start + ((token + (S - 1)) * HEADS + i_q))


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


@triton.jit
def moved(b_x, b_M, OP: tl.constexpr, PRECISION: tl.constexpr):
    """x + x M, for a map M less the identity. Operands of 16 bits add to x in the product, which saves registers."""
    if OP == tl.float32:
        return b_x + mm(b_x, b_M, None, OP, PRECISION)
    else:
        return mm(b_x, b_M, b_x, OP, PRECISION)


@triton.jit
def average(b_x, b_do, b_k, b_v, b_offset, factor, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Gradients of a tile of keys' weights, weighted: their part of <do, o>.   [BT]"""
    b_p = weights(mm(b_x, tl.trans(b_k), None, OP, PRECISION), factor.logit_scale, b_offset)
    return tl.sum(b_p * mm(b_do, tl.trans(b_v), None, OP, PRECISION), 1)


@triton.jit
def seen(BT: tl.constexpr):
    """Whether a chunk's key j precedes or is a query's own, for its row i.   [BT, BT]"""
    o_r = tl.arange(0, BT)
    return o_r[:, None] >= o_r[None, :]


@triton.jit
def products_with_directions(b_q, b_w, EXACT: tl.constexpr):
    """P: lower triangle of q w^T.   [BT, BT] float32"""
    b_P = mm_exact(b_q, tl.trans(b_w), None, EXACT)
    return tl.where(seen(b_P.shape[0]), b_P, 0.0)


@triton.jit
def own_products(b_q, b_k, b_P, b_E, OP: tl.constexpr, PRECISION: tl.constexpr, EXACT: tl.constexpr):
    """Products of a chunk's queries and keys; undefined above the diagonal.   [BT, BT]"""
    return mm(b_q, tl.trans(b_k), None, OP, PRECISION) - mm_exact(b_P, b_E, None, EXACT)


@triton.jit
def sums_inside(b_g, BT: tl.constexpr):
    """Sums of a chunk's log gates that follow key j up to query i; undefined above the diagonal.   [BT, BT]"""
    o_r = tl.arange(0, BT)
    return tl.cumsum(tl.where(o_r[:, None] > o_r[None, :], b_g[:, None], 0.0), 0)
