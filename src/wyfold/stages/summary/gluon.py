"""`summary` in Gluon, for Hopper: a warpgroup holds rows of H, or of M, and brings its own tiles ahead.

It is the scan's chunk without output, with the products of the Triton kernel beside it, in the same order and with the
same roundings:

    R^T = V^T - (S^T k^T) in           V is zero where M is made
    S^T <- total S^T + (R^T beta) E                         folded
    S^T <- total S^T + ((R^T W^T) beta out) k               else

What is summarised ends at a border, so every chunk of it is full. A stage is asked for again under the next chunk's
first product, behind a barrier of the program: a warp of its own for that, as in `scan`, would cost registers of four,
and a third program on a multiprocessor (docs/facts.md, SEGMENTS-1).
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

from wyfold.runtime.bound import launched
from wyfold.runtime.chunks import Segments
from wyfold.runtime.launch import tuned
from wyfold.stages.records import Prepared
from wyfold.stages.summary import triton
from wyfold.stages.summary.triton import summary_bwd as summary_bwd
from wyfold.tile.index.gluon import barrier, shared, tma_load
from wyfold.tile.index.triton import (
    every_box,
    number_boxes,
    segment_place,
    sequence_span,
    strides,
    tile_boxes,
    token_boxes,
)

ROWS: gl.constexpr = gl.constexpr(64)
"""Value rows of a program: those of a warpgroup's product."""


def summary(
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    segments: Segments,
    key: str,
    H: Tensor,
    M: Tensor,
) -> None:
    """Maps of the segments that end at borders. Arguments as of the Triton launch, to which calls are left whose memory
    the copy engine cannot read.

    Args:
        k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        v: [1, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        segments: Where they lie, of chunks of 64.
        key: Of the launch configuration.
        H: [borders, HV, K, V] float32 view, written.
        M: [borders, HV, K, K] float32 view, written; zeros for a segment that begins a sequence.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("summary.gluon", f"{key} fwd", k.device)
    boxes = _boxes(k, v, prepared, grid.chunk_size)
    if boxes is None or V % ROWS.value or K % ROWS.value:
        triton.summary(k, v, prepared, initial_state, segments, key, H, M)
        return
    launched(
        wyfold_summary_gluon,
        segments.borders * HV * ((V + K) // ROWS.value),
        *boxes,
        v.stride(2),
        k.stride(2),
        initial_state,
        strides(initial_state),
        H,
        strides(H),
        M,
        strides(M),
        segments.sequence,
        segments.first,
        segments.leading,
        segments.sequences,
        grid.cu,
        grid.first,
        grid.tokens,
        H=HK,
        HV=HV,
        K=K,
        V=V,
        BT=grid.chunk_size,
        CHANNEL=prepared.k is not None,
        FOLDED=prepared.E is not None,
        STAGES=config.stages,
        **config.options(),
    )


def _boxes(k: Tensor, v: Tensor, prepared: Prepared, C: int) -> list[Any] | None:
    """The kernel's first arguments, each as boxes where it is read by them; None if one cannot be."""
    rows, total, _, k_tiles, E, _, W = prepared
    K, channel = k.shape[3], k_tiles is not None
    given = k, v, rows, total, E if E is not None else W
    found = (
        tile_boxes(k_tiles, C, K) if k_tiles is not None else token_boxes(k, C, K),
        token_boxes(v, C, ROWS.value),
        number_boxes(rows.flatten(1), 4 * C),
        number_boxes(total, K) if channel else total,
        tile_boxes(E, C, K) if E is not None else None if W is None else tile_boxes(W, C, C),
    )
    boxes = every_box(given, found)
    return None if boxes is None else shared(boxes)


class Tiles(NamedTuple):
    """Shared memory. Of every stage what a chunk reads; write: E, or W; full: that it is there."""

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    full: Any


