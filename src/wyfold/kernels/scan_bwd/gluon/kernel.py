"""The kernel of `scan_bwd` in Gluon: a program's coordinates, its shared memory, and its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from wyfold.kernels.scan_bwd.gluon.forward import forward_half
from wyfold.kernels.scan_bwd.gluon.producer import producer
from wyfold.kernels.scan_bwd.gluon.program import Coords, Globals, Smem, TmaInputs
from wyfold.kernels.scan_bwd.gluon.reverse import reverse_half
from wyfold.tile.index.gluon import barrier, clear_lower, quarters
from wyfold.tile.index.triton import sequence_span
from wyfold.tile.index.triton.slots import segment_coords


@gluon.jit(do_not_specialize=["N", "going_back", "T", "per_sequence", "unit", "scale"])
def wyfold_scan_bwd_gluon(
    x_q,
    x_k,
    x_v,
    x_do,
    x_rows,
    x_total,
    x_E,
    x_F,
    x_W,
    x_S,
    x_dS,
    x_e,
    x_X,
    heads,
    states,
    segments,
    packing,
    N,
    going_back,
    T,
    per_sequence,
    unit,
    scale,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of one state or of its gradient; the latter take longer and come first.

    `going_back` sequences, or segments, are run backward. With segments, states are indexed by the sequence of a
    segment.
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
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    NV: gl.constexpr = V // BV
    pid = gl.program_id(0).to(gl.int64)
    half = going_back * HV * NV
    back = (pid < half).to(gl.int32)
    pid -= gl.where(back != 0, 0, half)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, SIZES.PACKED)
    i_tile = (i_c * HV + i_hv).to(gl.int32)
    begins, ends, i_border = True, True, i_n
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)
    column = (i_v * BV).to(gl.int32)
    token = (b * T + t).to(gl.int32)
    steps = (length // BT).to(gl.int32)
    tail_rows = (length - steps.to(gl.int64) * BT).to(gl.int32)
    count = steps + (tail_rows > 0).to(gl.int32)
    ahead = back * (count - 1)  # number of the first chunk

    q = gl.allocate_shared_memory(x_q.dtype, [STAGES, BT, K], x_q.layout)
    k = q
    if x_k is not None:
        k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    x = gl.allocate_shared_memory(x_v.dtype, [STAGES * PARTS, BT, BW], x_v.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    square = gl.allocate_shared_memory(x_F.dtype, [STAGES, BT, BT], x_F.layout)
    if FOLDED:
        write = gl.allocate_shared_memory(x_E.dtype, [STAGES, BT, K], x_E.layout)
    else:
        write = gl.allocate_shared_memory(x_W.dtype, [STAGES, BT, BT], x_W.layout)
    total = rows
    if CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], x_total.layout)
    state = gl.allocate_shared_memory(x_S.dtype, [OUT * PARTS, BW, K], x_S.layout)
    tokens = gl.allocate_shared_memory(x_e.dtype, [PARTS, BT, BW], x_e.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
    clear_lower(quarters(square, x_F, STAGES), STAGES)
    if not FOLDED:
        clear_lower(quarters(write, x_W, STAGES), STAGES)
    fence_async_shared()
    barrier()

    smem = Smem(q, k, x, rows, total, square, write, state, tokens, full, free)
    gmem = Globals(x_total, x_S, x_dS, x_e, x_X, states, segments)
    inputs = TmaInputs(
        x_q,
        x_k,
        x_v,
        x_do,
        x_rows,
        x_total,
        x_E,
        x_F,
        x_W,
        i_tile + ahead * HV,
        token + ahead * BT,
        (i_h * heads.h_q).to(gl.int32),
        (i_h * heads.h_k).to(gl.int32),
        (i_hv * heads.h_v).to(gl.int32) + column,
        (i_hv * heads.h_do).to(gl.int32) + column,
    )
    coords = Coords(back, i_tile, i_n, i_border, begins, i_n < N, ends, i_hv, column, steps, tail_rows)
    if PARTS == 1:
        gl.warp_specialize(
            [(_consumer, (gmem, smem, coords, unit, scale, 0, SIZES)), (producer, (inputs, smem, back, count, SIZES))],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (gmem, smem, coords, unit, scale, 0, SIZES)),
                (_consumer, (gmem, smem, coords, unit, scale, 1, SIZES)),
                (producer, (inputs, smem, back, count, SIZES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _consumer(gmem, smem, coords, unit, scale, part, SIZES: gl.constexpr):
    """Consumer: run BW value rows through all chunks, in either direction."""
    if coords.back != 0:
        reverse_half(gmem, smem, coords, unit, scale, part, SIZES)
    else:
        forward_half(gmem, smem, coords, part, SIZES)
    tma.store_wait(pendings=0)
