"""Consumer of `segment_summary_bwd` in Gluon: c of a segment."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from wyfold.kernels.pipeline.gluon import layouts, load_state, next_stage, release, store_state
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.dot.gluon import one_over
from wyfold.tile.index.gluon import clear_rows
from wyfold.tile.inverse.triton import nonzero_beta


class Globals(NamedTuple):
    """Global memory that the consumers access themselves.

    Attributes:
        total: Decays of a scalar gate.
        unit: `DeltaOptions.unit`, in which gradients are computed.
        scale: Factor of the outputs, in units.
        gradients: Argument of the kernel.
    """

    total: Any
    unit: Any
    scale: Any
    gradients: Any


@gluon.jit
def consumer(gmem, ring, smem, coords, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows backward through all chunks, from zeros or from the gradient of the final state."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    LS: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).state
    span, count = coords.span, coords.count
    row = span.column + part * BW
    dS = load_state(
        gmem.gradients.dST, gmem.gradients.s_dST, coords.n, coords.ends, None, None, None, None, span.hv, row, SIZES
    )
    dS *= 1.0 / gmem.unit
    opaque_zero = gl.minimum(count, 0)
    total = 0.0
    next_total = 0.0
    if not CHANNEL:
        last = span.tile + (count - 1) * HV
        total = chunk_decay(gmem.total, last, count > 0, opaque_zero, BW, LS)
        next_total = chunk_decay(gmem.total, last - HV, count > 1, opaque_zero, BW, LS)
    if coords.tail_rows > 0:
        mbarrier.wait(ring.full.index(0), 0)
        if not CHANNEL:
            clear_rows(ring.k.index(0), coords.tail_rows, BT, K)
            clear_rows(ring.q.index(0), coords.tail_rows, BT, K)
        clear_rows(ring.x.index(part), coords.tail_rows, BT, BW)
    stage = 0
    phase = 0
    for j in range(count):
        i = count - 1 - j
        mbarrier.wait(ring.full.index(stage), phase)
        if SIZES.ERASES or not CHANNEL:
            dS, later_total = _step(dS, total, gmem, ring, span, part, stage, i, j, opaque_zero, SIZES)
            total = next_total
            next_total = later_total
        else:
            dS = _step_without_keys(dS, gmem, ring, part, stage, j, SIZES)
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    if coords.needed != 0:
        store_state(gmem.gradients.c, gmem.gradients.s_c, coords.border, None, span.hv, row, dS * gmem.unit, SIZES)


@gluon.jit
def _step_without_keys(dS, gmem, ring, part, stage, done, SIZES: gl.constexpr):
    """`_step` under a channel gate where writes erase nothing: no query reads what the chunk has written."""
    BT: gl.constexpr = SIZES.BT
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    release(ring, stage, done > 0, SIZES.STAGES)
    in_q = ring.rows.index(stage).slice(BT, BT).load(L.row)
    doT = ring.x.index(stage * SIZES.PARTS + part).permute((1, 0)).load(L.chunk).to(gl.float32)
    doT = (doT * (in_q * gmem.scale)[None, :]).to(ring.q.dtype)
    total = ring.total.index(stage).load(gl.SliceLayout(0, L.state))[None, :]
    left = gl.convert_layout(doT, L.chunk_left, assert_trivial=True)
    dS = warpgroup_mma(left, ring.q.index(stage), dS * total, is_async=True)
    return warpgroup_mma_wait(0, deps=[dS])


@gluon.jit
def _step(dS, total, gmem, ring, span, part, stage, i, done, opaque_zero, SIZES: gl.constexpr):
    """Gradient of the state entering chunk i; with a scalar gate also the decay of the chunk after the next one.

    `done`: number of chunks before it in this direction. The decay is loaded two chunks ahead, as in the forward
    kernel.
    """
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps())
    LS: gl.constexpr = L.state
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = ring.k.dtype
    zeros = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = ring.k.index(stage), ring.q.index(stage), ring.rows.index(stage)
    do, write = ring.x.index(stage * SIZES.PARTS + part), ring.write.index(stage)

    left = gl.convert_layout(dS.to(OP), L.state_left, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    release(ring, stage, done > 0, SIZES.STAGES)
    doT, in_q = do.permute((1, 0)).load(LC), factors.slice(BT, BT).load(ROW)
    # Dropped by the compiler with FOLDED.
    out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
    X = warpgroup_mma(
        gl.convert_layout(doT, L.chunk_left, assert_trivial=True),
        ring.square.index(stage).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    doT = gl.convert_layout(
        (doT.to(gl.float32) * (in_q * gmem.scale)[None, :]).to(OP), L.chunk_left, assert_trivial=True
    )
    later_total = total
    if CHANNEL:
        total = ring.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
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
        later_total = chunk_decay(gmem.total, span.tile + (i - 2) * SIZES.HV, i > 1, opaque_zero, BW, LS)
    X = X * gmem.scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(nonzero_beta(beta))[None, :]
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), L.chunk_left, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    return warpgroup_mma_wait(0, deps=[dS]), later_total
