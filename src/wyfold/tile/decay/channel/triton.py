"""Grams under a channel gate on the device, and their adjoint.

The forward's grams have anchors at the first row of every 16 (`add_channel_grams`; `add_key_gram` of operands that are
not rounded). Their adjoint (`channel_bwd`) takes pairs inside 8 rows one by one and all others by halving: at level h,
blocks of 2h rows pair their upper with their lower half, both anchored at the lower half's first row. Log gates are to
base 2 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.decay.triton import NEAR, activated, log_gate
from wyfold.tile.dot.triton import mm, mm_exact, nearest_tf32
from wyfold.tile.index.triton import load_sub_chunks, to_sub_chunks


@triton.jit
def load_sub_chunk_gate(
    p_g,
    s_g,
    p_A_log,
    p_dt_bias,
    b,
    t,
    h,
    column,
    rows,
    opaque_zero,
    lower_bound,
    clamp,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Log gate of channels from `column` on, to base 2, in sub-chunks; zero in padding.   [BT / 16, 16, BK]"""
    x = load_sub_chunks(p_g, s_g, b, t, h, column, rows, opaque_zero, K, BT, BK).to(tl.float32)
    return sub_chunk_gate(x, p_A_log, p_dt_bias, h, column, rows, lower_bound, clamp, ACTIVATION, K, BT, BK, 16)


