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
def chunks_in_reach(p_total, p_rows, i_tile, step, count, BT: tl.constexpr):
    """Number of chunks at a segment's end that its summary needs; `count` unless the others are lost on their way.

    Args:
        p_total: [tiles] float32 decays of chunks.
        p_rows: [tiles, 4, BT] row factors of `prepare`, whose norm of k is at most 1.
        i_tile: Tile of the chunk at that end.
        step: From the tile of a chunk to that of the next one, away from that end.
        count: Number of chunks of the segment.
    """
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


@triton.jit
def transition_power(total, k, E, beta):
    """Power of two that bounds a chunk's transition under a channel gate: max(total) + sum_t |beta_t| |E_t| |k_t|.

    A NaN decays nothing.

    Args:
        total: [K] decays of the chunk.
        k, E: [BT, K] decayed keys, and E.
        beta: [BT] write strengths; zeros where keys erase nothing.
    """
    k, E = k.to(tl.float32) * SCALE, E.to(tl.float32) * SCALE
    rows = (tl.sqrt(tl.sum(E * E, 1)) + LEAST) * (tl.sqrt(tl.sum(k * k, 1)) + LEAST)
    norm = tl.max(tl.where(total <= 1.0, total, float("inf")), 0) + tl.sum(rows * tl.abs(beta), 0) * UNSCALE
    return exponent_above(norm * SLACK)


@triton.jit
def follow(power, i, needed, count):
    """Chunks in reach, and whether to go on, once `i` chunks have been seen to decay to 2^power.

    If chunks that decay as these do would not reach the horizon within the segment, all of it is needed.
    """
    needed = tl.where(power <= HORIZON, tl.minimum(needed, i), needed)
    return needed, (i < needed) & (power * count <= HORIZON * i)
