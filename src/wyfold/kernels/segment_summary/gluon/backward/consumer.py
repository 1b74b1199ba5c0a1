"""Consumer of `segment_summary_bwd` in Gluon: c of a segment."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.pipeline.gluon import layouts, next_stage, stage_before
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.dot.gluon import one_over
from wyfold.tile.index.gluon import clear_rows
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.gluon import state_offsets


@gluon.jit
def consumer(gmem, smem, coords, scale, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows backward through all chunks, from zeros or from the gradient of the final state."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    STAGES: gl.constexpr = SIZES.STAGES
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    dS = gl.zeros([BW, K], gl.float32, LS)
    if gmem.dST is not None:
        if coords.ends:
            dS = gl.load(gmem.dST + state_offsets(gmem.s_dST, coords.n, coords.hv, o_v, o_k)).to(gl.float32)
    opaque_zero = gl.minimum(coords.count, 0)
    total = 0.0
    next_total = 0.0
    if not CHANNEL:
        last = coords.tile + (coords.count - 1) * HV
        total = chunk_decay(gmem.total, last, coords.count > 0, opaque_zero, BW, LS)
        next_total = chunk_decay(gmem.total, last - HV, coords.count > 1, opaque_zero, BW, LS)
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(0), 0)
        if not CHANNEL:
            clear_rows(smem.k.index(0), coords.tail_rows, BT, K)
            clear_rows(smem.q.index(0), coords.tail_rows, BT, K)
        clear_rows(smem.do.index(part), coords.tail_rows, BT, BW)
    stage = 0
    phase = 0
    for j in range(coords.count):
        i = coords.count - 1 - j
        mbarrier.wait(smem.full.index(stage), phase)
        dS, later_total = _step(
            dS, total, gmem, smem, coords, scale, part, stage, i, j, opaque_zero,
            SIZES,
        )  # fmt: skip
        total = next_total
        next_total = later_total
        stage, phase = next_stage(stage, phase, STAGES)
    if coords.needed != 0:
        gl.store(gmem.c + state_offsets(gmem.s_c, coords.border, coords.hv, o_v, o_k), dS)


@gluon.jit
def _step(dS, total, gmem, smem, coords, scale, part, stage, i, done, opaque_zero, SIZES: gl.constexpr):
    """Gradient of the state entering chunk i; with a scalar gate also the decay of the chunk after the next one.

    `done`: number of chunks before it in this direction. The decay is loaded two chunks ahead, as in the forward
    kernel.
    """
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    PARTS: gl.constexpr = SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    STAGES: gl.constexpr = SIZES.STAGES
    L: gl.constexpr = layouts(K, BT, gl.num_warps())
    LS: gl.constexpr = L.state
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zeros = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    do, write = smem.do.index(stage * PARTS + part), smem.write.index(stage)

    left = gl.convert_layout(dS.to(OP), L.state_left, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    fence_async_shared()
    mbarrier.arrive(smem.free.index(stage_before(stage, STAGES)), count=1, pred=done > 0)
    doT, in_q = do.permute((1, 0)).load(LC), factors.slice(BT, BT).load(ROW)
    # Dropped by the compiler with FOLDED.
    out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
    X = warpgroup_mma(
        gl.convert_layout(doT, L.chunk_left, assert_trivial=True),
        smem.F.index(stage).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    doT = gl.convert_layout((doT.to(gl.float32) * (in_q * scale)[None, :]).to(OP), L.chunk_left, assert_trivial=True)
    later_total = total
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    dY = warpgroup_mma_wait(1, deps=[dY])
    if not FOLDED:
        d = gl.convert_layout((dY * out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        dY = warpgroup_mma(d, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Multiplied after the first product's wait: before it, ptxas would add a wait
    # (docs/facts/compilers.md, PTXAS-4).
    dS = warpgroup_mma(doT, query, dS * total, is_async=True)
    # Row factors are loaded where they are used, some twice, because registers are scarce here.
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if not CHANNEL:
        later_total = chunk_decay(gmem.total, coords.tile + (i - 2) * HV, i > 1, opaque_zero, BW, LS)
    X = X * scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(nonzero_beta(beta))[None, :]
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), L.chunk_left, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    return warpgroup_mma_wait(0, deps=[dS]), later_total
