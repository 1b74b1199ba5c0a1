"""`scan_bwd` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups.

A consumer holds a state, or its gradient. The products are those of `scan_bwd` in Triton, in the same order and with
the same roundings. A chunk stores S and e, or dS and X. Loads and barriers are as in `scan` in Gluon:

    forward half                                reverse half
    R^T = v^T - (S^T k^T) in                    X^T  = s do^T F + dS^T E^T                            folded
    e^T = R^T W^T                               X^T  = s do^T F + ((dS^T k^T) out beta) W / beta      else
    S^T <- total S^T + (R^T beta) E   folded    dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k
    S^T <- total S^T + (e^T beta out) k   else

The stored state is its rounded copy, the left operand of the chunk's first product, written to shared memory under that
product. Its TMA store is issued together with that of e or X of the preceding chunk, which was written under that
chunk's last product. TMA has the rest of the chunk to read both. With OUT 2, two state buffers, it has one chunk more
for the state.

dS and X are in units of `DeltaOptions.unit`, relative to which s, otherwise the scale, is 1 and needs no
multiplication. A product with W starts from the rounding error of its operand, except that of e where it enters the
state. In the reverse half do^T q does not depend on the gradient's products and fills the matrix units between two that
do.

A half that needs fewer tiles leaves its stages partly unused: x holds v or do, square W or F. A partial chunk is a
separate step, last in the forward half and first in the reverse half. Its rows past the last token are cleared in
shared memory first.
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

from wyfold.kernels.records import Prepared, TokenBorders
from wyfold.kernels.scan_bwd.triton import Half, programs, scan_bwd_key
from wyfold.kernels.scan_bwd.triton.arguments import States, segment_tables
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.dot.gluon import in_bfloat16, one_over
from wyfold.tile.index.gluon import (
    barrier,
    clear_lower,
    clear_rows,
    gluon_descriptors,
    quarters,
    tma_load,
    tma_load_upper,
    tma_store,
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


def scan_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    dS0: Tensor | None,
    borders: TokenBorders,
    segments: Segments | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    half: Half = "both",
) -> None:
    """States and their gradients at the borders of every chunk, with the arguments of the Triton launch.

    Tokens that TMA cannot read are copied first.

    Args:
        q, k: [B, T, H, K] tokens, bfloat16, K 64 or 128, as the table's row for `key` says.
        v, do: [B, T, HV, V].
        prepared: From `prepare`, including W.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        grid: Chunk grid of the call, or of its segments, with chunks of 64.
        options: Uses `scale`.
        key: Key of the launch configuration.
        dS0: [N, HV, K, V] view, written, or None.
        borders: From `token_borders`, written.
        segments: Layout of the segments, whose sequences are those of the states; None if no sequence is cut.
        entering, leaving: [borders, HV, K, V] views, states at the segments' borders and their gradients.
        half: Half to run: "forward" reads no gradient of a state, "reverse" no state.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    config = tuned("scan_bwd.gluon", scan_bwd_key(key, grid.sequences, v), q.device)
    halves, going_back = programs(half, grid.sequences)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    if prepared.q is None:
        q, k = tma_readable(q, C, K), tma_readable(k, C, K)
    v, do = tma_readable(v, C, BV // parts), tma_readable(do, C, BV // parts)
    x_q, x_k, x_v, x_do, x_rows, x_total, x_E, x_F, x_W, x_S, x_dS, x_e, x_X = require_descriptors(
        "scan_bwd", _descriptors(q, k, v, prepared, do, borders, C, BV // parts)
    )
    launch_kernel(
        wyfold_scan_bwd_gluon,
        halves * grid.sequences * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        x_F=x_F,
        x_W=x_W,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        heads=Heads(h_q=q.stride(2), h_k=k.stride(2), h_v=v.stride(2), h_do=do.stride(2)),
        states=States(
            S0=initial_state, s_S0=strides(initial_state), dST=dST, s_dST=strides(dST), dS0=dS0, s_dS0=strides(dS0)
        ),
        segments=segment_tables(segments, entering, leaving),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences if segments is None else segments.sequences,
        going_back=going_back,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        unit=options.unit,
        scale=None if options.scale == options.unit else options.scale / options.unit,
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
        **config.options(),
    )


def _descriptors(
    q: Tensor, k: Tensor, v: Tensor, prepared: Prepared, do: Tensor, borders: TokenBorders, C: int, BW: int
) -> list[Any] | None:
    """The kernel's first arguments, as descriptors where TMA accesses them; None if one cannot have a descriptor."""
    rows, total, q_tiles, k_tiles, E, F, W = prepared[:7]
    K, channel = q.shape[3], q_tiles is not None
    if W is None:
        return None
    given = q, k, v, do, rows, total, E, F, W, *borders
    descriptors = all_or_none(
        given,
        (
            tile_descriptor(q_tiles, C, K) if q_tiles is not None else token_descriptor(q, C, K),
            tile_descriptor(k_tiles, C, K) if k_tiles is not None else token_descriptor(k, C, K),
            token_descriptor(v, C, BW),
            token_descriptor(do, C, BW),
            vector_descriptor(rows.flatten(1), 4 * C),
            vector_descriptor(total, K) if channel else total,
            None if E is None else tile_descriptor(E, C, K),
            None if F is None else upper_descriptor(F),
            upper_descriptor(W),
            tile_descriptor(borders.S, BW, K),
            tile_descriptor(borders.dS, BW, K),
            tile_descriptor(borders.e, C, BW),
            tile_descriptor(borders.X, C, BW),
        ),
    )
    return None if descriptors is None else gluon_descriptors(descriptors)


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k, v and do."""

    h_q: Any
    h_k: Any
    h_v: Any
    h_do: Any


class Sizes(NamedTuple):
    """Constexprs.

    Attributes:
        H, HV, K, V, BT: Sizes of the call and of a chunk.
        BV: Value rows of a program, which PARTS share.
        OUT: Buffers per part for S or dS.
        STAGES: Chunks in flight.
        PACKED, CHANNEL, FOLDED: Whether the batch is packed, the gate is per channel, and E is read.
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
        x: Tiles [BT, BW] of v, or of do in the reverse half, [STAGES * PARTS, ..].
        rows: Row factors of a chunk, 4 BT numbers.
        total: Decay of the chunk, [K], with a channel gate.
        square: [BT, BT]: W, or F in the reverse half.
        write: E [BT, K], or W [BT, BT] in the reverse half.
        state: [OUT * PARTS, BW, K] S or dS until their TMA store has read them.
        tokens: [PARTS, BT, BW] e or X, likewise.
        full: Barrier: the producer's loads of the stage have arrived.
        free: Barrier: every part has read the stage.
    """

    q: Any
    k: Any
    x: Any
    rows: Any
    total: Any
    square: Any
    write: Any
    state: Any
    tokens: Any
    full: Any
    free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors of the tiles that the producer loads, and coordinates of the first chunk.

    Attributes:
        q, k, v, do, rows, total, E, F, W: Descriptors.
        tile: Number of the chunk's tile.
        token: Row of its first token.
        column_q, column_k, column_v, column_do: First column of the program's head in the tokens.
    """

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any
    total: Any
    E: Any
    F: Any
    W: Any
    tile: Any
    token: Any
    column_q: Any
    column_k: Any
    column_v: Any
    column_do: Any


class Globals(NamedTuple):
    """Global memory that the consumers access themselves; `s_` are the strides.

    Attributes:
        total: Decays of a scalar gate.
        S, dS, e, X: TMA descriptors of a chunk's results.
        S0: Initial states, or None.
        dST: Gradients of the final states, or None.
        dS0: Gradients of the initial states, or None.
        entering, leaving: States at the borders of segments and their gradients, or None.
    """

    total: Any
    S: Any
    dS: Any
    e: Any
    X: Any
    S0: Any
    s_S0: Any
    dST: Any
    s_dST: Any
    dS0: Any
    s_dS0: Any
    entering: Any
    s_entering: Any
    leaving: Any
    s_leaving: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        back: 1 in the reverse half, else 0.
        tile: First tile.
        n: Sequence.
        border: Border behind the segment.
        begins: The sequence begins in this segment.
        exists: The segment belongs to a sequence.
        ends: The sequence ends in this segment.
        hv: Value head.
        column: First value row.
        steps: Number of full chunks.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    back: Any
    tile: Any
    n: Any
    border: Any
    begins: Any
    exists: Any
    ends: Any
    hv: Any
    column: Any
    steps: Any
    tail_rows: Any


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
    gmem = Globals(
        x_total,
        x_S,
        x_dS,
        x_e,
        x_X,
        states.S0,
        states.s_S0,
        states.dST,
        states.s_dST,
        states.dS0,
        states.s_dS0,
        segments.entering,
        segments.s_entering,
        segments.leaving,
        segments.s_leaving,
    )
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
            [
                (
                    _consumer,
                    (gmem, smem, coords, unit, scale, 0, SIZES),
                ),
                (_producer, (inputs, smem, back, count, SIZES)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _consumer,
                    (gmem, smem, coords, unit, scale, 0, SIZES),
                ),
                (
                    _consumer,
                    (gmem, smem, coords, unit, scale, 1, SIZES),
                ),
                (_producer, (inputs, smem, back, count, SIZES)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _producer(
    inputs,
    smem,
    back,
    count,
    SIZES: gl.constexpr,
):
    """Producer: load the tiles of every chunk, including a partial one, as soon as a stage is free."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    BYTES: gl.constexpr = (
        inputs.k.block_type.nbytes
        + inputs.rows.block_type.nbytes
        + (inputs.total.block_type.nbytes if CHANNEL else 0)
        + (inputs.E.block_type.nbytes if FOLDED else 0)
    )
    FORWARD: gl.constexpr = BYTES + inputs.v.block_type.nbytes * PARTS + inputs.W.block_type.nbytes * 3
    REVERSE: gl.constexpr = (
        BYTES
        + inputs.q.block_type.nbytes
        + inputs.do.block_type.nbytes * PARTS
        + inputs.F.block_type.nbytes * 3
        + (0 if FOLDED else inputs.W.block_type.nbytes * 3)
    )
    tile, token = inputs.tile, inputs.token
    squares = quarters(smem.square, inputs.F, STAGES)
    ahead = 1 - 2 * back
    stage = 0
    phase = 1
    for _ in range(count):
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        mbarrier.expect(full, FORWARD, pred=back == 0)
        mbarrier.expect(full, REVERSE, pred=back != 0)
        if CHANNEL:
            tma_load(inputs.k, [tile * BT, 0], full, smem.k.index(stage))
            tma_load(inputs.total, [tile * K], full, smem.total.index(stage))
        else:
            tma_load(inputs.k, [token, inputs.column_k], full, smem.k.index(stage))
        if FOLDED:
            tma_load(inputs.E, [tile * BT, 0], full, smem.write.index(stage))
        tma_load(inputs.rows, [tile * (4 * BT)], full, smem.rows.index(stage))
        if back != 0:
            for part in gl.static_range(PARTS):
                tma_load(inputs.do, [token, inputs.column_do + part * BW], full, smem.x.index(stage * PARTS + part))
            tma_load_upper(inputs.F, tile, full, squares, stage)
            if not FOLDED:
                tma_load_upper(inputs.W, tile, full, quarters(smem.write, inputs.W, STAGES), stage)
            if CHANNEL:
                tma_load(inputs.q, [tile * BT, 0], full, smem.q.index(stage))
            else:
                tma_load(inputs.q, [token, inputs.column_q], full, smem.q.index(stage))
        else:
            for part in gl.static_range(PARTS):
                tma_load(inputs.v, [token, inputs.column_v + part * BW], full, smem.x.index(stage * PARTS + part))
            tma_load_upper(inputs.W, tile, full, squares, stage)
        tile += ahead * HV
        token += ahead * BT
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _consumer(
    gmem,
    smem,
    coords,
    unit,
    scale,
    part,
    SIZES: gl.constexpr,
):
    """Consumer: run BW value rows through all chunks, in either direction."""
    if coords.back != 0:
        _reverse(gmem, smem, coords, unit, scale, part, SIZES)
    else:
        _forward(gmem, smem, coords, part, SIZES)
    tma.store_wait(pendings=0)


@gluon.jit
def _reverse(
    gmem,
    smem,
    coords,
    unit,
    scale,
    part,
    SIZES: gl.constexpr,
):
    """Reverse half: from the last chunk, which may be partial, to the first."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    first_row = coords.column + part * BW
    dS = _load_state(
        gmem.dST, gmem.s_dST, coords.ends, gmem.leaving, gmem.s_leaving, coords.border, coords, first_row, K, BW
    )
    # Without a token the gradient passes through unchanged.
    unit = gl.where(coords.steps + coords.tail_rows > 0, unit, 1.0)
    dS = dS * (1.0 / unit)
    total = 0.0
    if not CHANNEL:
        total = gl.load(gmem.total + coords.tile + (coords.steps - 1) * HV, mask=coords.steps > 0, other=0.0)
    stage = 0
    phase = 0
    done = 0
    if coords.tail_rows > 0:
        last_total = total
        if not CHANNEL:
            last_total = gl.load(gmem.total + coords.tile + coords.steps * HV)
        mbarrier.wait(smem.full.index(stage), phase)
        dS = _reverse_step(
            dS, last_total, gmem, smem, coords, scale, part, stage, coords.steps, done, SIZES, False,
        )  # fmt: skip
        done += 1
        stage += 1  # no wrap: there are at least two stages
    for j in range(coords.steps):
        i = coords.steps - 1 - j
        next_total = total
        if not CHANNEL:
            next_total = gl.load(gmem.total + coords.tile + (i - 1) * HV, mask=i > 0, other=0.0)
        mbarrier.wait(smem.full.index(stage), phase)
        dS = _reverse_step(
            dS, total, gmem, smem, coords, scale, part, stage, i, done, SIZES, True,
        )  # fmt: skip
        total = next_total
        done += 1
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if done > 0:
        fence_async_shared()
        tma_store(gmem.X, [coords.tile * BT, first_row], smem.tokens.index(part))
    dS = dS * unit
    if gmem.leaving is None:
        _store_state(gmem.dS0, gmem.s_dS0, coords, first_row, dS, K, BW)
    elif coords.begins:
        _store_state(gmem.dS0, gmem.s_dS0, coords, first_row, dS, K, BW)


@gluon.jit
def _forward(
    gmem,
    smem,
    coords,
    part,
    SIZES: gl.constexpr,
):
    """Forward half: from the first chunk to the last. The state leaving the last chunk is not stored."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    STAGES: gl.constexpr = SIZES.STAGES
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    first_row = coords.column + part * BW
    before = coords.border - 1
    S = _load_state(gmem.S0, gmem.s_S0, coords.begins, gmem.entering, gmem.s_entering, before, coords, first_row, K, BW)
    total = 0.0
    if not CHANNEL:
        total = gl.load(gmem.total + coords.tile, mask=coords.steps + coords.tail_rows > 0, other=0.0)
    stage = 0
    phase = 0
    for i in range(coords.steps):
        next_total = total
        if not CHANNEL:
            next_total = gl.load(
                gmem.total + coords.tile + (i + 1) * HV,
                mask=(i + 1) * BT < coords.steps * BT + coords.tail_rows,
                other=0.0,
            )
        mbarrier.wait(smem.full.index(stage), phase)
        S = _forward_step(
            S, total, gmem, smem, coords, part, stage, i, SIZES, True,
        )  # fmt: skip
        total = next_total
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    last = coords.steps - 1
    if coords.tail_rows > 0:
        mbarrier.wait(smem.full.index(stage), phase)
        _forward_step(
            S, total, gmem, smem, coords, part, stage, coords.steps, SIZES, False,
        )  # fmt: skip
        last = coords.steps
    if last >= 0:
        fence_async_shared()
        tma_store(gmem.e, [(coords.tile + last * HV) * BT, first_row], smem.tokens.index(part))


@gluon.jit
def _reverse_step(
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
    SIZES: gl.constexpr,
    FULL: gl.constexpr,
):
    """Write dS and X of chunk i; return the gradient of the state entering it.

    `done`: number of chunks before it in this direction. FULL: all its rows are tokens.
    """
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, query, factors = smem.k.index(stage), smem.q.index(stage), smem.rows.index(stage)
    x, square, write = smem.x.index(stage * PARTS + part), smem.square.index(stage), smem.write.index(stage)
    if not FULL:
        if not CHANNEL:
            clear_rows(key, coords.tail_rows, BT, K)
            clear_rows(query, coords.tail_rows, BT, K)
        clear_rows(x, coords.tail_rows, BT, BW)

    rounded = dS.to(OP)
    left = gl.convert_layout(rounded, AS, assert_trivial=True)
    if FOLDED:
        dY = warpgroup_mma(left, write.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    else:
        dY = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    _release(
        gmem.dS, gmem.X, rounded, smem, part, tile, tile + HV, coords.column + part * BW, stage, done, SIZES,
    )  # fmt: skip
    doT = x.permute((1, 0)).load(LC)
    X = warpgroup_mma(
        gl.convert_layout(doT, AC, assert_trivial=True), square.permute((1, 0)), zero_acc, use_acc=False, is_async=True
    )
    in_q = factors.slice(BT, BT).load(ROW)
    if scale is not None:
        in_q *= scale
    doT = gl.convert_layout((doT.to(gl.float32) * in_q[None, :]).to(OP), AC, assert_trivial=True)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    dS = dS * total
    if not FOLDED:
        out = factors.slice(2 * BT, BT).load(ROW) * nonzero_beta(factors.slice(3 * BT, BT).load(ROW))
        dY = warpgroup_mma_wait(1, deps=[dY])
        d, d_wide = in_bfloat16(dY * out[None, :])
        less = gl.fma(dY, out[None, :], -d_wide)
        d = gl.convert_layout(d, AC, assert_trivial=True)
        dY = warpgroup_mma(d, write.permute((1, 0)), less, is_async=True)
    dS = warpgroup_mma(doT, query, dS, is_async=True)
    # Row factors are loaded where they are used, some twice, because registers are scarce here.
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    X, dY = warpgroup_mma_wait(1, deps=[X, dY])
    if scale is not None:
        X *= scale
    if FOLDED:
        X += dY
    else:
        X += dY * one_over(nonzero_beta(beta))[None, :]
    dR = gl.convert_layout((-(X * (beta * in_k)[None, :])).to(OP), AC, assert_trivial=True)
    dS = warpgroup_mma(dR, key, dS, is_async=True)
    tma.store_wait(pendings=OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(X.to(OP))
    return warpgroup_mma_wait(0, deps=[dS])


@gluon.jit
def _forward_step(
    S,
    total,
    gmem,
    smem,
    coords,
    part,
    stage,
    i,
    SIZES: gl.constexpr,
    FULL: gl.constexpr,
):
    """Write S and e of a chunk; return the state leaving it. FULL: all its rows are tokens."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = smem.k.dtype
    zero_acc = gl.zeros([BW, BT], gl.float32, LC)
    key, factors, x = smem.k.index(stage), smem.rows.index(stage), smem.x.index(stage * PARTS + part)
    if not FULL:
        if not CHANNEL:
            clear_rows(key, coords.tail_rows, BT, K)
        clear_rows(x, coords.tail_rows, BT, BW)

    rounded = S.to(OP)
    left = gl.convert_layout(rounded, AS, assert_trivial=True)
    Sk = warpgroup_mma(left, key.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    tile = coords.tile + i * HV
    _release(
        gmem.S, gmem.e, rounded, smem, part, tile, tile - HV, coords.column + part * BW, stage, i, SIZES,
    )  # fmt: skip
    v = x.permute((1, 0)).load(LC)
    in_k, beta = factors.slice(0, BT).load(ROW), factors.slice(3 * BT, BT).load(ROW)
    if CHANNEL:
        total = smem.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
    S = S * total
    Sk = warpgroup_mma_wait(0, deps=[Sk])
    R = v.to(gl.float32) - Sk * in_k[None, :]
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), AC, assert_trivial=True)
        r, r_wide = in_bfloat16(R)
        less = R - r_wide
        r = gl.convert_layout(r, AC, assert_trivial=True)
        e = warpgroup_mma(r, smem.square.index(stage), less, is_async=True)
        S = warpgroup_mma(y, smem.write.index(stage), S, is_async=True)
        e = warpgroup_mma_wait(1, deps=[e])
    else:
        r = gl.convert_layout(R.to(OP), AC, assert_trivial=True)
        e = warpgroup_mma(r, smem.square.index(stage), zero_acc, use_acc=False, is_async=True)
        beta_out = beta * factors.slice(2 * BT, BT).load(ROW)
        e = warpgroup_mma_wait(0, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), AC, assert_trivial=True)
        S = warpgroup_mma(u, key, S, is_async=True)
    tma.store_wait(pendings=OUT - 1)
    smem.tokens.index(part).permute((1, 0)).store(e.to(OP))
    return warpgroup_mma_wait(0, deps=[S])


@gluon.jit
def _release(
    x_state,
    x_tokens,
    rounded,
    smem,
    part,
    tile,
    tile_before,
    first_row,
    stage,
    done,
    SIZES: gl.constexpr,
):
    """Issue the TMA stores of a chunk's state and of the preceding chunk's tokens, and release that chunk's stage.

    Nothing is stored or released for the chunk before the first, which has no block. A state buffer is free: every
    chunk ends by waiting until TMA has read all but the last OUT - 1 states.
    """
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    STAGES: gl.constexpr = SIZES.STAGES
    state = smem.state.index((done % OUT) * PARTS + part)
    state.store(rounded)
    fence_async_shared()
    before = gl.where(stage == 0, STAGES, stage) - 1
    mbarrier.arrive(smem.free.index(before), count=1, pred=done > 0)
    if done > 0:
        tma_store(x_tokens, [tile_before * BT, first_row], smem.tokens.index(part))
    tma_store(x_state, [tile * V + first_row, 0], state)


@gluon.jit
def _load_state(p, strides, outer, p_border, s_border, border, coords, first_row, K: gl.constexpr, BW: gl.constexpr):
    """Load value rows first_row.. of a state in [N, HV, K, V] as float32.

    The sequence's own state if `outer`, else the border's; zeros if there is none.
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    S = gl.zeros([BW, K], gl.float32, LS)
    if p_border is None:
        if p is not None:
            S = gl.load(p + _offsets(strides, coords.n, coords, first_row, K, BW)).to(gl.float32)
    elif outer:
        if p is not None:
            S = gl.load(p + _offsets(strides, coords.n, coords, first_row, K, BW)).to(gl.float32)
    elif coords.exists:
        S = gl.load(p_border + _offsets(s_border, border, coords, first_row, K, BW))
    return S


@gluon.jit
def _store_state(p, strides, coords, first_row, S, K: gl.constexpr, BW: gl.constexpr):
    """Store value rows first_row.. of a state, rounding once to the storage dtype, if it is wanted."""
    if p is not None:
        gl.store(p + _offsets(strides, coords.n, coords, first_row, K, BW), S.to(p.dtype.element_ty))


@gluon.jit
def _offsets(strides, row, coords, first_row, K: gl.constexpr, BW: gl.constexpr):
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = first_row + gl.arange(0, BW, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    first = row * strides[0] + coords.hv * strides[1]
    return first + o_v.to(gl.int64)[:, None] * strides[3] + o_k.to(gl.int64)[None, :] * strides[2]
