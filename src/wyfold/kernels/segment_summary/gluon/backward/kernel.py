"""The kernel of `segment_summary_bwd` in Gluon: a program's coordinates, its shared memory, and its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.segment_summary.gluon.backward.consumer import consumer
from wyfold.kernels.segment_summary.gluon.backward.program import Coords, Globals, Smem, TmaInputs
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
from wyfold.tile.index.gluon import barrier, clear_lower, quarters, tma_load, tma_load_upper
from wyfold.tile.index.triton import sequence_span
from wyfold.tile.index.triton.slots import segment_coords


@gluon.jit(do_not_specialize=["N", "T", "scale"])
def wyfold_segment_summary_bwd_gluon(
    x_q,
    x_k,
    x_do,
    x_rows,
    x_total,
    x_F,
    x_write,
    p_rows,
    heads,
    gradients,
    segments,
    packing,
    N,
    T,
    scale,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of c."""
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
    BW: gl.constexpr = BV // PARTS
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, gl.load(segments.leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    needed = ((i_n < N) & (begins == 0)).to(gl.int32)
    column = (i_v * BV).to(gl.int32)
    count = ((length + (BT - 1)) // BT).to(gl.int32) * needed
    tail_rows = (length % BT).to(gl.int32) * needed
    if p_rows is not None:
        reach = chunks_in_reach(x_total, p_rows, i_tile, HV, count, BT)
        # Nothing of the final state's gradient or of the chunks behind the reach is left at the border.
        ends = ends & (reach == count)
        tail_rows = gl.where(reach < count, 0, tail_rows)
        count = reach

    q = gl.allocate_shared_memory(x_q.dtype, [STAGES, BT, K], x_q.layout)
    k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    do = gl.allocate_shared_memory(x_do.dtype, [STAGES * PARTS, BT, BW], x_do.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    F = gl.allocate_shared_memory(x_F.dtype, [STAGES, BT, BT], x_F.layout)
    write = gl.allocate_shared_memory(x_write.dtype, [STAGES, BT, K if FOLDED else BT], x_write.layout)
    total = rows
    if CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], x_total.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
    clear_lower(quarters(F, x_F, STAGES), STAGES)
    if not FOLDED:
        clear_lower(quarters(write, x_write, STAGES), STAGES)
    fence_async_shared()
    barrier()

    smem = Smem(q, k, do, rows, total, F, write, full, free)
    gmem = Globals(x_total, gradients.dST, gradients.s_dST, gradients.c, gradients.s_c)
    inputs = TmaInputs(
        x_q,
        x_k,
        x_do,
        x_rows,
        x_total,
        x_F,
        x_write,
        (i_tile + (count - 1) * HV).to(gl.int32),
        (b * T + t + (count - 1) * BT).to(gl.int32),
        (i_h * heads.h_q).to(gl.int32),
        (i_h * heads.h_k).to(gl.int32),
        (i_hv * heads.h_do).to(gl.int32) + column,
    )
    coords = Coords(needed, i_tile, i_n, i_border - 1, ends, i_hv, column, count, tail_rows)
    if PARTS == 1:
        gl.warp_specialize(
            [(consumer, (gmem, smem, coords, scale, 0, SIZES)), (_producer, (inputs, smem, count, SIZES))], [1], [24]
        )
    else:
        gl.warp_specialize(
            [
                (consumer, (gmem, smem, coords, scale, 0, SIZES)),
                (consumer, (gmem, smem, coords, scale, 1, SIZES)),
                (_producer, (inputs, smem, count, SIZES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _producer(inputs, smem, count, SIZES: gl.constexpr):
    """Producer: load the tiles of every chunk, including a partial one, as soon as a stage is free."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    PARTS: gl.constexpr = SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    STAGES: gl.constexpr = SIZES.STAGES
    SCALAR: gl.constexpr = (
        inputs.q.block_type.nbytes
        + inputs.k.block_type.nbytes
        + inputs.do.block_type.nbytes * PARTS
        + inputs.rows.block_type.nbytes
        + inputs.F.block_type.nbytes * 3
        + inputs.write.block_type.nbytes * (1 if FOLDED else 3)
    )
    BYTES: gl.constexpr = SCALAR + inputs.total.block_type.nbytes if CHANNEL else SCALAR
    tile, token = inputs.tile, inputs.token
    stage = 0
    phase = 1
    for _ in range(count):
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        mbarrier.expect(full, BYTES)
        # In the order of use.
        if CHANNEL:
            tma_load(inputs.k, [tile * BT, 0], full, smem.k.index(stage))
        else:
            tma_load(inputs.k, [token, inputs.column_k], full, smem.k.index(stage))
        if FOLDED:
            tma_load(inputs.write, [tile * BT, 0], full, smem.write.index(stage))
        else:
            tma_load_upper(inputs.write, tile, full, quarters(smem.write, inputs.write, STAGES), stage)
        for part in gl.static_range(PARTS):
            tma_load(inputs.do, [token, inputs.column_do + part * BW], full, smem.do.index(stage * PARTS + part))
        tma_load_upper(inputs.F, tile, full, quarters(smem.F, inputs.F, STAGES), stage)
        tma_load(inputs.rows, [tile * (4 * BT)], full, smem.rows.index(stage))
        if CHANNEL:
            tma_load(inputs.total, [tile * K], full, smem.total.index(stage))
            tma_load(inputs.q, [tile * BT, 0], full, smem.q.index(stage))
        else:
            tma_load(inputs.q, [token, inputs.column_q], full, smem.q.index(stage))
        tile -= HV
        token -= BT
        stage, phase = next_stage(stage, phase, STAGES)
