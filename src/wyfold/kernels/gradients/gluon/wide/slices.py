"""Gradients of q and k, for one slice of the channels after the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.tokens import Coords, store_token_tile
from wyfold.kernels.gradients.gluon.wide.arguments import BW, Totals
from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.tile.index.gluon import barrier, clear_rows

WIDTH = gl.constexpr(BW)


@gluon.jit
def slice_gradients(
    x_dq, x_dk, ring, smem, outputs, coords, offsets, scales, totals, h, stage, phase,
    SIZES: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dq and dk of slice h of the channels, through the states and the grams.

    They are stored to the memory of q and k, and to their tokens if they are final and a key head has one value head.

    Returns:
        The sums over channels with this slice's, and the next stage and its phase.
    """
    BT: gl.constexpr = SIZES.BT
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    o_r, o_c = offsets.row, offsets.column
    dq, dk, dw, trace, stage, phase = _state_products(ring, coords, stage, phase, SIZES, FLAGS, STAGES)
    q, k = smem.q.index(h), smem.k.index(h)
    row_q, row_k = q.load(LC).to(gl.float32), k.load(LC).to(gl.float32)
    dw = dw * scales.w[:, None]
    dq = dq * scales.q[:, None]
    read, write, traced = totals.read, totals.write, totals.traced
    if FLAGS.SCALAR:
        traced += gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1)
        write += gl.sum(row_k * dw, axis=1)
        read += gl.sum(gl.fma(row_q, dq, row_k * (dk * scales.k[:, None])), axis=1)
    dk = gl.fma(dk, scales.k[:, None], dw)
    P, J = smem.pair.index(0), smem.pair.index(1)
    dq = warpgroup_mma(P, k, dq, is_async=True)
    dk = warpgroup_mma(J, k, dk, is_async=True)
    dk = warpgroup_mma(J.permute((1, 0)), k, dk, is_async=True)
    dk = warpgroup_mma(P.permute((1, 0)), q, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    dot_q, dot_k = totals.dot_q, totals.dot_k
    if FLAGS.NORM:
        dot_q += gl.sum(q.load(LC).to(gl.float32) * dq, axis=1)
        dot_k += gl.sum(k.load(LC).to(gl.float32) * dk, axis=1)
    barrier()
    q.store(dq.to(q.dtype))
    k.store(dk.to(k.dtype))
    if not FLAGS.NORM and SIZES.HV == SIZES.H:
        store_slice(x_dq, x_dk, smem, outputs, coords, h, SIZES, FLAGS)
    return Totals(read, write, traced, dot_q, dot_k), stage, phase


@gluon.jit
def _state_products(ring, coords, stage, phase, SIZES: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr):
    """Products of the value tiles with a slice of both states: those for dq, dk and dw, and S^T dS, [BT, 64] each."""
    BT: gl.constexpr = SIZES.BT
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    zero_acc = gl.zeros([BT, WIDTH], gl.float32, LC)
    dq, dk, dw, trace = zero_acc, zero_acc, zero_acc, zero_acc
    for _ in range(SIZES.V // WIDTH):
        mbarrier.wait(ring.full.index(stage), phase)
        e, X, do = ring.e.index(stage), ring.X.index(stage), ring.do.index(stage)
        S, dS = ring.S.index(stage), ring.dS.index(stage)
        if not FLAGS.WHOLE:
            if coords.rows < BT:
                clear_rows(do, coords.rows, BT, WIDTH)
        dw = warpgroup_mma(e, dS, dw, is_async=True)
        if FLAGS.SCALAR:
            trace = warpgroup_mma(S.permute((1, 0)), dS, trace, is_async=True)
        dk = warpgroup_mma(X, S, dk, is_async=True)
        dq = warpgroup_mma(do, S, dq, is_async=True)
        dq, dk, dw, trace = warpgroup_mma_wait(0, deps=[dq, dk, dw, trace])
        barrier()
        mbarrier.arrive(ring.free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return dq, dk, dw, trace, stage, phase


@gluon.jit
def finish_slice(
    x_dq, x_dk, ring, smem, outputs, coords, dot_q, dot_k, h, stage, SIZES: gl.constexpr, FLAGS: gl.constexpr
):
    """Apply the norm's adjoint to slice h, whose q and k are in the stage again, and store it. dot_q, dot_k: Negative
    products of the rows with their gradients, divided by the rows' squares."""
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, SIZES.BT, 16])
    q, k = smem.q.index(h), smem.k.index(h)
    dq = gl.fma(ring.S.index(stage).load(LC).to(gl.float32), dot_q[:, None], q.load(LC).to(gl.float32))
    dk = gl.fma(ring.dS.index(stage).load(LC).to(gl.float32), dot_k[:, None], k.load(LC).to(gl.float32))
    q.store(dq.to(q.dtype))
    k.store(dk.to(k.dtype))
    store_slice(x_dq, x_dk, smem, outputs, coords, h, SIZES, FLAGS)


@gluon.jit
def store_slice(x_dq, x_dk, smem, outputs, coords, h, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Store dq and dk of slice h at their tokens, or in the head's tiles."""
    fence_async_shared()
    barrier()
    column, place = h * WIDTH, coords
    if SIZES.HV > SIZES.H:  # read here, not kept in registers
        row = gl.program_id(0).to(gl.int64) * SIZES.BT
        place = Coords(coords.b * 0, row, row.to(gl.int32), coords.h * 0, coords.rows)
    store_token_tile(x_dq, outputs.dq, outputs.s_dq, place, column, smem.q.index(h), FLAGS.WHOLE, SIZES.BT, WIDTH)
    store_token_tile(x_dk, outputs.dk, outputs.s_dk, place, column, smem.k.index(h), FLAGS.WHOLE, SIZES.BT, WIDTH)
