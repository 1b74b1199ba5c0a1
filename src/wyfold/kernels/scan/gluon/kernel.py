"""The kernel of `scan` in Gluon: a program's coordinates, its shared memory, and its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.scan.gluon.consumer import consumer
from wyfold.kernels.scan.gluon.program import Coords, Globals, Smem, TmaInputs
from wyfold.tile.index.gluon import barrier, clear_lower, clear_tokens, quarters, tma_load, tma_load_upper
from wyfold.tile.index.triton import TokenRows, sequence_span
from wyfold.tile.index.triton.slots import segment_coords, slot_coords


@gluon.jit(do_not_specialize=["N", "shift", "s_source", "s_target", "slots", "pad", "T", "per_sequence", "scale"])
def wyfold_scan_gluon(
    x_q,
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    x_F,
    x_o,
    tokens,
    states,
    segments,
    pool,
    packing,
    N,
    shift,
    s_source,
    s_target,
    slots,
    pad,
    T,
    per_sequence,
    scale,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of one state; the tiles of a head are neighbours, so that they share k and q in
    L2.

    i_n is the program's sequence of the chunk grid: its number n, or selected[n] + shift. With segments, the grid's
    sequences are segments, and segments.sequence[i_n] is the sequence that segment i_n belongs to. States are indexed
    by sequence, or with slots by the sequence's slots. With both, only the leaving states are in slots.
    """
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BV: gl.constexpr = SIZES.BV
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    STAGES: gl.constexpr = SIZES.STAGES
    PACKED: gl.constexpr = SIZES.PACKED
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    NV: gl.constexpr = V // BV
    BW: gl.constexpr = BV // PARTS
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    if segments.selected is not None:
        i_n = gl.load(segments.selected + i_n) + shift
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    begins, ends, i_border, i_to = True, True, i_n, None
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)
    if slots is not None:
        if segments.sequence is None:
            i_n, begins, i_to, ends, live = slot_coords(
                i_n, pool.source, s_source, pool.target, s_target, pool.given, slots, pad
            )  # fmt: skip
        else:
            # States enter from S0 by sequence: a slot may be written before the first segment has read it.
            _, _, i_to, stored, live = slot_coords(
                gl.minimum(i_n, N - 1), pool.source, s_source, pool.target, s_target, None, slots, pad
            )  # fmt: skip
            ends = ends & stored
        if not live:
            # The program of the first tile zeroes the output; the code below then sees no token.
            if i_v == 0:
                for row in range(0, length, BT):
                    clear_tokens(tokens.o, tokens.s_o, TokenRows(b, t + row, length - row), i_hv, V, BT, V)
            length = length * 0
    column = (i_v * BV).to(gl.int32)
    token = (b * T + t).to(gl.int32)
    steps = (length // BT).to(gl.int32)
    tail_rows = (length - steps.to(gl.int64) * BT).to(gl.int32)

    q = gl.allocate_shared_memory(x_q.dtype, [STAGES, BT, K], x_q.layout)
    k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    v = gl.allocate_shared_memory(x_v.dtype, [STAGES * PARTS, BT, BW], x_v.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    write = gl.allocate_shared_memory(x_write.dtype, [STAGES, BT, K if FOLDED else BT], x_write.layout)
    F = gl.allocate_shared_memory(x_F.dtype, [STAGES, BT, BT], x_F.layout)
    total = rows
    if CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], x_total.layout)
    out = v
    if OUT > 0:
        out = gl.allocate_shared_memory(x_o.dtype, [OUT * PARTS, BT, BW], x_o.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    out_free = free
    if OUT == 0:
        out_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
        if OUT == 0:
            mbarrier.init(out_free.index(s), count=PARTS)
    clear_lower(quarters(F, x_F, STAGES), STAGES)
    if not FOLDED:
        clear_lower(quarters(write, x_write, STAGES), STAGES)
    fence_async_shared()
    barrier()

    smem = Smem(q, k, v, rows, total, write, F, out, full, free, out_free)
    gmem = Globals(
        x_total,
        x_o,
        states.S0,
        states.s_S0,
        segments.borders,
        segments.s_borders,
        tokens.o,
        tokens.s_o,
        states.ST,
        states.s_ST,
    )
    inputs = TmaInputs(
        x_q,
        x_k,
        x_v,
        x_rows,
        x_total,
        x_write,
        x_F,
        i_tile.to(gl.int32),
        token,
        (i_h * tokens.h_q).to(gl.int32),
        (i_h * tokens.h_k).to(gl.int32),
        (i_hv * tokens.h_v).to(gl.int32) + column,
    )
    count = steps + (tail_rows > 0).to(gl.int32)
    # i_border is the border at the segment's end; the state enters at the border before it.
    coords = Coords(i_tile, i_n, i_to, i_border - 1, begins, i_n < N, ends, i_hv, b, t, token, column, steps, tail_rows)
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
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    BYTES: gl.constexpr = (
        inputs.q.block_type.nbytes
        + inputs.k.block_type.nbytes
        + inputs.v.block_type.nbytes * PARTS
        + inputs.rows.block_type.nbytes
        + inputs.write.block_type.nbytes * (1 if FOLDED else 3)
        + inputs.F.block_type.nbytes * 3
    )
    tile, token = inputs.tile, inputs.token
    stage = 0
    phase = 1
    for _ in range(count):
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        if CHANNEL:
            mbarrier.expect(full, BYTES + inputs.total.block_type.nbytes)
            tma_load(inputs.k, [tile * BT, 0], full, smem.k.index(stage))
            tma_load(inputs.q, [tile * BT, 0], full, smem.q.index(stage))
            tma_load(inputs.total, [tile * K], full, smem.total.index(stage))
        else:
            mbarrier.expect(full, BYTES)
            tma_load(inputs.k, [token, inputs.column_k], full, smem.k.index(stage))
            tma_load(inputs.q, [token, inputs.column_q], full, smem.q.index(stage))
        tma_load(inputs.rows, [tile * (4 * BT)], full, smem.rows.index(stage))
        if OUT == 0:
            mbarrier.wait(smem.out_free.index(stage), phase)
        for part in gl.static_range(PARTS):
            tma_load(inputs.v, [token, inputs.column_v + part * BW], full, smem.v.index(stage * PARTS + part))
        if FOLDED:
            tma_load(inputs.write, [tile * BT, 0], full, smem.write.index(stage))
        else:
            tma_load_upper(inputs.write, tile, full, quarters(smem.write, inputs.write, STAGES), stage)
        tma_load_upper(inputs.F, tile, full, quarters(smem.F, inputs.F, STAGES), stage)
        tile += HV
        token += BT
        stage, phase = next_stage(stage, phase, STAGES)
