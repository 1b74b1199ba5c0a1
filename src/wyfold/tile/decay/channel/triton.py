"""Decayed grams under a channel gate, and their adjoint, in Triton.

The forward anchors decays at the first row of every sub-chunk of 16 rows (`add_channel_grams`, and `add_key_gram` for
unrounded operands). The adjoint (`channel_bwd`) computes pairs inside 8 rows one by one, and all others by halving: at
level h, blocks of 2h rows pair their later with their earlier half, both anchored at the later half's first row. Log
gates are to base 2 here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.decay.triton import NEAR, activated, log_gate
from wyfold.tile.dot.triton import mm, mm_exact, nearest_tf32
from wyfold.tile.index.triton import load_sub_chunks, to_sub_chunks


@triton.jit
def load_sub_chunk_gate(
    gate, at, h, column, opaque_zero, ACTIVATION: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    """Load the log gate to base 2 in sub-chunks, from channel `column` on; zero in padding.   [BT / 16, 16, BK]"""
    x = load_sub_chunks(gate.g, gate.s_g, at, h, column, opaque_zero, K, BT, BK).to(tl.float32)
    return sub_chunk_gate(x, gate, h, column, at.rows, ACTIVATION, K)


@triton.jit
def sub_chunk_gate(x, gate, h, column, rows, ACTIVATION: tl.constexpr, K: tl.constexpr):
    """Log gate to base 2 from raw gates x in sub-chunks; zero in padding.   [BT / BR, BR, BK]"""
    BR: tl.constexpr = x.shape[1]
    BK: tl.constexpr = x.shape[2]
    g = log_gate(x, gate, h, column, "channel", ACTIVATION, K, BK)
    if ACTIVATION != "given":
        o_r = BR * tl.arange(0, x.shape[0])[:, None, None] + tl.arange(0, BR)[None, :, None]
        o_k = column + tl.arange(0, BK)[None, None, :]
        g = tl.where((o_r < rows) & (o_k < K), g, 0.0)
    return g * LOG2_E


@triton.jit
def sub_chunk_sums(b_g):
    """Sums of the gates [NB, 16, BK] of every sub-chunk.

    Returns:
        Running sum after the first row [NB, 16, BK], the first row's gate [NB, BK], and the sum of all others [NB, BK].
    """
    o_i = tl.arange(0, 16)[None, :, None]
    b_P = tl.cumsum(tl.where(o_i == 0, 0.0, b_g), axis=1)
    b_first = tl.sum(tl.where(o_i == 0, b_g, 0.0), axis=1)
    b_rest = tl.sum(tl.where(o_i == 15, b_P, 0.0), axis=1)
    return b_P, b_first, b_rest


@triton.jit
def sums_between(b_first, b_rest, NB: tl.constexpr):
    """Sum of gates from the end of sub-chunk n to the first row of sub-chunk i > n.   [NB, NB, BK], [i, n]

    The entry at i = 0 is the sum of all gates before n; entries at other i <= n are zero.
    """
    i_m = tl.arange(0, NB)[:, None, None, None]
    i_i = tl.arange(0, NB)[None, :, None, None]
    i_n = tl.arange(0, NB)[None, None, :, None]
    inside = ((i_n < i_m) & (i_m < i_i)) | ((i_i == 0) & (i_m < i_n))
    b_sum, b_first = (b_first + b_rest)[:, None, None], b_first[:, None, None]
    return tl.sum(tl.where(inside, b_sum, tl.where((i_m == i_i) & (i_n < i_i), b_first, 0.0)), axis=0)


@triton.jit
def sums_after(b_x, NB: tl.constexpr):
    """For each sub-chunk, the sum of b_x [NB, BK] over later ones.   [NB, BK]"""
    i_m, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    return tl.sum(tl.where(i_m > i_n, b_x[:, None], 0.0), axis=0)


REACH: tl.constexpr = tl.constexpr(96.0)
"""Range of log2 decays that one anchor serves: its factors, 2^-96 to 2^96, fit into bfloat16 and float32."""


@triton.jit
def add_channel_grams(
    b_JT,
    b_PT,
    b_q,
    b_k,
    b_c,
    b_P,
    b_rest,
    b_between,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add some channels to the transposed grams, for rows r of sub-chunk i.   [NB, BT, 16], [i, s, r]

        J[r, s] = sum_c k[r, c] column[s, c] exp(G[r, c] - G[s, c])    s <  r
        P[r, s] = sum_c q[r, c] column[s, c] exp(G[r, c] - G[s, c])    s <  r

    and undefined entries where s >= r. The anchor of a row r is the first row of its sub-chunk, so its factor is
    exp2(P[r]). A row s of an earlier sub-chunk decays up to that anchor. A row s of the same sub-chunk has the factor
    exp2(-P[s]) as long as P[s] >= -REACH, which 15 gates rarely exceed. Otherwise further anchors follow, REACH apart.
    Each serves the rows s inside its reach; other rows are zeros there, so they add nothing.

    Operands have the 11 bits of TF32: with bfloat16's 8, errors of repeated keys add up (docs/numerics.md).

    Args:
        b_q, b_k: [NB, 16, BK] normalised rows.
        b_c: [NB, 16, BK] columns; the delta rule's are k.
        b_P, b_rest: From `sub_chunk_sums`.
        b_between: From `sums_between`.

    Returns:
        J^T, P^T; and q and k times their row factors, float32.
    """
    NB: tl.constexpr = b_q.shape[0]
    NEAREST: tl.constexpr = CUT_TO_NEAREST if PRECISION == "tf32" else 1.0
    b_factor = tl.exp2(b_P)
    b_qf, b_kf = b_q * b_factor, b_k * b_factor
    b_qr = gram_operand(b_qf * NEAREST, OP, PRECISION).permute(0, 2, 1)
    b_kr = gram_operand(b_kf * NEAREST, OP, PRECISION).permute(0, 2, 1)

    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    b_scale = tl.where(i_n < i_i, tl.exp2(b_between + b_rest), tl.where(i_n == i_i, 1.0, 0.0)) * NEAREST
    b_s = -b_P
    most = -tl.min(b_rest)
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    anchors = tl.where(most > 0.0, most / REACH + 0.01, 0.0).to(tl.int32) + 1
    if anchors > 1:
        b_s = tl.where(b_P < -REACH, -1024.0, b_s)
    b_ks = gram_operand(scale_for_sub_chunks(b_c * tl.exp2(b_s), b_scale, NB), OP, PRECISION)
    b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
    b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
    if anchors > 1:
        b_s = tl.exp2(tl.where(b_P < -REACH, b_rest[:, None] - b_P, -1024.0)) * NEAREST
        b_scale = tl.where(i_n < i_i, tl.exp2(b_between), 0.0)
        b_ks = gram_operand(scale_for_sub_chunks(b_c * b_s, b_scale, NB), OP, PRECISION)
        b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
        b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
        for anchor in range(1, anchors):
            b_p = b_P + anchor * REACH
            b_factor = tl.exp2(tl.where(b_p > 0.0, 0.0, b_p)) * NEAREST
            b_s = tl.exp2(tl.where((b_p < 0.0) & (b_p >= -REACH), -b_p, -1024.0)) * NEAREST
            b_ks = tl.where((i_i == i_n)[:, :, None], (b_c * b_s)[None], 0.0).reshape(NB, 16 * NB, b_c.shape[2])
            b_ks = gram_operand(b_ks, OP, PRECISION)
            b_kr = gram_operand(b_k * b_factor, OP, PRECISION).permute(0, 2, 1)
            b_qr = gram_operand(b_q * b_factor, OP, PRECISION).permute(0, 2, 1)
            b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
            b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
    return b_JT, b_PT, b_qf, b_kf


LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

RESET: tl.constexpr = tl.constexpr(-180.0)
"""Natural log gate that stands for a reset, after which the state is zero."""

SHIFT: tl.constexpr = tl.constexpr(48.0)
"""Added to the exponents of rows r, and subtracted from those of rows s, in `add_key_gram`.

It is half of REACH, so that neither factor underflows in float32 before the decay, times a key, is below 2^-78, which
may count as zero.
"""


@triton.jit
def exact_sums(b_g, clamp, NB: tl.constexpr):
    """`sub_chunk_sums` and `sums_between` from raw natural log gates, without loss of precision for strong gates.

    The decay between two rows is a difference of sums, which a strong gate before both would make inexact. So a gate is
    split into a multiple of 2^-12, to base 2, and a natural-log rest. Sums of multiples are exact down to -4096, even
    for resets alone, and sums of rests are small.

    Args:
        b_g: [NB, 16, BK] of any float dtype.
        clamp: Smallest log gate.

    Returns:
        Sums of multiples, starting at SHIFT in a sub-chunk's first row, and of rests, [NB, 16, BK] each; both at the
        last row, [NB, BK] each; and sums between sub-chunks [NB, NB, BK].
    """
    o_i = tl.arange(0, 16)[None, :, None]
    b_g = activated(b_g.to(tl.float32), 1.0, 0.0, 0.0, clamp, "given")
    # RESET makes the decay times any key zero, even split over two factors, and fifteen of them still sum exactly.
    b_g = tl.where(b_g <= clamp, RESET, b_g)
    b_multiple = tl.fma(b_g, LOG2_E, 3072.0) - 3072.0
    b_P = tl.cumsum(tl.where(o_i == 0, SHIFT, b_multiple), axis=1)
    b_x = tl.cumsum(tl.where(o_i == 0, 0.0, tl.fma(b_multiple, -LN_2, b_g)), axis=1)
    b_first = tl.sum(tl.where(o_i == 0, b_g, 0.0), axis=1) * LOG2_E
    b_last, b_x_last = tl.sum(tl.where(o_i == 15, b_P, 0.0), axis=1), tl.sum(tl.where(o_i == 15, b_x, 0.0), axis=1)
    return b_P, b_x, b_last, b_x_last, sums_between(b_first, (b_last - SHIFT) + b_x_last * LOG2_E, NB)


