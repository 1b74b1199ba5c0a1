"""Tokens of 128 channels, of one head or of two neighbours: 8 rows of four channels in a thread.   [4, 8, 128]"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.decay.channel.triton import REACH
from wyfold.tile.decay.channel.triton.anchors import TWICE_TO_NEAREST
from wyfold.tile.decay.gluon import activated
from wyfold.tile.dot.gluon import add, exp2
from wyfold.tile.index.gluon import barrier, reinterpret

LAYOUT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8, 4], [1, 1, 32], [4, 1, 1], [2, 1, 0]))


class Place(NamedTuple):
    """Rows of a chunk, inside kernels.

    Attributes:
        b, t, rows: Batch row, first token, and number of tokens.
        zero: 0, or one that the compiler cannot fold: addresses are then computed again, not kept.
    """

    b: Any
    t: Any
    rows: Any
    zero: Any


@gluon.jit
def load_channels(
    p, s, at, h, early: gl.constexpr, FULL: gl.constexpr, SHARED: gl.constexpr, K: gl.constexpr, BT: gl.constexpr
):
    """Load a tile; rows past the last token are zero, and so are rows before the chunk.

    Args:
        p, s: Tokens [B, T, heads, K] and their strides.
        h: The first value head.
        early: Rows that are loaded earlier than their place.
        SHARED: Value heads of a head of p.
    """
    o_r = token_rows(BT) + (at.zero - early)
    o_c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    offsets = o_r.to(gl.int64) * s[1] + ((h + at.zero + o_c // K) // SHARED) * s[2] + (o_c % K).to(gl.int64) * s[3]
    inside = (o_r >= 0) & (o_c >= 0)
    if not FULL:
        inside = inside & (o_r < at.rows)
    return gl.load(p + (at.b * s[0] + at.t * s[1]) + offsets, mask=inside, other=0.0)


@gluon.jit
def token_rows(BT: gl.constexpr):
    """Number of each row.   [4, 8, 1]"""
    o_n = gl.arange(0, BT // 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    o_i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return 8 * o_n + o_i


@gluon.jit
def store_channels(p, ROWS: gl.constexpr, first, x, K: gl.constexpr, BT: gl.constexpr):
    """Store a tile, or with ROWS None a number for each channel, in the tiles [BT, K] or [K] of neighbouring heads."""
    o_c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    if ROWS is None:
        gl.store(p + first + o_c, x)
    else:
        o_c = o_c[None, None, :]
        offsets = token_rows(BT) * K + (o_c // K) * (BT * K) + o_c % K
        gl.store(p + first + offsets, x.to(p.dtype.element_ty))


@gluon.jit
def channel_sums(
    gate,
    at,
    h,
    numbers,
    FULL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
):
    """Log decays to base 2 from the chunk's start to before and behind each row [4, 8, 128], and in total [128].

    Args:
        numbers: [8 * 128] float32 shared memory.
    """
    o_c = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        if gate.A_log is not None:
            rate = gl.exp(gl.load(gate.A_log + h + o_c // K).to(gl.float32))[None, None, :]
        if gate.dt_bias is not None:
            bias = gl.load(gate.dt_bias + h * K + o_c).to(gl.float32)[None, None, :]
    earlier = log_gates(gate, at, h, rate, bias, 1, FULL, ACTIVATION, K, BT)
    g = log_gates(gate, at, h, rate, bias, 0, FULL, ACTIVATION, K, BT)
    before = gl.associative_scan(earlier, 1, add)
    tiles = reinterpret(numbers, gl.float32, [8, 128], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    tiles.slice(0, 4).store(last_row(before))
    tiles.slice(4, 4).store(last_row(g))
    barrier()
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT))
    one = numbers.slice(0, 128).load(ROW)
    two = one + numbers.slice(128, 128).load(ROW)
    three = two + numbers.slice(2 * 128, 128).load(ROW)
    total = three + numbers.slice(3 * 128, 128).load(ROW) + numbers.slice(7 * 128, 128).load(ROW)
    o_n = gl.arange(0, 4, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    one, two, three = one[None, None, :], two[None, None, :], three[None, None, :]
    before = before + gl.where(o_n == 0, 0.0, gl.where(o_n == 1, one, gl.where(o_n == 2, two, three)))
    return before, before + g, total


@gluon.jit
def log_gates(
    gate,
    at,
    h,
    rate,
    bias,
    early: gl.constexpr,
    FULL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
):
    """Log gates to base 2; zero outside of the chunk."""
    x = load_channels(gate.g, gate.s_g, at, h, early, FULL, 1, K, BT).to(gl.float32)
    g = activated(x, rate, bias, gate.lower_bound, gate.clamp, ACTIVATION)
    if ACTIVATION != "given":
        o_r = token_rows(BT) - early
        g = gl.where((o_r >= 0) & (o_r < at.rows), g, 0.0)
    # Rounded before it is added: docs/facts/compilers.md, LLVM-1.
    return gl.fma(g, gl.full(g.shape, LOG2_E, gl.float32, LAYOUT), gl.zeros(g.shape, gl.float32, LAYOUT))


@gluon.jit
def last_row(x):
    """The last row of each quarter; an exact selection.   [4, 8, 128] -> [4, 128]"""
    o_i = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))[None, :, None]
    return gl.sum(gl.where(o_i == 7, x.to(gl.int32, bitcast=True), 0), axis=1).to(gl.float32, bitcast=True)


@gluon.jit
def row_factor(sums, anchor):
    """`anchors.anchored` of rows."""
    return exp2(gl.minimum(sums + anchor * REACH, 0.0))


@gluon.jit
def column_factor(sums, anchor):
    """`anchors.anchored` of columns, with TF32's truncation of both operands made unbiased."""
    since = sums + anchor * REACH
    served = (since >= -REACH) & ((since < 0.0) | (anchor == 0))
    return exp2(gl.where(served, TWICE_TO_NEAREST - since, -1024.0))


@gluon.jit
def upper_columns(b, k, K: gl.constexpr):
    """The columns of the upper and of the lower rows: b and k, in a second head k and b."""
    if K == 128:
        return b, k
    else:
        first = gl.arange(0, 128, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :] < K
        return gl.where(first, b, k), gl.where(first, k, b)
