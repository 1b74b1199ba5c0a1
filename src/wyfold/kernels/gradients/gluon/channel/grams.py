"""Gradients of the grams, and products through the states."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.channel.tiles import allocate4, own_sub_chunk_columns, split4_columns
from wyfold.kernels.gradients.gluon.channel.values import store_dbeta
from wyfold.tile.index.gluon import barrier, clear_rows


@gluon.jit
def gram_gradients(
    head, betas, norms_q, norms_k, bars, strength, outputs, factors, coords, half,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Gradients of the grams P and J, scaled, and the gradients of q, k and w through the states, in flight.

    Returns:
        dq, dk, dw: [BK, BT] through the states, before their scales.
        carried: [BK] <S, dS> of every channel.
        read, written, erased: [BT] scales of dq, dw and dk.
        near_P, near_J: [BT, 8] gradients of the pairs of a sub-chunk.
        far_P, far_J: Four tiles [BT, 16] with those of the other pairs.

    If writes erase nothing, what belongs to J is what belongs to P, and dk is dq.
    """
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    WHOLE: gl.constexpr = FLAGS.WHOLE
    ERASES: gl.constexpr = FLAGS.ERASES
    NORM: gl.constexpr = FLAGS.NORM
    rows = coords.rows
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 16, 16])
    CH: gl.constexpr = gl.SliceLayout(1, L)
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)  # also of [BK, BT] and [BK, BK] products: BK = BT
    mbarrier.wait(bars.index(0), 0)
    if not WHOLE:
        if rows < BT:
            clear_rows(head.do, rows, BT, V)
    dJ = zero_acc
    if ERASES:
        dJ = warpgroup_mma(head.X, head.e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dP = warpgroup_mma(head.do, head.e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    mbarrier.wait(bars.index(1), 0)
    # Only the diagonal is used: <S, dS> of every channel. A product reads both states from shared memory;
    # elementwise, both would be loaded into registers.
    trace = warpgroup_mma(head.S.permute((1, 0)), head.dS, zero_acc, use_acc=False, is_async=True)
    if ERASES:
        dJ, dP, trace = warpgroup_mma_wait(0, deps=[dJ, dP, trace])
    else:
        dP, trace = warpgroup_mma_wait(0, deps=[dP, trace])
    dq = warpgroup_mma(head.S.permute((1, 0)), head.do.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dk = dq
    if ERASES:
        dk = warpgroup_mma(head.S.permute((1, 0)), head.X.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dw = warpgroup_mma(head.dS.permute((1, 0)), head.e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    o_r, o_c = (gl.arange(0, BT, layout=gl.SliceLayout(1, LC)), gl.arange(0, BT, layout=gl.SliceLayout(0, LC)))
    carried = gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1) * factors.unit
    carried = gl.convert_layout(carried, CH, assert_trivial=True)
    beta_r, beta_c = (betas.load(gl.SliceLayout(1, LC)), betas.load(gl.SliceLayout(0, LC)))
    if ERASES:
        store_dbeta(strength, outputs, coords, dJ, o_r, o_c, half, factors.unit, FLAGS.LOGIT)
    read, written = (gl.full([BT], factors.scale, gl.float32, gl.SliceLayout(0, LC)), beta_c * factors.unit)
    erased = beta_c * factors.erased_unit
    dP = dP * (factors.scale * beta_c)[None, :]
    if ERASES:
        dJ = dJ * (beta_c[None, :] * (-beta_r * factors.erased_unit)[:, None])
    if NORM:
        r_c = norms_k.load(gl.SliceLayout(0, LC))
        read, written, erased = (read * norms_q.load(gl.SliceLayout(0, LC)), written * r_c, erased * r_c)
        dP = dP * r_c[None, :] * norms_q.load(gl.SliceLayout(1, LC))[:, None]
        if ERASES:
            dJ = dJ * r_c[None, :] * norms_k.load(gl.SliceLayout(1, LC))[:, None]
    near_P = own_sub_chunk_columns(dP, o_r)
    near_J = near_P
    if ERASES:
        near_J = own_sub_chunk_columns(dJ, o_r)
    is_far = o_r[:, None] // 8 > o_c[None, :] // 8
    far_P = split4_columns(gl.where(is_far, dP, 0.0).to(head.X.dtype), L)
    far_J = far_P
    if ERASES:
        far_J = split4_columns(gl.where(is_far, dJ, 0.0).to(head.X.dtype), L)
    return dq, dk, dw, carried, read, written, erased, near_P, near_J, far_P, far_J


@gluon.jit
def store_pair_gradients(near_P, near_J, far_P, far_J, ERASES: gl.constexpr):
    """Store the gradients of the pairs to shared memory.

    Returns:
        near: [8 * BT, 2] of the pairs of a sub-chunk.
        P, J: Four tiles [BT, 16] of the others.
    """
    BT: gl.constexpr = near_P.shape[0]
    near = gl.allocate_shared_memory(gl.float32, [8 * BT, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    near.store(gl.join(near_P, near_J).permute((1, 0, 2)).reshape([8 * BT, 2]))
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    P = allocate4(far_P[0].dtype, BT, PAIRS)
    J = P
    if ERASES:
        J = allocate4(far_P[0].dtype, BT, PAIRS)
    for n in gl.static_range(4):
        P[n].store(far_P[n])
        if ERASES:
            J[n].store(far_J[n])
    fence_async_shared()
    barrier()
    return near, P, J
