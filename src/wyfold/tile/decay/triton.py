"""The gate on the device, in the one place that knows its kind.

GATE is "none", "scalar" (one number per token) or "channel" (one per token and key channel). A channel gate sits inside
the contraction, and each use splits it in its own way. The forward's grams have anchors at the first row of every 16
(`add_channel_grams`). Their adjoint (`channel_bwd`) takes pairs inside 8 rows one by one and all others by halving: at
level h, blocks of 2h rows pair their upper with their lower half, both anchored at the lower half's first row. `kkt`
halves down to single rows. Nothing is subtracted on any of these ways, so weak factors keep their relative accuracy.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.tile.activation.triton import sigmoid, softplus
from wyfold.tile.decay.eager import log_gate_floor
from wyfold.tile.dot.triton import mm, mm_exact, self_product, tf32_parts
from wyfold.tile.index.triton import (
    load_sub_chunks,
    load_token_scalars,
    load_tokens,
    store_token_scalars,
    store_token_sub_chunks,
    to_sub_chunks,
)

FLOOR = log_gate_floor(torch.float32)


def gate_kind(g: Tensor | None) -> str:
    """GATE of the kernels, from the gate [B, T, HV] or [B, T, HV, K] or None."""
    return "none" if g is None else "scalar" if g.ndim == 3 else "channel"


def gate_flags(g: Tensor | None) -> dict[str, Any]:
    """GATE, and what kernels ask of it, as keywords of a launch."""
    kind = gate_kind(g)
    return {"GATE": kind, "SCALAR": kind == "scalar", "CHANNEL": kind == "channel"}


def gate_width(g: Tensor | None) -> int:
    """Gates of a token and value head: K of a channel gate, else 1."""
    return g.shape[3] if g is not None and g.ndim == 4 else 1


@triton.jit
def load_gate(
    p_g,
    s_g,
    p_A_log,
    p_dt_bias,
    b,
    t,
    h,
    column,
    rows,
    lower_bound,
    clamp,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """The gate as the caller passed it, from a channel on, and the log gate: activated, floored, zero in padding.

    Both [BT, BK] for a channel gate, [BT] for a scalar one, zeros [BT] without one; float32.
    """
    if GATE == "none":
        return tl.zeros((BT,), tl.float32), tl.zeros((BT,), tl.float32)
    else:
        x = load_raw_gate(p_g, s_g, b, t, h, column, rows, GATE, K, BT, BK)
        g = log_gate(x, p_A_log, p_dt_bias, h, column, lower_bound, clamp, GATE, ACTIVATION, K, BK)
        o_r = tl.arange(0, BT)
        if GATE == "channel":
            o_k = column + tl.arange(0, BK)
            return x, tl.where((o_r < rows)[:, None] & (o_k < K)[None, :], g, 0.0)
        else:
            return x, tl.where(o_r < rows, g, 0.0)


@triton.jit
def load_raw_gate(
    p_g, s_g, b, t, h, column, rows, GATE: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr
):
    """The gate as the caller passed it, float32.   [BT, BK] of a channel gate's columns from `column` on, or [BT]"""
    if GATE == "channel":
        return load_tokens(p_g, s_g, b, t, h, column, rows, K, BT, BK).to(tl.float32)
    else:
        return load_token_scalars(p_g, s_g, b, t, h, rows, BT)


