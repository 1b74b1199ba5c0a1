"""The horizon in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from wyfold.tile.decay.horizon import eager

HORIZON: tl.constexpr = tl.constexpr(eager.HORIZON[torch.float32])

AT_ONCE: tl.constexpr = tl.constexpr(16)
"""Decays loaded at once, so that their latency is paid once."""


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
    p_beta = p_rows + i_tile.to(tl.int64) * (4 * BT) + 3 * BT + tl.arange(0, BT)
    b_most = tl.zeros((BT,), tl.float32)
    for i in range(tl.where(reach < count, reach, 0)):
        b_most = tl.maximum(b_most, tl.abs(tl.load(p_beta + i * step * (4 * BT)) - 1.0))
    return tl.where(tl.max(b_most, 0) <= 1.0, reach, count)


@triton.jit
def decayed_after(p_total, i_tile, step, count):
    """Number of chunks at a segment's end whose decays multiply to the horizon; `count` if all do not, or only all do.

    The arguments are those of `chunks_in_reach`. A NaN decays nothing.
    """
    reach = count
    power, i = count * 0, count * 0
    while i < reach:
        for j in tl.static_range(AT_ONCE):
            total = tl.load(p_total + i_tile + (i + j) * step, mask=i + j < count, other=1.0)
            # The exponent of the next power of two: of zero and subnormal numbers -126, of NaN 129.
            power += ((total.to(tl.int32, bitcast=True) >> 23) & 255) - 126
            reach = tl.where((power <= HORIZON) & (i + j + 1 < reach), i + j + 1, reach)
        i += AT_ONCE
    return reach
