"""Decayed grams of a whole chunk under a channel gate, in Triton: two factors whose product is the decay of a pair.

Unlike sub-chunks of 16 rows, a chunk is one operand of Hopper's matrix unit. Log gates are to base 2 here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton import REACH, sub_chunk_gate
from wyfold.tile.decay.channel.triton.near_pairs import sub_chunk_row
from wyfold.tile.index.triton.sub_chunks import load_sub_chunks

TWICE_TO_NEAREST: tl.constexpr = tl.constexpr(0.000995)
"""Binary logarithm of the square of `CUT_TO_NEAREST`."""


@triton.jit
def load_chunk_sums(
    gate, at, h, column, opaque_zero,
    ACTIVATION: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, OP: tl.constexpr,
):  # fmt: skip
    """Load the gates of some channels and sum them over the chunk, as a tuple of one or two addends [1, BT, BK].

    Sums are of log gates to base 2. Where operands are float32 there are two, so that a strong gate before two rows
    costs their difference no precision: sums of multiples of 2^-12, exact down to -4096, and small sums of what these
    leave.

    With BK threads, each holds all rows of one column: hiding the alignment twice leaves none.
    """
    x = load_sub_chunks(gate.g + opaque_zero, gate.s_g, at, h, column, opaque_zero, K, BT, BK, BT).to(tl.float32)
    b_g = sub_chunk_gate(x, gate, h, column, at.rows, ACTIVATION, K)
    if OP == tl.bfloat16:
        return (tl.cumsum(b_g, axis=1),)
    else:
        b_multiple = (b_g + 3072.0) - 3072.0
        return tl.cumsum(b_multiple, axis=1), tl.cumsum(b_g - b_multiple, axis=1)


@triton.jit
def chunk_total(sums):
    """Log decay over the chunk.   [1, BK]"""
    BT: tl.constexpr = sums[0].shape[1]
    b_total = sub_chunk_row(sums[0], BT - 1)
    if len(sums) == 2:
        b_total += sub_chunk_row(sums[1], BT - 1)
    return b_total


@triton.jit
def chunk_rest(sums):
    """Log decay from each row to the chunk's end.   [1, BT, BK]"""
    BT: tl.constexpr = sums[0].shape[1]
    b_rest = sub_chunk_row(sums[0], BT - 1)[:, None] - sums[0]
    if len(sums) == 2:
        b_rest += sub_chunk_row(sums[1], BT - 1)[:, None] - sums[1]
    return b_rest


@triton.jit
def since_anchor(sums, anchor):
    """Log decay from an anchor to each row; positive before the anchor.   [1, BT, BK]"""
    b_p = sums[0] + anchor * REACH
    if len(sums) == 2:
        b_p += sums[1]
    return b_p


@triton.jit
def to_loaded_layout(x, p, opaque_zero):
    """Reshape x [1, BT, BK] to a tile [BT, BK] in the register layout of vectorised loads.

    As in `to_sub_chunks`, x is the fallback of a fully masked load. p: any float32 pointer; it is never read.
    """
    BT: tl.constexpr = x.shape[1]
    BK: tl.constexpr = x.shape[2]
    offsets = tl.arange(0, BT)[:, None] * BK + tl.arange(0, BK)[None, :]
    return tl.load(p + offsets, mask=tl.full((BT, BK), 0, tl.int32) + opaque_zero > 0, other=x.reshape(BT, BK))


@triton.jit
def chunk_anchors(sums):
    """Number of anchors that a chunk needs, REACH apart: 1 unless it decays by more than that."""
    most = -tl.min(chunk_total(sums))
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    return tl.where(most > 0.0, most / REACH + 0.01, 0.0).to(tl.int32) + 1


@triton.jit
def anchored(b_p, anchor, PRECISION: tl.constexpr):
    """Factors of rows r and of columns s in the decayed grams of a chunk, for pairs that an anchor serves.

    Their product is the decay from s to r. Anchors are where a channel has decayed by a multiple of REACH. Each serves
    the columns s in reach behind it, with all rows r; other columns have the factor zero, so they add nothing. A row's
    pairs therefore do not depend on later gates.

    Operands of the grams have the 11 bits of TF32: with bfloat16's 8, errors of repeated keys add up
    (docs/numerics.md).

    Args:
        b_p: From `since_anchor`, of any shape.
    """
    b_served = (b_p >= -REACH) & ((b_p < 0.0) | (anchor == 0))
    # Truncation of both operands is made unbiased in one of them.
    NEAREST: tl.constexpr = TWICE_TO_NEAREST if PRECISION == "tf32" else 0.0
    return tl.exp2(tl.where(b_p > 0.0, 0.0, b_p)), tl.exp2(tl.where(b_served, NEAREST - b_p, -1024.0))
