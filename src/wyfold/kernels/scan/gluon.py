"""`scan` in Gluon, for Hopper: one warp brings tiles ahead of the warpgroups that hold the state.

The products are those of the Triton kernel beside it, in the same order and with the same roundings:

    R^T = V^T - (S^T k^T) in          Y^T = R^T beta
    o^T = (S^T q^T) in + Y^T F^T            S^T <- total S^T + Y^T E                      folded
    o^T = (S^T q^T) in + R^T (F beta)^T     S^T <- total S^T + ((R^T W^T) beta out) k     else

F beta and beta out come from `prepare`. Below, y is what both products begin with: Y, or R.

S^T [value rows, K] is a float32 accumulator of the matrix units. Every left operand is one, rounded, which is where it
has to be already; every right operand is a tile in shared memory, read as it lies or transposed on the way. What a
chunk's state waits for is its products and three conversions: the output's products run in their shadow, and its store
under the last one.

A program's value rows are halved among warpgroups that share the tiles (PARTS 2), or taken by all of them in step
(PARTS 1). Tiles are handed over by barriers in shared memory: `full` when the copy engine has written a stage, `free`
when every part has read it, which a part says after it has issued the next chunk's first products. Then, too, output is
given to the copy engine, from shared memory of its own (OUT buffers a part) or, with OUT 0, from that of the chunk's v,
which is freed by a barrier of its own, `spare`.

The chunk that a sequence does not fill is a step of its own after the loop: its rows that are no tokens are selected
away, its output goes by address.
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
from wyfold.kernels.scan.triton import SLOT_NUMBERS, scan_key, scanned, slot_arguments
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launched
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.gluon import chunk_decay
from wyfold.tile.index.gluon import (
    barrier,
    clear_lower,
    clear_rows,
    clear_tokens,
    quarters,
    shared,
    tma_load,
    tma_load_upper,
    tma_store,
)
from wyfold.tile.index.triton import (
    boxable,
    boxes_or_refusal,
    every_box,
    number_boxes,
    segment_place,
    sequence_span,
    slot_place,
    strides,
    tile_boxes,
    token_boxes,
    upper_boxes,
)
from wyfold.tile.state.gluon import state_offsets


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: str,
    o: Tensor,
    final_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
    segments: Segments | None = None,
    borders: Tensor | None = None,
    behind: bool | None = None,
    slots: Slots | None = None,
) -> None:
    """Run every sequence from its entering state. Arguments as of the Triton launch, which serves calls that want
    states on the way (`table.selected_backend`). Tokens that the copy engine cannot read are copied first.

    Args:
        q, k: [B, T, H, K] tokens, bfloat16, K 64 or 128, as the table's row for `key` says.
        v: [B, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        grid: The call's chunk grid, or that of its segments, of chunks of 64.
        options: Uses `scale`.
        key: Of the launch configuration.
        o: [B, T, HV, V] written.
        final_state: [N, HV, K, V] view, written, or None.
        states, first_state: None: states on the way are the Triton launch's.
        segments: Where the segments lie, whose sequences are those of the states; None if there are none.
        borders: [borders, HV, K, V] view, states that enter segments which do not begin a sequence.
        behind: Whether to run those segments, or the others; None where there are no segments.
        slots: Where in a pool, which is then both `initial_state` and `final_state`, states lie; None: by sequence.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    side_by_side = grid.sequences if segments is None else segments.likely
    named, shift, count = scanned(grid, segments, behind)
    config = tuned("scan.gluon", scan_key(key, side_by_side, v, kept=False), q.device)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    if prepared.q is None:
        q, k = boxable(q, C, K), boxable(k, C, K)
    v, out_rows = boxable(v, C, BV // parts), boxable(o, C, BV // parts)
    boxes = boxes_or_refusal("scan", _boxes(q, k, v, prepared, out_rows, C, BV // parts))
    launched(
        wyfold_scan_gluon,
        count * HV * (V // BV),
        *boxes,
        v.stride(2),
        q.stride(2),
        k.stride(2),
        initial_state,
        strides(initial_state),
        out_rows,
        out_rows.stride(),
        final_state,
        strides(final_state),
        borders,
        strides(borders),
        None if segments is None else segments.sequence,
        None if segments is None else segments.first,
        0 if segments is None else segments.sequences,
        named,
        shift,
        *slot_arguments(initial_state, slots),
        grid.cu,
        grid.first,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BV=BV,
        PARTS=parts,
        OUT=out,
        PACKED=grid.cu is not None,
        CHANNEL=prepared.q is not None,
        FOLDED=prepared.E is not None,
        STAGES=config.stages,
        **config.options(),
    )
    if out_rows is not o:
        o.copy_(out_rows)


def _boxes(q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, o: Tensor, C: int, BW: int) -> list[Any] | None:
    """The kernel's first arguments, each as boxes where it is read by them; None if one cannot be."""
    rows, total, q_tiles, k_tiles, E, F, W, FB, _ = prepared
    K, channel = q.shape[3], q_tiles is not None
    write, F = (W, FB) if E is None else (E, F)
    given = q, k, v, rows, total, write, F, o
    found = (
        tile_boxes(q_tiles, C, K) if q_tiles is not None else token_boxes(q, C, K),
        tile_boxes(k_tiles, C, K) if k_tiles is not None else token_boxes(k, C, K),
        token_boxes(v, C, BW),
        number_boxes(rows.flatten(1), 4 * C),
        number_boxes(total, K) if channel else total,
        None if write is None else tile_boxes(write, C, K) if write is E else upper_boxes(write),
        None if F is None else upper_boxes(F),
        token_boxes(o, C, BW),
    )
    boxes = every_box(given, found)
    return None if boxes is None else shared(boxes)


class Tiles(NamedTuple):
    """Shared memory. Of every stage what a chunk reads; write: E, or W; F: with beta beside W; v: by parts. out: where
    output waits."""

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
    spare: Any


class Source(NamedTuple):
    """Boxes of what is brought, and where the next chunk's are: its tile, its first token, columns of its tokens."""

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


class Memory(NamedTuple):
    """What the parts reach by themselves: decays of a scalar gate, output by boxes and by address, states."""

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


class Place(NamedTuple):
    """Of a program: first tile, number of the state that enters, and of the one that leaves (None: the same), border
    before a segment, whether the sequence begins in it, whether it has one, and whether it ends in it, value head,
    buffer row, first token there and in all rows, first value row, chunks that are full, and tokens of one that is
    not. Of a pool, a state is there to begin with, and there is a slot to end in."""

    tile: Any
    n: Any
    to: Any
    border: Any
    begins: Any
    here: Any
    ends: Any
    hv: Any
    b: Any
    t: Any
    token: Any
    column: Any
    steps: Any
    rest: Any


@gluon.jit(do_not_specialize=[*SLOT_NUMBERS, "N", "shift", "T", "per_sequence", "scale"])
def wyfold_scan_gluon(
    x_q,
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    x_F,
    x_o,
    h_v,
    h_q,
    h_k,
    p_S0,
    s_S0,
    p_o,
    s_o,
    p_ST,
    s_ST,
    p_borders,
    s_borders,
    p_sequence,
    p_first_segment,
    N,
    p_named,
    shift,
    p_source,
    s_source,
    p_target,
    s_target,
    p_given,
    slots,
    pad,
    p_cu,
    p_first,
    T,
    per_sequence,
    scale,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
    PACKED: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program owns BV value rows of one state; a head's tiles are neighbours, so that they share k and q in L2.

    Sequence i_n is a segment where p_sequence says of which one, so many behind one that p_named names; states that
    come and go have that one's number. Where there are slots, they have the numbers of these.
    """
    NV: gl.constexpr = V // BV
    BW: gl.constexpr = BV // PARTS
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    if p_named is not None:
        i_n = gl.load(p_named + i_n) + shift
    i_h = i_hv // (HV // H)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    begins, ends, i_border, i_to = True, True, i_n, None
    if p_sequence is not None:
        i_n, i_border, begins, ends = segment_place(i_n, p_sequence, p_first_segment, N)
    if slots is not None:
        i_n, begins, i_to, ends, live = slot_place(
            i_n, p_source, s_source, p_target, s_target, p_given, slots, pad
        )  # fmt: skip
        if not live:
            # Zeroed here, by the first tile's program; to all that follows there are none.
            if i_v == 0:
                for row in range(0, length, BT):
                    clear_tokens(p_o, s_o, b, t + row, i_hv, length - row, V, BT, V)
            length = length * 0
    column = (i_v * BV).to(gl.int32)
    token = (b * T + t).to(gl.int32)
    steps = (length // BT).to(gl.int32)
    rest = (length - steps.to(gl.int64) * BT).to(gl.int32)

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
    spare = free
    if OUT == 0:
        spare = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(free.index(s), count=PARTS)
        if OUT == 0:
            mbarrier.init(spare.index(s), count=PARTS)
    clear_lower(quarters(F, x_F, STAGES), STAGES)
    if not FOLDED:
        clear_lower(quarters(write, x_write, STAGES), STAGES)
    fence_async_shared()
    barrier()

    tiles = Tiles(q, k, v, rows, total, write, F, out, full, free, spare)
    memory = Memory(x_total, x_o, p_S0, s_S0, p_borders, s_borders, p_o, s_o, p_ST, s_ST)
    source = Source(
        x_q,
        x_k,
        x_v,
        x_rows,
        x_total,
        x_write,
        x_F,
        i_tile.to(gl.int32),
        token,
        (i_h * h_q).to(gl.int32),
        (i_h * h_k).to(gl.int32),
        (i_hv * h_v).to(gl.int32) + column,
    )
    count = steps + (rest > 0).to(gl.int32)
    at = Place(i_tile, i_n, i_to, i_border - 1, begins, i_n < N, ends, i_hv, b, t, token, column, steps, rest)
    if PARTS == 1:
        gl.warp_specialize(
            [
                (_recur, (memory, tiles, at, scale, 0, HV, K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES)),
                (_bring, (source, tiles, count, HV, K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_recur, (memory, tiles, at, scale, 0, HV, K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES)),
                (_recur, (memory, tiles, at, scale, 1, HV, K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES)),
                (_bring, (source, tiles, count, HV, K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _bring(
    source,
    tiles,
    count,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Bring every chunk's tiles, the unfilled one's too, as soon as there is a stage for them."""
    BYTES: gl.constexpr = (
        source.q.block_type.nbytes
        + source.k.block_type.nbytes
        + source.v.block_type.nbytes * PARTS
        + source.rows.block_type.nbytes
        + source.write.block_type.nbytes * (1 if FOLDED else 3)
        + source.F.block_type.nbytes * 3
    )
    tile, token = source.tile, source.token
    stage = 0
    phase = 1
    for _ in range(count):
        full = tiles.full.index(stage)
        mbarrier.wait(tiles.free.index(stage), phase)
        if CHANNEL:
            mbarrier.expect(full, BYTES + source.total.block_type.nbytes)
            tma_load(source.k, [tile * BT, 0], full, tiles.k.index(stage))
            tma_load(source.q, [tile * BT, 0], full, tiles.q.index(stage))
            tma_load(source.total, [tile * K], full, tiles.total.index(stage))
        else:
            mbarrier.expect(full, BYTES)
            tma_load(source.k, [token, source.column_k], full, tiles.k.index(stage))
            tma_load(source.q, [token, source.column_q], full, tiles.q.index(stage))
        tma_load(source.rows, [tile * (4 * BT)], full, tiles.rows.index(stage))
        if OUT == 0:
            mbarrier.wait(tiles.spare.index(stage), phase)
        for part in gl.static_range(PARTS):
            tma_load(source.v, [token, source.column_v + part * BW], full, tiles.v.index(stage * PARTS + part))
        if FOLDED:
            tma_load(source.write, [tile * BT, 0], full, tiles.write.index(stage))
        else:
            tma_load_upper(source.write, tile, full, quarters(tiles.write, source.write, STAGES), stage)
        tma_load_upper(source.F, tile, full, quarters(tiles.F, source.F, STAGES), stage)
        tile += HV
        token += BT
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _recur(
    memory,
    tiles,
    at,
    scale,
    part,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Take BW value rows through every chunk."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    mine = at.column + part * BW
    o_v = mine + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([BW, K], gl.float32, LS)
    if memory.borders is None:
        if memory.S0 is not None:
            if at.to is None:
                S = _entering(memory, at, o_v, o_k)
            elif at.begins:
                S = _entering(memory, at, o_v, o_k)
    elif at.begins:
        if memory.S0 is not None:
            S = _entering(memory, at, o_v, o_k)
    elif at.here:
        S = gl.load(memory.borders + state_offsets(memory.s_borders, at.border, at.hv, o_v, o_k))
    nothing = gl.minimum(at.steps, 0)
    total = 0.0
    if not CHANNEL:
        total = chunk_decay(memory.total, at.tile, at.steps + at.rest > 0, nothing, BW, LS)
    stage = 0
    phase = 0
    for i in range(at.steps):
        next_total = total
        if not CHANNEL:
            there = (i + 1) * BT < at.steps * BT + at.rest
            next_total = chunk_decay(memory.total, at.tile + (i + 1) * HV, there, nothing, BW, LS)
        mbarrier.wait(tiles.full.index(stage), phase)
        S = _step(
            S, total, memory, tiles, at, scale, part, stage, i,
            K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES, True,
        )  # fmt: skip
        total = next_total
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if at.rest > 0:
        mbarrier.wait(tiles.full.index(stage), phase)
        S = _step(
            S, total, memory, tiles, at, scale, part, stage, at.steps,
            K, BT, BW, PARTS, OUT, CHANNEL, FOLDED, STAGES, False,
        )  # fmt: skip
    elif at.steps > 0:
        before = gl.where(stage == 0, STAGES, stage) - 1
        _leave(memory, tiles, at, part, before, at.steps - 1, BT, BW, PARTS, OUT)
    if memory.ST is not None:
        i_to = at.n
        if at.to is not None:
            i_to = at.to
        offsets = state_offsets(memory.s_ST, i_to, at.hv, o_v, o_k)
        if memory.borders is None and at.to is None:
            gl.store(memory.ST + offsets, S.to(memory.ST.dtype.element_ty))
        elif at.ends:
            gl.store(memory.ST + offsets, S.to(memory.ST.dtype.element_ty))
    tma.store_wait(pendings=0)


@gluon.jit
def _entering(memory, at, o_v, o_k):
    """The state that a sequence begins with.   [BW, K]"""
    return gl.load(memory.S0 + state_offsets(memory.s_S0, at.n, at.hv, o_v, o_k)).to(gl.float32)


@gluon.jit
def _step(
    S,
    total,
    memory,
    tiles,
    at,
    scale,
    part,
    stage,
    i,
    K: gl.constexpr,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
    FULL: gl.constexpr,
):
    """Write a chunk's output; returns the state leaving it. FULL: all its rows are tokens."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = tiles.k.dtype
    PENDING: gl.constexpr = OUT - 1 if OUT > 0 else 0
    nothing = gl.zeros([BW, BT], gl.float32, LC)
    key, query, number = tiles.k.index(stage), tiles.q.index(stage), tiles.rows.index(stage)

    left = gl.convert_layout(S.to(OP), AS, assert_trivial=True)
    Sk = warpgroup_mma(left, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
    Sq = warpgroup_mma(left, query.permute((1, 0)), nothing, use_acc=False, is_async=True)
    before = gl.where(stage == 0, STAGES, stage) - 1
    _leave(memory, tiles, at, part, before, i - 1, BT, BW, PARTS, OUT)
    if not FULL:
        Sk, Sq = warpgroup_mma_wait(0, deps=[Sk, Sq])
    v = tiles.v.index(stage * PARTS + part).permute((1, 0)).load(LC)
    if not CHANNEL:
        in_k, in_q = number.slice(0, BT).load(ROW), number.slice(BT, BT).load(ROW)
    if FOLDED:
        beta = number.slice(3 * BT, BT).load(ROW)
    if FULL:
        Sk = warpgroup_mma_wait(1, deps=[Sk])
    if CHANNEL:
        R = v.to(gl.float32) - Sk
    else:
        R = v.to(gl.float32) - Sk * in_k[None, :]
    if not FULL:
        R = gl.where((gl.arange(0, BT, layout=ROW) < at.rest)[None, :], R, 0.0)
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), AC, assert_trivial=True)
        if FULL:
            Sq = warpgroup_mma_wait(0, deps=[Sq])
    else:
        y = gl.convert_layout(R.to(OP), AC, assert_trivial=True)
        e = warpgroup_mma(y, tiles.write.index(stage), nothing, use_acc=False, is_async=True)
        beta_out = number.slice(2 * BT, BT).load(ROW)
        if FULL:
            Sq = warpgroup_mma_wait(1, deps=[Sq])
    if not CHANNEL:
        Sq = Sq * in_q[None, :]
    o = warpgroup_mma(y, tiles.F.index(stage), Sq, is_async=True)
    if CHANNEL:
        total = tiles.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    S = S * total
    if FOLDED:
        S = warpgroup_mma(y, tiles.write.index(stage), S, is_async=True)
    else:
        e = warpgroup_mma_wait(1, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), AC, assert_trivial=True)
        if not FULL:
            clear_rows(key, at.rest, BT, K)
        S = warpgroup_mma(u, key, S, is_async=True)
    o = warpgroup_mma_wait(1, deps=[o])
    o = (o * scale).to(OP)
    tma.store_wait(pendings=PENDING)
    if OUT == 0:
        mbarrier.arrive(tiles.spare.index(before), count=1, pred=i > 0)
    place = _place(tiles, part, stage, i, PARTS, OUT)
    place.permute((1, 0)).store(o)
    if not FULL:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
        o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
        o_v = at.column + part * BW + gl.arange(0, BW, layout=gl.SliceLayout(0, L))
        first = at.b * memory.s_o[0] + (at.t + i * BT) * memory.s_o[1] + at.hv * memory.s_o[2]
        # The last stride is 1, since o has boxes; not multiplied by it, for a part does not know it and would store
        # each number by itself.
        offsets = o_t.to(gl.int64)[:, None] * memory.s_o[1] + o_v[None, :]
        gl.store(memory.o + first + offsets, place.load(L), mask=(o_t < at.rest)[:, None] & (o_v >= 0)[None, :])
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _place(tiles, part, stage, i, PARTS: gl.constexpr, OUT: gl.constexpr):
    """Where a part's output of chunk i waits to be stored."""
    if OUT == 0:
        return tiles.out.index(stage * PARTS + part)
    else:
        return tiles.out.index((i % OUT) * PARTS + part)


@gluon.jit
def _leave(
    memory,
    tiles,
    at,
    part,
    stage,
    i,
    BT: gl.constexpr,
    BW: gl.constexpr,
    PARTS: gl.constexpr,
    OUT: gl.constexpr,
):
    """Hand chunk i's stage back, and its output to the copy engine; of chunk -1 nothing.

    Not by a box that lies outside of memory as a whole: storing one is suspected to be an illegal instruction.
    """
    fence_async_shared()
    mbarrier.arrive(tiles.free.index(stage), count=1, pred=i >= 0)
    column = (at.hv * memory.s_o[2]).to(gl.int32) + at.column + part * BW
    if i >= 0:
        tma_store(memory.x_o, [at.token + i * BT, column], _place(tiles, part, stage, i + OUT, PARTS, OUT))
