"""The kernel of `segment_summary` in Gluon: a program's coordinates, its shared memory, and its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.segment_summary.gluon.forward.consumer import consumer
from wyfold.kernels.segment_summary.gluon.forward.producer import producer
from wyfold.kernels.segment_summary.gluon.forward.program import Coords, Globals, Smem, TmaInputs
from wyfold.kernels.segment_summary.gluon.forward.zeros import write_flag
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
from wyfold.tile.index.gluon import barrier, clear_lower, quarters
from wyfold.tile.index.triton import sequence_span
from wyfold.tile.index.triton.slots import segment_coords


@gluon.jit(do_not_specialize=["N", "T"])
def wyfold_segment_summary_gluon(
    x_k, x_v, x_rows, x_total, x_write, p_rows, heads, maps, segments, packing, N, T, SIZES: gl.constexpr
):
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2.

    Programs of H come first. If there are at most as many as multiprocessors, each gets one, which it has to itself
    once the programs of M have stopped.
    """
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BV: gl.constexpr = SIZES.BV
    PARTS: gl.constexpr = SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    STAGES: gl.constexpr = SIZES.STAGES
    NV: gl.constexpr = V // BV
    NK: gl.constexpr = K // BV
    BW: gl.constexpr = BV // PARTS
    pid = gl.program_id(0).to(gl.int64)
    of_M = gl.num_programs(0) // (NV + NK) * NV
    of_H = (pid < of_M).to(gl.int32)
    pid = gl.where(of_H != 0, pid, pid - of_M)
    width = gl.where(of_H != 0, NV, NK)
    i_v, i_hv, i_s = pid % width, (pid // width) % HV, gl.load(segments.leading + pid // (width * HV))
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    needed = ((i_n < N) & (ends == 0)).to(gl.int32)
    column = (i_v * BV).to(gl.int32)
    # The first segment needs no M: its entering state is known.
    steps = (length // BT).to(gl.int32) * needed * gl.where(begins, of_H, 1)
    if p_rows is not None:
        reach = chunks_in_reach(x_total, p_rows, i_tile + (steps - 1) * HV, -HV, steps, BT)
        # What enters the segment is lost: H begins as if its sequence did not begin here, and M is zeros.
        skipped = steps - reach
        begins = gl.where(skipped > 0, of_H == 0, begins)
        i_tile += skipped * HV
        t += skipped * BT
        steps = gl.where((skipped > 0) & (of_H == 0), 0, reach)

    k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    v = gl.allocate_shared_memory(x_v.dtype, [STAGES * PARTS, BT, BW], x_v.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    write = gl.allocate_shared_memory(x_write.dtype, [STAGES, BT, K if FOLDED else BT], x_write.layout)
    total = rows
    if CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], x_total.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
    if not FOLDED:
        clear_lower(quarters(write, x_write, STAGES), STAGES)
    FLAG: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    map_is_zero = gl.allocate_shared_memory(gl.int32, [PARTS, 1], FLAG)
    count = gl.allocate_shared_memory(gl.int32, [1], FLAG)
    for part in gl.static_range(PARTS):
        write_flag(map_is_zero.index(part), 0)
    write_flag(count, steps)
    if of_H == 0:
        # The producer loads no values for M.
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
        for s in gl.static_range(STAGES * PARTS):
            v.index(s).store(gl.zeros([BT, BW], x_v.dtype, L))
    fence_async_shared()
    barrier()

    smem = Smem(k, v, rows, total, write, full, free, map_is_zero, count)
    gmem = Globals(x_total, maps.S0, maps.s_S0, maps.H, maps.s_H, maps.M, maps.s_M)
    inputs = TmaInputs(
        x_k,
        x_v,
        x_rows,
        x_total,
        x_write,
        i_tile.to(gl.int32),
        (b * T + t).to(gl.int32),
        (i_h * heads.h_k).to(gl.int32),
        (i_hv * heads.h_v).to(gl.int32) + column,
    )
    coords = Coords(of_H, needed, i_tile, i_n, i_border, begins, i_hv, column, steps)
    if PARTS == 1:
        gl.warp_specialize(
            [(consumer, (gmem, smem, coords, 0, SIZES)), (producer, (inputs, smem, of_H, steps, SIZES))], [1], [24]
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (gmem, smem, coords, 0, SIZES)),
                (consumer, (gmem, smem, coords, 1, SIZES)),
                (producer, (inputs, smem, of_H, steps, SIZES)),
            ],
            [4, 1],
            [240, 24],
        )
    # Keep the barriers' memory allocated: no other buffer may reuse it (docs/facts/hopper.md, KDA-NAN-1).
    full._keep_alive()
    free._keep_alive()
