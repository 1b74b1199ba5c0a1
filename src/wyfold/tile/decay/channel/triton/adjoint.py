"""Adjoint of all that a channel gate decays, in Triton.

Pairs inside 8 rows are computed one by one (`near_pairs`), all others by halving: at level h, blocks of 2h rows pair
their later with their earlier half, both anchored at the later half's first row. Log gates are to base 2 here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton.near_pairs import add_near_pairs, sub_chunk_row
from wyfold.tile.decay.triton import NEAR
from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton.sub_chunks import to_sub_chunks


class PairMemory(NamedTuple):
    """Gradients of a tile's pairs of rows, which are in memory for lack of registers.

    Attributes:
        pairs: [tiles, 3, BT, BT] gradient of J below the diagonal and its transpose above, of P, and of P^T.
        near: [tiles, NB, NEAR, NEAR, 2] from `store_near_pairs`.
        i_tile: Number of the tile.
        opaque_zero: As of `load_sub_chunks`.
    """

    pairs: Any
    near: Any
    i_tile: Any
    opaque_zero: Any


class GatedRows(NamedTuple):
    """Rows of a tile in sub-chunks, and their gates.

    Attributes:
        q, k: [NB, NEAR, BK] normalised rows.
        a: [NB, NEAR, BK] decays of the tokens.
        first, rest: [NB, BK] log gate of a sub-chunk's first row, and of the rows after it.
    """

    q: Any
    k: Any
    a: Any
    first: Any
    rest: Any


class RowGradients(NamedTuple):
    """Gradients of the rows of a tile so far.

    Attributes:
        q, k: [NB, NEAR, BK] gradients of rows, from columns before their sub-chunk.
        kc: [NB, NEAR, BK] gradients of columns, from rows after their sub-chunk.
        over: [NB, BK] gate gradient from intervals that span a whole sub-chunk.
    """

    q: Any
    k: Any
    kc: Any
    over: Any


class PairRows(NamedTuple):
    """Rows whose decayed grams with k `channel_bwd` differentiates; the gram of k has no diagonal.

    Attributes:
        q, k: [NB, NEAR, BK] normalised rows.
    """

    q: Any
    k: Any


@triton.jit
def channel_bwd(rows, b_g, memory, b_dq, b_dk, b_dk_write, b_carried, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Adjoint of all terms that a channel gate decays, for some channels: reads, writes, the state, and the grams.

    Tiles are in sub-chunks of NEAR rows, with all rows of a column in one thread. Between sub-chunks the grams are
    split by halving (`add_half_pairs`); inside them pairs are computed one by one (`add_near_pairs`). The gate's
    gradient has two parts: intervals that begin or end in the token's own sub-chunk are a sum along its rows, and
    intervals that span the sub-chunk are one number for all rows. Each term is added once, and none is subtracted.

    Args:
        rows: `PairRows`.
        b_g: [NB, NEAR, BK] log gate to base 2.
        memory: A `PairMemory`.
        b_dq, b_dk, b_dk_write: [BT, BK] gradients of the rows decayed from the start, and of the keys decayed to the
            end.
        b_carried: [BK] entering state times the leaving one's gradient, summed over V.

    Returns:
        dq, dk of the normalised rows, and dg of the per-token log gate in interval form: [NB, NEAR, BK] each.
    """
    b_q, b_k = rows.q, rows.k
    b_dq, b_dk = to_near_rows(b_dq, memory), to_near_rows(b_dk, memory)
    NB: tl.constexpr = b_g.shape[0]
    i_n = tl.arange(0, NB)
    start, end = i_n * 0, i_n * 0 + NB
    b_first = sub_chunk_row(b_g, 0)
    b_rest = tl.sum(tl.where(tl.arange(0, NEAR)[None, :, None] == 0, 0.0, b_g), axis=1)
    b_sum = b_first + b_rest
    b_before, b_after = sum_over(b_sum, start, i_n, NB), sum_over(b_sum, i_n + 1, end, NB)
    b_start, b_a = tl.exp2(b_before + b_first), tl.exp2(b_g)
    b_decay = decays_since(b_start, b_a)
    b_dq, b_dk = b_dq * b_decay, b_dk * b_decay
    b_over = b_carried[None, :] * tl.exp2(b_before + b_sum + b_after)
    b_over += sum_over(tl.sum(tl.fma(b_q, b_dq, b_k * b_dk), axis=1), i_n + 1, end, NB)
    b_dkc = to_near_rows(b_dk_write, memory) * decays_until(tl.exp2(b_after), b_a)
    b_over += sum_over(tl.sum(b_k * b_dkc, axis=1), start, i_n, NB)
    for level in tl.static_range(3):
        if NB >> (level + 1) > 0:
            b_dq, b_dk, b_dkc, b_over = add_half_pairs(
                memory,
                GatedRows(b_q, b_k, b_a, b_first, b_rest),
                RowGradients(b_dq, b_dk, b_dkc, b_over),
                NB >> (level + 1),
                OP,
                PRECISION,
            )
    b_dg = sums_inside(tl.fma(b_q, b_dq, b_k * b_dk), b_k * b_dkc, b_over)
    return add_near_pairs(memory, rows, b_a, b_dq, b_dk + b_dkc, b_dg, NB)


