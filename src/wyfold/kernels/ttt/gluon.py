"""`ttt` forward in Gluon, for Hopper: one launch, in which four groups of warps pass segments of 64 tokens on.

    bring      one warp: k, v and q of a segment, by the copy engine, as soon as there is a stage for them
    prepare    what the walk takes that no state is in: w (u - v + k) and its sums, steps, factors
    walk       the chain of mini-batches, its state transposed, [V, K], in registers; leaves N, and the state of borders
    read       what a segment's tokens read, normalised: o, and what a backward wants

A stage of shared memory holds all that belongs to one segment, and goes from each group to the next by a barrier:
`full`, `ready`, `done`, `free`. The walk finds every stage ready and is read behind its back, so that it alone takes
time.

Its mini-batch has two exchanges. The product k S + c leaves a slab of 16 value rows to each warp; through shared memory
it becomes rows, a token's values eight lanes' own, whose sums are all added at once; N goes back in the same way. No
mean is taken off beforehand: values are counted from the first one of their token, which takes one shuffle, and the
sums are corrected. That value is as far from the mean as values differ, so that no square cancels.

All products are those of one warp's instructions: what a group leaves in shared memory is then read as it was written,
and no operand is read while the next one is made.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.ttt import SegmentBorders, StateViews, TTTInputs, triton
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
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import bf16_parts
from wyfold.tile.index.gluon import barrier, clear_rows, gluon_descriptors, tma_load
from wyfold.tile.index.triton import TmaDescriptor, sequence_span, strides, token_descriptor
from wyfold.tile.inner.triton import add_five
from wyfold.tile.state.gluon import state_offsets

# The backward is that of the Triton launches: what of its kernels was compiled is asked of this module as well.
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
    """Run every sequence from its entering state. Arguments as of the Triton launches, to which are left calls without
    a sequence, and of more tokens than the copy engine counts.

    q, k and v that it cannot read are copied: results do not depend on how memory is laid out.

    Args:
        x: bfloat16 tokens of 64 channels, in mini-batches of 16, as the table's row says.
        o: Contiguous, as are the borders.
        borders: Written for `ttt_bwd`; None where no backward follows, and then nothing is kept of the walk.
    """
    descriptors = [_descriptors(y) for y in (x.q, x.k, x.v)]
    if grid.sequences == 0 or None in descriptors:
        triton.ttt(x, entering, leaving, grid, chunk_size, scale, eps, o, borders)
        return
    HV, D = x.v.shape[2:]
    config = tuned("ttt.gluon", forward_scan_key(x.q.dtype, D, chunk_size), x.q.device)
    N, S, c, X, rows = borders or (None,) * 5
    launch_kernel(
        wyfold_ttt_gluon,
        grid.sequences * HV,
        *gluon_descriptors(descriptors),
        *(descriptor.base.stride(2) for descriptor in descriptors if descriptor is not None),
        x.w,
        x.w.stride(),
        x.u,
        x.u.stride(),
        x.eta,
        x.eta.stride(),
        x.col,
        strides(x.col),
        entering.S,
        strides(entering.S),
        entering.c,
        strides(entering.c),
        leaving.S,
        strides(leaving.S),
        leaving.c,
        strides(leaving.c),
        o,
        N,
        X,
        S,
        c,
        rows,
        grid.cu,
        grid.first,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        scale,
        eps,
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
    """Boxes of a segment's tokens of one head, of a copy where memory is not laid out for them."""
    D = x.shape[3]
    return token_descriptor(x, SEGMENT, D) or token_descriptor(
        x.clone(memory_format=torch.contiguous_format), SEGMENT, D
    )


class Smem(NamedTuple):
    """Shared memory. Of every stage: tokens; w (u - v + k); four numbers of a token; N, X and three numbers of a token
    that the walk finds; the state that enters, V-first, and its bias. And places of the walk's exchanges."""

    q: Any
    k: Any
    v: Any
    wt: Any
    numbers: Any
    N: Any
    X: Any
    marks: Any
    S: Any
    c: Any
    z: Any
    high: Any
    low: Any
    o: Any
    full: Any
    ready: Any
    done: Any
    free: Any


