"""`segment_fold` in Gluon: one program per cut sequence, value head and tile of value columns, serial over the borders.

    S[r + 1] = H[r + 1] + M[r + 1] S[r]        dS[r - 1] = c[r - 1] + M[r]^T dS[r]

The map is the left operand: its 128 rows fill two warpgroups, and a program has few columns of the state. TMA loads
maps in float32 some borders ahead. While the products of a border run, the next map is split into bfloat16 parts, in
the registers from which WGMMA reads it. So only its products, and the state's way through shared memory, are serial.
Each WGMMA seems to take 40 cycles, and 20 more for each 16 columns. So the two parts of a state are beside each
other: each part of the map is multiplied by both at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.pipeline.gluon import barriers, next_stage, stage_before
from wyfold.runtime.chunk_layout import EvenSegments, Segments
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.gluon import bf16_parts
from wyfold.tile.index.gluon import (
    barrier,
    gluon_descriptors,
    start_next_launch,
    tma_load,
    wait_for_launch_ahead,
)
from wyfold.tile.index.triton import strides
from wyfold.tile.index.triton.descriptors import require_descriptors, tile_descriptor


class States(NamedTuple):
    """Kernel argument: H or c, and maps, in global memory.

    Attributes:
        S: [borders, HV, K, V] states.
        s_S: Their strides.
        M: [borders, HV, K, K] contiguous maps, transposed.
    """

    S: Any
    s_S: Any
    M: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call; BV columns of a program; BACK: whether borders are folded from the last one."""

    HV: int
    K: int
    V: int
    BV: int
    STAGES: int
    BACK: bool


def segment_fold(S: Tensor, M: Tensor, segments: Segments | EvenSegments, *, reverse: bool, dtype: torch.dtype) -> None:
    """Fold summaries into states, in place. The arguments are those of the Triton launch; K = 128, bfloat16 tokens.

    M is transposed in memory, where it is contiguous.
    """
    HV, K, V = S.shape[1:]
    # A rank folds states and maps at once, in V + K columns.
    config = tuned("segment_fold.gluon", LaunchKey(dtype_word(dtype), K, K), S.device)
    (x_M,) = gluon_descriptors(require_descriptors("segment_fold", [tile_descriptor(M.mT.flatten(0, 1), K, K)]))
    first = divided = None
    sequences = segments.sequences
    if isinstance(segments, Segments):
        first, divided = segments.first, segments.divided
        sequences = divided.shape[0]
    launch_kernel(
        wyfold_segment_fold_gluon,
        sequences * HV * (V // config.blocks["BV"]),
        x_M=x_M,
        states=States(S=S, s_S=strides(S), M=M.mT),
        p_first=first,
        p_divided=divided,
        N=segments.sequences,
        borders=segments.borders,
        SIZES=Sizes(HV=HV, K=K, V=V, BV=config.blocks["BV"], STAGES=config.stages, BACK=reverse),
        **config.options(),
    )


@gluon.jit(do_not_specialize=["N", "borders"])
def wyfold_segment_fold_gluon(x_M, states, p_first, p_divided, N, borders, SIZES: gl.constexpr):
    """One program owns BV value columns of one state at all borders. Without tables, sequences share the borders."""
    NV: gl.constexpr = SIZES.V // SIZES.BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % SIZES.HV, pid // (NV * SIZES.HV)
    if p_divided is None:
        count = borders // N - 1
        start = i_n * (count + 1)
    else:
        # Written before the launch ahead, which has waited for it (`kernel_launch.overlapping_launches`).
        i_n = gl.load(p_divided + i_n)
        start, stop = gl.load(p_first + i_n) - i_n, gl.load(p_first + i_n + 1, mask=i_n < N, other=0) - i_n - 1
        count = (stop - start - 1).to(gl.int32)
    wait_for_launch_ahead()
    start_next_launch()
    if count > 0:
        if _adds(states, start, count, i_hv, i_v * SIZES.BV, SIZES):
            _fold(x_M, states, start, count, i_hv, i_v * SIZES.BV, SIZES)


@gluon.jit
def _fold(x_M, states, start, count, i_hv, column, SIZES: gl.constexpr):
    """Apply `count` maps between the borders from `start` on."""
    K: gl.constexpr = SIZES.K
    BV: gl.constexpr = SIZES.BV
    STAGES: gl.constexpr = SIZES.STAGES
    # Of a state, and of its two parts beside each other.
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BV, 16])
    PARTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 2 * BV, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, PARTS, 2)
    STEP: gl.constexpr = -1 if SIZES.BACK else 1
    maps = gl.allocate_shared_memory(gl.float32, [STAGES, K, K], x_M.layout)
    parts = gl.allocate_shared_memory(gl.bfloat16, [2, 2 * BV, K], gl.NVMMASharedLayout(128, 16, 2))
    full = barriers(STAGES, 1)
    fence_async_shared()
    barrier()
    # Border of the state that enters, and the map applied to it first.
    r, i_map = start, start + 1
    if SIZES.BACK:
        r, i_map = start + count, start + count
    row = ((i_map * SIZES.HV + i_hv) * K).to(gl.int32)
    for stage in gl.static_range(STAGES):
        if stage < count:
            _load_map(x_M, maps, full, stage, row + stage * (STEP * SIZES.HV * K))
    row += STAGES * (STEP * SIZES.HV * K)
    o_k = gl.arange(0, K, layout=gl.SliceLayout(1, L)).to(gl.int64)
    o_v = column + gl.arange(0, BV, layout=gl.SliceLayout(0, L)).to(gl.int64)
    o_S = o_k[:, None] * states.s_S[2] + o_v[None, :] * states.s_S[3]
    p_S = states.S + (i_hv * states.s_S[1] + o_S)
    S = gl.load(p_S + r * states.s_S[0])
    r += STEP
    own = gl.load(p_S + r * states.s_S[0])
    zeros = gl.zeros([K, 2 * BV], gl.float32, PARTS)
    mbarrier.wait(full.index(0), 0)
    high, low = _map_parts(maps, 0, A, SIZES)
    stage = 1
    phase = 0
    for i in range(count):
        S_parts = parts.index(i % 2).permute((1, 0))
        S_parts.store(gl.convert_layout(_side_by_side(S, SIZES), PARTS))
        fence_async_shared()
        barrier()
        acc = warpgroup_mma(low, S_parts, zeros, use_acc=False, is_async=True)
        acc = warpgroup_mma(high, S_parts, acc, is_async=True)
        # All warps have read the map that is multiplied now.
        if i + STAGES < count:
            _load_map(x_M, maps, full, stage_before(stage, STAGES), row)
        row += STEP * SIZES.HV * K
        # Behind the last border these are values that are not used.
        later = gl.load(p_S + gl.where(i + 1 < count, r + STEP, r) * states.s_S[0])
        if i + 1 < count:
            mbarrier.wait(full.index(stage), phase)
        high, low = _map_parts(maps, stage, A, SIZES)
        stage, phase = next_stage(stage, phase, STAGES)
        acc = warpgroup_mma_wait(0, deps=[acc])
        of_high, of_low = gl.split(acc.reshape((K, 2, BV)).permute((0, 2, 1)))
        S = own + gl.convert_layout(of_high + of_low, L)
        gl.store(p_S + r * states.s_S[0], S)
        own = later
        r += STEP
    full._keep_alive()


