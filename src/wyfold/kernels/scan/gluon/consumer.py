"""Consumer of `scan` in Gluon: the value rows of a part, through all chunks."""

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

from wyfold.kernels.pipeline.gluon import layouts, load_state, next_stage, stage_before, store_state
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.index.gluon import clear_rows, tma_store


@gluon.jit
def consumer(gmem, smem, coords, scale, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows through all chunks."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LS: gl.constexpr = layouts(K, BT, gl.num_warps()).state
    o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    S = _entering_state(gmem, coords, o_v, o_k, gl.zeros([BW, K], gl.float32, LS))
    opaque_zero = gl.minimum(coords.steps, 0)
    total = 0.0
    if not CHANNEL:
        total = chunk_decay(gmem.total, coords.tile, coords.steps + coords.tail_rows > 0, opaque_zero, BW, LS)
    stage = 0
    phase = 0
    for i in range(coords.steps):
        next_total = total
        if not CHANNEL:
            has_next = (i + 1) * BT < coords.steps * BT + coords.tail_rows
            next_total = chunk_decay(gmem.total, coords.tile + (i + 1) * HV, has_next, opaque_zero, BW, LS)
        mbarrier.wait(smem.full.index(stage), phase)
        S = _step(S, total, gmem, smem, coords, scale, part, stage, i, SIZES, True)
        total = next_total
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(stage), phase)
        S = _step(S, total, gmem, smem, coords, scale, part, stage, coords.steps, SIZES, False)
    elif coords.steps > 0:
        _release(gmem, smem, coords, part, stage_before(stage, SIZES.STAGES), coords.steps - 1, SIZES)
    _store_leaving_state(gmem, coords, o_v, o_k, S)
    tma.store_wait(pendings=0)


@gluon.jit
def _entering_state(gmem, coords, o_v, o_k, S):
    """Value rows o_v of the state that the sequence begins with, or that enters its segment; S if there is none."""
    if gmem.borders is None:
        if coords.to is None:
            S = load_state(gmem.S0, gmem.s_S0, coords.n, coords.hv, o_v, o_k, None, S)
        else:
            S = load_state(gmem.S0, gmem.s_S0, coords.n, coords.hv, o_v, o_k, coords.begins, S)
    elif coords.begins:
        S = load_state(gmem.S0, gmem.s_S0, coords.n, coords.hv, o_v, o_k, None, S)
    else:
        S = load_state(gmem.borders, gmem.s_borders, coords.border, coords.hv, o_v, o_k, coords.exists, S)
    return S


@gluon.jit
def _store_leaving_state(gmem, coords, o_v, o_k, S):
    """Store value rows o_v of the state that leaves the sequence, if it is wanted and the segment is the last."""
    to = coords.n
    if coords.to is not None:
        to = coords.to
    if gmem.borders is None and coords.to is None:
        store_state(gmem.ST, gmem.s_ST, to, coords.hv, o_v, o_k, None, S)
    else:
        store_state(gmem.ST, gmem.s_ST, to, coords.hv, o_v, o_k, coords.ends, S)


