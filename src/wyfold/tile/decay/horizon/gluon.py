"""The horizon for Hopper kernels."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.decay.horizon.triton import decayed_after


@gluon.jit
def chunks_in_reach(p_total, p_rows, i_tile, step, count, BT: gl.constexpr):
    """`chunks_in_reach` of the Triton kernels."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    reach = decayed_after(p_total, i_tile, step, count)
    p_beta = p_rows + i_tile.to(gl.int64) * (4 * BT) + 3 * BT + gl.arange(0, BT, layout=L)
    most = gl.zeros([BT], gl.float32, L)
    for i in range(gl.where(reach < count, reach, 0)):
        most = gl.maximum(most, gl.abs(gl.load(p_beta + i * step * (4 * BT)) - 1.0))
    return gl.where(gl.max(most, 0) <= 1.0, reach, count)