class TmaInputs(NamedTuple):
    """Boxes, and the columns of a program's heads in them."""

    q: Any
    k: Any
    v: Any
    column_q: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """What groups reach by themselves; o and all below it contiguous."""

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
    """Of a program: sequence, value head, number of its first segment's tile, buffer row, first token there and in all
    rows, length, segments, and tokens of its buffer row behind its end that are no sequence's."""

    n: Any
    hv: Any
    tile: Any
    b: Any
    t: Any
    token: Any
    length: Any
    segments: Any
    padding: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "eps"])
def wyfold_ttt_gluon(
    x_q,
    x_k,
    x_v,
    h_q,
    h_k,
    h_v,
    p_w,
    s_w,
    p_u,
    s_u,
    p_eta,
    s_eta,
    p_col,
    s_col,
    p_S0,
    s_S0,
    p_c0,
    s_c0,
    p_ST,
    s_ST,
    p_cT,
    s_cT,
    p_o,
    p_N,
    p_X,
    p_S,
    p_c,
    p_rows,
    p_cu,
    p_first,
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
    """One program owns a sequence of one value head. READ, PREPARE: registers of a thread of these groups."""
    KEPT: gl.constexpr = p_N is not None
    pid = gl.program_id(0).to(gl.int64)
    i_n, i_hv = pid // HV, pid % HV
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    segments = ((length + SEGMENT - 1) // SEGMENT).to(gl.int32)
    padding = i_n * 0
    if PACKED:
        if i_n == N - 1:
            padding = T - t - length

    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    TURNED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    q = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_q.layout)
    k = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
    v = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_v.layout)
    wt = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT, D], FLAT)
    numbers = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * SEGMENT], LINE)
    left_N = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
    left_X = left_N
    marks = numbers, numbers, numbers
    if KEPT:
        left_X = gl.allocate_shared_memory(gl.bfloat16, [STAGES, SEGMENT, D], x_k.layout)
        # Each by itself: a store into memory that was stored to waits at a barrier.
        left_r = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        left_xy = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        left_y = gl.allocate_shared_memory(gl.float32, [STAGES, SEGMENT], LINE)
        marks = left_r, left_xy, left_y
    left_S = gl.allocate_shared_memory(gl.bfloat16, [STAGES, D, D], x_k.layout)
    left_c = gl.allocate_shared_memory(gl.float32, [STAGES, D], LINE)
    z = gl.allocate_shared_memory(gl.float32, [BT, D], TURNED)
    high = gl.allocate_shared_memory(gl.bfloat16, [BT, D], x_k.layout)
    low = gl.allocate_shared_memory(gl.bfloat16, [BT, D], x_k.layout)
    out = gl.allocate_shared_memory(gl.bfloat16, [SEGMENT, D], x_k.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(done.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    fence_async_shared()
    barrier()

    smem = Smem(q, k, v, wt, numbers, left_N, left_X, marks, left_S, left_c, z, high, low, out, full, ready, done, free)
    inputs = TmaInputs(x_q, x_k, x_v, (i_h * h_q).to(gl.int32), (i_h * h_k).to(gl.int32), (i_hv * h_v).to(gl.int32))
    gmem = Globals(
        p_w, s_w, p_u, s_u, p_eta, s_eta, p_col, s_col, p_S0, s_S0, p_c0, s_c0, p_ST, s_ST, p_cT, s_cT,
        p_o, p_N, p_X, p_S, p_c, p_rows,
    )  # fmt: skip
    coords = Coords(i_n, i_hv, i_c * HV + i_hv, b, t, (b * T + t).to(gl.int32), length, segments, padding)
    gl.warp_specialize(
        [
            (_walk, (gmem, smem, coords, eps, D, BT, SEGMENT, STAGES, KEPT)),
            (_read, (gmem, smem, coords, scale, eps, HV, D, BT, SEGMENT, STAGES, KEPT, ON_Q)),
            (_prepare, (gmem, smem, coords, D, BT, SEGMENT, STAGES)),
            (_producer, (inputs, smem, coords, SEGMENT, STAGES)),
        ],
        [4, 4, 1],
        [READ, PREPARE, 24],
    )


@gluon.jit
def _producer(inputs, smem, coords, SEGMENT: gl.constexpr, STAGES: gl.constexpr):
    """Bring every segment's tokens, and those behind the last one's end, which `_prepare` clears."""
    BYTES: gl.constexpr = inputs.q.block_type.nbytes + inputs.k.block_type.nbytes + inputs.v.block_type.nbytes
    token = coords.token
    stage = 0
    phase = 1
    for _ in range(coords.segments):
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        mbarrier.expect(full, BYTES)
        tma_load(inputs.k, [token, inputs.column_k], full, smem.k.index(stage))
        tma_load(inputs.v, [token, inputs.column_v], full, smem.v.index(stage))
        tma_load(inputs.q, [token, inputs.column_q], full, smem.q.index(stage))
        token += SEGMENT
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _prepare(gmem, smem, coords, D: gl.constexpr, BT: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr):
    """Of every token w (u - v + k), its sum, the step that closes its mini-batch and its own, both negative, and its
    factor; all zero where there is no token, and so is k."""
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
        number = smem.numbers.index(stage)
        mbarrier.wait(smem.full.index(stage), phase)
        number.slice(0, SEGMENT).store(factor)
        number.slice(SEGMENT, SEGMENT).store(-close.to(gl.float32))
        number.slice(2 * SEGMENT, SEGMENT).store(-own.to(gl.float32))
        for i in gl.static_range(SEGMENT // BT):
            k = smem.k.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            v = smem.v.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            here = i * BT + gl.arange(0, BT, layout=ROW) < rows
            wt = gl.where(here[:, None], w * (u - v + k), 0.0)
            smem.wt.index(stage).slice(i * BT, BT).store(wt)
            number.slice(3 * SEGMENT + i * BT, BT).store(gl.sum(wt, 1))
        if rows < SEGMENT:
            clear_rows(smem.k.index(stage), rows, SEGMENT, D)
        mbarrier.arrive(smem.ready.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _walk(
    gmem,
    smem,
    coords,
    eps,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    KEPT: gl.constexpr,
):
    """Of each mini-batch    Z = k S + c    N = gradient of the inner loss    S <- S - e_n k^T N    c <- c - e_n sum(N)

    N is made as in `tile/inner`, but that d is counted from the first value of its token: with m the mean of that,

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
    left = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    stage = 0
    phase = 0
    for _ in range(coords.segments):
        number = smem.numbers.index(stage)
        mbarrier.wait(smem.ready.index(stage), phase)
        smem.S.index(stage).store(S.to(gl.bfloat16))
        smem.c.index(stage).store(gl.reduce(c, 1, _first))
        for i in gl.static_range(SEGMENT // BT):
            key = smem.k.index(stage).slice(i * BT, BT)
            Z = mma_v2(left, key.permute((1, 0)).load(RIGHT), c)
            # What meets Z and N is asked for while it is made.
            keys = key.load(RIGHT)
            wt = smem.wt.index(stage).slice(i * BT, BT).load(L)
            factor = number.slice(i * BT, BT).load(ROW)
            step = number.slice(SEGMENT + i * BT, BT).load(ROW)
            sum_t = number.slice(3 * SEGMENT + i * BT, BT).load(ROW)
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
            if KEPT:
                smem.X.index(stage).slice(i * BT, BT).store((d * r[:, None]).to(gl.bfloat16))
                smem.marks[0].index(stage).slice(i * BT, BT).store(r)
                smem.marks[1].index(stage).slice(i * BT, BT).store(xy)
                smem.marks[2].index(stage).slice(i * BT, BT).store(y)
            writes = smem.high.permute((1, 0)).load(LEFT)
            rest = smem.low.permute((1, 0)).load(LEFT)
            S = mma_v2(writes, keys, S)
            c = mma_v2(rest, ones, mma_v2(writes, ones, c))
            left = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        mbarrier.arrive(smem.done.index(stage), count=1)
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
    KEPT: gl.constexpr,
    ON_Q: gl.constexpr,
):
    """Of each segment    O = s q S + c - (steps * (s q k^T + 1)) N    out = O + w normalise(O) + u

    steps: a row reads its own mini-batch with its own step, up to itself, and what is before with the closing ones.
    """
    LO: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LO, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    FOUR: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    INVERSE: gl.constexpr = 1.0 / D
    o_r = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, LO))[:, None]
    o_s = gl.arange(0, SEGMENT, layout=gl.SliceLayout(0, LO))[None, :]
    o_v = gl.arange(0, D, layout=gl.SliceLayout(0, LO))
    w = _parameter(gmem.w, gmem.s_w, coords.hv, o_v)[None, :]
    u = _parameter(gmem.u, gmem.s_u, coords.hv, o_v)[None, :]
    before = o_s // BT < o_r // BT
    own = (o_s // BT == o_r // BT) & (o_s <= o_r)
    no_pairs = gl.zeros([SEGMENT, SEGMENT], gl.float32, LO)
    no_output = gl.zeros([SEGMENT, D], gl.float32, LO)
    tile = coords.tile
    stage = 0
    phase = 0
    for j in range(coords.segments):
        number = smem.numbers.index(stage)
        query = smem.q.index(stage)
        mbarrier.wait(smem.ready.index(stage), phase)
        q = query.load(LEFT)
        pairs = mma_v2(q, smem.k.index(stage).permute((1, 0)).load(RIGHT), no_pairs)
        closed = number.slice(SEGMENT, SEGMENT).load(gl.SliceLayout(0, LO))[None, :]
        steps = number.slice(2 * SEGMENT, SEGMENT).load(gl.SliceLayout(1, LO))[:, None]
        steps = gl.where(own, steps, gl.where(before, closed, 0.0))
        pairs = gl.convert_layout(((pairs * scale + 1.0) * steps).to(gl.bfloat16), LEFT)

        mbarrier.wait(smem.done.index(stage), phase)
        O = mma_v2(q, smem.S.index(stage).permute((1, 0)).load(RIGHT), no_output)
        O = O * scale + smem.c.index(stage).load(gl.SliceLayout(0, LO))[None, :]
        O = mma_v2(pairs, smem.N.index(stage).load(RIGHT), O)
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
        if KEPT:
            _store_tokens(gmem.N, token, coords.hv, rows, smem.N.index(stage).load(L), HV, D, SEGMENT, L)
            _store_tokens(gmem.X, token, coords.hv, rows, smem.X.index(stage).load(L), HV, D, SEGMENT, L)
            xy = smem.marks[1].index(stage).load(LT)
            four = gl.join(smem.marks[0].index(stage).load(LT), smem.marks[2].index(stage).load(LT))
            four = gl.convert_layout(gl.join(four, gl.join(xy, xy)).reshape((SEGMENT, 4)), FOUR)
            _store_tokens(gmem.rows, token, coords.hv, rows, four, HV, 4, SEGMENT, FOUR)
            o_w = gl.arange(0, D, layout=gl.SliceLayout(1, L)) * D
            o_k = gl.arange(0, D, layout=gl.SliceLayout(0, L))
            gl.store(gmem.S + tile * (D * D) + (o_w[:, None] + o_k[None, :]), smem.S.index(stage).load(L))
            gl.store(gmem.c + tile * D + gl.arange(0, D, layout=LT), smem.c.index(stage).load(LT))
        # No fence: what was read of the stage is in registers, and a fence would wait for the stores above.
        mbarrier.arrive(smem.free.index(stage), count=1)
        tile += HV
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    blank = gl.zeros([SEGMENT, D], gl.bfloat16, L)
    token = (coords.token + coords.length).to(gl.int32)
    for j in range(((coords.padding + SEGMENT - 1) // SEGMENT).to(gl.int32)):
        rows = gl.minimum(coords.padding - j * SEGMENT, SEGMENT).to(gl.int32)
        _store_tokens(gmem.o, token + j * SEGMENT, coords.hv, rows, blank, HV, D, SEGMENT, L)


@gluon.jit
def _parameter(p, strides, i_hv, o_v):
    """A head's row of a parameter [HV, D], float32."""
    return gl.load(p + i_hv * strides[0] + o_v.to(gl.int64) * strides[1]).to(gl.float32)


@gluon.jit
def _store_tokens(p, token, i_hv, rows, x, HV: gl.constexpr, W: gl.constexpr, SEGMENT: gl.constexpr, L: gl.constexpr):
    """Write x [SEGMENT, W], laid out as L, to the rows of a contiguous [tokens, HV, W] from `token` on that are tokens.

    No stride is an argument: inside a group of warps none is known to be 1, and each number would be stored by itself.
    """
    o_t = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, L))
    o_w = gl.arange(0, W, layout=gl.SliceLayout(0, L))
    first = (token.to(gl.int64) * HV + i_hv) * W
    gl.store(p + first + (o_t[:, None] * (HV * W) + o_w[None, :]), x, mask=(o_t < rows)[:, None] & (o_w >= 0)[None, :])


@gluon.jit
def _first(a, b):
    return a


@gluon.jit
def _from_first(z):
    """z less the first value of its row, rows being eight lanes' own, eight numbers each."""
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
