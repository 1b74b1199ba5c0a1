"""Gradients of a chunk that belongs to no sequence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import store_rows, store_scalars


@gluon.jit
def store_zeros(outputs, dgate, coords, o_1, pid, SIZES: gl.constexpr):
    """Store zeros as the gradients of half of a value head's channels; as those of q and k only if no other head has
    them."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    i_tile, half = pid // 2, (pid % 2).to(gl.int32)
    column = half * BK
    zeros = gl.zeros([BT, BK], gl.float32, ROWS)
    if outputs.dv is not None:
        store_rows(outputs.dv, outputs.s_dv, coords, column, zeros, ROWS, BT, BK)
    if SIZES.HV == SIZES.H:
        store_rows(outputs.dq, outputs.s_dq, coords, column, zeros, ROWS, BT, BK)
        store_rows(outputs.dk, outputs.s_dk, coords, column, zeros, ROWS, BT, BK)
    store_rows(dgate.g, dgate.s_g, coords, column, zeros, ROWS, BT, BK)
    if half == 0:
        store_scalars(outputs.dbeta, outputs.s_dbeta, coords, o_1, gl.zeros([BT], gl.float32, ONE))
    if dgate.A_log is not None:
        gl.store(dgate.A_log + pid, 0.0)
    if dgate.dt_bias is not None:
        o_k = gl.arange(0, BK, layout=ONE)
        gl.store(dgate.dt_bias + i_tile * K + column + o_k, gl.zeros([BK], gl.float32, ONE))
