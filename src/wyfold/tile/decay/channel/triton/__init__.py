"""Decayed grams under a channel gate, in Triton; `adjoint` has their adjoint.

Decays are anchored at the first row of every sub-chunk of 16 rows (`add_channel_grams`, and `add_key_gram` for
unrounded operands). Log gates are to base 2 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.activation.triton import LN_2, LOG2_E
from wyfold.tile.decay.triton import activated, log_gate
from wyfold.tile.dot.triton import mm, mm_exact, nearest_tf32
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks


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
            b_JT, b_PT = _add_anchor(b_JT, b_PT, b_q, b_k, b_c, b_P + anchor * REACH, i_i == i_n, OP, PRECISION)
    return b_JT, b_PT, b_qf, b_kf


@triton.jit
def _add_anchor(b_JT, b_PT, b_q, b_k, b_c, b_p, own, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Add the pairs inside sub-chunks that one further anchor of `add_channel_grams` serves.

    Args:
        b_p: [NB, 16, BK] running sums from the anchor.
        own: [NB, NB, 1] whether sub-chunk n is i.
    """
    NB: tl.constexpr = b_q.shape[0]
    NEAREST: tl.constexpr = CUT_TO_NEAREST if PRECISION == "tf32" else 1.0
    b_factor = tl.exp2(tl.where(b_p > 0.0, 0.0, b_p)) * NEAREST
    b_s = tl.exp2(tl.where((b_p < 0.0) & (b_p >= -REACH), -b_p, -1024.0)) * NEAREST
    b_ks = tl.where(own[:, :, None], (b_c * b_s)[None], 0.0).reshape(NB, 16 * NB, b_c.shape[2])
    b_ks = gram_operand(b_ks, OP, PRECISION)
    b_kr = gram_operand(b_k * b_factor, OP, PRECISION).permute(0, 2, 1)
    b_qr = gram_operand(b_q * b_factor, OP, PRECISION).permute(0, 2, 1)
    b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
    return b_JT, mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)


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
