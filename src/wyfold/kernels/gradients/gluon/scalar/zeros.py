"""Gradients of a chunk that belongs to no sequence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import Coords, store_rows, store_scalars


@gluon.jit
def store_zeros(outputs, dgate, coords, o_1, pid, SIZES: gl.constexpr):
    """Store zeros as the gradients of the chunk, in the order of the value heads."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    GR: gl.constexpr = SIZES.HV // SIZES.H
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    b, t, i_h, rows = coords.b, coords.t, coords.h, coords.rows
    for r in range(GR):
        value = Coords(b, t, coords.token, i_h * GR + r, rows)
        store_rows(outputs.dv, outputs.s_dv, value, 0, gl.zeros([BT, V], gl.float32, LV), LV, BT, V)
    for h in range(2):
        store_rows(outputs.dq, outputs.s_dq, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
        store_rows(outputs.dk, outputs.s_dk, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
    for r in range(GR):
        value = Coords(b, t, coords.token, i_h * GR + r, rows)
        store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_1, gl.zeros([BT], gl.float32, ONE))
        store_scalars(dgate.g, dgate.s_g, value, o_1, gl.zeros([BT], gl.float32, ONE))
        if dgate.A_log is not None:
            gl.store(dgate.A_log + pid * GR + r, 0.0)
        if dgate.dt_bias is not None:
            gl.store(dgate.dt_bias + pid * GR + r, 0.0)
