"""`scan` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups that hold the state.

The products are those of `scan` in Triton, in the same order and with the same roundings:

    R^T = V^T - (S^T k^T) in          Y^T = R^T beta
    o^T = (S^T q^T) in + Y^T F^T            S^T <- total S^T + Y^T E                      folded
    o^T = (S^T q^T) in + R^T (F beta)^T     S^T <- total S^T + ((R^T W^T) beta out) k     else

Factors come from `prepare`, in `Prepared`. in and out are a token's decay since the chunk's start and until its end,
with 1/|k| or 1/|q| where `prepare` computes norms; a channel gate's are in the tiles of q and k. total is the state's
decay over the chunk. "beta out" and "F beta" are stored as products. Calls are folded where the gate is per channel
(`prepare.reads_folded`). In the code, y is the left operand of both later products: Y if folded, else R.

S^T [value rows, K] is a float32 accumulator in registers. Every left operand is a rounded accumulator, which is already
in the register layout that WGMMA reads. Every right operand is a tile in shared memory, read directly or transposed.
The critical path of a chunk's state is its products and three conversions. The output's products run in their shadow,
and its store overlaps the last product.

A program's value rows are split between two parts that share the tiles (PARTS 2), or all its warpgroups work on them
together (PARTS 1). Mbarriers in shared memory synchronise the stages. `full` completes when TMA has written the
stage. `free` completes when every part has read it. A part arrives there after it has issued the next chunk's first
products, and then issues the TMA store of this chunk's output (`_release`). Until then the output is in one of OUT
buffers per part. With OUT 0 it is in the stage's v buffer, and `out_free` completes when TMA has read it from there.

A partial last chunk is a separate step after the loop. Its rows past the last token are masked, and its output is
stored through pointers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.records import Prepared, Slots
from wyfold.kernels.scan.triton import scan_key, sequences_to_run, slot_arguments
from wyfold.kernels.scan.triton.arguments import segment_tables
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.index.gluon import (
    barrier,
    clear_lower,
    clear_rows,
    clear_tokens,
    gluon_descriptors,
    quarters,
    tma_load,
    tma_load_upper,
    tma_store,
)
from wyfold.tile.index.triton import Packing, TokenRows, sequence_span, strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    require_descriptors,
    tile_descriptor,
    tma_readable,
    token_descriptor,
    upper_descriptor,
    vector_descriptor,
)
from wyfold.tile.index.triton.slots import segment_coords, slot_coords
from wyfold.tile.state.gluon import state_offsets


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    final_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
    segments: Segments | None = None,
    borders: Tensor | None = None,
    from_borders: bool | None = None,
    slots: Slots | None = None,
) -> None:
    """Run every sequence from its entering state, with the arguments of the Triton launch.

    Calls that want intermediate states use the Triton launch (`table.selected_backend`). Tokens that TMA cannot read
    are copied first.

    Args:
        q, k: [B, T, H, K] tokens, bfloat16, with the K of the configuration's row for `key`; all rows have K 128.
        v: [B, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        grid: Chunk grid of the call, or of its segments, with chunks of 64.
        options: Uses `scale`.
        key: Key of the launch configuration.
        o: [B, T, HV, V] written.
        final_state: [N, HV, K, V] view, written, or None.
        states, first_state: None. They are arguments because both launches are called alike; only the Triton launch
            stores intermediate states.
        segments: Layout of the segments, whose sequences are those of the states; None if no sequence is cut.
        borders: [borders, HV, K, V] view, states entering the segments that do not begin a sequence.
        from_borders: Whether to run only those segments, or only the others; None if no sequence is cut.
        slots: Slots of a pool, which then is both `initial_state` and `final_state`; None: states are indexed by
            sequence.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    concurrent = grid.sequences if segments is None else segments.expected
    selected, shift, count = sequences_to_run(grid, segments, from_borders)
    config = tuned("scan.gluon", scan_key(key, concurrent, v, kept=False), q.device)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    if prepared.q is None:
        q, k = tma_readable(q, C, K), tma_readable(k, C, K)
    v, out_rows = tma_readable(v, C, BV // parts), tma_readable(o, C, BV // parts)
    x_q, x_k, x_v, x_rows, x_total, x_write, x_F, x_o = require_descriptors(
        "scan", _descriptors(q, k, v, prepared, out_rows, C, BV // parts)
    )
    launch_kernel(
        wyfold_scan_gluon,
        count * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_write,
        x_F=x_F,
        x_o=x_o,
        tokens=Tokens(h_q=q.stride(2), h_k=k.stride(2), h_v=v.stride(2), o=out_rows, s_o=out_rows.stride()),
        states=States(S0=initial_state, s_S0=strides(initial_state), ST=final_state, s_ST=strides(final_state)),
        segments=segment_tables(segments, borders, selected),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=0 if segments is None else segments.sequences,
        shift=shift,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=options.scale,
        SIZES=Sizes(
            H=H,
            HV=HV,
            K=K,
            V=V,
            BT=C,
            BV=BV,
            PARTS=parts,
            OUT=out,
            STAGES=config.stages,
            PACKED=grid.cu is not None,
            CHANNEL=prepared.q is not None,
            FOLDED=prepared.E is not None,
        ),
        **slot_arguments(initial_state, slots),
        **config.options(),
    )
    if out_rows is not o:
        o.copy_(out_rows)


def _descriptors(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, o: Tensor, C: int, BW: int) -> list[Any] | None:
    """The kernel's first arguments, as descriptors where TMA accesses them; None if one cannot have a descriptor."""
    rows, total, q_tiles, k_tiles, E, F, W, FB, _ = prepared
    K, channel = q.shape[3], q_tiles is not None
    write, F = (W, FB) if E is None else (E, F)  # the kernel's x_write and x_F: W and F beta, or if folded E and F
    given = q, k, v, rows, total, write, F, o
    found = (
        tile_descriptor(q_tiles, C, K) if q_tiles is not None else token_descriptor(q, C, K),
        tile_descriptor(k_tiles, C, K) if k_tiles is not None else token_descriptor(k, C, K),
        token_descriptor(v, C, BW),
        vector_descriptor(rows.flatten(1), 4 * C),
        vector_descriptor(total, K) if channel else total,
        None if write is None else tile_descriptor(write, C, K) if write is E else upper_descriptor(write),
        None if F is None else upper_descriptor(F),
        token_descriptor(o, C, BW),
    )
    descriptors = all_or_none(given, found)
    return None if descriptors is None else gluon_descriptors(descriptors)


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        h_q, h_k, h_v: Distances between heads.
        o, s_o: Output, and its strides, for the partial chunk.
    """

    h_q: Any
    h_k: Any
    h_v: Any
    o: Any
    s_o: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [N, HV, K, V], each with its strides; None where the call has none.

    Attributes:
        S0, s_S0: Initial states.
        ST, s_ST: Final states, written.
    """

    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        OUT: Buffers per part for the output, or 0 (see above).
        STAGES: Chunks in flight.
        PACKED, CHANNEL, FOLDED: Whether the batch is packed, the gate is per channel, and E is read instead of W.
    """

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int
    PARTS: int
    OUT: int
    STAGES: int
    PACKED: bool
    CHANNEL: bool
    FOLDED: bool


class Smem(NamedTuple):
    """Shared-memory buffers, [STAGES, ..] unless noted.

    Attributes:
        q, k: Tiles [BT, K].
        v: Value tiles [BT, BW], [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        write: E [BT, K] if folded, else W [BT, BT].
        F: [BT, BT] F if folded, else F beta.
        out: Output tiles until their TMA store has read them: OUT * PARTS buffers, or v with OUT 0.
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
        out_free: Barrier, with OUT 0: the output stored from the stage's v has been read.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    F: Any
    out: Any
    full: Any
    free: Any
    out_free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        q, k, v, rows, total, write, F: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_v: First column of the program's head in the tokens.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    F: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        x_o: TMA descriptor of the output.
        S0: Initial states, or None.
        borders: States at the borders of segments, or None.
        o: Output pointer, for the partial chunk.
        ST: Final states, or None.
    """

    total: Any
    x_o: Any
    S0: Any
    s_S0: Any
    borders: Any
    s_borders: Any
    o: Any
    s_o: Any
    ST: Any
    s_ST: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        tile: Number of the first chunk's tile.
        n: Index of the entering state: a sequence, or with slots a slot.
        to: Slot of the leaving state; None without slots, where it is n.
        border: Number of the border in front of the segment.
        begins: Whether the segment begins its sequence; with slots, whether slot n holds a state.
        exists: Whether the segment belongs to a sequence.
        ends: Whether the segment ends its sequence; with slots, whether slot `to` is written.
        hv: Value head.
        b: Index in the batch.
        t: First token, in that row of the batch.
        token: First token, over all rows of the batch.
        column: First of the program's value rows.
        steps: Number of full chunks.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    tile: Any
    n: Any
    to: Any
    border: Any
    begins: Any
    exists: Any
    ends: Any
    hv: Any
    b: Any
    t: Any
    token: Any
    column: Any
    steps: Any
    tail_rows: Any


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
    by sequence, or with slots by the sequence's slots.
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
        i_n, begins, i_to, ends, live = slot_coords(
            i_n, pool.source, s_source, pool.target, s_target, pool.given, slots, pad
        )  # fmt: skip
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
            [
                (_consumer, (gmem, smem, coords, scale, 0, SIZES)),
                (_producer, (inputs, smem, count, SIZES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (gmem, smem, coords, scale, 0, SIZES)),
                (_consumer, (gmem, smem, coords, scale, 1, SIZES)),
                (_producer, (inputs, smem, count, SIZES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _producer(
    inputs,
    smem,
    count,
    SIZES: gl.constexpr,
):
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
    SIZES: gl.constexpr,
):
    """Consumer: run BW value rows through all chunks."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    first_row = coords.column + part * BW
    o_v = first_row + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([BW, K], gl.float32, LS)
    if gmem.borders is None:
        if gmem.S0 is not None:
            if coords.to is None:
                S = _load_state(gmem, coords, o_v, o_k)
            elif coords.begins:
                S = _load_state(gmem, coords, o_v, o_k)
    elif coords.begins:
        if gmem.S0 is not None:
            S = _load_state(gmem, coords, o_v, o_k)
    elif coords.exists:
        S = gl.load(gmem.borders + state_offsets(gmem.s_borders, coords.border, coords.hv, o_v, o_k))
    opaque_zero = gl.minimum(coords.steps, 0)
    total = 0.0
    if not CHANNEL:
        total = chunk_decay(gmem.total, coords.tile, coords.steps + coords.tail_rows > 0, opaque_zero, BW, LS)
    stage = 0
    phase = 0
    for i in range(coords.steps):
        next_total = total
        if not CHANNEL:
            has_next = (i + 1) * BT < coords.steps * BT + coords.tail_rows
            next_total = chunk_decay(gmem.total, coords.tile + (i + 1) * HV, has_next, opaque_zero, BW, LS)
        mbarrier.wait(smem.full.index(stage), phase)
        S = _step(
            S, total, gmem, smem, coords, scale, part, stage, i,
            SIZES, True,
        )  # fmt: skip
        total = next_total
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(stage), phase)
        S = _step(
            S, total, gmem, smem, coords, scale, part, stage, coords.steps,
            SIZES, False,
        )  # fmt: skip
    elif coords.steps > 0:
        before = gl.where(stage == 0, STAGES, stage) - 1
        _release(gmem, smem, coords, part, before, coords.steps - 1, BT, BW, PARTS, OUT)
    if gmem.ST is not None:
        i_to = coords.n
        if coords.to is not None:
            i_to = coords.to
        offsets = state_offsets(gmem.s_ST, i_to, coords.hv, o_v, o_k)
        if gmem.borders is None and coords.to is None:
            gl.store(gmem.ST + offsets, S.to(gmem.ST.dtype.element_ty))
        elif coords.ends:
            gl.store(gmem.ST + offsets, S.to(gmem.ST.dtype.element_ty))
    tma.store_wait(pendings=0)


@gluon.jit
def _load_state(gmem, coords, o_v, o_k):
    """Load the state that a sequence begins with.   [BW, K]"""
    return gl.load(gmem.S0 + state_offsets(gmem.s_S0, coords.n, coords.hv, o_v, o_k)).to(gl.float32)


@gluon.jit
def _step(
    S,
    total,
    gmem,
    smem,
    coords,
    scale,
    part,
    stage,
    i,
    SIZES: gl.constexpr,
    FULL: gl.constexpr,
):
    """Write a chunk's output; return the state leaving it.

    A channel gate implies FOLDED (`prepare.reads_folded`): the branches without FOLDED have one decay per token.

    Args:
        FULL: Whether all rows of the chunk are tokens.
    """
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    PENDING: gl.constexpr = OUT - 1 if OUT > 0 else 0
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)

    left = gl.convert_layout(S.to(OP), AS, assert_trivial=True)
    Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    Sq = warpgroup_mma(left, query.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    before = gl.where(stage == 0, STAGES, stage) - 1
    _release(gmem, smem, coords, part, before, i - 1, BT, BW, PARTS, OUT)
    if not FULL:
        Sk, Sq = warpgroup_mma_wait(0, deps=[Sk, Sq])
    v = smem.v.index(stage * PARTS + part).permute((1, 0)).load(LC)
    # The compiler drops the loads that a gate kind or a form does not use.
    in_k, in_q = factors.slice(0, BT).load(ROW), factors.slice(BT, BT).load(ROW)
    beta = factors.slice(3 * BT, BT).load(ROW)
    if FULL:
        Sk = warpgroup_mma_wait(1, deps=[Sk])
    if CHANNEL:
        R = v.to(gl.float32) - Sk
    else:
        R = v.to(gl.float32) - Sk * in_k[None, :]
    if not FULL:
        R = gl.where((gl.arange(0, BT, layout=ROW) < coords.tail_rows)[None, :], R, 0.0)
    e, beta_out = zero_acc, beta  # read without FOLDED alone
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), AC, assert_trivial=True)
        if FULL:
            Sq = warpgroup_mma_wait(0, deps=[Sq])
    else:
        y = gl.convert_layout(R.to(OP), AC, assert_trivial=True)
        e = warpgroup_mma(y, smem.write.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = factors.slice(2 * BT, BT).load(ROW)
        if FULL:
            Sq = warpgroup_mma_wait(1, deps=[Sq])
    if not CHANNEL:
        Sq = Sq * in_q[None, :]
    o = warpgroup_mma(y, smem.F.index(stage), Sq, is_async=True)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    S = S * total
    if FOLDED:
        S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
    else:
        e = warpgroup_mma_wait(1, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), AC, assert_trivial=True)
        if not FULL:
            clear_rows(key, coords.tail_rows, BT, K)
        S = warpgroup_mma(u, key, S, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    o = (o * scale).to(OP)
    tma.store_wait(pendings=PENDING)
    if OUT == 0:
        mbarrier.arrive(smem.out_free.index(before), count=1, pred=i > 0)
    buffer = _out_buffer(smem, part, stage, i, PARTS, OUT)
    buffer.permute((1, 0)).store(o)
    if not FULL:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
        o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
        o_v = coords.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(0, L))
        first = coords.b * gmem.s_o[0] + (coords.t + i * BT) * gmem.s_o[1] + coords.hv * gmem.s_o[2]
        # o has a descriptor, so its last stride is 1. Multiplying by the runtime stride would split the store into
        # single numbers.
        offsets = o_t.to(gl.int64)[:, None] * gmem.s_o[1] + o_v[None, :]
        # o_v >= 0 is always true; it gives the mask the second dimension of the pointers.
        gl.store(gmem.o + first + offsets, buffer.load(L), mask=(o_t < coords.tail_rows)[:, None] & (o_v >= 0)[None, :])
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _out_buffer(smem, part, stage, i, PARTS: gl.constexpr, OUT: gl.constexpr):
    """Shared-memory buffer of a part's output of chunk i."""
    if OUT == 0:
        return smem.out.index(stage * PARTS + part)
    else:
        return smem.out.index((i % OUT) * PARTS + part)


@gluon.jit
def _release(
    gmem,
    smem,
    coords,
    part,
    stage,
    i,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
):
    """Arrive at `free` for chunk i's stage and issue the TMA store of its output; nothing for i = -1.

    The first call has i = -1 and stores nothing: a TMA store of a block that lies entirely before the tensor is an
    illegal instruction (docs/facts/hopper.md, TMA-1).
    """
    fence_async_shared()
    mbarrier.arrive(smem.free.index(stage), count=1, pred=i >= 0)
    column = (coords.hv * gmem.s_o[2]).to(gl.int32) + coords.column + part * BW
    if i >= 0:
        # The buffer of i + OUT is that of i, and the sum is not negative for i = -1 either.
        tma_store(gmem.x_o, [coords.token + i * BT, column], _out_buffer(smem, part, stage, i + OUT, PARTS, OUT))
