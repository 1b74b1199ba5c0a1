"""Gradients at the segments' borders: the reverse half of `scan_bwd` without X, with the products of the Triton kernel,
in its order and with its roundings:

    X^T = s do^T F + dS^T E^T                              folded
    X^T = s do^T F + ((dS^T k^T) out beta) W / beta        else
    dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k

What s multiplies does not wait for dS: do^T F keeps the matrix units busy while what the first product left is rounded
for the second, do^T q while X is for the last. Of the chunk that a sequence does not fill, which comes first, the rows
that are no tokens are cleared in shared memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.dot.gluon import one_over
from wyfold.tile.index.gluon import (
    barrier,
    clear_lower,
    clear_rows,
    gluon_descriptors,
    quarters,
    tma_load,
    tma_load_upper,
)
from wyfold.tile.index.triton import (
    all_or_none,
    require_descriptors,
    segment_place,
    sequence_span,
    strides,
    tile_descriptor,
    tma_readable,
    token_descriptor,
    upper_descriptor,
    vector_descriptor,
)
from wyfold.tile.inverse.triton import divisor
from wyfold.tile.state.gluon import state_offsets


def segment_summary_bwd(
    q: Tensor,
    k: Tensor,
    prepared: Prepared,
    do: Tensor,
    dST: Tensor | None,
    segments: Segments,
    options: DeltaOptions,
    key: str,
    c: Tensor,
) -> None:
    """Gradients of the states that enter the segments which begin at borders. Arguments as of the Triton launch. Tokens
    that the copy engine cannot read are copied first.

    Args:
        q, k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        prepared: From `prepare`, W among it.
        do: [1, T, HV, V].
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        segments: Where they lie, of chunks of 64.
        options: Uses `scale`.
        key: Of the launch configuration.
        c: [borders, HV, K, V] float32 view, written.
    """
    (HK, K), (HV, V), grid = q.shape[2:], do.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", f"{key} bwd", q.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.q is None:
        q, k = tma_readable(q, grid.chunk_size, K), tma_readable(k, grid.chunk_size, K)
    do = tma_readable(do, grid.chunk_size, BV // parts)
    descriptors = require_descriptors("segment_summary", _descriptors(q, k, prepared, do, grid.chunk_size, BV // parts))
    launch_kernel(
        wyfold_segment_summary_bwd_gluon,
        segments.borders * HV * (V // BV),
        *descriptors,
        q.stride(2),
        k.stride(2),
        do.stride(2),
        dST,
        strides(dST),
        c,
        strides(c),
        segments.sequence,
        segments.first,
        segments.leading,
        segments.sequences,
        grid.cu,
        grid.first,
        grid.tokens,
        options.scale,
        H=HK,
        HV=HV,
        K=K,
        V=V,
        BT=grid.chunk_size,
        BV=BV,
        PARTS=parts,
        CHANNEL=prepared.q is not None,
        FOLDED=prepared.E is not None,
        STAGES=config.stages,
        **config.options(),
    )


def _descriptors(q: Tensor, k: Tensor, prepared: Prepared, do: Tensor, C: int, BW: int) -> list[Any] | None:
    """The kernel's first arguments, each as boxes where it is read by them; None if one cannot be."""
    rows, total, q_tiles, k_tiles, E, F, W = prepared[:7]
    K, channel = q.shape[3], q_tiles is not None
    given = q, k, do, rows, total, F, E if E is not None else W
    found = (
        tile_descriptor(q_tiles, C, K) if q_tiles is not None else token_descriptor(q, C, K),
        tile_descriptor(k_tiles, C, K) if k_tiles is not None else token_descriptor(k, C, K),
        token_descriptor(do, C, BW),
        vector_descriptor(rows.flatten(1), 4 * C),
        vector_descriptor(total, K) if channel else total,
        None if F is None else upper_descriptor(F),
        tile_descriptor(E, C, K) if E is not None else None if W is None else upper_descriptor(W),
    )
    descriptors = all_or_none(given, found)
    return None if descriptors is None else gluon_descriptors(descriptors)


class Smem(NamedTuple):
    """Shared memory. Of every stage what a chunk reads; write: E, or W; do: by parts."""

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    F: Any
    write: Any
    full: Any
    free: Any


class TmaInputs(NamedTuple):
    """Boxes of what is brought, and where the last chunk's are: its tile, its first token, columns of its tokens."""

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    F: Any
    write: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_do: Any


class Globals(NamedTuple):
    """What the parts reach by themselves: decays of a scalar gate, and gradients of states."""

    total: Any
    dST: Any
    s_dST: Any
    c: Any
    s_c: Any


class Coords(NamedTuple):
    """Of a program: whether anybody asks for its c, first tile, sequence, border that the segment begins at, whether
    the sequence ends in it, value head, first value row, chunks, and tokens of the last one if that is not full."""

    asked: Any
    tile: Any
    n: Any
    border: Any
    ends: Any
    hv: Any
    column: Any
    count: Any
    tail_rows: Any


