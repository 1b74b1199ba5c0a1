"""Gradients at the segments' borders: the reverse half of `scan_bwd` without X.

The products are those of the Triton kernel, in the same order and with the same roundings:

    X^T = s do^T F + dS^T E^T                              folded
    X^T = s do^T F + ((dS^T k^T) out beta) W / beta        else
    dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k

Products with s do not depend on dS. do^T F keeps the matrix units busy while the first product's result is rounded for
the second, and do^T q while X is rounded for the last. A partial chunk comes first; its rows past the last token are
cleared in shared memory.
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
from wyfold.kernels.segment_summary.triton.arguments import Gradients, SegmentIndex
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
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
from wyfold.tile.index.triton import Packing, sequence_span, strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    require_descriptors,
    tile_descriptor,
    tma_readable,
    token_descriptor,
    upper_descriptor,
    vector_descriptor,
)
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.gluon import state_offsets


def segment_summary_bwd(
    q: Tensor,
    k: Tensor,
    prepared: Prepared,
    do: Tensor,
    dST: Tensor | None,
    segments: Segments,
    options: DeltaOptions,
    key: LaunchKey,
    c: Tensor,
    *,
    horizon: bool,
) -> None:
    """Gradients of the states entering the segments that begin at borders.

    The arguments are those of the Triton launch. Tokens that TMA cannot read are copied first.

    Args:
        q, k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        prepared: From `prepare`, including W.
        do: [1, T, HV, V].
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        segments: Layout of the segments, with chunks of 64.
        options: Uses `scale`.
        key: Key of the launch configuration.
        c: [borders, HV, K, V] float32 view, written.
        horizon: As of the Triton launch.
    """
    (HK, K), (HV, V), grid = q.shape[2:], do.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", key._replace(launch="bwd"), q.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.q is None:
        q, k = tma_readable(q, grid.chunk_size, K), tma_readable(k, grid.chunk_size, K)
    do = tma_readable(do, grid.chunk_size, BV // parts)
    x_q, x_k, x_do, x_rows, x_total, x_F, x_write = require_descriptors(
        "segment_summary", _descriptors(q, k, prepared, do, grid.chunk_size, BV // parts)
    )
    launch_kernel(
        wyfold_segment_summary_bwd_gluon,
        segments.borders * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_F=x_F,
        x_write=x_write,
        p_rows=prepared.rows if horizon else None,
        heads=Heads(h_q=q.stride(2), h_k=k.stride(2), h_do=do.stride(2)),
        gradients=Gradients(dST=dST, s_dST=strides(dST), c=c, s_c=strides(c)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        scale=options.scale,
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
    """The kernel's first arguments, as descriptors where TMA reads them; None if one cannot have a descriptor."""
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


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and do."""

    h_q: Any
    h_k: Any
    h_do: Any


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        q, k: Tiles [BT, K].
        do: Tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        F: [BT, BT].
        write: E [BT, K], or W [BT, BT].
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
    """

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
    """TMA descriptors of the tiles that the producer loads, and coordinates of the last chunk.

    Attributes:
        q, k, do, rows, total, F, write: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_do: First column of the program's head in the tokens.
    """

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
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        dST: Gradients of the final states, or None.
        c: Results.
    """

    total: Any
    dST: Any
    s_dST: Any
    c: Any
    s_c: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        needed: 1 if the segment has a c, else 0.
        tile: First tile.
        n: Sequence.
        border: Border at which the segment begins.
        ends: The sequence ends in this segment.
        hv: Value head.
        column: First value row.
        count: Number of chunks.
        tail_rows: Tokens of the last chunk if it is partial, or 0.
    """

    needed: Any
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
    p_rows,
    heads,
    gradients,
    segments,
    packing,
    N,
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
    """Producer: load the tiles of every chunk, including a partial one, as soon as a stage is free."""
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
    """Consumer: run BW value rows backward through all chunks, from zeros or from the gradient of the final state."""
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
    if coords.needed != 0:
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
    """Gradient of the state entering chunk i; with a scalar gate also the decay of the chunk after the next one.

    `done`: number of chunks before it in this direction. The decay is loaded two chunks ahead, as in the forward
    kernel.
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    zeros = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    do, write = smem.do.index(stage * PARTS + part), smem.write.index(stage)

    left = gl.convert_layout(dS.to(OP), AS, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zeros, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zeros, use_acc=False, is_async=True)
    fence_async_shared()
    mbarrier.arrive(smem.free.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=done > 0)
    doT, in_q = do.permute((1, 0)).load(LC), factors.slice(BT, BT).load(ROW)
    # Dropped by the compiler with FOLDED.
    out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
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
    # Multiplied after the first product's wait: before it, ptxas would add a wait
    # (docs/facts/compilers.md, PTXAS-4).
    dS = warpgroup_mma(doT, query, dS * total, is_async=True)
    # Row factors are loaded where they are used, some twice, because registers are scarce here.
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if not CHANNEL:
        later_total = chunk_decay(gmem.total, coords.tile + (i - 2) * HV, i > 1, opaque_zero, BW, LS)
    X = X * scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(nonzero_beta(beta))[None, :]
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), AC, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    return warpgroup_mma_wait(0, deps=[dS]), later_total
