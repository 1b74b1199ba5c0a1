"""Consumer of `scan` in Gluon: the value rows of a part, through all chunks."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.pipeline.gluon import layouts, load_state, next_stage, release, stage_before, store_state
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.index.gluon import barrier, clear_rows, tma_store, wait_for_launch_ahead


class Globals(NamedTuple):
    """Global memory that the consumers access themselves.

    Attributes:
        total: Decays of a scalar gate.
        x_o, x_w: TMA descriptors of the output, and of the factors of v or None.
        scale: Factor of the output.
        tokens, states, segments: Arguments of the kernel.
    """

    total: Any
    x_o: Any
    x_w: Any
    scale: Any
    tokens: Any
    states: Any
    segments: Any


class Smem(NamedTuple):
    """Shared memory of the consumers beside the ring.

    Attributes:
        out: Buffers of the output.
        state: [PARTS, BW, K] rounded state of a part, if registers do not hold it as a left operand; else None.
    """

    out: Any
    state: Any


@gluon.jit
def consumer(gmem, ring, smem, coords, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows through all chunks."""
    HV: gl.constexpr = SIZES.HV
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    LS: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).state
    span, state, states, segments = coords.span, coords.state, gmem.states, gmem.segments
    row = span.column + part * BW
    if segments.borders is not None:
        wait_for_launch_ahead()
    # The state enters at the border before the segment.
    S = load_state(
        states.S0, states.s_S0, state.n, state.begins, segments.borders, segments.s_borders, state.border - 1,
        state.exists, span.hv, row, SIZES,
    )  # fmt: skip
    if segments.borders is None:
        wait_for_launch_ahead()  # of `prepare`; what is loaded so far is not its
    opaque_zero = gl.minimum(span.steps, 0)
    total = 0.0
    if not CHANNEL:
        total = chunk_decay(gmem.total, span.tile, span.steps + span.tail_rows > 0, opaque_zero, BW, LS)
    stage = 0
    phase = 0
    for i in range(span.steps):
        next_total = total
        if not CHANNEL:
            has_next = (i + 1) * BT < span.steps * BT + span.tail_rows
            next_total = chunk_decay(gmem.total, span.tile + (i + 1) * HV, has_next, opaque_zero, BW, LS)
        mbarrier.wait(ring.full.index(stage), phase)
        if smem.state is None:
            S = _step(S, total, gmem, ring, smem, span, part, stage, i, SIZES, True)
        else:
            S = _wide_step(S, total, gmem, ring, smem, span, part, stage, i, SIZES, True)
        total = next_total
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
    if span.tail_rows > 0:
        mbarrier.wait(ring.full.index(stage), phase)
        if smem.state is None:
            S = _step(S, total, gmem, ring, smem, span, part, stage, span.steps, SIZES, False)
        else:
            S = _wide_step(S, total, gmem, ring, smem, span, part, stage, span.steps, SIZES, False)
    elif span.steps > 0:
        _release(gmem, ring, smem, span, part, stage, span.steps, SIZES)
    to = state.n
    if state.to is not None:
        to = state.to
    store_state(states.ST, states.s_ST, to, state.ends, span.hv, row, S, SIZES)
    tma.store_wait(pendings=0)


