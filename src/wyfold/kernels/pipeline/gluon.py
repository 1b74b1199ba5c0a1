"""The ring of stages and the states of Gluon kernels on Hopper that run through the chunks of a sequence.

The warps of a program are partitions, which pass a ring of shared-memory stages to each other. A stage holds the tiles
of one chunk. Mbarriers synchronise it:

    producer, one warp             consumer, a warpgroup or more; PARTS of them share the tiles
    wait for `free` of the stage   wait for `full` of the stage
    expect the tiles' bytes        compute the chunk
    load them by TMA               arrive at `free`

`full` completes when TMA has written the stage. `free` completes when every part has read it. A part arrives there
after it has issued the first product of the next chunk, so that no product waits for the arrival. The producer starts
with phase 1, which a new barrier has already completed: all stages are free.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.state.gluon import state_offsets


class Layouts(NamedTuple):
    """Register layouts of a consumer with tiles of value rows.

    Attributes:
        state, chunk: Accumulators [BW, K] and [BW, BT].
        state_left, chunk_left: Left operands, which rounded accumulators are without an exchange.
        row: A number per token of an accumulator `chunk`.
    """

    state: Any
    chunk: Any
    state_left: Any
    chunk_left: Any
    row: Any


@gluon.constexpr_function
def layouts(K, BT, warps):
    """The layouts of a consumer of `warps` warps, for K channels and chunks of BT tokens."""
    state = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, K, 16])
    chunk = gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, BT, 16])
    state_left, chunk_left = gl.DotOperandLayout(0, state, 2), gl.DotOperandLayout(0, chunk, 2)
    return Layouts(state, chunk, state_left, chunk_left, gl.SliceLayout(0, chunk))


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Stage and phase of the next chunk."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def stage_before(stage, STAGES: gl.constexpr):
    """Stage of the chunk before."""
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def load_state(p, strides, n, hv, o_v, o_k, there, S):
    """Load value rows o_v of a state [N, HV, K, V] as float32, in place of S.   [BW, K]

    Returns S if p is None, or unless `there`. `there` None is always.
    """
    if p is not None:
        if there is None:
            S = gl.load(p + state_offsets(strides, n, hv, o_v, o_k)).to(gl.float32)
        elif there:
            S = gl.load(p + state_offsets(strides, n, hv, o_v, o_k)).to(gl.float32)
    return S


@gluon.jit
def store_state(p, strides, n, hv, o_v, o_k, wanted, S):
    """Store value rows o_v of a state, rounded to its dtype; nothing if p is None, or unless `wanted`. None: always."""
    if p is not None:
        offsets = state_offsets(strides, n, hv, o_v, o_k)
        if wanted is None:
            gl.store(p + offsets, S.to(p.dtype.element_ty))
        elif wanted:
            gl.store(p + offsets, S.to(p.dtype.element_ty))
