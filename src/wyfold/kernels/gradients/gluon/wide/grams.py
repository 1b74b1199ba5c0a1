"""Gradients of the grams, of beta, and of v, value tile by value tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.scalar.grams import store_dbeta
from wyfold.kernels.gradients.gluon.scalar.numbers import Scales
from wyfold.kernels.gradients.gluon.scalar.pairs import pair_sums, reciprocal_norms
from wyfold.kernels.gradients.gluon.tokens import store_token_tile
from wyfold.kernels.gradients.gluon.wide.arguments import BW
from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.tile.index.gluon import barrier, clear_rows

WIDTH = gl.constexpr(BW)


@gluon.jit
def gram_products(
    x_dv, ring, smem, outputs, coords, beta, unit,
    SIZES: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """X e^T and do e^T, [BT, BT] each; dv is stored on the way.

    Returns:
        The products, and the next stage and its phase.
    """
    BT: gl.constexpr = SIZES.BT
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    dJ, dP = zero_acc, zero_acc
    stage = 0
    phase = 0
    for i in range(SIZES.V // WIDTH):
        mbarrier.wait(ring.full.index(stage), phase)
        e, X, do = ring.e.index(stage), ring.X.index(stage), ring.do.index(stage)
        if not FLAGS.WHOLE:
            if coords.rows < BT:
                clear_rows(do, coords.rows, BT, WIDTH)
        dJ = warpgroup_mma(X, e.permute((1, 0)), dJ, is_async=True)
        dP = warpgroup_mma(do, e.permute((1, 0)), dP, is_async=True)
        dv = (X.load(LC).to(gl.float32) * (beta * unit)[:, None]).to(X.dtype)
        tma.store_wait(pendings=1)
        barrier()
        smem.pair.index(i % 2).store(dv)
        fence_async_shared()
        barrier()
        store_token_tile(
            x_dv, outputs.dv, outputs.s_dv, coords, i * WIDTH, smem.pair.index(i % 2), FLAGS.WHOLE, BT, WIDTH
        )
        dJ, dP = warpgroup_mma_wait(0, deps=[dJ, dP])
        barrier()
        mbarrier.arrive(ring.free.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    tma.store_wait(pendings=0)
    barrier()
    return dJ, dP, stage, phase


@gluon.jit
def gram_gradients(
    dJ, dP, smem, strength, outputs, factors, coords, offsets, scales, opaque_zero,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Store dP and dJ to `pair`, and dbeta.

    Returns:
        The scales, with the norms; the reciprocal norms of q and k; and the pairs' part of a scalar gate's gradient.
    """
    BT: gl.constexpr = SIZES.BT
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    o_r, o_c = offsets.row, offsets.column
    mbarrier.wait(smem.tokens_ready, 0)
    if not FLAGS.WHOLE:
        if coords.rows < BT:
            for h in gl.static_range(SIZES.K // WIDTH):
                clear_rows(smem.q.index(h), coords.rows, BT, WIDTH)
                clear_rows(smem.k.index(h), coords.rows, BT, WIDTH)
    r_q, r_k = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
    weight, scale_q, scale_k, scale_w = scales.weight, scales.q, scales.k, scales.w
    if FLAGS.NORM:
        r_q, r_k = reciprocal_norms(smem.q, LC, BT), reciprocal_norms(smem.k, LC, BT)
        smem.numbers.slice(0, BT).store(r_k)
        barrier()
        weight *= smem.numbers.slice(0, BT).load(COL)[None, :]
        scale_q, scale_k, scale_w = scale_q * r_q, scale_k * r_k, scale_w * r_k
    store_dbeta(strength, outputs, coords, offsets, dJ, factors.unit, FLAGS.LOGIT)
    dJ = gl.where(o_r[:, None] > o_c[None, :], dJ * weight * -(scales.beta * factors.erased_unit * r_k)[:, None], 0.0)
    dP = gl.where(o_r[:, None] >= o_c[None, :], dP * weight * (factors.scale * r_q)[:, None], 0.0)
    dg = scales.beta  # never read without a gate
    if FLAGS.SCALAR:
        dg = pair_sums(dJ, dP, smem.q, smem.k, smem.pair, opaque_zero, BT)
    smem.pair.index(0).store(dP.to(smem.q.dtype))
    smem.pair.index(1).store(dJ.to(smem.q.dtype))
    fence_async_shared()
    barrier()
    return Scales(scales.beta, weight, scale_q, scale_k, scale_w, scales.total), r_q, r_k, dg
