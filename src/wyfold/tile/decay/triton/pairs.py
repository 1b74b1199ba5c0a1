"""Decays between pairs of rows in Triton, and the grams that they decay; for every gate but one per channel."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.dot.triton import mm, no_fma


@triton.jit
def decayed_grams_transposed(
    b_q, b_k, b_rq, b_rk, b_g, GATE: tl.constexpr, BT: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr
):
    """Decayed grams of normalised rows, transposed to [s, r], and the key gram [r, s]; not for channel gates.

        J[r, s] = sum_c k[r, c] k[s, c] exp(G[r] - G[s])    s <  r, else 0 in J^T and undefined in J
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
    b_PT, b_factor = mm(b_k, tl.trans(b_q), None, OP, PRECISION), b_rk[:, None] * b_rq[None, :]
    if GATE == "scalar":
        b_decay = pairwise_decay(tl.cumsum(b_g, axis=0), BT)
        b_kk, b_factor = b_kk * b_decay, b_factor * b_decay
    # `no_fma`: a later exact product splits the rounded number into parts.
    b_PT = tl.where(o[:, None] <= o[None, :], no_fma(b_PT * b_factor), 0.0)
    return b_kk, tl.where(o[:, None] < o[None, :], b_kk, 0.0), b_PT


@triton.jit
def pairwise_decay(b_G, BT: tl.constexpr):
    """Decay between two rows, exp(-|G_r - G_s|) for non-increasing G.   [BT, BT], symmetric

    The sign is selected by the side of the diagonal, not by the difference. So an increase in G, which is outside the
    contract, does not swap a decay for its inverse.
    """
    o = tl.arange(0, BT)
    difference = b_G[:, None] - b_G[None, :]
    # exp2, because Triton's exp spends three more instructions on subnormal results.
    return tl.exp2(tl.where(o[:, None] >= o[None, :], difference, -difference) * LOG2_E)


@triton.jit
def interval_decay(b_g, BT: tl.constexpr):
    """exp of the sum of a scalar gate after row s up to row r; undefined where r is not after s.   [BT, BT], [r, s]

    A gate is split into a multiple of 2^-10, whose running sums are exact, and a rest with small sums. So a strong gate
    before both rows costs their difference no precision.
    """
    o = tl.arange(0, BT)
    # Both sums are gathered at once, by row number, so that the tile gets its final layout. A tile broadcast from the
    # sums would go through shared memory (docs/facts/compilers.md, TRITON-6).
    b_sums = _pack2(*_two_sums(b_g))
    b_G_r, b_rest_r = _unpack2(tl.gather(b_sums, o, 0)[:, None])
    b_G_s, b_rest_s = _unpack2(tl.gather(b_sums, o, 0)[None, :])
    return tl.exp2(((b_G_r - b_G_s) + (b_rest_r - b_rest_s)) * LOG2_E)


@triton.jit
def decay_to_end(b_g, GATE: tl.constexpr, BT: tl.constexpr):
    """exp of the sum of a scalar gate after each row, with the precision of `interval_decay`; else 1.   [BT]"""
    if GATE == "scalar":
        b_sum, b_rest = _two_sums(b_g)
        last = tl.arange(0, BT) == BT - 1
        b_later = tl.sum(tl.where(last, b_sum, 0.0), axis=0) - b_sum
        return tl.exp(b_later + (tl.sum(tl.where(last, b_rest, 0.0), axis=0) - b_rest))
    else:
        return tl.exp(b_g)


@triton.jit
def _two_sums(b_g):
    """Running sums of a gate's multiple of 2^-10, which are exact, and of its rest."""
    b_coarse = (b_g + 12288.0) - 12288.0
    return tl.associative_scan((b_coarse, b_g - b_coarse), 0, _add_pairs)


@triton.jit
def _add_pairs(x, y, to_x, to_y):
    return x + to_x, y + to_y


@triton.jit
def _pack2(x, y):
    """Pack two float32 into 64 bits."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | y.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _unpack2(pair):
    return (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True), pair.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def pair_decay(b_G, GATE: tl.constexpr, BT: tl.constexpr):
    """`pairwise_decay` for a scalar gate, else 1; a channel gate is inside the contraction."""
    if GATE == "scalar":
        return pairwise_decay(b_G, BT)
    else:
        return 1.0