@gluon.jit
def _side_by_side(S, SIZES: gl.constexpr):
    """The two bfloat16 parts of a state, the larger one first.   [K, 2 BV]"""
    high, low = bf16_parts(S)
    return gl.join(high, low).permute((0, 2, 1)).reshape((SIZES.K, 2 * SIZES.BV))


@gluon.jit
def _load_map(x_M, maps, full, stage, row):
    mbarrier.expect(full.index(stage), x_M.block_type.nbytes)
    tma_load(x_M, [row, 0], full.index(stage), maps.index(stage))


@gluon.jit
def _map_parts(maps, stage, A: gl.constexpr, SIZES: gl.constexpr):
    """The map of a stage, or its transpose for gradients, in two bfloat16 parts as left operands.   [K, K]"""
    tile = maps.index(stage)
    if not SIZES.BACK:
        tile = tile.permute((1, 0))
    return bf16_parts(tile.load(A))


@gluon.jit
def _adds(states, start, count, i_hv, column, SIZES: gl.constexpr):
    """Whether any map between these borders is not zeros, or any state to which they apply is not finite.

    If not, the summaries at the borders are already the states. `segment_summary` marks a map of zeros by negative
    zeros.
    """
    K: gl.constexpr = SIZES.K
    ROWS: gl.constexpr = 8 * SIZES.BV
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    o_k, o_row = gl.arange(0, K, layout=gl.SliceLayout(0, L)), gl.arange(0, ROWS, layout=gl.SliceLayout(1, L))
    o_v = column + o_row % SIZES.BV
    adds = 0
    first = count * 0
    while (first < count) & (adds == 0):
        at = first + o_row // SIZES.BV
        r = start + at
        diagonal = gl.arange(0, 8, layout=gl.SliceLayout(1, L))
        m_map = (first + diagonal < count)[:, None]
        o_map = ((start + 1 + first + diagonal) * SIZES.HV + i_hv)[:, None] * (K * K) + (o_k * (K + 1))[None, :]
        b_map = gl.load(states.M + o_map, mask=m_map, other=0.0)
        if SIZES.BACK:
            r += 1
        o_S = (r * states.s_S[0] + i_hv * states.s_S[1] + o_v * states.s_S[3])[:, None] + (o_k * states.s_S[2])[None, :]
        b_S = gl.load(states.S + o_S, mask=(at < count)[:, None], other=0.0)
        unmarked = ((b_map.to(gl.int32, bitcast=True) != -(2**31)) & m_map).to(gl.int32)
        adds = gl.max(gl.max(unmarked, 1), 0)
        if adds == 0:
            adds = gl.max(gl.max((b_S - b_S != 0.0).to(gl.int32), 1), 0)
        first += 8
    return adds != 0
