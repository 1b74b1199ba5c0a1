"""The kernel of `ttt` in Gluon: a program's coordinates, its shared memory, and its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.ttt.gluon.prepare import prepare_segments
from wyfold.kernels.ttt.gluon.program import Coords, Globals, Smem, TmaInputs
from wyfold.kernels.ttt.gluon.read import read_segments
from wyfold.kernels.ttt.gluon.scan import scan_segments
from wyfold.tile.index.gluon import barrier, tma_load
from wyfold.tile.index.triton import sequence_span


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "eps"])
def wyfold_ttt_gluon(
    x_q,
    x_k,
    x_v,
    tokens,
    heads,
    states,
    results,
    packing,
    N,
    T,
    per_sequence,
    scale,
    eps,
    H: gl.constexpr,
    HV: gl.constexpr,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    PACKED: gl.constexpr,
    ON_Q: gl.constexpr,
    STAGES: gl.constexpr,
    READ: gl.constexpr,
    PREPARE: gl.constexpr,
):
    """One program runs a sequence of one value head. READ and PREPARE are registers per thread of these groups."""
    FOR_BACKWARD: gl.constexpr = results.N is not None
    pid = gl.program_id(0).to(gl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    segments = ((length + SEGMENT - 1) // SEGMENT).to(gl.int32)
    padding = i_n * 0
    if PACKED:
        if i_n == N - 1:
            padding = T - t - length

    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TRANSPOSED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_q.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_v.layout)
    wt = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT, D], FLAT)
    row_numbers = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * SEGMENT], LINE)
    stage_N = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
    stage_X = stage_N
    row_stats = row_numbers, row_numbers, row_numbers
    if FOR_BACKWARD:
        stage_X = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
        # Separate allocations: a store to memory that was stored to before would wait at a barrier.
        stage_r = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        stage_xy = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        stage_y = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        row_stats = stage_r, stage_xy, stage_y
    stage_S = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, D], x_k.layout)
    stage_c = gl.allocate_shared_memory(gl.float32, [STAGES, D], LINE)
    z = gl.allocate_shared_memory(gl.float32, [BT, D], TRANSPOSED)
    high = gl.allocate_shared_memory(gl.bfloat16, [BT, D], x_k.layout)
    low = gl.allocate_shared_memory(gl.bfloat16, [BT, D], x_k.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [SEGMENT, D], x_k.layout)
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    prepared = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scanned = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(loaded.index(s), count=1)
        mbarrier.init(prepared.index(s), count=1)
        mbarrier.init(scanned.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    barrier()

    smem = Smem(
        q, k, v, wt, row_numbers, stage_N, stage_X, row_stats, stage_S, stage_c, z, high, low, out,
        loaded, prepared, scanned, free,
    )  # fmt: skip
    inputs = TmaInputs(
        x_q, x_k, x_v, (i_h * heads.h_q).to(gl.int32), (i_h * heads.h_k).to(gl.int32), (i_hv * heads.h_v).to(gl.int32)
    )
    gmem = Globals(tokens, states, results)
    coords = Coords(i_n, i_hv, i_c * HV + i_hv, b, t, (b * T + t).to(gl.int32), length, segments, padding)
    gl.warp_specialize(
        [
            (scan_segments, (gmem, smem, coords, eps, D, BT, SEGMENT, STAGES, FOR_BACKWARD)),
            (read_segments, (gmem, smem, coords, scale, eps, HV, D, BT, SEGMENT, STAGES, FOR_BACKWARD, ON_Q)),
            (prepare_segments, (gmem, smem, coords, D, BT, SEGMENT, STAGES)),
            (_producer, (inputs, smem, coords, SEGMENT, STAGES)),
        ],
        [4, 4, 1],
        [READ, PREPARE, 24],
    )


@gluon.jit
def _producer(inputs, smem, coords, SEGMENT: gl.constexpr, STAGES: gl.constexpr):
    """Load every segment's tokens. The last load may pass the sequence's end; `prepare_segments` zeroes those rows."""
    BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    token = coords.token
    stage = 0
    phase = 1
    for _ in range(coords.segments):
        loaded = smem.loaded.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        mbarrier.expect(loaded, BYTES)
        tma_load(inputs.k, [token, inputs.column_k], loaded, smem.k.index(stage))
        tma_load(inputs.v, [token, inputs.column_v], loaded, smem.v.index(stage))
        tma_load(inputs.q, [token, inputs.column_q], loaded, smem.q.index(stage))
        token += SEGMENT
        stage, phase = next_stage(stage, phase, STAGES)
