"""Gradients of a chunk that belongs to no sequence, and numbers of tiles."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import Coords, store_rows, store_scalars


@gluon.jit
def store_zeros(outputs, dgate, coords, o_1, pid, SIZES: gl.constexpr):
    """Store zeros as the gradients of half of the chunk's channels."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    GR: gl.constexpr = SIZES.HV // SIZES.H
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    b, t, i_h, rows = coords.b, coords.t, coords.h, coords.rows
    i_key, half = pid // 2, (pid % 2).to(gl.int32)
    column = half * BK
    zeros = gl.zeros([BT, BK], gl.float32, ROWS)
    for r in range(GR):
        value = Coords(b, t, coords.token, i_h * GR + r, rows)
        if outputs.dv is not None:
            store_rows(outputs.dv, outputs.s_dv, value, column, zeros, ROWS, BT, BK)
    store_rows(outputs.dq, outputs.s_dq, coords, column, zeros, ROWS, BT, BK)
    store_rows(outputs.dk, outputs.s_dk, coords, column, zeros, ROWS, BT, BK)
    for r in range(GR):
        value, i_tile = Coords(b, t, coords.token, i_h * GR + r, rows), i_key * GR + r
        store_rows(dgate.g, dgate.s_g, value, column, zeros, ROWS, BT, BK)
        if half == 0:
            store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_1, gl.zeros([BT], gl.float32, ONE))
        if dgate.A_log is not None:
            gl.store(dgate.A_log + half_tile(pid, i_tile, half, GR), 0.0)
        if dgate.dt_bias is not None:
            o_k = gl.arange(0, BK, layout=ONE)
            gl.store(dgate.dt_bias + i_tile * K + column + o_k, gl.zeros([BK], gl.float32, ONE))


@gluon.jit
def half_tile(pid, i_tile, half, GR: gl.constexpr):
    """Number of half of the channels of a value head's tile."""
    if GR == 1:
        return pid
    else:
        return i_tile * 2 + half
