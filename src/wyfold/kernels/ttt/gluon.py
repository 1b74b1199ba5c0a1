"""`ttt` forward in Gluon for Hopper: one launch, a pipeline of four warp groups over segments of 64 tokens.

    producer   one warp: loads k, v and q of a segment by TMA as soon as a stage is free
    prepare    computes the scan's inputs that do not depend on the state: w (u - v + k) and its sums, steps, factors
    scan       runs the mini-batches in order, its state transposed, [V, K], in registers; writes N and segment states
    read       computes the outputs of a segment, and stores the results that a backward needs

A stage of shared memory holds all data of one segment. It passes from group to group through mbarriers: `loaded`,
`prepared`, `scanned` and `free`. The scan always finds its stage prepared, and the outputs are computed behind it, so
the scan alone determines the time.

A mini-batch of the scan has two exchanges. The product k S + c leaves a slab of 16 value rows in each warp. Through
shared memory it is converted to rows, with a token's values in eight lanes, where all row sums are reduced together. N
is converted back the same way. No mean is subtracted beforehand: values are taken relative to the first value of their
token, which costs one shuffle, and the sums are corrected. That value is as far from the mean as values differ from
each other, so no square cancels.

All products are synchronous single-warp instructions (`mma_v2`): operands in shared memory need no fence before they
are read, and no product still reads an operand while the next one is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.ttt import triton
from wyfold.kernels.ttt.triton import (
    SEGMENT,
    empty,
    forward_scan_key,
    ttt_bwd,
    wyfold_ttt_bwd_triton,
    wyfold_ttt_gradients_triton,
    wyfold_ttt_parameters_triton,
    wyfold_ttt_replay_triton,
)
from wyfold.kernels.ttt.triton.arguments import Inputs, States
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import bf16_parts
from wyfold.tile.index.gluon import barrier, clear_rows, gluon_descriptors, tma_load
from wyfold.tile.index.triton import Packing, sequence_span, strides
from wyfold.tile.index.triton.descriptors import TmaDescriptor, token_descriptor
from wyfold.tile.inner.triton import add_five
from wyfold.tile.state.gluon import state_offsets

# The backward is that of the Triton module. Its kernels are exported because `kernel_configs.compiled` looks them up
# here.
__all__ = [
    "SEGMENT",
    "empty",
    "ttt",
    "ttt_bwd",
    "wyfold_ttt_bwd_triton",
    "wyfold_ttt_gluon",
    "wyfold_ttt_gradients_triton",
    "wyfold_ttt_parameters_triton",
    "wyfold_ttt_replay_triton",
]


def ttt(
    x: TTTInputs,
    entering: StateViews,
    leaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    o: Tensor,
    borders: SegmentBorders | None,
) -> None:
    """Run every sequence from its entering state; takes the arguments of the Triton launch.

    Calls without a sequence, or with more tokens than TMA can address, go to the Triton launch. q, k and v are copied
    where TMA cannot read them, so results do not depend on strides.

    Args:
        x: bfloat16 tokens of 64 channels, in mini-batches of 16.
        o: Contiguous, as are the borders.
        borders: Written for `ttt_bwd`; None where no backward follows, and then the scan's results are not stored.
    """
    descriptors = [_descriptors(y) for y in (x.q, x.k, x.v)]
    if grid.sequences == 0 or None in descriptors:
        triton.ttt(x, entering, leaving, grid, chunk_size, scale, eps, o, borders)
        return
    HV, D = x.v.shape[2:]
    config = tuned("ttt.gluon", forward_scan_key(x.q.dtype, D, chunk_size), x.q.device)
    N, S, c, X, rows = borders or (None,) * 5
    x_q, x_k, x_v = gluon_descriptors(descriptors)
    launch_kernel(
        wyfold_ttt_gluon,
        grid.sequences * HV,
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        tokens=Inputs(
            w=x.w,
            s_w=x.w.stride(),
            u=x.u,
            s_u=x.u.stride(),
            eta=x.eta,
            s_eta=x.eta.stride(),
            col=x.col,
            s_col=strides(x.col),
        ),
        heads=Heads(h_q=x_q.base.stride(2), h_k=x_k.base.stride(2), h_v=x_v.base.stride(2)),
        states=States(
            S0=entering.S,
            s_S0=strides(entering.S),
            c0=entering.c,
            s_c0=strides(entering.c),
            ST=leaving.S,
            s_ST=strides(leaving.S),
            cT=leaving.c,
            s_cT=strides(leaving.c),
        ),
        results=Results(o=o, N=N, X=X, S=S, c=c, rows=rows),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=scale,
        eps=eps,
        H=x.q.shape[2],
        HV=HV,
        D=D,
        BT=chunk_size,
        SEGMENT=SEGMENT,
        PACKED=grid.cu is not None,
        ON_Q=x.residual == "q",
        STAGES=config.stages,
        READ=config.blocks["READ"],
        PREPARE=config.blocks["PREPARE"],
        **config.options(),
    )


def _descriptors(x: Tensor) -> TmaDescriptor | None:
    """TMA descriptor of a segment's tokens of one head; of a copy where x's strides do not allow one."""
    D = x.shape[3]
    return token_descriptor(x, SEGMENT, D) or token_descriptor(
        x.clone(memory_format=torch.contiguous_format), SEGMENT, D
    )


class Smem(NamedTuple):
    """Shared memory, by stage, and the scan's exchange buffers.

    Attributes:
        q, k, v: [STAGES, SEGMENT, D] tokens.
        wt: [STAGES, SEGMENT, D] w (u - v + k).
        row_numbers: [STAGES, 4 * SEGMENT] factor, negative closing step, negative own step, and sum of wt, per token.
        N, X: [STAGES, SEGMENT, D] results of the scan.
        row_stats: Three tiles [STAGES, SEGMENT] from the scan: r, mean X Y and mean Y.
        S: [STAGES, D, D] state entering the segment, V-first.
        c: [STAGES, D] its bias.
        z: [BT, D] exchange buffer of predictions.
        high, low: [BT, D] exchange buffers of N times its step, as a bfloat16 pair.
        o: [SEGMENT, D] outputs.
        loaded, prepared, scanned, free: [STAGES, 1] mbarriers.
    """

    q: Any
    k: Any
    v: Any
    wt: Any
    row_numbers: Any
    N: Any
    X: Any
    row_stats: Any
    S: Any
    c: Any
    z: Any
    high: Any
    low: Any
    o: Any
    loaded: Any
    prepared: Any
    scanned: Any
    free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors, and the program's first column in each.

    Attributes:
        q, k, v: Descriptors.
        column_q, column_k, column_v: First column of the head.
    """

    q: Any
    k: Any
    v: Any
    column_q: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Pointers and strides that the groups of warps use without TMA; o and all fields after it are contiguous.

    Attributes:
        w, u, eta, col, S0, c0, ST, cT: Parameters, steps, factors, initial and final states, each followed by strides.
        o: Output.
        N, X, S, c, rows: `SegmentBorders`; None where no backward follows.
    """

    w: Any
    s_w: Any
    u: Any
    s_u: Any
    eta: Any
    s_eta: Any
    col: Any
    s_col: Any
    S0: Any
    s_S0: Any
    c0: Any
    s_c0: Any
    ST: Any
    s_ST: Any
    cT: Any
    s_cT: Any
    o: Any
    N: Any
    X: Any
    S: Any
    c: Any
    rows: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        n: Sequence.
        hv: Value head.
        tile: Number of its first segment's tile.
        b: Row of the batch.
        t: First token in that row.
        token: First token over all rows.
        length: Number of tokens.
        segments: Number of segments.
        padding: Tokens after the last sequence's end that belong to no sequence; 0 in other programs.
    """

    n: Any
    hv: Any
    tile: Any
    b: Any
    t: Any
    token: Any
    length: Any
    segments: Any
    padding: Any


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and v."""

    h_q: Any
    h_k: Any
    h_v: Any


class Results(NamedTuple):
    """Kernel argument: output and `SegmentBorders`, contiguous, written; the latter None where no backward follows."""

    o: Any
    N: Any
    X: Any
    S: Any
    c: Any
    rows: Any


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
    gmem = Globals(
        tokens.w, tokens.s_w, tokens.u, tokens.s_u, tokens.eta, tokens.s_eta, tokens.col, tokens.s_col, states.S0,
        states.s_S0, states.c0, states.s_c0, states.ST, states.s_ST, states.cT, states.s_cT, results.o, results.N,
        results.X, results.S, results.c, results.rows,
    )  # fmt: skip
    coords = Coords(i_n, i_hv, i_c * HV + i_hv, b, t, (b * T + t).to(gl.int32), length, segments, padding)
    gl.warp_specialize(
        [
            (_scan, (gmem, smem, coords, eps, D, BT, SEGMENT, STAGES, FOR_BACKWARD)),
            (_read, (gmem, smem, coords, scale, eps, HV, D, BT, SEGMENT, STAGES, FOR_BACKWARD, ON_Q)),
            (_prepare, (gmem, smem, coords, D, BT, SEGMENT, STAGES)),
            (_producer, (inputs, smem, coords, SEGMENT, STAGES)),
        ],
        [4, 4, 1],
        [READ, PREPARE, 24],
    )


@gluon.jit
def _producer(inputs, smem, coords, SEGMENT: gl.constexpr, STAGES: gl.constexpr):
    """Load every segment's tokens. The last load may pass the sequence's end; `_prepare` zeroes those rows."""
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
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _prepare(gmem, smem, coords, D: gl.constexpr, BT: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr):
    """Compute `wt` and `row_numbers` of every token, and zero k past the sequence's end.

    All results are zero in rows without a token.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_v = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    w = _parameter(gmem.w, gmem.s_w, coords.hv, o_v)[None, :]
    u = _parameter(gmem.u, gmem.s_u, coords.hv, o_v)[None, :]
    o_t = gl.arange(0, SEGMENT, layout=LT)
    p_eta = gmem.eta + coords.b * gmem.s_eta[0] + coords.t * gmem.s_eta[1] + coords.hv * gmem.s_eta[2]
    stage = 0
    phase = 0
    for j in range(coords.segments):
        first = j * SEGMENT
        rows = gl.minimum(coords.length - first, SEGMENT).to(gl.int32)
        last = first + gl.minimum((o_t // BT + 1) * BT, rows) - 1
        own = gl.load(p_eta + (first + o_t).to(gl.int64) * gmem.s_eta[1], mask=o_t < rows, other=0.0)
        close = gl.load(p_eta + last.to(gl.int64) * gmem.s_eta[1], mask=o_t < rows, other=0.0)
        factor = gl.where(o_t < rows, 1.0, 0.0)
        if gmem.col is not None:
            p_col = gmem.col + coords.b * gmem.s_col[0] + coords.t * gmem.s_col[1] + coords.hv * gmem.s_col[2]
            offsets = (first + o_t).to(gl.int64) * gmem.s_col[1]
            factor = gl.load(p_col + offsets, mask=o_t < rows, other=0.0).to(gl.float32)
        row_number = smem.row_numbers.index(stage)
        mbarrier.wait(smem.loaded.index(stage), phase)
        row_number.slice(0, SEGMENT).store(factor)
        row_number.slice(SEGMENT, SEGMENT).store(-close.to(gl.float32))
        row_number.slice(2 * SEGMENT, SEGMENT).store(-own.to(gl.float32))
        for i in gl.static_range(SEGMENT // BT):
            k = smem.k.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            v = smem.v.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            is_token = i * BT + gl.arange(0, BT, layout=ROW) < rows
            wt = gl.where(is_token[:, None], w * (u - v + k), 0.0)
            smem.wt.index(stage).slice(i * BT, BT).store(wt)
            row_number.slice(3 * SEGMENT + i * BT, BT).store(gl.sum(wt, 1))
        if rows < SEGMENT:
            clear_rows(smem.k.index(stage), rows, SEGMENT, D)
        mbarrier.arrive(smem.prepared.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _scan(
    gmem,
    smem,
    coords,
    eps,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    FOR_BACKWARD: gl.constexpr,
):
    """Scan the mini-batches in order.

        Z = k S + c    N = gradient of the inner loss    S <- S - e_n k^T N    c <- c - e_n sum(N)

    N is computed as in `tile/inner`, except that d is relative to the first value of its token. With m the mean of d:

        sum (d - m)^2 = sum d^2 - m sum d        sum a (d - m) = sum a d - m sum a
        sum w^2 (d - m)^2 = sum w^2 d^2 - m (sum w^2 d + sum w^2 (d - m))
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LS, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    INVERSE: gl.constexpr = 1.0 / D
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([D, D], gl.float32, LS)
    c = gl.zeros([D, BT], gl.float32, LS)
    if gmem.S0 is not None:
        S = gl.load(gmem.S0 + state_offsets(gmem.s_S0, coords.n, coords.hv, o_v, o_k)).to(gl.float32)
    if gmem.c0 is not None:
        p_c0 = gmem.c0 + coords.n * gmem.s_c0[0] + coords.hv * gmem.s_c0[1]
        c += gl.load(p_c0 + o_v.to(gl.int64) * gmem.s_c0[3]).to(gl.float32)[:, None]
    w = _parameter(gmem.w, gmem.s_w, coords.hv, gl.arange(0, D, layout=gl.SliceLayout(0, L)))
    ww = (w * w)[None, :]
    sum_ww = gl.sum(w * w, 0)
    ones = gl.full([BT, BT], 1.0, gl.bfloat16, RIGHT)
    S_operand = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    stage = 0
    phase = 0
    for _ in range(coords.segments):
        row_number = smem.row_numbers.index(stage)
        mbarrier.wait(smem.prepared.index(stage), phase)
        smem.S.index(stage).store(S.to(gl.bfloat16))
        smem.c.index(stage).store(gl.reduce(c, 1, _first))
        for i in gl.static_range(SEGMENT // BT):
            key = smem.k.index(stage).slice(i * BT, BT)
            Z = mma_v2(S_operand, key.permute((1, 0)).load(RIGHT), c)
            # Operands for Z and N are loaded during the product.
            keys = key.load(RIGHT)
            wt = smem.wt.index(stage).slice(i * BT, BT).load(L)
            factor = row_number.slice(i * BT, BT).load(ROW)
            step = row_number.slice(SEGMENT + i * BT, BT).load(ROW)
            sum_t = row_number.slice(3 * SEGMENT + i * BT, BT).load(ROW)
            smem.z.permute((1, 0)).store(Z)

            d = _from_first(smem.z.load(L))
            wwd = ww * d
            m, dd, y, yy, xy = gl.reduce((d, d * d, wwd, wwd * d, wt * d), 1, add_five)
            mean = m * INVERSE
            r = gl.rsqrt((dd - mean * m) * INVERSE + eps)
            yy = yy - mean * y
            y = y - mean * sum_ww
            yy = yy - mean * y
            xy = xy - mean * sum_t
            y = (r * y + sum_t) * INVERSE
            xy = (r * r * yy + r * xy) * INVERSE
            factor = factor * r
            rr = r * factor
            d = d - mean[:, None]
            N = d * (rr[:, None] * ww - (rr * xy)[:, None]) + (factor[:, None] * wt - (factor * y)[:, None])
            written = N * step[:, None]
            high, low = bf16_parts(written)
            smem.high.store(high)
            smem.low.store(low)
            smem.N.index(stage).slice(i * BT, BT).store(N.to(gl.bfloat16))
            if FOR_BACKWARD:
                smem.X.index(stage).slice(i * BT, BT).store((d * r[:, None]).to(gl.bfloat16))
                smem.row_stats[0].index(stage).slice(i * BT, BT).store(r)
                smem.row_stats[1].index(stage).slice(i * BT, BT).store(xy)
                smem.row_stats[2].index(stage).slice(i * BT, BT).store(y)
            high_operand = smem.high.permute((1, 0)).load(LEFT)
            low_operand = smem.low.permute((1, 0)).load(LEFT)
            S = mma_v2(high_operand, keys, S)
            c = mma_v2(low_operand, ones, mma_v2(high_operand, ones, c))
            S_operand = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        mbarrier.arrive(smem.scanned.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if gmem.ST is not None:
        offsets = state_offsets(gmem.s_ST, coords.n, coords.hv, o_v, o_k)
        gl.store(gmem.ST + offsets, S.to(gmem.ST.dtype.element_ty))
    if gmem.cT is not None:
        p_cT = gmem.cT + coords.n * gmem.s_cT[0] + coords.hv * gmem.s_cT[1]
        gl.store(p_cT + o_v.to(gl.int64) * gmem.s_cT[3], gl.reduce(c, 1, _first).to(gmem.cT.dtype.element_ty))


@gluon.jit
def _read(
    gmem,
    smem,
    coords,
    scale,
    eps,
    HV: gl.constexpr,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    FOR_BACKWARD: gl.constexpr,
    ON_Q: gl.constexpr,
):
    """Compute the outputs of every segment.

        O = s q S + c - (steps * (s q k^T + 1)) N    out = O + w normalise(O) + u

    `steps`: inside its mini-batch a row reads earlier rows and itself with its own step, and earlier mini-batches with
    their closing steps.
    """
    LO: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LO, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW4: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    INVERSE: gl.constexpr = 1.0 / D
    o_r = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, LO))[:, None]
    o_s = gl.arange(0, SEGMENT, layout=gl.SliceLayout(0, LO))[None, :]
    o_v = gl.arange(0, D, layout=gl.SliceLayout(0, LO))
    w = _parameter(gmem.w, gmem.s_w, coords.hv, o_v)[None, :]
    u = _parameter(gmem.u, gmem.s_u, coords.hv, o_v)[None, :]
    before = o_s // BT < o_r // BT
    own = (o_s // BT == o_r // BT) & (o_s <= o_r)
    zero_acc = gl.zeros([SEGMENT, SEGMENT], gl.float32, LO)
    zero_out = gl.zeros([SEGMENT, D], gl.float32, LO)
    tile = coords.tile
    stage = 0
    phase = 0
    for j in range(coords.segments):
        row_number = smem.row_numbers.index(stage)
        query = smem.q.index(stage)
        mbarrier.wait(smem.prepared.index(stage), phase)
        q = query.load(LEFT)
        weights = mma_v2(q, smem.k.index(stage).permute((1, 0)).load(RIGHT), zero_acc)
        closed = row_number.slice(SEGMENT, SEGMENT).load(gl.SliceLayout(0, LO))[None, :]
        steps = row_number.slice(2 * SEGMENT, SEGMENT).load(gl.SliceLayout(1, LO))[:, None]
        steps = gl.where(own, steps, gl.where(before, closed, 0.0))
        weights = gl.convert_layout(((weights * scale + 1.0) * steps).to(gl.bfloat16), LEFT)

        mbarrier.wait(smem.scanned.index(stage), phase)
        O = mma_v2(q, smem.S.index(stage).permute((1, 0)).load(RIGHT), zero_out)
        O = O * scale + smem.c.index(stage).load(gl.SliceLayout(0, LO))[None, :]
        O = mma_v2(weights, smem.N.index(stage).load(RIGHT), O)
        d = O - (gl.sum(O, 1) * INVERSE)[:, None]
        r = gl.rsqrt(gl.sum(d * d, 1) * INVERSE + eps)
        out = w * (d * r[:, None]) + u
        if ON_Q:
            out = query.load(LO).to(gl.float32) + out
        else:
            out = O + out
        smem.o.store(out.to(gl.bfloat16))

        token = coords.token + j * SEGMENT
        rows = gl.minimum(coords.length - j * SEGMENT, SEGMENT).to(gl.int32)
        _store_tokens(gmem.o, token, coords.hv, rows, smem.o.load(L), HV, D, SEGMENT, L)
        if FOR_BACKWARD:
            _store_tokens(gmem.N, token, coords.hv, rows, smem.N.index(stage).load(L), HV, D, SEGMENT, L)
            _store_tokens(gmem.X, token, coords.hv, rows, smem.X.index(stage).load(L), HV, D, SEGMENT, L)
            xy = smem.row_stats[1].index(stage).load(LT)
            stats = gl.join(smem.row_stats[0].index(stage).load(LT), smem.row_stats[2].index(stage).load(LT))
            stats = gl.convert_layout(gl.join(stats, gl.join(xy, xy)).reshape((SEGMENT, 4)), ROW4)
            _store_tokens(gmem.rows, token, coords.hv, rows, stats, HV, 4, SEGMENT, ROW4)
            o_w = gl.arange(0, D, layout=gl.SliceLayout(1, L)) * D
            o_k = gl.arange(0, D, layout=gl.SliceLayout(0, L))
            gl.store(gmem.S + tile * (D * D) + (o_w[:, None] + o_k[None, :]), smem.S.index(stage).load(L))
            gl.store(gmem.c + tile * D + gl.arange(0, D, layout=LT), smem.c.index(stage).load(LT))
        # No fence: all data read from the stage is in registers, and a fence would wait for the stores above.
        mbarrier.arrive(smem.free.index(stage), count=1)
        tile += HV
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    zeros = gl.zeros([SEGMENT, D], gl.bfloat16, L)
    token = (coords.token + coords.length).to(gl.int32)
    for j in range(((coords.padding + SEGMENT - 1) // SEGMENT).to(gl.int32)):
        rows = gl.minimum(coords.padding - j * SEGMENT, SEGMENT).to(gl.int32)
        _store_tokens(gmem.o, token + j * SEGMENT, coords.hv, rows, zeros, HV, D, SEGMENT, L)


@gluon.jit
def _parameter(p, strides, i_hv, o_v):
    """Load one head's row of a parameter [HV, D] as float32."""
    return gl.load(p + i_hv * strides[0] + o_v.to(gl.int64) * strides[1]).to(gl.float32)


@gluon.jit
def _store_tokens(p, token, i_hv, rows, x, HV: gl.constexpr, W: gl.constexpr, SEGMENT: gl.constexpr, L: gl.constexpr):
    """Store the first `rows` rows of x [SEGMENT, W] in layout L to a contiguous [tokens, HV, W], from `token` on.

    Strides are not arguments: inside a warp group the compiler cannot see that one is 1, and stores would be scalar.
    """
    o_t = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, L))
    o_w = gl.arange(0, W, layout=gl.SliceLayout(0, L))
    first = (token.to(gl.int64) * HV + i_hv) * W
    gl.store(p + first + (o_t[:, None] * (HV * W) + o_w[None, :]), x, mask=(o_t < rows)[:, None] & (o_w >= 0)[None, :])


@gluon.jit
def _first(a, b):
    """Combine function of a reduction that selects the first element."""
    return a


@gluon.jit
def _from_first(z):
    """Subtract the first value of each row; eight lanes hold a row, eight numbers each."""
    SUBTRACT: gl.constexpr = """
    {
    .reg .f32 first;
    shfl.sync.idx.b32 first, $8, 0, 0x181f, 0xffffffff;
    sub.f32 $0, $8, first;
    sub.f32 $1, $9, first;
    sub.f32 $2, $10, first;
    sub.f32 $3, $11, first;
    sub.f32 $4, $12, first;
    sub.f32 $5, $13, first;
    sub.f32 $6, $14, first;
    sub.f32 $7, $15, first;
    }
    """
    return gl.inline_asm_elementwise(
        SUBTRACT, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f", [z], dtype=gl.float32, is_pure=True, pack=8
    )