@triton.jit
def add_key_gram(b_JT, b_k, b_P, b_x, b_last, b_x_last, b_between, NB: tl.constexpr, EXACT: tl.constexpr):
    """Add some channels to the transposed key gram, for pairs in reach of a sub-chunk's first row.   [NB, BT, 16]

    Like `add_channel_grams` with the same anchors, but with unrounded operands, and without further anchors: their
    pairs are left to `add_far_key_gram`, so that the common case is not slowed. A row s contributes in its own
    sub-chunk if it is in reach, and to later ones in the channels whose last row is.

    Args:
        b_k: [NB, 16, BK] keys.
        b_P, b_x, b_last, b_x_last, b_between: From `exact_sums`.
    """
    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    # A comparison that NaN fails: it must stay NaN.
    b_end = tl.where(beyond_reach(b_last), 0.0, tl.exp2(b_last - SHIFT) * (1.0 + _expm1(b_x_last)))
    b_scale = tl.where(i_n < i_i, tl.exp2(b_between) * b_end, tl.where(i_n == i_i, 1.0, 0.0))
    b_s = tl.exp2(tl.where(b_P >= SHIFT - REACH, -b_P, -1024.0))
    return _add_decayed_keys(b_JT, b_k, b_x, tl.exp2(b_P), b_s, b_scale, NB, EXACT)


@triton.jit
def beyond_reach(b_last):
    """Whether `add_key_gram` leaves out rows of a sub-chunk, given the smallest sum at its last row."""
    return b_last < SHIFT - REACH


@triton.jit
def add_far_key_gram(b_JT, b_k, b_P, b_x, b_last, b_x_last, b_between, NB: tl.constexpr, EXACT: tl.constexpr):
    """Add the pairs that `add_key_gram` leaves out of some channels to the transposed key gram.

    First come sub-chunks whose last row is out of reach, with later sub-chunks: their rows decay to that last row. Then
    come, inside a sub-chunk, the rows s in reach of each further anchor.
    """
    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    most = SHIFT - tl.min(b_last)
    # Rounded up at a multiple of REACH, as in `add_channel_grams`.
    anchors = tl.where(most > REACH, most / REACH + 1.01, 0.0).to(tl.int32)
    for anchor in range(anchors):
        b_p = b_P + anchor * REACH
        if anchor == 0:
            b_s = tl.where(beyond_reach(b_last)[:, None], (b_last - SHIFT)[:, None] - b_P, -1024.0)
            b_scale = tl.where(i_n < i_i, tl.exp2(b_between) * (1.0 + _expm1(b_x_last)), 0.0)
        else:
            b_s = tl.where((b_p < SHIFT) & (b_p >= SHIFT - REACH), -b_p, -1024.0)
            b_scale = tl.broadcast_to(tl.where(i_n == i_i, 1.0, 0.0), b_between.shape)
        b_r = tl.exp2(tl.where(b_p > SHIFT, SHIFT, b_p))
        b_JT = _add_decayed_keys(b_JT, b_k, b_x, b_r, tl.exp2(b_s), b_scale, NB, EXACT)
    return b_JT


