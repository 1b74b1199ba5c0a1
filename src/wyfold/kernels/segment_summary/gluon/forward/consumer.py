"""Consumer of `segment_summary` in Gluon: H or M of a segment."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from wyfold.kernels.pipeline.gluon import layouts, load_state, next_stage, release, store_state
from wyfold.kernels.segment_summary.gluon.forward.zeros import all_zeros, next_check, read_flag, write_flag
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.index.gluon import barrier


class Globals(NamedTuple):
    """Global memory that the consumers access themselves.

    Attributes:
        total: Decays of a scalar gate.
        maps: Argument of the kernel.
    """

    total: Any
    maps: Any


@gluon.jit
def consumer(gmem, ring, smem, coords, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows through all chunks, from zeros or the initial state (H), or from the identity (M).

    M is checked for zeros now and then.
    """
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    LS: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps()).state
    span = coords.span
    row = span.column + part * BW
    if coords.of_H == 0:
        if coords.slot is not None:
            if coords.first:
                _copy_state(gmem.maps, coords, row, SIZES)
        # Zeros where the sequence begins, so that no map is applied to its initial state twice.
        o_v, o_k = row + gl.arange(0, BW, layout=gl.SliceLayout(1, LS)), gl.arange(0, K, layout=gl.SliceLayout(0, LS))
        S = ((o_v[:, None] == o_k[None, :]) & (o_k[None, :] >= gl.where(coords.begins, K, 0))).to(gl.float32)
    else:
        S = _initial_state(gmem.maps, coords, row, SIZES)
    opaque_zero = gl.minimum(span.steps, 0)
    total = 0.0
    next_total = 0.0
    if not CHANNEL:
        total = chunk_decay(gmem.total, span.tile, span.steps > 0, opaque_zero, BW, LS)
        next_total = chunk_decay(gmem.total, span.tile + HV, span.steps > 1, opaque_zero, BW, LS)
    stage = 0
    phase = 0
    checked = 0
    count = span.steps
    check = count
    if not CHANNEL:
        check = gl.where(coords.of_H != 0, count, gl.minimum(next_check(checked), count))
    while checked < count:
        for i in range(checked, check):
            mbarrier.wait(ring.full.index(stage), phase)
            S, later_total = _step(S, total, gmem, ring, span, part, stage, i, opaque_zero, SIZES)
            total = next_total
            next_total = later_total
            stage, phase = next_stage(stage, phase, SIZES.STAGES)
        checked = check
        if not CHANNEL:
            # `count` is written as soon as a stage is free for the chunk after a check. Stages are freed a chunk late,
            # and checks are at least 3 chunks apart: with 5 stages a warp could still read it at the previous check.
            gl.static_assert(SIZES.STAGES <= 4)
            if (coords.of_H == 0) & (checked < count):
                write_flag(smem.map_is_zero.index(part), all_zeros(S).to(gl.int32))
                # The result of earlier checks, so that all warps of all parts continue or none does.
                mbarrier.wait(ring.full.index(stage), phase)
                count = read_flag(smem.count)
                check = gl.minimum(next_check(checked), count)
                # Without it the compiler places a barrier at the beginning of every chunk.
                barrier()
    if coords.needed != 0:
        if coords.of_H != 0:
            store_state(gmem.maps.H, gmem.maps.s_H, coords.border, None, span.hv, row, S, SIZES)
        else:
            # Mark for `segment_fold`: rows of zeros get the other sign, which no other zero has.
            S = gl.where(S == 0.0, 0.0, S) * gl.where(all_zeros(S), -1.0, 1.0)
            store_state(gmem.maps.M, gmem.maps.s_M, coords.border, None, span.hv, row, S, SIZES)


@gluon.jit
def _initial_state(maps, coords, row, SIZES: gl.constexpr):
    """What H begins with: the initial state of its sequence, or zeros."""
    hv = coords.span.hv
    if coords.slot is None:
        return load_state(maps.S0, maps.s_S0, coords.n, coords.begins, None, None, None, None, hv, row, SIZES)
    else:
        there = coords.begins & coords.given
        return load_state(maps.S0, maps.s_S0, coords.slot, there, None, None, None, None, hv, row, SIZES)


@gluon.jit
def _copy_state(maps, coords, row, SIZES: gl.constexpr):
    """Copy a state out of its slot for the scan, which may write the slot before it reads it; zeros if there is none.

    The programs of M do so in segments that begin a sequence, where they have no chunk.
    """
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    hv = coords.span.hv
    for first in gl.static_range(0, V, K):
        if first + row < V:
            S = load_state(
                maps.S0, maps.s_S0, coords.slot, coords.given, None, None, None, None, hv, first + row, SIZES
            )  # fmt: skip
            store_state(maps.copy, maps.s_copy, coords.n, None, hv, first + row, S, SIZES)


@gluon.jit
def _step(S, total, gmem, ring, span, part, stage, i, opaque_zero, SIZES: gl.constexpr):
    """State leaving a chunk of tokens only; with a scalar gate also the decay of the chunk after the next one.

    The decay is loaded two chunks ahead: an iteration begins by copying the next value to its register, and waits for
    it there.
    """
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    ERASES: gl.constexpr = SIZES.ERASES
    L: gl.constexpr = layouts(SIZES.K, SIZES.BT, gl.num_warps())
    LS: gl.constexpr = L.state
    LC: gl.constexpr = L.chunk
    ROW: gl.constexpr = L.row
    OP: gl.constexpr = ring.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, factors = ring.k.index(stage), ring.rows.index(stage)

    left = gl.convert_layout(S.to(OP), L.state_left, assert_trivial=True)
    Sk = zero_acc
    if ERASES:
        Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    release(ring, stage, i > 0, SIZES.STAGES)
    v = ring.x.index(stage * SIZES.PARTS + part).permute((1, 0)).load(LC).to(gl.float32)
    beta = factors.slice(3 * BT, BT).load(ROW)  # dropped by the compiler where it is not used
    if CHANNEL:
        S = S * ring.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
        R = v
        if ERASES:
            Sk = warpgroup_mma_wait(0, deps=[Sk])
            R = v - Sk
    else:
        in_k = factors.slice(0, BT).load(ROW)
        S = S * total
        if ERASES:
            Sk = warpgroup_mma_wait(0, deps=[Sk])
        total = chunk_decay(gmem.total, span.tile + (i + 2) * SIZES.HV, i + 2 < span.steps, opaque_zero, BW, LS)
        R = v
        if ERASES:
            R = v - Sk * in_k[None, :]
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        S = warpgroup_mma(y, ring.write.index(stage), S, is_async=True)
    else:
        r = gl.convert_layout(R.to(OP), L.chunk_left, assert_trivial=True)
        e = warpgroup_mma(r, ring.write.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = factors.slice(2 * BT, BT).load(ROW)
        e = warpgroup_mma_wait(0, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), L.chunk_left, assert_trivial=True)
        S = warpgroup_mma(u, key, S, is_async=True)
    return warpgroup_mma_wait(0, deps=[S]), total
