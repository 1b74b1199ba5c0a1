"""Gradients of the grams, of beta, and of v."""

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

from wyfold.kernels.gradients.gluon.scalar.loads import clear_rows
from wyfold.kernels.gradients.gluon.scalar.numbers import Scales
from wyfold.kernels.gradients.gluon.scalar.pairs import pair_sums, reciprocal_norms
from wyfold.kernels.gradients.gluon.tokens import load_scalars, store_scalars, store_token_tile
from wyfold.tile.activation.triton import sigmoid_bwd
from wyfold.tile.index.gluon import barrier


@gluon.jit
def gram_gradients(
    x_dv, smem, pair, strength, outputs, factors, value, offsets, scales, T, per_sequence,
    SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Store dP and dJ to `pair`, dv over X, and dbeta.

    Returns:
        X as a left operand; the scales, with the norms; the reciprocal norms of q and k; the pairs' part of a scalar
        gate's gradient; and a 0 that the compiler cannot fold.
    """
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    WHOLE: gl.constexpr = FLAGS.WHOLE
    SCALAR: gl.constexpr = FLAGS.SCALAR
    NORM: gl.constexpr = FLAGS.NORM
    rows = value.rows
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    o_r, o_c = offsets.row, offsets.column
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    mbarrier.wait(smem.rows_ready, 0)
    X = smem.X.load(LV)
    X_operand = gl.convert_layout(X, gl.DotOperandLayout(0, LV, 2), assert_trivial=True)
    mbarrier.wait(smem.values_ready, 0)
    if not WHOLE:
        if rows < BT:
            clear_rows(smem.do, rows, BT, V)
    dJ = warpgroup_mma(X_operand, smem.e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dP = warpgroup_mma(smem.do, smem.e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    smem.X.store(
        (X.to(gl.float32) * (smem.numbers.slice(0, BT).load(gl.SliceLayout(1, LV)) * factors.unit)[:, None]).to(X.dtype)
    )
    fence_async_shared()
    barrier()
    store_token_tile(x_dv, outputs.dv, outputs.s_dv, value, 0, smem.X, WHOLE, BT, V)
    mbarrier.wait(smem.tokens_ready, 0)
    if not WHOLE:
        if rows < BT:
            for h in gl.static_range(2):
                clear_rows(smem.q.index(h), rows, BT, BK)
                clear_rows(smem.k.index(h), rows, BT, BK)
    r_q, r_k = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
    weight, scale_q, scale_k, scale_w = scales.weight, scales.q, scales.k, scales.w
    if NORM:
        r_q, r_k = reciprocal_norms(smem.q, LC, BT), reciprocal_norms(smem.k, LC, BT)
        smem.numbers.slice(0, BT).store(r_k)
        barrier()
        weight *= smem.numbers.slice(0, BT).load(COL)[None, :]
        scale_q, scale_k, scale_w = scale_q * r_q, scale_k * r_k, scale_w * r_k
    dJ, dP = warpgroup_mma_wait(0, deps=[dJ, dP])
    store_dbeta(strength, outputs, value, offsets, dJ, factors.unit, FLAGS.LOGIT)
    dJ = gl.where(o_r[:, None] > o_c[None, :], dJ * weight * -(scales.beta * factors.erased_unit * r_k)[:, None], 0.0)
    dP = gl.where(o_r[:, None] >= o_c[None, :], dP * weight * (factors.scale * r_q)[:, None], 0.0)
    J_operand, P_operand = dJ.to(X.dtype), dP.to(X.dtype)
    opaque_zero = (gl.minimum(T, 0) - gl.minimum(per_sequence, 0)).to(gl.int32)
    dg = scales.beta  # never read without a gate
    if SCALAR:
        dg = pair_sums(dJ, dP, smem.q, smem.k, pair, opaque_zero, BT)
    else:
        tma.store_wait(pendings=0)
        barrier()
    pair.index(0).store(P_operand)
    pair.index(1).store(J_operand)
    fence_async_shared()
    barrier()
    return (X_operand, Scales(scales.beta, weight, scale_q, scale_k, scale_w, scales.total), r_q, r_k, dg, opaque_zero)


@gluon.jit
def store_dbeta(strength, outputs, value, offsets, dJ, unit, LOGIT: gl.constexpr):
    """Store the gradient of beta, which is the diagonal of dJ, if it is wanted."""
    o_r, o_c = offsets.row, offsets.column
    if outputs.dbeta is not None:
        dbeta = gl.sum(gl.where(o_r[:, None] == o_c[None, :], dJ, 0.0), axis=1) * unit
        if LOGIT:
            dbeta = sigmoid_bwd(load_scalars(strength.beta, strength.s_beta, value, o_r), dbeta) * strength.most
        store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_r, dbeta)
