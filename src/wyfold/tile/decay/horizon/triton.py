"""The horizon in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wyfold.tile.decay.horizon import eager

HORIZON: tl.constexpr = tl.constexpr(eager.HORIZON[torch.float32])

AT_ONCE: tl.constexpr = tl.constexpr(128)
"""Decays of one load, so that a segment of up to as many chunks waits for memory once."""

ROWS: tl.constexpr = tl.constexpr(8)
"""Chunks whose write strengths are loaded at once."""

SCALE: tl.constexpr = tl.constexpr(2.0**60)
"""Factor of decayed rows, so that squares of small ones are numbers of float32."""

UNSCALE: tl.constexpr = tl.constexpr(2.0**-120)

LEAST: tl.constexpr = tl.constexpr(2.0**-59)
"""More than what a scaled row's elements add to its norm if their squares are lost: sqrt(K) 2^-63."""

SLACK: tl.constexpr = tl.constexpr(1.0625)
"""Factor of a bound that covers roundings of the state and of Y to bfloat16, and of sums in float32."""


@triton.jit
def chunks_in_reach(
    bounds,
    i_tile,
    step,
    count,
    at,
    i_h,
    CHANNEL: tl.constexpr,
    BT: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
):
    """Number of chunks at a segment's end that its summary needs; `count` unless the others are lost on their way.

    Args:
        bounds: `Bounds` of `segment_summary`.
        i_tile: Tile of the chunk at that end.
        step: From the tile of a chunk to that of the next one, away from that end.
        count: Number of chunks of the segment.
        at: First token of the chunk at that end.
        i_h: Head of the keys.
    """
    if CHANNEL:
        found = channels_in_reach(bounds, i_tile, step, count, BT, K, BK)
    elif bounds.k is not None:
        found = keys_in_reach(bounds, i_tile, step, count, at, i_h, BT, K, BK)
    else:
        found = numbers_in_reach(bounds.total, bounds.rows, i_tile, step, count, BT)
    return found


@triton.jit
def channels_in_reach(bounds, i_tile, step, count, BT: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """`chunks_in_reach` of a channel gate: a chunk has at most the norm max(total) + sum_t |beta_t| |E_t| |k_t|.

    A NaN decays nothing. `count` as well if the first chunks decay too little for the length of the segment.
    """
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    needed, power, i = count, count * 0, count * 0
    while i < needed:
        tile = i_tile + i * step
        b_total = tl.load(bounds.total + tile * K + o_k, mask=o_k < K, other=0.0)
        norm = tl.max(tl.where(b_total <= 1.0, b_total, float("inf")), 0)
        at = tile * (BT * K) + o_t[:, None] * K + o_k[None, :]
        b_E = tl.load(bounds.E + at, mask=o_k[None, :] < K, other=0.0).to(tl.float32) * SCALE
        b_k = tl.load(bounds.k + at, mask=o_k[None, :] < K, other=0.0).to(tl.float32) * SCALE
        p_row = bounds.rows + tile * (4 * BT) + o_t
        b_beta = tl.load(p_row) * tl.load(p_row + 3 * BT)
        b_rows = (tl.sqrt(tl.sum(b_E * b_E, 1)) + LEAST) * (tl.sqrt(tl.sum(b_k * b_k, 1)) + LEAST)
        norm += tl.sum(b_rows * tl.abs(b_beta), 0) * UNSCALE
        i += 1
        power += exponent_above(norm * SLACK)
        needed = tl.where(power <= HORIZON, tl.minimum(needed, i), needed)
        # The segment ends before the horizon if later chunks decay as these do. Then all of it is needed.
        i = tl.where(power * count > HORIZON * i, count, i)
    return needed


@triton.jit
def keys_in_reach(bounds, i_tile, step, count, at, i_h, BT: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """`chunks_in_reach` of a scalar gate: 0 <= beta |k|^2 <= 2 in the chunks that are needed. A NaN is outside."""
    reach = decayed_after(bounds.total, i_tile, step, count)
    o_t, o_k = tl.arange(0, BT), tl.arange(0, BK)
    p_k = bounds.k + at.b * bounds.s_k[0] + i_h * bounds.s_k[2] + (o_k * bounds.s_k[3])[None, :]
    b_outside = tl.zeros((BT,), tl.int32)
    for i in range(tl.where(reach < count, reach, 0)):
        row = at.t + tl.where(step < 0, -i, i) * BT + o_t
        b_k = tl.load(p_k + row[:, None] * bounds.s_k[1], mask=(row < at.T)[:, None] & (o_k < K)[None, :], other=0.0)
        b_k = b_k.to(tl.float32)
        b_beta = tl.load(bounds.rows + (i_tile.to(tl.int64) + i * step) * (4 * BT) + 3 * BT + o_t)
        b_outside |= (tl.abs(b_beta * tl.sum(b_k * b_k, 1) - 1.0) <= 1.0).to(tl.int32) ^ 1
    return tl.where(tl.max(b_outside, 0) == 0, reach, count)


@triton.jit
def numbers_in_reach(p_total, p_rows, i_tile, step, count, BT: tl.constexpr):
    """`chunks_in_reach` of a scalar gate whose keys have at most the norm 1, or erase nothing."""
    reach = decayed_after(p_total, i_tile, step, count)
    needed = tl.where(reach < count, reach, 0)
    p_beta = p_rows + i_tile.to(tl.int64) * (4 * BT) + 3 * BT + tl.arange(0, BT)[None, :]
    b_most = tl.zeros((ROWS, BT), tl.float32)
    for i in range(0, needed, ROWS):
        chunk = (i + tl.arange(0, ROWS))[:, None]
        b_beta = tl.load(p_beta + chunk * step * (4 * BT), mask=chunk < needed, other=1.0)
        b_most = tl.maximum(b_most, tl.abs(b_beta - 1.0))
    return tl.where(tl.max(tl.max(b_most, 1), 0) <= 1.0, reach, count)


@triton.jit
def decayed_after(p_total, i_tile, step, count):
    """Number of chunks at a segment's end whose decays multiply to the horizon; `count` if all do not, or only all do.

    The arguments are those of `chunks_in_reach`. A NaN decays nothing.
    """
    reach, power, i = count, count * 0, count * 0
    while i < reach:
        chunk = i + tl.arange(0, AT_ONCE)
        b_total = tl.load(p_total + i_tile + chunk * step, mask=chunk < count, other=1.0)
        b_power = power + tl.cumsum(exponent_above(b_total), 0)
        reach = tl.min(tl.where((b_power <= HORIZON) & (chunk < count), chunk + 1, reach), 0)
        power = tl.sum(tl.where(chunk == i + AT_ONCE - 1, b_power, 0), 0)
        i += AT_ONCE
    return reach


@triton.jit
def exponent_above(x):
    """Exponent of the next power of two above float32 numbers >= 0: of zero and subnormal numbers -126, of NaN 129."""
    return ((x.to(tl.int32, bitcast=True) >> 23) & 255) - 126