@gluon.jit
def _step(S, total, gmem, smem, coords, scale, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Write a chunk's output; return the state leaving it.

    A channel gate implies FOLDED (`prepare.reads_folded`): the branches without FOLDED have one decay per token.

    Args:
        FULL: Whether all rows of the chunk are tokens.
    """
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    ERASES: gl.constexpr = SIZES.ERASES
    L: gl.constexpr = layouts(SIZES.K, BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)

    left = gl.convert_layout(S.to(OP), L.state_left, assert_trivial=True)
    Sk = zero_acc
    if ERASES:
        Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    Sq = warpgroup_mma(left, query.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    before = stage_before(stage, SIZES.STAGES)
    _release(gmem, smem, coords, part, before, i - 1, SIZES)
    if not FULL:
        Sk, Sq = warpgroup_mma_wait(0, deps=[Sk, Sq])
    v = smem.v.index(stage * SIZES.PARTS + part).permute((1, 0)).load(LC)
    # The compiler drops the loads that a gate kind or a form does not use.
    in_k, in_q = factors.slice(0, BT).load(ROW), factors.slice(BT, BT).load(ROW)
    beta = factors.slice(3 * BT, BT).load(ROW)
    if FULL and ERASES:
        Sk = warpgroup_mma_wait(1, deps=[Sk])
    if not ERASES:
        R = v.to(gl.float32)
    elif CHANNEL:
        R = v.to(gl.float32) - Sk
    else:
        R = v.to(gl.float32) - Sk * in_k[None, :]
    if not FULL:
        R = gl.where((gl.arange(0, BT, layout=ROW) < coords.tail_rows)[None, :], R, 0.0)
    e, beta_out = zero_acc, beta  # read without FOLDED alone
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        if FULL:
            Sq = warpgroup_mma_wait(0, deps=[Sq])
    else:
        y = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
        e = warpgroup_mma(y, smem.write.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = factors.slice(2 * BT, BT).load(ROW)
        if FULL:
            Sq = warpgroup_mma_wait(1, deps=[Sq])
    if not CHANNEL:
        Sq = Sq * in_q[None, :]
    o = warpgroup_mma(y, smem.F.index(stage), Sq, is_async=True)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, L.state))[None, :]
    S = S * total
    if FOLDED:
        S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
    else:
        e = warpgroup_mma_wait(1, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        if not FULL:
            clear_rows(key, coords.tail_rows, BT, SIZES.K)
        S = warpgroup_mma(u, key, S, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    _write_output((o * scale).to(OP), gmem, smem, coords, part, stage, before, i, SIZES, FULL)
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _write_output(o, gmem, smem, coords, part, stage, before, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Write chunk i's output to its buffer once that is free, and the tokens of a partial chunk to global memory."""
    OUT: gl.constexpr = SIZES.OUT
    PENDING: gl.constexpr = OUT - 1 if OUT > 0 else 0
    tma.store_wait(pendings=PENDING)
    if OUT == 0:
        mbarrier.arrive(smem.out_free.index(before), count=1, pred=i > 0)
    buffer = _out_buffer(smem, part, stage, i, SIZES)
    buffer.permute((1, 0)).store(o)
    if not FULL:
        _store_tail(gmem, coords, part, i, buffer, SIZES)


@gluon.jit
def _store_tail(gmem, coords, part, i, buffer, SIZES: gl.constexpr):
    """Store the tokens of a partial chunk i from its buffer [BT, BW] of shared memory, through pointers."""
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(0, L))
    first = coords.b * gmem.s_o[0] + (coords.t + i * BT) * gmem.s_o[1] + coords.hv * gmem.s_o[2]
    # o has a descriptor, so its last stride is 1. Multiplying by the runtime stride would split the store into
    # single numbers.
    offsets = o_t.to(gl.int64)[:, None] * gmem.s_o[1] + o_v[None, :]
    # o_v >= 0 is always true; it gives the mask the second dimension of the pointers.
    gl.store(gmem.o + first + offsets, buffer.load(L), mask=(o_t < coords.tail_rows)[:, None] & (o_v >= 0)[None, :])


@gluon.jit
def _out_buffer(smem, part, stage, i, SIZES: gl.constexpr):
    """Shared-memory buffer of a part's output of chunk i."""
    if SIZES.OUT == 0:
        return smem.out.index(stage * SIZES.PARTS + part)
    else:
        return smem.out.index((i % SIZES.OUT) * SIZES.PARTS + part)


@gluon.jit
def _release(gmem, smem, coords, part, stage, i, SIZES: gl.constexpr):
    """Arrive at `free` for chunk i's stage and issue the TMA store of its output; nothing for i = -1.

    The first call has i = -1 and stores nothing: a TMA store of a block that lies entirely before the tensor is an
    illegal instruction (docs/facts/hopper.md, TMA-1).
    """
    fence_async_shared()
    mbarrier.arrive(smem.free.index(stage), count=1, pred=i >= 0)
    column = (coords.hv * gmem.s_o[2]).to(gl.int32) + coords.column + part * (SIZES.BV // SIZES.PARTS)
    if i >= 0:
        # The buffer of i + OUT is that of i, and the sum is not negative for i = -1 either.
        tma_store(gmem.x_o, [coords.token + i * SIZES.BT, column], _out_buffer(smem, part, stage, i + SIZES.OUT, SIZES))