@triton.jit
def to_near_rows(x, memory):
    """`to_sub_chunks` in sub-chunks of NEAR rows.   [BT, BK] -> [NB, NEAR, BK]"""
    return to_sub_chunks(x, memory.near, memory.opaque_zero, x.shape[0], x.shape[1], NEAR)


@triton.jit
def add_half_pairs(memory, rows, sums, H: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs between the two halves of every block of 2 H sub-chunks to the gradients.

    Both halves are anchored at the later half's first row.

    Args:
        memory, rows, sums: A `PairMemory`, `GatedRows` and `RowGradients`.

    Returns:
        The gradients of `RowGradients`.
    """
    NB: tl.constexpr = rows.q.shape[0]
    BT: tl.constexpr = NB * NEAR
    BK: tl.constexpr = rows.q.shape[2]
    i_n = tl.arange(0, NB)
    half = i_n // H * H
    anchor = i_n // (2 * H) * (2 * H) + H
    later = half == anchor
    # Gates from the anchor to a later sub-chunk's first row, or from an earlier sub-chunk's end to the anchor.
    b_border = sum_over(rows.first, tl.minimum(i_n, anchor) + 1, tl.maximum(i_n, anchor) + 1, NB)
    if H > 1:
        b_border += sum_over(rows.rest, tl.where(later, anchor, i_n + 1), tl.where(later, i_n, anchor), NB)
    b_border = tl.exp2(b_border)
    b_decay = tl.where(later[:, None, None], decays_since(b_border, rows.a), decays_until(b_border, rows.a))
    # Later rows meet earlier columns, and the other way round.
    b_kd, b_qd = (rows.k * b_decay).reshape(BT, BK), (rows.q * -b_decay).reshape(BT, BK)
    b_dqh = mm(load_half_pairs(memory.pairs, memory.i_tile, 1, H, NB), b_kd, None, OP, PRECISION)
    b_dkh = mm(load_half_pairs(memory.pairs, memory.i_tile, 0, H, NB), b_kd, None, OP, PRECISION)
    # A separate product, subtracted below: chained into one accumulator, its layout suits eight warps badly.
    b_dkp = mm(load_half_pairs(memory.pairs, memory.i_tile, 2, H, NB), b_qd, None, OP, PRECISION)
    b_dqh = to_near_rows(b_dqh, memory) * b_decay
    b_dkh = to_near_rows(b_dkh - b_dkp, memory) * b_decay
    b_over = sums.over
    if H > 1:
        b_products = tl.sum(tl.fma(rows.q, b_dqh, rows.k * b_dkh), axis=1)
        b_over += sum_over(b_products, tl.where(later, i_n + 1, half), tl.where(later, half + H, i_n), NB)
    b_later = tl.where(later, 1.0, 0.0)[:, None, None]
    return sums.q + b_dqh, sums.k + b_later * b_dkh, sums.kc + (1.0 - b_later) * b_dkh, b_over


@triton.jit
def sum_over(b_x, begin, end, NB: tl.constexpr):
    """For each sub-chunk n, the sum of b_x [NB, BK] over sub-chunks begin[n] to end[n], excluding the last.   [NB, BK]

    With one sub-chunk per warp, all values are exchanged once, and each thread sums the ones it needs.
    """
    i_m = tl.arange(0, NB)[None, :]
    b_some = tl.where((i_m >= begin[:, None]) & (i_m < end[:, None]), 1.0, 0.0)
    return tl.sum(b_some[:, :, None] * b_x[None], axis=1)


@triton.jit
def load_half_pairs(p_pairs, i_tile, which: tl.constexpr, H: tl.constexpr, NB: tl.constexpr):
    """Load one of a tile's three pair gradients for pairs between the halves of a block, zero elsewhere.   [BT, BT]

    `which`: 0 for both orders, 1 for [r, s], 2 for [s, r].
    """
    BT: tl.constexpr = NEAR * NB
    o = tl.arange(0, BT)
    i_row, i_column = (o // (NEAR * H))[:, None], (o // (NEAR * H))[None, :]
    is_pair = i_row // 2 == i_column // 2
    if which == 0:
        is_pair = is_pair & (i_row != i_column)
    elif which == 1:
        is_pair = is_pair & (i_row > i_column)
    else:
        is_pair = is_pair & (i_row < i_column)
    p = p_pairs + (i_tile * 3 + which) * (BT * BT) + o[:, None] * BT + o[None, :]
    return tl.load(p, mask=is_pair, other=0.0)


@triton.jit
def decays_since(b_start, b_a):
    """b_start decayed from a sub-chunk's first row to each.   [NB, BK], [NB, NEAR, BK] -> [NB, NEAR, BK]

    Computed as a product of tokens' decays: a difference of running sums would lose precision after strong gates.
    """
    o_i = tl.arange(0, NEAR)[None, :, None]
    b_decay = tl.broadcast_to(b_start[:, None], b_a.shape)
    for i in tl.static_range(1, NEAR):
        b_start *= sub_chunk_row(b_a, i)
        b_decay = tl.where(o_i == i, b_start[:, None], b_decay)
    return b_decay


@triton.jit
def decays_until(b_end, b_a):
    """b_end times the decay from each row to its sub-chunk's end.   [NB, BK], [NB, NEAR, BK] -> [NB, NEAR, BK]"""
    o_i = tl.arange(0, NEAR)[None, :, None]
    b_decay = tl.broadcast_to(b_end[:, None], b_a.shape)
    for i in tl.static_range(1, NEAR):
        b_end *= sub_chunk_row(b_a, NEAR - i)
        b_decay = tl.where(o_i == NEAR - 1 - i, b_end[:, None], b_decay)
    return b_decay


@triton.jit
def sums_inside(b_rows, b_columns, b_over):
    """For each row i of a sub-chunk, b_over plus the sum of b_rows from i on and of b_columns before i."""
    o_i = tl.arange(0, NEAR)[None, :, None]
    b_later = tl.zeros_like(b_rows)
    b_sum = b_over
    for i in tl.static_range(NEAR):
        b_sum += sub_chunk_row(b_rows, NEAR - 1 - i)
        b_later = tl.where(o_i == NEAR - 1 - i, b_sum[:, None], b_later)
    b_earlier = tl.zeros_like(b_rows)
    b_sum = tl.zeros_like(b_over)
    for i in tl.static_range(1, NEAR):
        b_sum += sub_chunk_row(b_columns, i - 1)
        b_earlier = tl.where(o_i == i, b_sum[:, None], b_earlier)
    return b_later + b_earlier