@gluon.jit
def _step(S, total, gmem, ring, smem, span, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
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
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = ring.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = ring.k.index(stage), ring.q.index(stage), ring.rows.index(stage)

    left = gl.convert_layout(S.to(OP), L.state_left, assert_trivial=True)
    Sk = zero_acc
    if ERASES:
        Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    Sq = warpgroup_mma(left, query.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    _release(gmem, ring, smem, span, part, stage, i, SIZES)
    if not FULL:
        Sk, Sq = warpgroup_mma_wait(0, deps=[Sk, Sq])
    v = _values(gmem, ring, stage * SIZES.PARTS + part, LC)
    if SIZES.ADDS:
        in_k = gl.full([BT], 1.0, gl.float32, ROW)
        in_q, beta = in_k, in_k
    else:
        # The compiler drops the loads that a gate kind or a form does not use.
        in_k, in_q = factors.slice(0, BT).load(ROW), factors.slice(BT, BT).load(ROW)
        beta = factors.slice(3 * BT, BT).load(ROW)
    if FULL and ERASES:
        Sk = warpgroup_mma_wait(1, deps=[Sk])
    R = _residual(v, Sk, in_k, span.tail_rows, SIZES, FULL)
    e, beta_out = zero_acc, beta  # read without FOLDED alone
    if FOLDED:
        y = gl.convert_layout((R if SIZES.ADDS else R * beta[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        if FULL:
            Sq = warpgroup_mma_wait(0, deps=[Sq])
    else:
        y = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
        e = warpgroup_mma(y, ring.write.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = factors.slice(2 * BT, BT).load(ROW)
        if FULL:
            Sq = warpgroup_mma_wait(1, deps=[Sq])
    if not CHANNEL:
        Sq = Sq * in_q[None, :]
    o = warpgroup_mma(y, ring.square.index(stage), Sq, is_async=True)
    if CHANNEL:
        total = ring.total.index(stage).load(gl.SliceLayout(0, L.state))[None, :]
    S = S * total
    if FOLDED:
        S = warpgroup_mma(y, ring.write.index(stage), S, is_async=True)
    else:
        e = warpgroup_mma_wait(1, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        if not FULL:
            clear_rows(key, span.tail_rows, BT, SIZES.K)
        S = warpgroup_mma(u, key, S, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    _write_output((o * gmem.scale).to(OP), gmem, ring, smem, span, part, stage, i, SIZES, FULL)
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _wide_step(S, total, gmem, ring, smem, span, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """`_step` of a state that fills the registers, unfolded: its rounded copy is read from shared memory.

    The queries' product is issued behind that of the residual, so that one accumulator fewer is alive.
    """
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps())
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = ring.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = ring.k.index(stage), ring.q.index(stage), ring.rows.index(stage)
    left = smem.state.index(part)
    left.store(S.to(OP))
    fence_async_shared()
    barrier()
    Sk = zero_acc
    if SIZES.ERASES:
        Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    _release(gmem, ring, smem, span, part, stage, i, SIZES)
    S = S * total
    v = ring.x.index(stage * SIZES.PARTS + part).permute((1, 0)).load(LC)
    if SIZES.ERASES:
        Sk = warpgroup_mma_wait(0, deps=[Sk])
    R = _residual(v, Sk, factors.slice(0, BT).load(ROW), span.tail_rows, SIZES, FULL)
    y = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
    e = warpgroup_mma(y, ring.write.index(stage), zero_acc, use_acc=False, is_async=True)
    Sq = warpgroup_mma(left, query.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    e = warpgroup_mma_wait(1, deps=[e])
    beta_out = factors.slice(2 * BT, BT).load(ROW)
    u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
    if not FULL:
        Sq = warpgroup_mma_wait(0, deps=[Sq])
        clear_rows(key, span.tail_rows, BT, SIZES.K)
    S = warpgroup_mma(u, key, S, is_async=True)
    if FULL:
        Sq = warpgroup_mma_wait(1, deps=[Sq])
    o = warpgroup_mma(y, ring.square.index(stage), Sq * factors.slice(BT, BT).load(ROW)[None, :], is_async=True)
    S, o = warpgroup_mma_wait(0, deps=[S, o])
    _write_output((o * gmem.scale).to(OP), gmem, ring, smem, span, part, stage, i, SIZES, FULL)
    return S


@gluon.jit
def _values(gmem, ring, i, LC: gl.constexpr):
    """Values of a stage's part, v or w v.   [BW, BT]"""
    v = ring.x.index(i).permute((1, 0)).load(LC)
    if gmem.x_w is not None:
        # Rounded before it is added, as in Triton.
        zeros = gl.zeros(v.shape, gl.float32, LC)
        v = gl.fma(v.to(gl.float32), ring.w.index(i).permute((1, 0)).load(LC).to(gl.float32), zeros)
    return v


@gluon.jit
def _residual(v, Sk, in_k, rows, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Values, minus what the state holds at their keys if the rule erases; zero past the chunk's tokens."""
    if not SIZES.ERASES:
        R = v.to(gl.float32)
    elif SIZES.ADDS:
        R = v.to(gl.float32) + Sk
    elif SIZES.CHANNEL:
        R = v.to(gl.float32) - Sk
    else:
        R = v.to(gl.float32) - Sk * in_k[None, :]
    if not FULL:
        ROW: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).row
        R = gl.where((gl.arange(0, SIZES.BT, layout=ROW) < rows)[None, :], R, 0.0)
    return R


@gluon.jit
def _write_output(o, gmem, ring, smem, span, part, stage, i, SIZES: gl.constexpr, FULL: gl.constexpr):
    """Write chunk i's output to its buffer once that is free, and the tokens of a partial chunk to global memory."""
    PENDING: gl.constexpr = SIZES.OUT - 1 if SIZES.OUT > 0 else 0
    tma.store_wait(pendings=PENDING)
    if SIZES.IN_PLACE:
        mbarrier.arrive(ring.x_free.index(stage_before(stage, SIZES.STAGES)), count=1, pred=i > 0)
    buffer = _out_buffer(smem.out, part, stage, i, SIZES)
    buffer.permute((1, 0)).store(o)
    if not FULL:
        _store_tail(gmem, span, part, i, buffer, SIZES)


@gluon.jit
def _store_tail(gmem, span, part, i, buffer, SIZES: gl.constexpr):
    """Store the tokens of a partial chunk i from its buffer [BT, BW] of shared memory, through pointers."""
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LO: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, LO))
    o_v = span.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(0, LO))
    first = span.b * gmem.tokens.s_o[0] + (span.t + i * BT) * gmem.tokens.s_o[1] + span.hv * gmem.tokens.s_o[2]
    # o has a descriptor, so its last stride is 1. Multiplying by the runtime stride would split the store into
    # single numbers.
    offsets = o_t.to(gl.int64)[:, None] * gmem.tokens.s_o[1] + o_v[None, :]
    # o_v >= 0 is always true; it gives the mask the second dimension of the pointers.
    gl.store(
        gmem.tokens.o + first + offsets, buffer.load(LO), mask=(o_t < span.tail_rows)[:, None] & (o_v >= 0)[None, :]
    )


@gluon.jit
def _out_buffer(out, part, stage, i, SIZES: gl.constexpr):
    """Shared-memory buffer of a part's output of chunk i."""
    if SIZES.IN_PLACE:
        return out.index(stage * SIZES.PARTS + part)
    else:
        return out.index((i % SIZES.OUT) * SIZES.PARTS + part)


@gluon.jit
def _release(gmem, ring, smem, span, part, stage, i, SIZES: gl.constexpr):
    """Free the stage of the chunk before chunk i, and issue the TMA store of its output; nothing for the first chunk.

    A TMA store of a block that lies entirely before the tensor is an illegal instruction (docs/facts/hopper.md, TMA-1).
    """
    release(ring, stage, i > 0, SIZES.STAGES)
    if i > 0:
        column = (span.hv * gmem.tokens.s_o[2]).to(gl.int32) + span.column + part * (SIZES.BV // SIZES.PARTS)
        buffer = _out_buffer(smem.out, part, stage_before(stage, SIZES.STAGES), i - 1, SIZES)
        tma_store(gmem.x_o, [span.token + (i - 1) * SIZES.BT, column], buffer)
