"""Gradient of a scalar gate."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import load_scalars, store_scalars
from wyfold.tile.decay.triton.gradient import log_gate_bwd
from wyfold.tile.index.gluon import barrier


@gluon.jit
def store_gate_gradient(
    gate, dgate, numbers, value, offsets, dg, read, write, traced, total, unit, tile,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Store the gradients of the gate and of its parameters.

    Args:
        dg: [BT] part of the pairs.
        read, write, traced: [BT] parts of reads from the state, of writes to it, and of the state itself.
        total, unit: Decay over the chunk, and unit of the gradients.
        tile: Number of the tile of the chunk and the value head.
    """
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    CLAMPED: gl.constexpr = FLAGS.CLAMPED
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    o_r, o_c = offsets.row, offsets.column
    numbers.slice(0, BT).store(read)
    numbers.slice(BT, BT).store(write)
    barrier()
    read_c, write_c = numbers.slice(0, BT).load(COL), numbers.slice(BT, BT).load(COL)
    dg += gl.sum(gl.where(o_c[None, :] >= o_r[:, None], read_c[None, :], write_c[None, :]), axis=1)
    dg = gl.fma(gl.zeros([BT], gl.float32, ROW) + gl.sum(traced, axis=0), total * unit, dg)
    raw = load_scalars(gate.g, gate.s_g, value, o_r)
    dx, dA = log_gate_bwd(raw, dg, gate, value.h, 0, CLAMPED, "scalar", ACTIVATION, K, BK)
    store_scalars(dgate.g, dgate.s_g, value, o_r, dx)
    if dgate.A_log is not None:
        gl.store(dgate.A_log + tile, gl.sum(gl.where(o_r < value.rows, dA, 0.0), axis=0))
    if dgate.dt_bias is not None:
        gl.store(dgate.dt_bias + tile, gl.sum(gl.where(o_r < value.rows, dx, 0.0), axis=0))
