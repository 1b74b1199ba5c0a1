"""Gradients of a chunk that belongs to no sequence."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import store_rows, store_scalars


@gluon.jit
def store_zeros(outputs, dgate, coords, o_1, pid, SIZES: gl.constexpr):
    """Store zeros as the gradients of a value head; as those of q and k only if no other value head has them."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    store_rows(outputs.dv, outputs.s_dv, coords, 0, gl.zeros([BT, V], gl.float32, LV), LV, BT, V)
    if SIZES.HV == SIZES.H:
        for h in range(2):
            store_rows(outputs.dq, outputs.s_dq, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
            store_rows(outputs.dk, outputs.s_dk, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
    store_scalars(outputs.dbeta, outputs.s_dbeta, coords, o_1, gl.zeros([BT], gl.float32, ONE))
    store_scalars(dgate.g, dgate.s_g, coords, o_1, gl.zeros([BT], gl.float32, ONE))
    if dgate.A_log is not None:
        gl.store(dgate.A_log + pid, 0.0)
    if dgate.dt_bias is not None:
        gl.store(dgate.dt_bias + pid, 0.0)