@gluon.jit(do_not_specialize=["N", "T", "scale"])
def wyfold_segment_summary_bwd_gluon(
    x_q,
    x_k,
    x_do,
    x_rows,
    x_total,
    x_F,
    x_write,
    h_q,
    h_k,
    h_do,
    p_dST,
    s_dST,
    p_c,
    s_c,
    p_sequence,
    p_first_segment,
    p_leading,
    N,
    p_cu,
    p_first,
    T,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program owns BV value rows of c."""
    NV: gl.constexpr = V // BV
    BW: gl.constexpr = BV // PARTS
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, gl.load(p_leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_place(i_s, p_sequence, p_first_segment, N)
    i_c, b, t, length = sequence_span(i_s, p_cu, p_first, T, 0, True)
    i_tile = i_c * HV + i_hv
    asked = ((i_n < N) & (begins == 0)).to(gl.int32)
    column = (i_v * BV).to(gl.int32)
    count = ((length + (BT - 1)) // BT).to(gl.int32) * asked
    tail_rows = (length % BT).to(gl.int32) * asked

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
    gmem = Globals(x_total, p_dST, s_dST, p_c, s_c)
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
        (i_h * h_q).to(gl.int32),
        (i_h * h_k).to(gl.int32),
        (i_hv * h_do).to(gl.int32) + column,
    )
    coords = Coords(asked, i_tile, i_n, i_border - 1, ends, i_hv, column, count, tail_rows)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_consumer, (gmem, smem, coords, scale, 0, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_producer, (inputs, smem, count, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (gmem, smem, coords, scale, 0, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_consumer, (gmem, smem, coords, scale, 1, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_producer, (inputs, smem, count, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _producer(
    inputs,
    smem,
    count,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring every chunk's tiles, the unfilled one's too, as soon as there is a stage for them."""
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
        # In the order in which they are wanted.
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
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _consumer(
    gmem,
    smem,
    coords,
    scale,
    part,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take BW value rows back through every chunk: of zeros, or of the gradient of the sequence's final state."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    dS = gl.zeros([BW, K], gl.float32, LS)
    if gmem.dST is not None:
        if coords.ends:
            dS = gl.load(gmem.dST + state_offsets(gmem.s_dST, coords.n, coords.hv, o_v, o_k)).to(gl.float32)
    opaque_zero = gl.minimum(coords.count, 0)
    total = 0.0
    next_total = 0.0
    if not CHANNEL:
        last = coords.tile + (coords.count - 1) * HV
        total = chunk_decay(gmem.total, last, coords.count > 0, opaque_zero, BW, LS)
        next_total = chunk_decay(gmem.total, last - HV, coords.count > 1, opaque_zero, BW, LS)
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(0), 0)
        if not CHANNEL:
            clear_rows(smem.k.index(0), coords.tail_rows, BT, K)
            clear_rows(smem.q.index(0), coords.tail_rows, BT, K)
        clear_rows(smem.do.index(part), coords.tail_rows, BT, BW)
    stage = 0
    phase = 0
    for j in range(coords.count):
        i = coords.count - 1 - j
        mbarrier.wait(smem.full.index(stage), phase)
        dS, later_total = _step(
            dS, total, gmem, smem, coords, scale, part, stage, i, j, opaque_zero,
            HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES,
        )  # fmt: skip
        total = next_total
        next_total = later_total
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if coords.asked != 0:
        gl.store(gmem.c + state_offsets(gmem.s_c, coords.border, coords.hv, o_v, o_k), dS)


@gluon.jit
def _step(
    dS,
    total,
    gmem,
    smem,
    coords,
    scale,
    part,
    stage,
    i,
    done,
    opaque_zero,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Gradient of the state entering chunk i, before which so many were done, and of a scalar gate the decay of
    the chunk after the next, as on the way forward."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    zeros = gl.zeros([BW, BT], gl.float32, LC)
    key, query, number = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    do, write = smem.do.index(stage * PARTS + part), smem.write.index(stage)

    left = gl.convert_layout(dS.to(OP), AS, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    fence_async_shared()
    mbarrier.arrive(smem.free.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=done > 0)
    doT, in_q = do.permute((1, 0)).load(LC), number.slice(BT, BT).load(ROW)
    if not FOLDED:
        out = number.slice(2 * BT, BT).load(ROW) * divisor(number.slice(3 * BT, BT).load(ROW))
    X = warpgroup_mma(
        gl.convert_layout(doT, AC, assert_trivial=True),
        smem.F.index(stage).permute((1, 0)),
        zeros,
        use_acc=False,
        is_async=True,
    )
    doT = gl.convert_layout((doT.to(gl.float32) * (in_q * scale)[None, :]).to(OP), AC, assert_trivial=True)
    later_total = total
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    dY = warpgroup_mma_wait(1, deps=[dY])
    if not FOLDED:
        d = gl.convert_layout((dY * out[None, :]).to(OP), AC, assert_trivial=True)
        dY = warpgroup_mma(d, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    # Multiplied behind the first product's wait: in front of it the assembler adds a wait
    # (docs/facts/compilers.md, PTXAS-4).
    dS = warpgroup_mma(doT, query, dS * total, is_async=True)
    # Numbers of rows are read where they are wanted, again if need be: registers are short here.
    in_k, beta = number.slice(0, BT).load(ROW), number.slice(3 * BT, BT).load(ROW)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if not CHANNEL:
        later_total = chunk_decay(gmem.total, coords.tile + (i - 2) * HV, i > 1, opaque_zero, BW, LS)
    X = X * scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(divisor(beta))[None, :]
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), AC, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    return warpgroup_mma_wait(0, deps=[dS]), later_total