@triton.jit
def _add_decayed_keys(b_JT, b_k, b_x, b_r, b_s, b_scale, NB: tl.constexpr, EXACT: tl.constexpr):
    """Add the gram of b_k * b_r (rows r) with b_k * b_s (rows s) to the transposed gram."""
    b_r, b_s = b_k * b_r, b_k * b_s
    b_r, b_s = tl.fma(b_r, _expm1(b_x), b_r), tl.fma(b_s, _expm1(-b_x), b_s)
    return mm_exact(scale_for_sub_chunks(b_s, b_scale, NB), b_r.permute(0, 2, 1), b_JT, EXACT)


@triton.jit
def _expm1(b_x):
    """exp(x) - 1 for sums of rests: so small that the third power is negligible next to 1."""
    return tl.fma(0.5 * b_x, b_x, b_x)


@triton.jit
def scale_for_sub_chunks(b_s, b_scale, NB: tl.constexpr):
    """Scale rows s of sub-chunk n, for each sub-chunk i, by a factor per channel.   [NB, 16 NB, BK], [i, s]

    Args:
        b_s: [NB, 16, BK] rows.
        b_scale: [NB, NB, BK], [i, n].
    """
    return (b_s[None] * b_scale[:, :, None]).reshape(NB, 16 * NB, b_s.shape[2])


CUT_TO_NEAREST: tl.constexpr = tl.constexpr(1.0 + 2.0**-11.5)
"""Factor that makes truncation to the 11 bits of TF32 unbiased, like rounding.

It adds 0.7 to 1.4 times half of the last bit kept, depending on the number's other bits. Truncation alone loses half of
that bit on average, which adds up over repeated keys. Rounding each operand would take four instructions; this factor
is multiplied into others and takes none.
"""