class Source(NamedTuple):
    """Boxes of what is brought, and where the first chunk's are: its tile, its first token, columns of its tokens."""

    k: Any
    v: Any
    rows: Any
    total: Any
    write: Any
    tile: Any
    token: Any
    column_k: Any
    column_v: Any


@gluon.jit(do_not_specialize=["N", "T"])
def wyfold_summary_gluon(
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    h_v,
    h_k,
    p_S0,
    s_S0,
    p_H,
    s_H,
    p_M,
    s_M,
    p_sequence,
    p_first_segment,
    p_leading,
    N,
    p_cu,
    p_first,
    T,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """One program owns ROWS value rows of H or M; the tiles of a head are neighbours, so that they share k in L2."""
    NV: gl.constexpr = V // ROWS
    TILES: gl.constexpr = NV + K // ROWS
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_s = pid % TILES, (pid // TILES) % HV, gl.load(p_leading + pid // (TILES * HV))
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_place(i_s, p_sequence, p_first_segment, N)
    if (i_n == N) | (ends != 0):
        return
    i_c, b, t, length = sequence_span(i_s, p_cu, p_first, T, 0, True)
    i_tile = i_c * HV + i_hv
    of_H = (i_v < NV).to(gl.int32)
    column = (gl.where(of_H != 0, i_v, i_v - NV) * ROWS).to(gl.int32)
    # Of M of a sequence's first segment nobody asks.
    steps = (length // BT).to(gl.int32) * gl.where(begins, of_H, 1)

    k = gl.allocate_shared_memory(x_k.dtype, [STAGES, BT, K], x_k.layout)
    v = gl.allocate_shared_memory(x_v.dtype, [STAGES, BT, ROWS], x_v.layout)
    rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], x_rows.layout)
    write = gl.allocate_shared_memory(x_write.dtype, [STAGES, BT, x_write.block_shape[1]], x_write.layout)
    total = rows
    if CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], x_total.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
    fence_async_shared()
    barrier()
    tiles = Tiles(k, v, rows, total, write, full)
    source = Source(
        x_k,
        x_v,
        x_rows,
        x_total,
        x_write,
        i_tile.to(gl.int32),
        (b * T + t).to(gl.int32),
        (i_h * h_k).to(gl.int32),
        (i_hv * h_v).to(gl.int32) + column,
    )
    for s in gl.static_range(STAGES):
        if s < steps:
            _bring(source, tiles, of_H, s, s, HV, K, BT, CHANNEL)

    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    o_v = column + gl.arange(0, ROWS, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([ROWS, K], gl.float32, LS)
    if of_H == 0:
        # Nothing, where the sequence begins: so no map is applied to its first state twice.
        S = ((o_v[:, None] == o_k[None, :]) & (o_k[None, :] >= gl.where(begins, K, 0))).to(gl.float32)
    elif begins:
        if p_S0 is not None:
            S = gl.load(p_S0 + _state_offsets(s_S0, i_n, i_hv, o_v, o_k)).to(gl.float32)
    decay = 0.0
    if not CHANNEL:
        decay = gl.load(x_total + i_tile, mask=steps > 0, other=0.0)
    stage = 0
    phase = 0
    for i in range(steps):
        next_decay = decay
        if not CHANNEL:
            next_decay = gl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
        mbarrier.wait(full.index(stage), phase)
        S = _step(S, decay, source, tiles, of_H, stage, i, steps, HV, K, BT, CHANNEL, FOLDED, STAGES)
        decay = next_decay
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    if of_H != 0:
        gl.store(p_H + _state_offsets(s_H, i_border, i_hv, o_v, o_k), S)
    else:
        gl.store(p_M + _state_offsets(s_M, i_border, i_hv, o_v, o_k), S)


@gluon.jit
def _bring(source, tiles, of_H, i, stage, HV: gl.constexpr, K: gl.constexpr, BT: gl.constexpr, CHANNEL: gl.constexpr):
    """Ask for the tiles of chunk i; for v where H is made."""
    SCALAR: gl.constexpr = source.k.block_type.nbytes + source.rows.block_type.nbytes + source.write.block_type.nbytes
    BYTES: gl.constexpr = SCALAR + source.total.block_type.nbytes if CHANNEL else SCALAR
    tile, token, full = source.tile + i * HV, source.token + i * BT, tiles.full.index(stage)
    if of_H != 0:
        mbarrier.expect(full, BYTES + source.v.block_type.nbytes)
        tma_load(source.v, [token, source.column_v], full, tiles.v.index(stage))
    else:
        mbarrier.expect(full, BYTES)
    if CHANNEL:
        tma_load(source.k, [tile * BT, 0], full, tiles.k.index(stage))
        tma_load(source.total, [tile * K], full, tiles.total.index(stage))
    else:
        tma_load(source.k, [token, source.column_k], full, tiles.k.index(stage))
    tma_load(source.rows, [tile * (4 * BT)], full, tiles.rows.index(stage))
    tma_load(source.write, [tile * BT, 0], full, tiles.write.index(stage))


@gluon.jit
def _state_offsets(strides, i_n, i_h, o_v, o_k):
    """Offsets of value rows o_v of a state in [N, HV, K, V].   [ROWS, K]"""
    first = i_n * strides[0] + i_h * strides[1]
    return first + (o_v.to(gl.int64)[:, None] * strides[3] + o_k.to(gl.int64)[None, :] * strides[2])


@gluon.jit
def _step(
    S,
    total,
    source,
    tiles,
    of_H,
    stage,
    i,
    steps,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    CHANNEL: gl.constexpr,
    FOLDED: gl.constexpr,
    STAGES: gl.constexpr,
):
    """State leaving a chunk, all of whose rows are tokens; the stage of the one before is asked for again."""
    LS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    AS: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, LC)
    OP: gl.constexpr = tiles.k.dtype
    nothing = gl.zeros([ROWS, BT], gl.float32, LC)
    key, number = tiles.k.index(stage), tiles.rows.index(stage)

    left = gl.convert_layout(S.to(OP), AS, assert_trivial=True)
    Sk = warpgroup_mma(left, key.permute((1, 0)), nothing, use_acc=False, is_async=True)
    fence_async_shared()
    barrier()
    after = i + STAGES - 1
    if (i > 0) & (after < steps):
        _bring(source, tiles, of_H, after, gl.where(stage == 0, STAGES, stage) - 1, HV, K, BT, CHANNEL)
    # Nobody brought any where M is made, and what lies there may be no number.
    v = tiles.v.index(stage).permute((1, 0)).load(LC).to(gl.float32)
    there = gl.arange(0, BT, layout=ROW) < of_H * BT
    v = gl.where(there[None, :], v, 0.0)
    beta = number.slice(3 * BT, BT).load(ROW)
    if CHANNEL:
        total = tiles.total.index(stage).load(gl.SliceLayout(0, LS))[None, :]
        S = S * total
        Sk = warpgroup_mma_wait(0, deps=[Sk])
        R = v - Sk
    else:
        in_k = number.slice(0, BT).load(ROW)
        S = S * total
        Sk = warpgroup_mma_wait(0, deps=[Sk])
        R = v - Sk * in_k[None, :]
    if FOLDED:
        y = gl.convert_layout((R * beta[None, :]).to(OP), AC, assert_trivial=True)
        S = warpgroup_mma(y, tiles.write.index(stage), S, is_async=True)
    else:
        r = gl.convert_layout(R.to(OP), AC, assert_trivial=True)
        e = warpgroup_mma(r, tiles.write.index(stage), nothing, use_acc=False, is_async=True)
        beta_out = beta * number.slice(2 * BT, BT).load(ROW)
        e = warpgroup_mma_wait(0, deps=[e])
        u = gl.convert_layout((e * beta_out[None, :]).to(OP), AC, assert_trivial=True)
        S = warpgroup_mma(u, key, S, is_async=True)
    return warpgroup_mma_wait(0, deps=[S])