@triton.jit
def sub_chunk_gate(
    x,
    p_A_log,
    p_dt_bias,
    h,
    column,
    rows,
    lower_bound,
    clamp,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BR: tl.constexpr,
):
    """`load_sub_chunk_gate` of what was loaded, in sub-chunks of BR rows.   [BT / BR, BR, BK]"""
    g = log_gate(x, p_A_log, p_dt_bias, h, column, lower_bound, clamp, "channel", ACTIVATION, K, BK)
    if ACTIVATION != "given":
        o_r = BR * tl.arange(0, BT // BR)[:, None, None] + tl.arange(0, BR)[None, :, None]
        o_k = column + tl.arange(0, BK)[None, None, :]
        g = tl.where((o_r < rows) & (o_k < K), g, 0.0)
    return g * LOG2_E


@triton.jit
def sub_chunk_sums(b_g):
    """Sums of gates [NB, 16, BK] in their sub-chunk: after its first row up to each, the first, and after the first.

    Returns:
        [NB, 16, BK], [NB, BK], [NB, BK].
    """
    o_i = tl.arange(0, 16)[None, :, None]
    b_P = tl.cumsum(tl.where(o_i == 0, 0.0, b_g), axis=1)
    b_first = tl.sum(tl.where(o_i == 0, b_g, 0.0), axis=1)
    b_rest = tl.sum(tl.where(o_i == 15, b_P, 0.0), axis=1)
    return b_P, b_first, b_rest


@triton.jit
def sums_between(b_first, b_rest, NB: tl.constexpr):
    """Gates from the end of sub-chunk n to the first row of sub-chunk i > n, and, at i = 0, all those before n.

    Zero for other i. One sum over sub-chunks serves both.   [NB, NB, BK], [i, n]
    """
    i_m = tl.arange(0, NB)[:, None, None, None]
    i_i = tl.arange(0, NB)[None, :, None, None]
    i_n = tl.arange(0, NB)[None, None, :, None]
    inside = ((i_n < i_m) & (i_m < i_i)) | ((i_i == 0) & (i_m < i_n))
    b_sum, b_first = (b_first + b_rest)[:, None, None], b_first[:, None, None]
    return tl.sum(tl.where(inside, b_sum, tl.where((i_m == i_i) & (i_n < i_i), b_first, 0.0)), axis=0)


@triton.jit
def sums_after(b_x, NB: tl.constexpr):
    """Sums over later sub-chunks of one number for each.   [NB, BK]"""
    i_m, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    return tl.sum(tl.where(i_m > i_n, b_x[:, None], 0.0), axis=0)


REACH: tl.constexpr = tl.constexpr(96.0)
"""Span of log2 decays that one anchor serves: bfloat16 and float32 hold its factors, down to 2^-96 and up to 2^96."""


@triton.jit
def add_channel_grams(
    b_JT,
    b_PT,
    b_q,
    b_k,
    b_P,
    b_rest,
    b_between,
    NB: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Transposed grams plus what some channels give, for rows r of sub-chunk i.   [NB, BT, 16], [i, s, r]

        J[r, s] = sum_c k[r, c] k[s, c] exp(G[r, c] - G[s, c])    s <  r
        P[r, s] = sum_c q[r, c] k[s, c] exp(G[r, c] - G[s, c])    s <  r

    and anything where s >= r. The anchor of a row r is the first of its sub-chunk, so that its factor is exp2(P[r]). A
    row s of an earlier sub-chunk decays up to there. One of the same sub-chunk has the factor exp2(-P[s]), as long as
    P[s] >= -REACH, which 15 gates rarely miss. Where one does, further anchors follow, REACH from each other, and each
    serves the s inside its reach; to the others those are zeros, so that nothing but their own rows feels them.

    Operands have the 11 bits of TF32: with bfloat16's 8, errors of repeated keys add up (docs/numerics.md).

    Args:
        b_q, b_k: [NB, 16, BK] normalised rows.
        b_P, b_rest: From `sub_chunk_sums`.
        b_between: From `sums_between`.

    Returns:
        J^T, P^T; and q and k with the factors of rows, float32.
    """
    NEAREST: tl.constexpr = CUT_TO_NEAREST if PRECISION == "tf32" else 1.0
    b_factor = tl.exp2(b_P)
    b_qf, b_kf = b_q * b_factor, b_k * b_factor
    b_qr = gram_operand(b_qf * NEAREST, OP, PRECISION).permute(0, 2, 1)
    b_kr = gram_operand(b_kf * NEAREST, OP, PRECISION).permute(0, 2, 1)

    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    b_on = tl.where(i_n < i_i, tl.exp2(b_between + b_rest), tl.where(i_n == i_i, 1.0, 0.0)) * NEAREST
    b_s = -b_P
    most = -tl.min(b_rest)
    # Rounded up at a multiple of REACH: one too many costs time, one too few a pair.
    anchors = tl.where(most > 0.0, most / REACH + 0.01, 0.0).to(tl.int32) + 1
    if anchors > 1:
        b_s = tl.where(b_P < -REACH, -1024.0, b_s)
    b_ks = gram_operand(over_sub_chunks(b_k * tl.exp2(b_s), b_on, NB), OP, PRECISION)
    b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
    b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
    if anchors > 1:
        b_s = tl.exp2(tl.where(b_P < -REACH, b_rest[:, None] - b_P, -1024.0)) * NEAREST
        b_on = tl.where(i_n < i_i, tl.exp2(b_between), 0.0)
        b_ks = gram_operand(over_sub_chunks(b_k * b_s, b_on, NB), OP, PRECISION)
        b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
        b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
        for anchor in range(1, anchors):
            b_p = b_P + anchor * REACH
            b_factor = tl.exp2(tl.where(b_p > 0.0, 0.0, b_p)) * NEAREST
            b_s = tl.exp2(tl.where((b_p < 0.0) & (b_p >= -REACH), -b_p, -1024.0)) * NEAREST
            b_ks = tl.where((i_i == i_n)[:, :, None], (b_k * b_s)[None], 0.0).reshape(NB, 16 * NB, BK)
            b_ks = gram_operand(b_ks, OP, PRECISION)
            b_kr = gram_operand(b_k * b_factor, OP, PRECISION).permute(0, 2, 1)
            b_qr = gram_operand(b_q * b_factor, OP, PRECISION).permute(0, 2, 1)
            b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
            b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
    return b_JT, b_PT, b_qf, b_kf


LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)

RESET: tl.constexpr = tl.constexpr(-180.0)
"""Natural log gate of a token that forgets all."""

SHIFT: tl.constexpr = tl.constexpr(48.0)
"""Exponents of rows are this much more in `add_key_gram`, and those of what they meet less: half of REACH, so that
neither factor is below float32's numbers before the decay, times a key, is below 2^-78, which may count as nothing."""


@triton.jit
def exact_sums(b_g, clamp, NB: tl.constexpr):
    """`sub_chunk_sums` and `sums_between` of log gates as given, so that nothing is lost where gates are strong.

    What lies between two rows is a difference of sums, which would lose what a strong gate before both has of them. So
    a gate is a multiple of 2^-12, to base 2, and a rest, natural: sums of multiples are exact down to -4096, even of
    resets alone, and those of rests are small.

    Args:
        b_g: [NB, 16, BK] of any float.
        clamp: Least of a log gate.

    Returns:
        [NB, 16, BK] of multiples, from SHIFT at a sub-chunk's first row on, and of rests; [NB, BK] both at its last
        row; and [NB, NB, BK] between sub-chunks.
    """
    o_i = tl.arange(0, 16)[None, :, None]
    b_g = activated(b_g.to(tl.float32), 1.0, 0.0, 0.0, clamp, "given")
    # A reset is nothing times any key, though two factors share it; fifteen are still summed exactly.
    b_g = tl.where(b_g <= clamp, RESET, b_g)
    b_multiple = tl.fma(b_g, LOG2_E, 3072.0) - 3072.0
    b_P = tl.cumsum(tl.where(o_i == 0, SHIFT, b_multiple), axis=1)
    b_x = tl.cumsum(tl.where(o_i == 0, 0.0, tl.fma(b_multiple, -LN_2, b_g)), axis=1)
    b_first = tl.sum(tl.where(o_i == 0, b_g, 0.0), axis=1) * LOG2_E
    b_last, b_x_last = tl.sum(tl.where(o_i == 15, b_P, 0.0), axis=1), tl.sum(tl.where(o_i == 15, b_x, 0.0), axis=1)
    return b_P, b_x, b_last, b_x_last, sums_between(b_first, (b_last - SHIFT) + b_x_last * LOG2_E, NB)


@triton.jit
def add_key_gram(b_JT, b_k, b_P, b_x, b_last, b_x_last, b_between, NB: tl.constexpr, EXACT: tl.constexpr):
    """Transposed key gram plus what some channels give, inside the reach of a sub-chunk's first row.   [NB, BT, 16]

    As `add_channel_grams`, whose anchors these are, but of operands that are not rounded, and without the pairs that
    further anchors serve: those are `add_far_key_gram`'s, so that nothing of them stands in the usual way. A row s is
    met in its own sub-chunk if it is in reach, and by later ones in the channels whose last row is.

    Args:
        b_k: [NB, 16, BK] keys.
        b_P, b_x, b_last, b_x_last, b_between: From `exact_sums`.
    """
    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    # A comparison that NaN fails: it must stay NaN.
    b_end = tl.where(beyond_reach(b_last), 0.0, tl.exp2(b_last - SHIFT) * (1.0 + _expm1(b_x_last)))
    b_on = tl.where(i_n < i_i, tl.exp2(b_between) * b_end, tl.where(i_n == i_i, 1.0, 0.0))
    b_s = tl.exp2(tl.where(b_P >= SHIFT - REACH, -b_P, -1024.0))
    return _add_decayed_keys(b_JT, b_k, b_x, tl.exp2(b_P), b_s, b_on, NB, EXACT)


@triton.jit
def beyond_reach(b_last):
    """Whether a sub-chunk has rows that `add_key_gram` leaves out, by the least of its last rows' sums."""
    return b_last < SHIFT - REACH


@triton.jit
def add_far_key_gram(b_JT, b_k, b_P, b_x, b_last, b_x_last, b_between, NB: tl.constexpr, EXACT: tl.constexpr):
    """Transposed key gram plus what `add_key_gram` leaves out of some channels; zeros for what it has.

    First the sub-chunks whose last row is out of reach, each with later ones: their rows decay to that last row. Then,
    inside a sub-chunk, the rows s that each further anchor has in its reach.
    """
    i_i, i_n = tl.arange(0, NB)[:, None, None], tl.arange(0, NB)[None, :, None]
    most = SHIFT - tl.min(b_last)
    # Rounded up at a multiple of REACH, as in `add_channel_grams`.
    anchors = tl.where(most > REACH, most / REACH + 1.01, 0.0).to(tl.int32)
    for anchor in range(anchors):
        b_p = b_P + anchor * REACH
        if anchor == 0:
            b_s = tl.where(beyond_reach(b_last)[:, None], (b_last - SHIFT)[:, None] - b_P, -1024.0)
            b_on = tl.where(i_n < i_i, tl.exp2(b_between) * (1.0 + _expm1(b_x_last)), 0.0)
        else:
            b_s = tl.where((b_p < SHIFT) & (b_p >= SHIFT - REACH), -b_p, -1024.0)
            b_on = tl.broadcast_to(tl.where(i_n == i_i, 1.0, 0.0), b_between.shape)
        b_r = tl.exp2(tl.where(b_p > SHIFT, SHIFT, b_p))
        b_JT = _add_decayed_keys(b_JT, b_k, b_x, b_r, tl.exp2(b_s), b_on, NB, EXACT)
    return b_JT


@triton.jit
def _add_decayed_keys(b_JT, b_k, b_x, b_r, b_s, b_on, NB: tl.constexpr, EXACT: tl.constexpr):
    """Transposed gram plus the keys, times factors of rows, with the keys, times factors of what those meet."""
    b_r, b_s = b_k * b_r, b_k * b_s
    b_r, b_s = tl.fma(b_r, _expm1(b_x), b_r), tl.fma(b_s, _expm1(-b_x), b_s)
    return mm_exact(over_sub_chunks(b_s, b_on, NB), b_r.permute(0, 2, 1), b_JT, EXACT)


@triton.jit
def _expm1(b_x):
    """exp of sums of rests less 1: they are so small that a third power is nothing beside 1."""
    return tl.fma(0.5 * b_x, b_x, b_x)


@triton.jit
def over_sub_chunks(b_s, b_on, NB: tl.constexpr):
    """Rows, for each sub-chunk i that they meet times a number of sub-chunk n's channels.   [NB, 16 NB, BK], [i, s]

    Args:
        b_s: [NB, 16, BK] rows.
        b_on: [NB, NB, BK], [i, n].
    """
    return (b_s[None] * b_on[:, :, None]).reshape(NB, 16 * NB, b_s.shape[2])


CUT_TO_NEAREST: tl.constexpr = tl.constexpr(1.0 + 2.0**-11.5)
"""A number times this, cut to the 11 bits of TF32, lies above the number about as often as below, as if it were
rounded: 0.7 to 1.4 times half of the last bit kept is added, by the number's other bits. Cutting alone loses half of
that bit on average, which repeated keys sum up; rounding each operand takes four instructions, this none of its own.
"""


@triton.jit
def gram_operand(x, OP: tl.constexpr, PRECISION: tl.constexpr):
    """x, whose last bits a TF32 product cuts off; where products are exact, rounded to TF32 here for bfloat16."""
    if OP == tl.bfloat16 and PRECISION == "ieee":
        return nearest_tf32(x)
    else:
        return x


@triton.jit
def channel_bwd(
    b_q,
    b_k,
    b_g,
    p_pairs,
    p_near,
    i_tile,
    b_dq,
    b_dk,
    b_dk_write,
    b_carried,
    opaque_zero,
    BT: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adjoint of everything a channel gate decays, for some channels: reads, writes, the state, and the grams.

    Tiles lie in sub-chunks of NEAR rows, all of a column in one thread. Between sub-chunks the grams are split by
    halving (`add_half_pairs`); inside them pairs meet one by one (`add_near_pairs`). Of a token's gate, what begins or
    ends in its own sub-chunk is a sum along the rows there, and what spans that whole is one number for all of them:
    each is added once, and nothing is subtracted.

    Args:
        b_q, b_k: [NB, NEAR, BK] normalised rows.
        b_g: [NB, NEAR, BK] log gate to base 2.
        p_pairs: [tiles, 3, BT, BT] gradient of J below the diagonal and its transpose above, of P, and of P^T.
        p_near: [tiles, NB, NEAR, NEAR, 2] from `store_near_pairs`. Both come from memory: registers have no room.
        b_dq, b_dk, b_dk_write: [BT, BK] gradients of the rows decayed from the start, and of those decayed to the end.
        b_carried: [BK] entering state times the leaving one's gradient, summed over V.
        nothing: As of `load_sub_chunks`.

    Returns:
        dq, dk of the normalised rows, and dg of the per-token log gate in interval form: [NB, NEAR, BK] each.
    """
    NB: tl.constexpr = BT // NEAR
    i_n = tl.arange(0, NB)
    start, end = i_n * 0, i_n * 0 + NB
    b_a = tl.exp2(b_g)
    b_first = sub_chunk_row(b_g, 0)
    b_rest = tl.sum(tl.where(tl.arange(0, NEAR)[None, :, None] == 0, 0.0, b_g), axis=1)
    b_sum = b_first + b_rest
    b_before, b_after = sum_over(b_sum, start, i_n, NB), sum_over(b_sum, i_n + 1, end, NB)
    b_decay = decays_since(tl.exp2(b_before + b_first), b_a)
    b_dq = to_sub_chunks(b_dq, p_near, opaque_zero, BT, BK, NEAR) * b_decay
    b_dk = to_sub_chunks(b_dk, p_near, opaque_zero, BT, BK, NEAR) * b_decay
    b_dkc = to_sub_chunks(b_dk_write, p_near, opaque_zero, BT, BK, NEAR) * decays_until(tl.exp2(b_after), b_a)
    b_over = b_carried[None, :] * tl.exp2(b_before + b_sum + b_after)
    b_over += sum_over(tl.sum(tl.fma(b_q, b_dq, b_k * b_dk), axis=1), i_n + 1, end, NB)
    b_over += sum_over(tl.sum(b_k * b_dkc, axis=1), start, i_n, NB)
    for level in tl.static_range(3):
        if NB >> (level + 1) > 0:
            b_dq, b_dk, b_dkc, b_over = add_half_pairs(
                p_pairs, p_near, i_tile, opaque_zero, b_q, b_k, b_a, b_first, b_rest, b_dq, b_dk, b_dkc, b_over,
                NB >> (level + 1), NB, BK, OP, PRECISION,
            )  # fmt: skip
    b_dg = sums_inside(tl.fma(b_q, b_dq, b_k * b_dk), b_k * b_dkc, b_over)
    return add_near_pairs(p_near, i_tile, b_q, b_k, b_a, b_dq, b_dk + b_dkc, b_dg, NB)


@triton.jit
def add_half_pairs(
    p_pairs,
    p_near,
    i_tile,
    opaque_zero,
    b_q,
    b_k,
    b_a,
    b_first,
    b_rest,
    b_dq,
    b_dk,
    b_dkc,
    b_over,
    H: tl.constexpr,
    NB: tl.constexpr,
    BK: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradients plus what pairs of two halves of H sub-chunks give, one before the other in a block of 2 H.

    Both halves are anchored at the later one's first row.

    Args:
        b_a: [NB, NEAR, BK] decays of the tokens.
        b_first, b_rest: [NB, BK] log gate of a sub-chunk's first row, and of the rows after it.
        b_dq, b_dk: [NB, NEAR, BK] gradients of rows that met what is before their sub-chunk.
        b_dkc: [NB, NEAR, BK] gradients of rows that met what is after their sub-chunk.
        b_over: [NB, BK] gate gradient of intervals that span a sub-chunk whole.
    """
    i_n = tl.arange(0, NB)
    half = i_n // H * H
    anchor = i_n // (2 * H) * (2 * H) + H
    later = half == anchor
    # From the anchor to the first row of a sub-chunk after it, or from the end of one before it to the anchor.
    b_way = sum_over(b_first, tl.minimum(i_n, anchor) + 1, tl.maximum(i_n, anchor) + 1, NB)
    if H > 1:
        b_way += sum_over(b_rest, tl.where(later, anchor, i_n + 1), tl.where(later, i_n, anchor), NB)
    b_way = tl.exp2(b_way)
    b_decay = tl.where(later[:, None, None], decays_since(b_way, b_a), decays_until(b_way, b_a))
    b_kd, b_qd = (b_k * b_decay).reshape(NEAR * NB, BK), (b_q * -b_decay).reshape(NEAR * NB, BK)
    b_dqh = mm(half_pairs(p_pairs, i_tile, 1, H, NB), b_kd, None, OP, PRECISION)
    b_dkh = mm(half_pairs(p_pairs, i_tile, 0, H, NB), b_kd, None, OP, PRECISION)
    # Subtracted below: a sum of two products becomes a chain, whose layout eight warps share badly.
    b_dkp = mm(half_pairs(p_pairs, i_tile, 2, H, NB), b_qd, None, OP, PRECISION)
    b_dqh = to_sub_chunks(b_dqh, p_near, opaque_zero, NEAR * NB, BK, NEAR) * b_decay
    b_dkh = to_sub_chunks(b_dkh - b_dkp, p_near, opaque_zero, NEAR * NB, BK, NEAR) * b_decay
    if H > 1:
        b_along = tl.sum(tl.fma(b_q, b_dqh, b_k * b_dkh), axis=1)
        b_over += sum_over(b_along, tl.where(later, i_n + 1, half), tl.where(later, half + H, i_n), NB)
    b_later = tl.where(later, 1.0, 0.0)[:, None, None]
    return b_dq + b_dqh, b_dk + b_later * b_dkh, b_dkc + (1.0 - b_later) * b_dkh, b_over


@triton.jit
def sum_over(b_x, begin, end, NB: tl.constexpr):
    """Sum, for each sub-chunk n, of what those from begin[n] on to before end[n] have.   [NB, BK]

    Where a warp has a sub-chunk, its threads add up what all warps gave them.
    """
    i_m = tl.arange(0, NB)[None, :]
    b_some = tl.where((i_m >= begin[:, None]) & (i_m < end[:, None]), 1.0, 0.0)
    return tl.sum(b_some[:, :, None] * b_x[None], axis=1)


@triton.jit
def half_pairs(p_pairs, i_tile, which: tl.constexpr, H: tl.constexpr, NB: tl.constexpr):
    """One of a tile's three pair gradients where two halves of H sub-chunks of one block meet, else zeros.   [BT, BT]

    `which`: 0 for both orders, 1 for [r, s], 2 for [s, r].
    """
    BT: tl.constexpr = NEAR * NB
    o = tl.arange(0, BT)
    i_row, i_column = (o // (NEAR * H))[:, None], (o // (NEAR * H))[None, :]
    met = i_row // 2 == i_column // 2
    if which == 0:
        met = met & (i_row != i_column)
    elif which == 1:
        met = met & (i_row > i_column)
    else:
        met = met & (i_row < i_column)
    p = p_pairs + (i_tile * 3 + which) * (BT * BT) + o[:, None] * BT + o[None, :]
    return tl.load(p, mask=met, other=0.0)


@triton.jit
def sub_chunk_row(x, i: tl.constexpr):
    """Row i of every sub-chunk, bit for bit.   [NB, BR, BK] -> [NB, BK]

    As integers, so that where a thread holds all rows of a column the sum with zeros is nothing but a choice.
    """
    o_i = tl.arange(0, x.shape[1])[None, :, None]
    return tl.sum(tl.where(o_i == i, x.to(tl.int32, bitcast=True), 0), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def decays_since(b_start, b_a):
    """b_start decayed from a sub-chunk's first row to each.   [NB, BK], [NB, NEAR, BK] -> [NB, NEAR, BK]

    A product of tokens' decays: a difference of running sums would lose what strong gates before it have.
    """
    o_i = tl.arange(0, NEAR)[None, :, None]
    b_decay = tl.broadcast_to(b_start[:, None], b_a.shape)
    for i in tl.static_range(1, NEAR):
        b_start *= sub_chunk_row(b_a, i)
        b_decay = tl.where(o_i == i, b_start[:, None], b_decay)
    return b_decay


@triton.jit
def decays_until(b_end, b_a):
    """b_end and the decay from each row to its sub-chunk's end.   [NB, BK], [NB, NEAR, BK] -> [NB, NEAR, BK]"""
    o_i = tl.arange(0, NEAR)[None, :, None]
    b_decay = tl.broadcast_to(b_end[:, None], b_a.shape)
    for i in tl.static_range(1, NEAR):
        b_end *= sub_chunk_row(b_a, NEAR - i)
        b_decay = tl.where(o_i == NEAR - 1 - i, b_end[:, None], b_decay)
    return b_decay


@triton.jit
def sums_inside(b_rows, b_columns, b_over):
    """b_over plus, for each row i of a sub-chunk, the sum of b_rows from i on and of b_columns before i."""
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
    """Write [s, r] pairs of a sub-chunk, gradients of P (0) or J (1), where `add_near_pairs` finds them."""
    o_s, o_r = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    o_near = (o_s // NEAR * NEAR + o_s % NEAR) * NEAR + o_r % NEAR
    mask = (o_s // NEAR == o_r // NEAR) & (o_s <= o_r)
    tl.store(p_near + i_tile * (BT * NEAR * 2) + o_near * 2 + which, b_pairs, mask=mask)


@triton.jit
def load_near_pairs(p_near, i_tile, s: tl.constexpr, NB: tl.constexpr):
    """Gradients of P[r, s], and of J[r, s], of every sub-chunk, of the rows r from s on.   2 x (NEAR - s) x [NB, 1]

    Two rows are 16 bytes. What lies above the diagonal was never written, and is not handed on.
    """
    o_n, o_r, o_two = tl.arange(0, NB)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    dP_rows, dJ_rows = (), ()
    for r in tl.static_range(s // 2 * 2, NEAR, 2):
        p = p_near + i_tile * (NB * NEAR * NEAR * 2) + ((o_n * NEAR + s) * NEAR + r + o_r) * 2 + o_two
        b_dP, b_dJ = tl.split(tl.load(p))
        b_dP, b_next_dP = tl.split(b_dP)
        b_dJ, b_next_dJ = tl.split(b_dJ)
        if r >= s:
            dP_rows, dJ_rows = also(dP_rows, b_dP[:, None]), also(dJ_rows, b_dJ[:, None])
        dP_rows, dJ_rows = also(dP_rows, b_next_dP[:, None]), also(dJ_rows, b_next_dJ[:, None])
    return dP_rows, dJ_rows


@triton.jit
def add_near_pairs(p_near, i_tile, b_q, b_k, b_a, b_dq, b_dk, b_dg, NB: tl.constexpr):
    """Gradients plus what the pairs inside a sub-chunk give: no anchors, each decay a product of what lies between.

        z[s, r] = k[s] a[s + 1] ... a[r]                 what row r sees of s
        u[s, r] = dP[r, s] q[r] + dJ[r, s] k[r]          what it gives back, and that summed and decayed to i:
        b[s, i] = u[s, i] + a[i + 1] b[s, i + 1]

        dq[r] += sum_{s<=r} dP[r, s] z[s, r]     dk[r] += sum_{s<r} dJ[r, s] z[s, r]
        dk[s] += dP[s, s] q[s] + a[s + 1] b[s, s + 1]     dg[i] += sum_{s<i} z[s, i] b[s, i]

    A thread holds all rows of its columns, so that nothing here waits for another one.
    """
    q_rows, k_rows, a_rows = (), (), ()
    for i in tl.static_range(NEAR):
        q_rows = also(q_rows, sub_chunk_row(b_q, i))
        k_rows = also(k_rows, sub_chunk_row(b_k, i))
        a_rows = also(a_rows, sub_chunk_row(b_a, i))
    for s in tl.static_range(NEAR):
        b_z = sub_chunk_row(b_k, s)
        dP_rows, dJ_rows = load_near_pairs(p_near, i_tile, s, NB)
        b_dq = add_row(b_dq, s, dP_rows[0] * b_z)
        b_dk = add_row(b_dk, s, dP_rows[0] * q_rows[s])
        z_rows, u_rows = (), ()
        for r in tl.static_range(s + 1, NEAR):
            b_dP, b_dJ = dP_rows[r - s], dJ_rows[r - s]
            b_z *= a_rows[r]
            b_dq = add_row(b_dq, r, b_dP * b_z)
            b_dk = add_row(b_dk, r, b_dJ * b_z)
            z_rows, u_rows = also(z_rows, b_z), also(u_rows, tl.fma(b_dP, q_rows[r], b_dJ * k_rows[r]))
        b_b = tl.zeros_like(b_z)
        for i in tl.static_range(NEAR - 1 - s):
            b_b += u_rows[NEAR - 2 - s - i]
            b_dg = add_row(b_dg, NEAR - 1 - i, z_rows[NEAR - 2 - s - i] * b_b)
            b_b *= a_rows[NEAR - 1 - i]
        b_dk = add_row(b_dk, s, b_b)
    return b_dq, b_dk, b_dg


@triton.jit
def also(rows, b_row):
    """The rows and one more."""
    return rows + (b_row,)


@triton.jit
def add_row(x, i: tl.constexpr, b_row):
    """x with a row added to row i of every sub-chunk.   [NB, BR, BK], [NB, BK] -> [NB, BR, BK]"""
    return tl.where(tl.arange(0, x.shape[1])[None, :, None] == i, x + b_row[:, None], x)
