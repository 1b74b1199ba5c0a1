"""Gradients of q and k, for one half of the channels after the other."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.scalar.loads import load_again, load_states
from wyfold.kernels.gradients.gluon.tokens import store_token_tile
from wyfold.tile.index.gluon import barrier, reinterpret


@gluon.jit
def half_gradients(
    x_dq, x_dk, inputs, smem, pair, outputs, coords, offsets, X_operand, scales, r_q, r_k,
    read, write, traced, dot_q, dot_k, h, opaque_zero, SIZES: gl.constexpr, FLAGS: gl.constexpr,
):  # fmt: skip
    """Compute dq and dk of half h of the channels, through the states and the grams.

    Returns:
        read, write, traced, dot_q and dot_k, the sums over channels, with this half's.
    """
    BT: gl.constexpr = SIZES.BT
    SCALAR: gl.constexpr = FLAGS.SCALAR
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    o_r, o_c = offsets.row, offsets.column
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    mbarrier.wait(smem.states_ready, h)
    h_zero = h * opaque_zero
    e, do = _recomputed_address(smem.e, h_zero), _recomputed_address(smem.do, h_zero)
    S, dS = _recomputed_address(smem.S, h_zero), _recomputed_address(smem.dS, h_zero)
    P_tile, J_tile = pair.index(h_zero), pair.index(h_zero + 1)
    dw = warpgroup_mma(e, dS, zero_acc, use_acc=False, is_async=True)
    if SCALAR:
        trace = warpgroup_mma(S.permute((1, 0)), dS, zero_acc, use_acc=False, is_async=True)
    dk = warpgroup_mma(X_operand, S, zero_acc, use_acc=False, is_async=True)
    dq = warpgroup_mma(do, S, zero_acc, use_acc=False, is_async=True)
    q, k = smem.q.index(h), smem.k.index(h)
    if SCALAR:
        dw, trace = warpgroup_mma_wait(2, deps=[dw, trace])
        traced += gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1)
        dw = dw * scales.w[:, None]
        write += gl.sum(k.load(LC).to(gl.float32) * dw, axis=1)
        dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
    else:
        dw, dk, dq = warpgroup_mma_wait(0, deps=[dw, dk, dq])
        dw = dw * scales.w[:, None]
    barrier()
    _load_next(inputs, smem, h, SIZES, FLAGS)
    dq = dq * scales.q[:, None]
    if SCALAR:
        k_dk = k.load(LC).to(gl.float32) * (dk * scales.k[:, None])
        read += gl.sum(gl.fma(q.load(LC).to(gl.float32), dq, k_dk), axis=1)
    dk = gl.fma(dk, scales.k[:, None], dw)
    dq = warpgroup_mma(P_tile, k, dq, is_async=True)
    dk = warpgroup_mma(J_tile, k, dk, is_async=True)
    dk = warpgroup_mma(J_tile.permute((1, 0)), k, dk, is_async=True)
    dk = warpgroup_mma(P_tile.permute((1, 0)), q, dk, is_async=True)
    dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
    dot_q, dot_k = _finish_half(x_dq, x_dk, smem, outputs, coords, dq, dk, r_q, r_k, dot_q, dot_k, h, SIZES, FLAGS)
    return read, write, traced, dot_q, dot_k


@gluon.jit
def _load_next(inputs, smem, h, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Issue the loads that follow the states' last product: the other half, or q and k again."""
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    if h == 0:
        load_states(inputs, smem, 1, V, BK)
    elif FLAGS.NORM:
        load_again(inputs, smem, BT, BK)


@gluon.jit
def _finish_half(
    x_dq, x_dk, smem, outputs, coords, dq, dk, r_q, r_k, dot_q, dot_k, h, SIZES: gl.constexpr, FLAGS: gl.constexpr
):
    """Store dq and dk of half h; with the norm, the first half waits for its dot products."""
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    WHOLE: gl.constexpr = FLAGS.WHOLE
    NORM: gl.constexpr = FLAGS.NORM
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    q, k = smem.q.index(h), smem.k.index(h)
    if NORM:
        row_q, row_k = q.load(LC).to(gl.float32), k.load(LC).to(gl.float32)
        dot_q += gl.sum(row_q * dq, axis=1)
        dot_k += gl.sum(row_k * dk, axis=1)
        if h == 1:
            dot_q, dot_k = -(dot_q * r_q * r_q), -(dot_k * r_k * r_k)
            dq, dk = (gl.fma(row_q, dot_q[:, None], dq), gl.fma(row_k, dot_k[:, None], dk))
    barrier()
    q.store(dq.to(q.dtype))
    k.store(dk.to(k.dtype))
    fence_async_shared()
    barrier()
    if not NORM or h == 1:
        store_token_tile(x_dq, outputs.dq, outputs.s_dq, coords, h * BK, q, WHOLE, BT, BK)
        store_token_tile(x_dk, outputs.dk, outputs.s_dk, coords, h * BK, k, WHOLE, BT, BK)
    return dot_q, dot_k


@gluon.jit
def finish_first_half(x_dq, x_dk, smem, outputs, coords, dot_q, dot_k, SIZES: gl.constexpr, FLAGS: gl.constexpr):
    """Apply the norm's adjoint to the first half, whose q and k are loaded again, and store it."""
    BT: gl.constexpr = SIZES.BT
    BK: gl.constexpr = SIZES.K // 2
    WHOLE: gl.constexpr = FLAGS.WHOLE
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    mbarrier.wait(smem.states_ready, 0)
    reloaded = reinterpret(smem.S, smem.q.dtype, [2, BT, BK], smem.q.layout)
    q, k = smem.q.index(0), smem.k.index(0)
    dq = gl.fma(reloaded.index(0).load(LC).to(gl.float32), dot_q[:, None], q.load(LC).to(gl.float32))
    dk = gl.fma(reloaded.index(1).load(LC).to(gl.float32), dot_k[:, None], k.load(LC).to(gl.float32))
    q.store(dq.to(q.dtype))
    k.store(dk.to(k.dtype))
    fence_async_shared()
    barrier()
    store_token_tile(x_dq, outputs.dq, outputs.s_dq, coords, 0, q, WHOLE, BT, BK)
    store_token_tile(x_dk, outputs.dk, outputs.s_dk, coords, 0, k, WHOLE, BT, BK)


@gluon.jit
def _recomputed_address(tile, h_zero):
    """The same shared memory tile, with its address computed again; `h_zero` is a 0 that the compiler cannot fold.

    The compiler would hoist the tile's matrix descriptors out of the loop. They take two registers for every 16
    columns, so they would spill to local memory and be reloaded in every iteration (docs/facts/hopper.md, SASS-7).
    """
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(h_zero)