@triton.jit
def gram_operand(x, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Operand of a TF32 product, which truncates it; rounded to TF32 here where bfloat16 products run in float32."""
    if OP == tl.bfloat16 and PRECISION == "ieee":
        return nearest_tf32(x)
    else:
        return x


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
        c: [NB, NEAR, BK] columns, or None: they are k.
    """

    q: Any
    k: Any
    a: Any
    first: Any
    rest: Any
    c: Any = None


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
    """Rows and columns whose decayed grams `channel_bwd` differentiates.

    Attributes:
        q, k: [NB, NEAR, BK] normalised rows.
        c: [NB, NEAR, BK] columns, or None: they are k, and the gram of k has no diagonal.
    """

    q: Any
    k: Any
    c: Any = None


@triton.jit
def channel_bwd(rows, b_g, memory, b_dq, b_dk, b_dc_write, b_carried, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Adjoint of all terms that a channel gate decays, for some channels: reads, writes, the state, and the grams.

    Tiles are in sub-chunks of NEAR rows, with all rows of a column in one thread. Between sub-chunks the grams are
    split by halving (`add_half_pairs`); inside them pairs are computed one by one (`add_near_pairs`). The gate's
    gradient has two parts: intervals that begin or end in the token's own sub-chunk are a sum along its rows, and
    intervals that span the sub-chunk are one number for all rows. Each term is added once, and none is subtracted.

    Args:
        rows: `PairRows`.
        b_g: [NB, NEAR, BK] log gate to base 2.
        memory: A `PairMemory`.
        b_dq, b_dk, b_dc_write: [BT, BK] gradients of the rows decayed from the start, and of the columns decayed to
            the end.
        b_carried: [BK] entering state times the leaving one's gradient, summed over V.

    Returns:
        dq, dk of the normalised rows, that of the columns if they are not k, and dg of the per-token log gate in
        interval form: [NB, NEAR, BK] each.
    """
    b_q, b_k = rows.q, rows.k
    b_c = b_k
    if rows.c is not None:
        b_c = rows.c
    NB: tl.constexpr = b_g.shape[0]
    i_n = tl.arange(0, NB)
    start, end = i_n * 0, i_n * 0 + NB
    b_a = tl.exp2(b_g)
    b_first = sub_chunk_row(b_g, 0)
    b_rest = tl.sum(tl.where(tl.arange(0, NEAR)[None, :, None] == 0, 0.0, b_g), axis=1)
    b_sum = b_first + b_rest
    b_before, b_after = sum_over(b_sum, start, i_n, NB), sum_over(b_sum, i_n + 1, end, NB)
    b_decay = decays_since(tl.exp2(b_before + b_first), b_a)
    b_dq = _to_near_rows(b_dq, memory) * b_decay
    b_dk = _to_near_rows(b_dk, memory) * b_decay
    b_dkc = _to_near_rows(b_dc_write, memory) * decays_until(tl.exp2(b_after), b_a)
    b_over = b_carried[None, :] * tl.exp2(b_before + b_sum + b_after)
    b_over += sum_over(tl.sum(tl.fma(b_q, b_dq, b_k * b_dk), axis=1), i_n + 1, end, NB)
    b_over += sum_over(tl.sum(b_c * b_dkc, axis=1), start, i_n, NB)
    for level in tl.static_range(3):
        if NB >> (level + 1) > 0:
            b_dq, b_dk, b_dkc, b_over = add_half_pairs(
                memory,
                GatedRows(b_q, b_k, b_a, b_first, b_rest, rows.c),
                RowGradients(b_dq, b_dk, b_dkc, b_over),
                NB >> (level + 1),
                OP,
                PRECISION,
            )
    b_dg = sums_inside(tl.fma(b_q, b_dq, b_k * b_dk), b_c * b_dkc, b_over)
    if rows.c is None:
        return add_near_pairs(memory, rows, b_a, b_dq, b_dk + b_dkc, None, b_dg, NB)
    else:
        return add_near_pairs(memory, rows, b_a, b_dq, b_dk, b_dkc, b_dg, NB)


@triton.jit
def _to_near_rows(x, memory):
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
    b_k = rows.k
    if rows.c is not None:
        b_k = tl.where(later[:, None, None], rows.k, rows.c)
    b_kd, b_qd = (b_k * b_decay).reshape(BT, BK), (rows.q * -b_decay).reshape(BT, BK)
    b_dqh = mm(load_half_pairs(memory.pairs, memory.i_tile, 1, H, NB), b_kd, None, OP, PRECISION)
    b_dkh = mm(load_half_pairs(memory.pairs, memory.i_tile, 0, H, NB), b_kd, None, OP, PRECISION)
    # A separate product, subtracted below: chained into one accumulator, its layout suits eight warps badly.
    b_dkp = mm(load_half_pairs(memory.pairs, memory.i_tile, 2, H, NB), b_qd, None, OP, PRECISION)
    b_dqh = _to_near_rows(b_dqh, memory) * b_decay
    b_dkh = _to_near_rows(b_dkh - b_dkp, memory) * b_decay
    b_over = sums.over
    if H > 1:
        b_products = tl.sum(tl.fma(rows.q, b_dqh, b_k * b_dkh), axis=1)
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
def sub_chunk_row(x, i: tl.constexpr):
    """Row i of every sub-chunk, bit for bit.   [NB, BR, BK] -> [NB, BK]

    Summed as integers: where a thread holds all rows of a column, the sum with zeros is an exact selection.
    """
    o_i = tl.arange(0, x.shape[1])[None, :, None]
    return tl.sum(tl.where(o_i == i, x.to(tl.int32, bitcast=True), 0), axis=1).to(tl.float32, bitcast=True)


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


@triton.jit
def store_near_pairs(p_near, i_tile, which: tl.constexpr, b_pairs, BT: tl.constexpr):
    """Store the pairs [s, r] inside sub-chunks, gradients of P (`which` 0) or J (1), for `add_near_pairs`."""
    o_s, o_r = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    o_near = (o_s // NEAR * NEAR + o_s % NEAR) * NEAR + o_r % NEAR
    mask = (o_s // NEAR == o_r // NEAR) & (o_s <= o_r)
    tl.store(p_near + i_tile * (BT * NEAR * 2) + o_near * 2 + which, b_pairs, mask=mask)


@triton.jit
def load_near_pairs(p_near, i_tile, s: tl.constexpr, NB: tl.constexpr):
    """Load the gradients of P[r, s] and J[r, s] of every sub-chunk for rows r >= s.   2 x (NEAR - s) x [NB, 1]

    Two rows are loaded together, 16 bytes. Entries above the diagonal were never written and are dropped.
    """
    o_n, o_r, o_two = tl.arange(0, NB)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    dP_rows, dJ_rows = (), ()
    for r in tl.static_range(s // 2 * 2, NEAR, 2):
        p = p_near + i_tile * (NB * NEAR * NEAR * 2) + ((o_n * NEAR + s) * NEAR + r + o_r) * 2 + o_two
        b_dP, b_dJ = tl.split(tl.load(p))
        b_dP, b_next_dP = tl.split(b_dP)
        b_dJ, b_next_dJ = tl.split(b_dJ)
        if r >= s:
            dP_rows, dJ_rows = append_row(dP_rows, b_dP[:, None]), append_row(dJ_rows, b_dJ[:, None])
        dP_rows, dJ_rows = append_row(dP_rows, b_next_dP[:, None]), append_row(dJ_rows, b_next_dJ[:, None])
    return dP_rows, dJ_rows


@triton.jit
def add_near_pairs(memory, rows, b_a, b_dq, b_dk, b_dc, b_dg, NB: tl.constexpr):
    """Add the pairs inside sub-chunks to the gradients: no anchors, each decay is a product over the tokens between.

        z[s, r] = k[s] a[s + 1] ... a[r]                 key s decayed to row r
        u[s, r] = dP[r, s] q[r] + dJ[r, s] k[r]          gradient that row r returns to s
        b[s, i] = u[s, i] + a[i + 1] b[s, i + 1]         the same, summed over r >= i and decayed to i

        dq[r] += sum_{s<=r} dP[r, s] z[s, r]     dk[r] += sum_{s<r} dJ[r, s] z[s, r]
        dk[s] += dP[s, s] q[s] + a[s + 1] b[s, s + 1]     dg[i] += sum_{s<i} z[s, i] b[s, i]

    Columns that are not k take the place of k[s] and dk[s], and dJ then has a diagonal. A thread holds all rows of its
    columns, so threads exchange no data here.
    """
    q_rows, k_rows, a_rows = (), (), ()
    for i in tl.static_range(NEAR):
        q_rows = append_row(q_rows, sub_chunk_row(rows.q, i))
        k_rows = append_row(k_rows, sub_chunk_row(rows.k, i))
        a_rows = append_row(a_rows, sub_chunk_row(b_a, i))
    for s in tl.static_range(NEAR):
        b_z = sub_chunk_row(rows.k if rows.c is None else rows.c, s)
        dP_rows, dJ_rows = load_near_pairs(memory.near, memory.i_tile, s, NB)
        b_dq = add_row(b_dq, s, dP_rows[0] * b_z)
        if rows.c is None:
            b_dk = add_row(b_dk, s, dP_rows[0] * q_rows[s])
        else:
            b_dk = add_row(b_dk, s, dJ_rows[0] * b_z)
            b_dc = add_row(b_dc, s, tl.fma(dP_rows[0], q_rows[s], dJ_rows[0] * k_rows[s]))
        z_rows, u_rows = (), ()
        for r in tl.static_range(s + 1, NEAR):
            b_dP, b_dJ = dP_rows[r - s], dJ_rows[r - s]
            b_z *= a_rows[r]
            b_dq = add_row(b_dq, r, b_dP * b_z)
            b_dk = add_row(b_dk, r, b_dJ * b_z)
            z_rows, u_rows = append_row(z_rows, b_z), append_row(u_rows, tl.fma(b_dP, q_rows[r], b_dJ * k_rows[r]))
        b_b = tl.zeros_like(b_z)
        for i in tl.static_range(NEAR - 1 - s):
            b_b += u_rows[NEAR - 2 - s - i]
            b_dg = add_row(b_dg, NEAR - 1 - i, z_rows[NEAR - 2 - s - i] * b_b)
            b_b *= a_rows[NEAR - 1 - i]
        if rows.c is None:
            b_dk = add_row(b_dk, s, b_b)
        else:
            b_dc = add_row(b_dc, s, b_b)
    if rows.c is None:
        return b_dq, b_dk, b_dg
    else:
        return b_dq, b_dk, b_dc, b_dg


@triton.jit
def append_row(rows, b_row):
    """Append a row to a tuple of rows."""
    return rows + (b_row,)


@triton.jit
def add_row(x, i: tl.constexpr, b_row):
    """Add b_row to row i of every sub-chunk of x.   [NB, BR, BK], [NB, BK] -> [NB, BR, BK]"""
    return tl.where(tl.arange(0, x.shape[1])[None, :, None] == i, x + b_row[:, None], x)
