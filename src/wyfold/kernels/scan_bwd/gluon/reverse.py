"""Reverse half of `scan_bwd` in Gluon: gradients of the states leaving the chunks, and X."""

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

from wyfold.kernels.pipeline.gluon import IN_REGISTERS, layouts, next_stage
from wyfold.kernels.scan_bwd.gluon.states import load_state, release, store_left, store_state
from wyfold.tile.dot.gluon import in_bfloat16, one_over
from wyfold.tile.index.gluon import clear_rows, tma_store
from wyfold.tile.inverse.triton import nonzero_beta


@gluon.jit
def reverse_half(gmem, smem, coords, unit, scale, part, SIZES: gl.constexpr):
    """Reverse half: from the last chunk, which may be partial, to the first."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    states, segments = gmem.states, gmem.segments
    first_row = coords.column + part * BW
    dS = load_state(
        states.dST, states.s_dST, coords.ends, segments.leaving, segments.s_leaving, coords.border, coords, first_row,
        K, BW,
    )  # fmt: skip
    # Without a token the gradient passes through unchanged.
    unit = gl.where(coords.steps + coords.tail_rows > 0, unit, 1.0)
    dS = dS * (1.0 / unit)
    total = 0.0
    if not CHANNEL:
        total = gl.load(gmem.total + coords.tile + (coords.steps - 1) * HV, mask=coords.steps > 0, other=0.0)
    stage = 0
    phase = 0
    done = 0
    if coords.tail_rows > 0:
        last_total = total
        if not CHANNEL:
            last_total = gl.load(gmem.total + coords.tile + coords.steps * HV)
        mbarrier.wait(smem.full.index(stage), phase)
        if K > IN_REGISTERS:
            dS = _wide_reverse_step(
                dS, last_total, gmem, smem, coords, scale, part, stage, coords.steps, done, SIZES, False
            )
        else:
            dS = _reverse_step(dS, last_total, gmem, smem, coords, scale, part, stage, coords.steps, done, SIZES, False)
        done += 1
        stage += 1  # no wrap: there are at least two stages
    for j in range(coords.steps):
        i = coords.steps - 1 - j
        next_total = total
        if not CHANNEL:
            next_total = gl.load(gmem.total + coords.tile + (i - 1) * HV, mask=i > 0, other=0.0)
        mbarrier.wait(smem.full.index(stage), phase)
        if K > IN_REGISTERS:
            dS = _wide_reverse_step(dS, total, gmem, smem, coords, scale, part, stage, i, done, SIZES, True)
        else:
            dS = _reverse_step(dS, total, gmem, smem, coords, scale, part, stage, i, done, SIZES, True)
        total = next_total
        done += 1
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    if done > 0:
        fence_async_shared()
        tma_store(gmem.X, [coords.tile * BT, first_row], smem.tokens.index(part))
    dS = dS * unit
    if segments.leaving is None:
        store_state(states.dS0, states.s_dS0, coords, first_row, dS, K, BW)
    elif coords.begins:
        store_state(states.dS0, states.s_dS0, coords, first_row, dS, K, BW)


@gluon.jit
def _reverse_step(dS, total, gmem, smem, coords, scale, part, stage, i, done, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Write dS and X of chunk i; return the gradient of the state entering it.

    `done`: number of chunks before it in this direction. FULL: all its rows are tokens.
    """
    HV: gl.constexpr = SIZES.HV
    BT: gl.constexpr = SIZES.BT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    x, square, write = smem.x.index(stage * SIZES.PARTS + part), smem.square.index(stage), smem.write.index(stage)
    if not FULL:
        if not CHANNEL:
            clear_rows(key, coords.tail_rows, BT, SIZES.K)
            clear_rows(query, coords.tail_rows, BT, SIZES.K)
        clear_rows(x, coords.tail_rows, BT, BW)

    rounded = dS.to(OP)
    left = gl.convert_layout(rounded, L.state_left, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    release(gmem.dS, gmem.X, rounded, smem, part, tile, tile + HV, coords.column + part * BW, stage, done, SIZES)
    doT = x.permute((1, 0)).load(LC)
    do_left = gl.convert_layout(doT, L.chunk_left, assert_trivial=True)
    X = warpgroup_mma(do_left, square.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    in_q = factors.slice(BT, BT).load(ROW)
    if scale is not None:
        in_q *= scale
    doT = gl.convert_layout((doT.to(gl.float32) * in_q[None, :]).to(OP), L.chunk_left, assert_trivial=True)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, L.state))[None, :]
    dS = dS * total
    if not FOLDED:
        out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
        dY = warpgroup_mma_wait(1, deps=[dY])
        d, d_wide = in_bfloat16(dY * out[None, :])
        less = gl.fma(dY, out[None, :], -d_wide)
        d = gl.convert_layout(d, L.chunk_left, assert_trivial=True)
        dY = warpgroup_mma(d, write.permute((1, 0)), less, is_async=True)
    dS = warpgroup_mma(doT, query, dS, is_async=True)
    # Row factors are loaded where they are used, some twice, because registers are scarce here.
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if scale is not None:
        X *= scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(nonzero_beta(beta))[None, :]
    if SIZES.ERASES or not CHANNEL:
        dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), L.chunk_left, assert_trivial=True)
        dS = warpgroup_mma(dR, key, dS, is_async=True)
    tma.store_wait(pendings=SIZES.OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(X.to(OP))
    return warpgroup_mma_wait(0, deps=[dS])


@gluon.jit
def _wide_reverse_step(
    dS, total, gmem, smem, coords, scale, part, stage, i, done, SIZES: gl.constexpr, FULL: gl.constexpr
):
    """`_reverse_step` of a gradient that fills the registers, unfolded.

    Its rounded copy and do are read from shared memory, and do is loaded where it is scaled.
    """
    HV: gl.constexpr = SIZES.HV
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    x, square, write = smem.x.index(stage * SIZES.PARTS + part), smem.square.index(stage), smem.write.index(stage)
    if not FULL:
        clear_rows(key, coords.tail_rows, BT, SIZES.K)
        clear_rows(query, coords.tail_rows, BT, SIZES.K)
        clear_rows(x, coords.tail_rows, BT, BW)
    left = store_left(dS.to(OP), smem, part, done, SIZES)
    dY = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    release(gmem.dS, gmem.X, None, smem, part, tile, tile + HV, coords.column + part * BW, stage, done, SIZES)
    dS = dS * total
    dY = warpgroup_mma_wait(0, deps=[dY])
    out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
    d, d_wide = in_bfloat16(dY * out[None, :])
    less = gl.fma(dY, out[None, :], -d_wide)
    d = gl.convert_layout(d, L.chunk_left, assert_trivial=True)
    dY = warpgroup_mma(d, write.permute((1, 0)), less, is_async=True)
    X = warpgroup_mma(x.permute((1, 0)), square.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    in_q = factors.slice(BT, BT).load(ROW)
    if scale is not None:
        in_q *= scale
    doT = (x.permute((1, 0)).load(LC).to(gl.float32) * in_q[None, :]).to(OP)
    dS = warpgroup_mma(gl.convert_layout(doT, L.chunk_left, assert_trivial=True), query, dS, is_async=True)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if scale is not None:
        X *= scale
    beta = factors.slice(3 * BT, BT).load(ROW)
    X += dY * one_over(nonzero_beta(beta))[None, :]
    in_k = factors.slice(0, BT).load(ROW)
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), L.chunk_left, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    tma.store_wait(pendings=SIZES.OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(X.to(OP))
    return warpgroup_mma_wait(0, deps=[dS])