@triton.jit
def load_gate_parameters(p_A_log, p_dt_bias, h, column, GATE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """exp(A_log) of the head, and dt_bias ([BK] for a channel gate); 1 and 0 where a parameter is None."""
    rate = 1.0
    if p_A_log is not None:
        rate = tl.exp(tl.load(p_A_log + h).to(tl.float32))
    bias = 0.0
    if p_dt_bias is not None:
        if GATE == "channel":
            o_k = column + tl.arange(0, BK)
            bias = tl.load(p_dt_bias + h * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)[None, :]
        else:
            bias = tl.load(p_dt_bias + h).to(tl.float32)
    return rate, bias


@triton.jit
def log_gate(
    x,
    p_A_log,
    p_dt_bias,
    h,
    column,
    lower_bound,
    clamp,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """Log gate from what the caller passed, as the eager twin; clamp is the floor where none was asked."""
    if ACTIVATION == "given":
        g = x
    else:
        rate, bias = load_gate_parameters(p_A_log, p_dt_bias, h, column, GATE, K, BK)
        u = x + bias
        if ACTIVATION == "softplus":
            g = -rate * softplus(u)
        else:
            g = lower_bound * sigmoid(u * rate)
    # A comparison, not a maximum: NaN must stay NaN.
    return tl.where(g < clamp, clamp, g)


@triton.jit
def running_sum(b_g, GATE: tl.constexpr):
    """G: running sum of the log gate inside its chunk.   [BT] for a scalar gate; zeros without one"""
    if GATE == "scalar":
        return tl.cumsum(b_g, axis=0)
    else:
        return b_g * 0.0


@triton.jit
def spans(o_interval, b_g, EXACT: tl.constexpr):
    """Sums of a channel gate over the token intervals of a 0/1 matrix: o_interval @ g.   [BT, BK]

    bfloat16 pairs keep 16 bits of each gate, far more than a factor rounded to 16 bits needs; float32 takes three TF32
    products.
    """
    if EXACT == "bf16x3":
        b_m = o_interval.to(tl.bfloat16)
        b_high = b_g.to(tl.bfloat16)
        b_low = (b_g - b_high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(b_m, b_high, tl.dot(b_m, b_low))
    else:
        return tl.dot(o_interval.to(tl.float32), b_g, input_precision=EXACT)


@triton.jit
def to_anchor(h, BT: tl.constexpr):
    """Intervals between each row and the first row of its block's lower half, at level h.   [BT, BT] 0/1

    Row i of a lower half: after the anchor, up to i. Row i of an upper half: after i, up to the anchor.
    """
    o = tl.arange(0, BT)
    anchor = (o // (2 * h)) * (2 * h) + h
    low = tl.minimum(o, anchor)[:, None]
    high = tl.maximum(o, anchor)[:, None]
    return (o[None, :] > low) & (o[None, :] <= high)


@triton.jit
def decayed_grams_transposed(
    b_q, b_k, b_rq, b_rk, b_g, GATE: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr
):
    """Grams of normalised rows, s before or at r, both [s, r], and the key gram [r, s] as well; gates are no channels'.

        J[r, s] = sum_c k[r, c] k[s, c] exp(G[r] - G[s])    s <  r, else 0; not transposed, else anything
        P[r, s] = sum_c q[r, c] k[s, c] exp(G[r] - G[s])    s <= r, else 0

    Args:
        b_q, b_k: [BT, BK] raw rows.
        b_rq, b_rk: [BT] reciprocal norms, or ones.
        b_g: From `load_gate`.

    Returns:
        J, J^T, P^T: [BT, BT] float32.
    """
    o = tl.arange(0, BT)
    b_kk = mm(b_k, tl.trans(b_k), None, OP, PRECISION) * (b_rk[:, None] * b_rk[None, :])
    b_PT = mm(b_k, tl.trans(b_q), None, OP, PRECISION) * (b_rk[:, None] * b_rq[None, :])
    if GATE == "scalar":
        b_G = tl.cumsum(b_g, axis=0)
        b_kk *= pairwise_decay(b_G, BT)
        b_PT *= pairwise_decay(b_G, BT)
    b_PT = tl.where(o[:, None] <= o[None, :], b_PT, 0.0)
    return b_kk, tl.where(o[:, None] < o[None, :], b_kk, 0.0), b_PT


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
    nothing,
    lower_bound,
    clamp,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Log gate of channels from `column` on, to base 2, in sub-chunks; zero in padding.   [BT / 16, 16, BK]"""
    x = load_sub_chunks(p_g, s_g, b, t, h, column, rows, nothing, K, BT, BK).to(tl.float32)
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
    return g * 1.4426950408889634


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
    b_ks = ((b_k * tl.exp2(b_s))[None] * b_on[:, :, None]).reshape(NB, 16 * NB, BK)
    b_ks = gram_operand(b_ks, OP, PRECISION)
    b_JT = mm(b_ks, b_kr, b_JT, tl.float32, PRECISION)
    b_PT = mm(b_ks, b_qr, b_PT, tl.float32, PRECISION)
    if anchors > 1:
        b_s = tl.exp2(tl.where(b_P < -REACH, b_rest[:, None] - b_P, -1024.0)) * NEAREST
        b_on = tl.where(i_n < i_i, tl.exp2(b_between), 0.0)
        b_ks = gram_operand(((b_k * b_s)[None] * b_on[:, :, None]).reshape(NB, 16 * NB, BK), OP, PRECISION)
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


CUT_TO_NEAREST: tl.constexpr = tl.constexpr(1.0 + 2.0**-11.5)
"""A number times this, cut to the 11 bits of TF32, lies above the number about as often as below, as if it were
rounded: 0.7 to 1.4 times half of the last bit kept is added, by the number's other bits. Cutting alone loses half of
that bit on average, which repeated keys sum up; rounding each operand takes four instructions, this none of its own.
"""


@triton.jit
def gram_operand(x, OP: tl.constexpr, PRECISION: tl.constexpr):
    """x, whose last bits a TF32 product cuts off; where products are exact, rounded to TF32 here for bfloat16."""
    if OP == tl.bfloat16 and PRECISION == "ieee":
        high, _ = tf32_parts(x)
        return tl.where(x == x, high, x)
    else:
        return x


def gram_levels(gate: str, chunk_size: int) -> int:
    """How many partial grams `add_key_gram` makes J of: the dyadic levels of a channel gate, else one."""
    return chunk_size.bit_length() - 1 if gate == "channel" else 1


@triton.jit
def add_key_gram(b_J, b_k, b_g, level, GATE: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """b_J plus what some of the channels give to a level of J, for keys as they are.   [BT, BT], [r, s]

    `level` is a number of the running program, so that one level's tiles are held at a time. OP holds the rows exactly,
    and is float32 for a channel gate, whose decays stand in the rows.
    """
    if GATE == "channel":
        h = BT >> (level + 1)
        b_k = b_k.to(tl.float32) * tl.exp(spans(to_anchor(h, BT), b_g, PRECISION))
    return self_product(b_k, b_J, OP, PRECISION)


@triton.jit
def decay_key_gram(b_J, b_g, level, GATE: tl.constexpr, BT: tl.constexpr):
    """A level summed over all channels, as a part of J below the diagonal, anything elsewhere.   [BT, BT], [r, s]"""
    if GATE == "channel":
        h = BT >> (level + 1)
        return tl.where(meets_transposed(h, BT), b_J, 0.0)
    elif GATE == "scalar":
        return b_J * interval_decay(b_g, BT)
    else:
        return b_J


@triton.jit
def meets_transposed(h, BT: tl.constexpr):
    """Pairs [r, s] that level h serves: s in the upper, r in the lower half of one block of 2h rows."""
    o = tl.arange(0, BT) // h
    return ((o % 2) == 0)[None, :] & (o[:, None] == o[None, :] + 1)


@triton.jit
def pairwise_decay(b_G, BT: tl.constexpr):
    """Decay between the earlier and the later of two rows, exp(-|G_r - G_s|) for G that never rises.   [BT, BT]

    Symmetric. The difference has one sign on each side of the diagonal; it is selected, so that a rise in G, which
    is outside the contract, does not change what is a decay.
    """
    o = tl.arange(0, BT)
    difference = b_G[:, None] - b_G[None, :]
    return tl.exp(tl.where(o[:, None] >= o[None, :], difference, -difference))


@triton.jit
def interval_decay(b_g, BT: tl.constexpr):
    """exp of the sum of a scalar gate after row s, up to row r; 1 where r is not after s.   [BT, BT], [r, s]

    A gate is split into a multiple of 2^-10, whose running sums are exact, and a rest whose sums are small: however
    strong a gate before both rows is, their difference loses nothing to it.
    """
    o = tl.arange(0, BT)
    b_coarse = (b_g + 12288.0) - 12288.0
    b_G, b_rest = tl.cumsum(b_coarse, axis=0), tl.cumsum(b_g - b_coarse, axis=0)
    difference = (b_G[:, None] - b_G[None, :]) + (b_rest[:, None] - b_rest[None, :])
    return tl.exp(tl.where(o[:, None] > o[None, :], difference, 0.0))


@triton.jit
def scalar_rows(b_G, GATE: tl.constexpr, BT: tl.constexpr):
    """Decay from the chunk's start to each row and from each row to its end, one number a row: ones unless scalar.

    Padding has g = 0, so the last row's sum is the last token's.
    """
    if GATE == "scalar":
        o = tl.arange(0, BT)
        b_last = tl.sum(tl.where(o == BT - 1, b_G, 0.0), axis=0)
        return tl.exp(b_G), tl.exp(b_last - b_G), tl.exp(b_last)
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return ones, ones, 1.0


@triton.jit
def log_gate_bwd(
    x,
    b_dg,
    p_A_log,
    p_dt_bias,
    h,
    column,
    lower_bound,
    clamp,
    CLAMPED: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """Adjoint of `log_gate`: gradients of x, and of A_log before its sum over rows and channels, shaped like x."""
    if GATE == "none":
        return b_dg, b_dg
    elif ACTIVATION == "given":
        if CLAMPED:
            b_dg = tl.where(x < clamp, 0.0, b_dg)
        return b_dg, b_dg
    else:
        rate, bias = load_gate_parameters(p_A_log, p_dt_bias, h, column, GATE, K, BK)
        u = x + bias
        if ACTIVATION == "softplus":
            g = -rate * softplus(u)
            if CLAMPED:
                b_dg = tl.where(g < clamp, 0.0, b_dg)
            # After a reset dg is zero, and -inf * 0 would be NaN.
            return b_dg * sigmoid(u) * -rate, tl.where(b_dg == 0.0, 0.0, g * b_dg)
        else:
            s = sigmoid(u * rate)
            if CLAMPED:
                b_dg = tl.where(lower_bound * s < clamp, 0.0, b_dg)
            b_dx = b_dg * (lower_bound * s * sigmoid(-u * rate)) * rate
            return b_dx, tl.where(b_dx == 0.0, 0.0, u * b_dx)


@triton.jit
def store_gate_gradient(
    p_dg,
    s_dg,
    p_dA_log,
    p_ddt_bias,
    i_tile,
    b,
    t,
    h,
    column,
    rows,
    b_dx,
    b_dA,
    nothing,
    GATE: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
):
    """Write a gate's gradient to its tokens, and this tile's share of the parameters' sums.

    Args:
        p_dA_log, p_ddt_bias: [tiles, slices of K or 1] and [tiles, K or 1], float32, or None.
        b_dx, b_dA: From `log_gate_bwd`: [BT / NEAR, NEAR, BK] for the channels from `column` on, or [BT].
        nothing: As of `load_sub_chunks`.
    """
    o_r = tl.arange(0, BT)
    if GATE == "channel":
        NK: tl.constexpr = (K + BK - 1) // BK
        o_n, o_k = tl.arange(0, BT // NEAR)[:, None], column + tl.arange(0, BK)
        real = (o_n * NEAR + tl.arange(0, NEAR)[None, :] < rows)[:, :, None] & (o_k < K)[None, None, :]
        if p_dg is not None:
            store_token_sub_chunks(p_dg, s_dg, b, t, h, column, rows, b_dx, nothing, K, BT, BK, NEAR)
        if p_ddt_bias is not None:
            b_sum = tl.sum(tl.sum(tl.where(real, b_dx, 0.0), axis=1), axis=0)
            tl.store(p_ddt_bias + i_tile * K + o_k, b_sum, mask=o_k < K)
        if p_dA_log is not None:
            b_sum = tl.sum(tl.sum(tl.sum(tl.where(real, b_dA, 0.0), axis=1), axis=0), axis=0)
            tl.store(p_dA_log + i_tile * NK + column // BK, b_sum)
    elif GATE == "scalar":
        if p_dg is not None:
            store_token_scalars(p_dg, s_dg, b, t, h, rows, b_dx, BT)
        # As a row of a tile: for sm_100 Triton 3.6 fails to compile a sum of one dimension that comes from a product.
        o_one = i_tile + tl.arange(0, 1)
        if p_ddt_bias is not None:
            tl.store(p_ddt_bias + o_one, tl.sum(tl.where(o_r < rows, b_dx, 0.0)[None, :], axis=1))
        if p_dA_log is not None:
            tl.store(p_dA_log + o_one, tl.sum(tl.where(o_r < rows, b_dA, 0.0)[None, :], axis=1))


@triton.jit
def pair_decay(b_G, GATE: tl.constexpr, BT: tl.constexpr):
    """`pairwise_decay` where one number decays a pair of rows, else 1: a channel gate's is inside the contraction."""
    if GATE == "scalar":
        return pairwise_decay(b_G, BT)
    else:
        return 1.0


@triton.jit
def interval_sum(b_pairs, BT: tl.constexpr, EXACT: tl.constexpr):
    """sum over r >= i > s of pairs[r, s]; others than r > s count as nothing.   [BT, BT] -> [BT]

    The sum over s is a product, with the pairs as its left operand: they stay in the registers of the product they
    came from.
    """
    o_r, o_i = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_before = mm_exact(tl.where(o_r > o_i, b_pairs, 0.0), (o_r < o_i).to(tl.bfloat16), None, EXACT)
    return tl.sum(tl.where(o_r >= o_i, b_before, 0.0), axis=0)


@triton.jit
def state_gate_gradient(b_read, b_write, carried, BT: tl.constexpr):
    """Gradient of a scalar gate through the states, interval form.   [BT]

    Args:
        b_read: [BT] x * dx of every row decayed from the chunk's start, summed.
        b_write: [BT] the same of the rows decayed to its end.
        carried: The entering state times its gradient, decayed over the chunk, summed.
    """
    o_r, o_i = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    return tl.sum(tl.where(o_r >= o_i, b_read[:, None], b_write[:, None]), axis=0) + carried


NEAR: tl.constexpr = tl.constexpr(8)
"""Rows of a sub-chunk of the adjoint, whose pairs meet one by one."""


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
    nothing,
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
    b_dq = to_sub_chunks(b_dq, p_near, nothing, BT, BK, NEAR) * b_decay
    b_dk = to_sub_chunks(b_dk, p_near, nothing, BT, BK, NEAR) * b_decay
    b_dkc = to_sub_chunks(b_dk_write, p_near, nothing, BT, BK, NEAR) * decays_until(tl.exp2(b_after), b_a)
    b_over = b_carried[None, :] * tl.exp2(b_before + b_sum + b_after)
    b_over += sum_over(tl.sum(b_q * b_dq + b_k * b_dk, axis=1), i_n + 1, end, NB)
    b_over += sum_over(tl.sum(b_k * b_dkc, axis=1), start, i_n, NB)
    for level in tl.static_range(3):
        if NB >> (level + 1) > 0:
            b_dq, b_dk, b_dkc, b_over = add_half_pairs(
                p_pairs, p_near, i_tile, nothing, b_q, b_k, b_a, b_first, b_rest, b_dq, b_dk, b_dkc, b_over,
                NB >> (level + 1), NB, BK, OP, PRECISION,
            )  # fmt: skip
    b_dg = sums_inside(b_q * b_dq + b_k * b_dk, b_k * b_dkc, b_over)
    return add_near_pairs(p_near, i_tile, b_q, b_k, b_a, b_dq, b_dk + b_dkc, b_dg, NB)


@triton.jit
def add_half_pairs(
    p_pairs,
    p_near,
    i_tile,
    nothing,
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
    b_dqh = to_sub_chunks(b_dqh, p_near, nothing, NEAR * NB, BK, NEAR) * b_decay
    b_dkh = to_sub_chunks(b_dkh - b_dkp, p_near, nothing, NEAR * NB, BK, NEAR) * b_decay
    if H > 1:
        b_along = tl.sum(b_q * b_dqh + b_k * b_dkh, axis=1)
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
def load_near_pair(p_near, i_tile, s: tl.constexpr, r: tl.constexpr, NB: tl.constexpr):
    """Gradients of P[r, s] and J[r, s] of every sub-chunk.   2 x [NB, 1]"""
    o_n, o_two = tl.arange(0, NB)[:, None], tl.arange(0, 2)[None, :]
    p = p_near + i_tile * (NB * NEAR * NEAR * 2) + ((o_n * NEAR + s) * NEAR + r) * 2 + o_two
    b_dP, b_dJ = tl.split(tl.load(p))
    return b_dP[:, None], b_dJ[:, None]


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
        b_dP, _ = load_near_pair(p_near, i_tile, s, s, NB)
        b_dq = add_row(b_dq, s, b_dP * b_z)
        b_dk = add_row(b_dk, s, b_dP * q_rows[s])
        z_rows, u_rows = (), ()
        for r in tl.static_range(s + 1, NEAR):
            b_dP, b_dJ = load_near_pair(p_near, i_tile, s, r, NB)
            b_z *= a_rows[r]
            b_dq = add_row(b_dq, r, b_dP * b_z)
            b_dk = add_row(b_dk, r, b_dJ * b_z)
            z_rows, u_rows = also(z_rows, b_z), also(u_rows, b_dP * q_rows[r] + b_dJ * k_rows[r])
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
