"""The horizon of a summary under a channel gate, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.horizon.triton import follow, transition_power
from wyfold.tile.index.triton import load_vector
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block


@triton.jit
def channels_in_reach(inputs, i_tile, step, count, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, USE_TMA):
    """Number of chunks at a segment's end that its summary needs; `count` unless the others are lost on their way.

    The arguments are those of `chunks_in_reach` of a scalar gate, and `Inputs` of the kernel.
    """
    needed, power, i = count, count * 0, count * 0
    proceed = i < count
    while proceed:
        tile = i_tile + i * step
        b_total = load_vector(inputs.total, tile, K, BK, USE_TMA)
        b_k = load_tile_block(inputs.k, tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_E = load_tile_block(inputs.E, tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_in_k, _, _, b_beta = load_row_factors(inputs.rows, tile, BT, USE_TMA)
        i += 1
        power += transition_power(b_total, b_k, b_E, b_beta * b_in_k)
        needed, proceed = follow(power, i, needed, count)
    return needed
