"""Forward half of `scan_bwd` in Gluon: states entering the chunks, and e."""

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
from wyfold.kernels.scan_bwd.gluon.states import load_state, release, store_left
from wyfold.tile.dot.gluon import in_bfloat16
from wyfold.tile.index.gluon import clear_rows, tma_store


@gluon.jit
def forward_half(gmem, smem, coords, part, SIZES: gl.constexpr):
    """Forward half: from the first chunk to the last. The state leaving the last chunk is not stored."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    states, segments = gmem.states, gmem.segments
    first_row = coords.column + part * BW
    before = coords.border - 1
    S = load_state(
        states.S0, states.s_S0, coords.begins, segments.entering, segments.s_entering, before, coords, first_row, K, BW
    )
    total = 0.0
    if not CHANNEL:
        total = gl.load(gmem.total + coords.tile, mask=coords.steps + coords.tail_rows > 0, other=0.0)
    stage = 0
    phase = 0
    for i in range(coords.steps):
        next_total = total
        if not CHANNEL:
            next_total = gl.load(
                gmem.total + coords.tile + (i + 1) * HV,
                mask=(i + 1) * BT < coords.steps * BT + coords.tail_rows,
                other=0.0,
            )
        mbarrier.wait(smem.full.index(stage), phase)
        if K > IN_REGISTERS:
            S = _wide_forward_step(S, total, gmem, smem, coords, part, stage, i, SIZES, True)
        else:
            S = _forward_step(S, total, gmem, smem, coords, part, stage, i, SIZES, True)
        total = next_total
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    last = coords.steps - 1
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(stage), phase)
        if K > IN_REGISTERS:
            _wide_forward_step(S, total, gmem, smem, coords, part, stage, coords.steps, SIZES, False)
        else:
            _forward_step(S, total, gmem, smem, coords, part, stage, coords.steps, SIZES, False)
        last = coords.steps
    if last >= 0:
        fence_async_shared()
        tma_store(gmem.e, [(coords.tile + last * HV) * BT, first_row], smem.tokens.index(part))


@gluon.jit
def _forward_step(S, total, gmem, smem, coords, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Write S and e of a chunk; return the state leaving it. FULL: all its rows are tokens."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    READS: gl.constexpr = SIZES.ERASES or not CHANNEL  # without k there is no W: e is v
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, factors, x = smem.k.index(stage), smem.rows.index(stage), smem.x.index(stage * PARTS + part)
    if not FULL:
        if not CHANNEL:
            clear_rows(key, coords.tail_rows, BT, K)
        clear_rows(x, coords.tail_rows, BT, BW)

    rounded = S.to(OP)
    if READS:
        left = gl.convert_layout(rounded, L.state_left, assert_trivial=True)
        Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    release(gmem.S, gmem.e, rounded, smem, part, tile, tile - HV, coords.column + part * BW, stage, i, SIZES)
    v = x.permute((1, 0)).load(LC)
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, L.state))[None, :]
    S = S * total
    if READS:
        Sk = warpgroup_mma_wait(0, deps=[Sk])
        R = v.to(gl.float32) - Sk * in_k[None, :]
        if FOLDED:
            y = gl.convert_layout((R * beta[None, :]).to(OP), L.chunk_left, assert_trivial=True)
            r, r_wide = in_bfloat16(R)
            less = R - r_wide
            r = gl.convert_layout(r, L.chunk_left, assert_trivial=True)
            e = warpgroup_mma(r, smem.square.index(stage), less, is_async=True)
            S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
            e = warpgroup_mma_wait(1, deps=[e])
        else:
            r = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
            e = warpgroup_mma(r, smem.square.index(stage), zero_acc, use_acc=False, is_async=True)
            beta_out = beta * factors.slice(2 * BT, BT).load(ROW)
            e = warpgroup_mma_wait(0, deps=[e])
            u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
            S = warpgroup_mma(u, key, S, is_async=True)
    else:
        e = v.to(gl.float32)
        y = gl.convert_layout((e * beta[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
    tma.store_wait(pendings=OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(e.to(OP))
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _wide_forward_step(S, total, gmem, smem, coords, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """`_forward_step` of a state that fills the registers, unfolded: its rounded copy is read from shared memory."""
    HV: gl.constexpr = SIZES.HV
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, factors, x = smem.k.index(stage), smem.rows.index(stage), smem.x.index(stage * SIZES.PARTS + part)
    if not FULL:
        clear_rows(key, coords.tail_rows, BT, SIZES.K)
        clear_rows(x, coords.tail_rows, BT, BW)
    left = store_left(S.to(OP), smem, part, i, SIZES)
    Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    release(gmem.S, gmem.e, None, smem, part, tile, tile - HV, coords.column + part * BW, stage, i, SIZES)
    v = x.permute((1, 0)).load(LC)
    S = S * total
    Sk = warpgroup_mma_wait(0, deps=[Sk])
    R = v.to(gl.float32) - Sk * factors.slice(0, BT).load(ROW)[None, :]
    r = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
    e = warpgroup_mma(r, smem.square.index(stage), zero_acc, use_acc=False, is_async=True)
    beta_out = factors.slice(3 * BT, BT).load(ROW) * factors.slice(2 * BT, BT).load(ROW)
    e = warpgroup_mma_wait(0, deps=[e])
    u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
    S = warpgroup_mma(u, key, S, is_async=True)
    tma.store_wait(pendings=SIZES.OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(e.to(OP))
    return warpgroup_mma_wait(0, deps=[S])
