"""Maps of segments: the scan without output.

The products are those of the Triton kernel, in the same order and with the same roundings:

    R^T = V^T - (S^T k^T) in           V is zero where M is made
    S^T <- total S^T + (R^T beta) E                         folded
    S^T <- total S^T + ((R^T W^T) beta out) k               else; beta out comes from `prepare`

A summarised segment ends at a border, so all its chunks are full.

Each chunk multiplies M by the decay, which may underflow it to zeros; then it stays zeros. Under a scalar gate programs
share a multiprocessor. There, programs of M check for zeros now and then and stop early. No bit changes, and the
programs of H get the multiprocessor to themselves.
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
from wyfold.kernels.segment_summary.triton.arguments import Maps, SegmentIndex
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
from wyfold.tile.index.gluon import barrier, clear_lower, gluon_descriptors, quarters, tma_load, tma_load_upper
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
from wyfold.tile.state.gluon import state_offsets


def segment_summary(
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    segments: Segments,
    key: LaunchKey,
    H: Tensor,
    M: Tensor,
    *,
    horizon: bool,
) -> None:
    """Maps of the segments that end at borders.

    The arguments are those of the Triton launch. Tokens that TMA cannot read are copied first.

    Args:
        k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        v: [1, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        segments: Layout of the segments, with chunks of 64.
        key: Key of the launch configuration.
        H: [borders, HV, K, V] float32 view, written.
        M: [borders, HV, K, K] float32 view, written; zeros for a segment that begins a sequence. Only a row of zeros
            holds negative zeros.
        horizon: As of the Triton launch.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", key._replace(launch="fwd"), k.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.k is None:
        k = tma_readable(k, grid.chunk_size, K)
    v = tma_readable(v, grid.chunk_size, BV // parts)
    x_k, x_v, x_rows, x_total, x_write = require_descriptors(
        "segment_summary", _descriptors(k, v, prepared, grid.chunk_size, BV // parts)
    )
    launch_kernel(
        wyfold_segment_summary_gluon,
        segments.borders * HV * (V // BV + K // BV),
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_write,
        p_rows=prepared.rows if horizon else None,
        heads=Heads(h_k=k.stride(2), h_v=v.stride(2)),
        maps=Maps(S0=initial_state, s_S0=strides(initial_state), H=H, s_H=strides(H), M=M, s_M=strides(M)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        H=HK,
        HV=HV,
        K=K,
        V=V,
        BT=grid.chunk_size,
        BV=BV,
        PARTS=parts,
        CHANNEL=prepared.k is not None,
        FOLDED=prepared.E is not None,
        STAGES=config.stages,
        **config.options(),
    )


def _descriptors(k: Tensor, v: Tensor, prepared: Prepared, C: int, BW: int) -> list[Any] | None:
    """The kernel's first arguments, as descriptors where TMA reads them; None if one cannot have a descriptor."""
    rows, total, _, k_tiles, E, _, W = prepared[:7]
    K, channel = k.shape[3], k_tiles is not None
    write = E if E is not None else W
    given = k, v, rows, total, write
    found = (
        tile_descriptor(k_tiles, C, K) if k_tiles is not None else token_descriptor(k, C, K),
        token_descriptor(v, C, BW),
        vector_descriptor(rows.flatten(1), 4 * C),
        vector_descriptor(total, K) if channel else total,
        None if write is None else tile_descriptor(write, C, K) if write is E else upper_descriptor(write),
    )
    descriptors = all_or_none(given, found)
    return None if descriptors is None else gluon_descriptors(descriptors)


class Heads(NamedTuple):
    """Kernel argument: distances between heads of k and v."""

    h_k: Any
    h_v: Any


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        k: Tiles [BT, K].
        v: Value tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        write: E [BT, K], or W [BT, BT].
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
        map_is_zero: [PARTS, 1] flags: the part's rows of M are zeros.
        count: [1] number of chunks to load; reduced once all flags are set.
    """

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    full: Any
    free: Any
    map_is_zero: Any
    count: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        k, v, rows, total, write: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_k, column_v: First column of the program's head in the tokens.
    """

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    tile: Any
    token: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        S0: Initial states, or None.
        H, M: Results.
    """

    total: Any
    S0: Any
    s_S0: Any
    H: Any
    s_H: Any
    M: Any
    s_M: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        of_H: 1 if the program computes H, 0 if M.
        needed: 1 if the segment ends at a border, else 0.
        tile: First tile.
        n: Sequence.
        border: Border at which the segment ends.
        begins: The sequence begins in this segment; of H with its initial state, of M with zeros.
        hv: Value head.
        column: First value row of H or of M.
        steps: Number of chunks.
    """

    of_H: Any
    needed: Any
    tile: Any
    n: Any
    border: Any
    begins: Any
    hv: Any
    column: Any
    steps: Any


@gluon.jit(do_not_specialize=["N", "T"])
def wyfold_segment_summary_gluon(
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    p_rows,
    heads,
    maps,
    segments,
    packing,
    N,
    T,
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
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2.

    Programs of H come first. If there are at most as many as multiprocessors, each gets one, which it has to itself
    once the programs of M have stopped.
    """
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
        _write_flag(map_is_zero.index(part), 0)
    _write_flag(count, steps)
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
            [
                (_consumer, (gmem, smem, coords, 0, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_producer, (inputs, smem, of_H, steps, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (gmem, smem, coords, 0, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_consumer, (gmem, smem, coords, 1, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
                (_producer, (inputs, smem, of_H, steps, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )
    # Keep the barriers' memory allocated: no other buffer may reuse it (docs/facts/hopper.md, KDA-NAN-1).
    full._keep_alive()
    free._keep_alive()


@gluon.jit
def _producer(
    inputs,
    smem,
    of_H,
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
    """Producer: load the tiles of every chunk as soon as a stage is free; values only for H.

    Once M is zeros in all parts, it stops at the next check: it writes the reduced count and completes `full` without a
    load.
    """
    WRITE: gl.constexpr = inputs.write.block_type.nbytes * (1 if FOLDED else 3)
    SCALAR: gl.constexpr = inputs.k.block_type.nbytes + inputs.rows.block_type.nbytes + WRITE
    BYTES: gl.constexpr = SCALAR + inputs.total.block_type.nbytes if CHANNEL else SCALAR
    tile, token = inputs.tile, inputs.token
    stage = 0
    phase = 1
    i = 0
    check = _next_check(i)
    while i < count:
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        map_is_zero = 0
        if not CHANNEL:
            if (of_H == 0) & (i == check):
                check = _next_check(i)
                for part in gl.static_range(PARTS):
                    map_is_zero += _read_flag(smem.map_is_zero.index(part))
        if map_is_zero == PARTS:
            _write_flag(smem.count, i)
            mbarrier.arrive(full, count=1)
            i = count
        else:
            if of_H != 0:
                mbarrier.expect(full, BYTES + inputs.v.block_type.nbytes * PARTS)
            else:
                mbarrier.expect(full, BYTES)
            if CHANNEL:
                tma_load(inputs.k, [tile * BT, 0], full, smem.k.index(stage))
                tma_load(inputs.total, [tile * K], full, smem.total.index(stage))
            else:
                tma_load(inputs.k, [token, inputs.column_k], full, smem.k.index(stage))
            tma_load(inputs.rows, [tile * (4 * BT)], full, smem.rows.index(stage))
            if of_H != 0:
                for part in gl.static_range(PARTS):
                    tma_load(inputs.v, [token, inputs.column_v + part * BW], full, smem.v.index(stage * PARTS + part))
            if FOLDED:
                tma_load(inputs.write, [tile * BT, 0], full, smem.write.index(stage))
            else:
                tma_load_upper(inputs.write, tile, full, quarters(smem.write, inputs.write, STAGES), stage)
            tile += HV
            token += BT
            i += 1
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1


@gluon.jit
def _consumer(
    gmem,
    smem,
    coords,
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
    """Consumer: run BW value rows through all chunks, from zeros or the initial state (H), or from the identity (M).

    M is checked for zeros now and then.
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([BW, K], gl.float32, LS)
    if coords.of_H == 0:
        # Zeros where the sequence begins, so that no map is applied to its initial state twice.
        S = ((o_v[:, None] == o_k[None, :]) & (o_k[None, :] >= gl.where(coords.begins, K, 0))).to(gl.float32)
    elif coords.begins:
        if gmem.S0 is not None:
            S = gl.load(gmem.S0 + state_offsets(gmem.s_S0, coords.n, coords.hv, o_v, o_k)).to(gl.float32)
    opaque_zero = gl.minimum(coords.steps, 0)
    total = 0.0
    next_total = 0.0
    if not CHANNEL:
        total = chunk_decay(gmem.total, coords.tile, coords.steps > 0, opaque_zero, BW, LS)
        next_total = chunk_decay(gmem.total, coords.tile + HV, coords.steps > 1, opaque_zero, BW, LS)
    stage = 0
    phase = 0
    checked = 0
    count = coords.steps
    check = count
    if not CHANNEL:
        check = gl.where(coords.of_H != 0, count, gl.minimum(_next_check(checked), count))
    while checked < count:
        for i in range(checked, check):
            mbarrier.wait(smem.full.index(stage), phase)
            S, later_total = _step(
                S, total, gmem, smem, coords, part, stage, i, opaque_zero, HV, K, BT, BW, PARTS, CHANNEL, FOLDED, STAGES
            )
            total = next_total
            next_total = later_total
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        checked = check
        if not CHANNEL:
            # `count` is written as soon as a stage is free for the chunk after a check. Stages are freed a chunk late,
            # and checks are at least 3 chunks apart: with 5 stages a warp could still read it at the previous check.
            gl.static_assert(STAGES <= 4)
            if (coords.of_H == 0) & (checked < count):
                _write_flag(smem.map_is_zero.index(part), _all_zeros(S).to(gl.int32))
                # The result of earlier checks, so that all warps of all parts continue or none does.
                mbarrier.wait(smem.full.index(stage), phase)
                count = _read_flag(smem.count)
                check = gl.minimum(_next_check(checked), count)
                # Without it the compiler places a barrier at the beginning of every chunk.
                barrier()
    if coords.needed != 0:
        if coords.of_H != 0:
            gl.store(gmem.H + state_offsets(gmem.s_H, coords.border, coords.hv, o_v, o_k), S)
        else:
            # Mark for `segment_fold`: rows of zeros get the other sign, which no other zero has.
            S = gl.where(S == 0.0, 0.0, S) * gl.where(_all_zeros(S), -1.0, 1.0)
            gl.store(gmem.M + state_offsets(gmem.s_M, coords.border, coords.hv, o_v, o_k), S)


@gluon.jit
def _next_check(chunks):
    """Number of chunks after which M is checked next; early checks are close together."""
    return chunks + gl.maximum(gl.minimum(chunks, 16), 3)


@gluon.jit
def _all_zeros(S):
    """Whether all numbers of S are zero."""
    return gl.max(gl.max((S != 0.0).to(gl.int32), 1), 0) == 0


@gluon.jit
def _write_flag(flag, value):
    """Write a number [1] to shared memory, visible to every warp that is signalled afterwards."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    flag.store(gl.zeros([1], gl.int32, L) + value)
    barrier()


@gluon.jit
def _read_flag(flag):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(flag.load(L), 0)


@gluon.jit
def _step(
    S,
    total,
    gmem,
    smem,
    coords,
    part,
    stage,
    i,
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
    """State leaving a chunk of tokens only; with a scalar gate also the decay of the chunk after the next one.

    The decay is loaded two chunks ahead: an iteration begins by copying the next value to its register, and waits for
    it there.
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, factors = smem.k.index(stage), smem.rows.index(stage)

    left = gl.convert_layout(S.to(OP), AS, assert_trivial=True)
    Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    fence_async_shared()
    mbarrier.arrive(smem.free.index(gl.where(stage == 0, STAGES, stage) - 1), count=1, pred=i > 0)
    v = smem.v.index(stage * PARTS + part).permute((1, 0)).load(LC).to(gl.float32)
    beta = factors.slice(3 * BT, BT).load(ROW)  # dropped by the compiler where it is not used
    if CHANNEL:
        S = S * smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
        Sk = warpgroup_mma_wait(0, deps=[Sk])
        R = v - Sk
    else:
        in_k = factors.slice(0, BT).load(ROW)
        S = S * total
        Sk = warpgroup_mma_wait(0, deps=[Sk])
        total = chunk_decay(gmem.total, coords.tile + (i + 2) * HV, i + 2 < coords.steps, opaque_zero, BW, LS)
        R = v - Sk * in_k[None, :]
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), AC, assert_trivial=True)
        S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
    else:
        r = gl.convert_layout(R.to(OP), AC, assert_trivial=True)
        e = warpgroup_mma(r, smem.write.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = factors.slice(2 * BT, BT).load(ROW)
        e = warpgroup_mma_wait(0, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), AC, assert_trivial=True)
        S = warpgroup_mma(u, key, S, is_async=True)
    return warpgroup_mma_wait(0, deps=[S]), total
