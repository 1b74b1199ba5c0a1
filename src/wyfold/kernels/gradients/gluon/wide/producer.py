"""The producer: every load of a program, in the order of use."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.gradients.gluon.wide.arguments import BW
from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.tile.index.gluon import tma_load

WIDTH = gl.constexpr(BW)


@gluon.jit
def produce(inputs, ring, smem, SIZES: gl.constexpr, FLAGS: gl.constexpr, STAGES: gl.constexpr):
    """Load q and k, the value tiles for the grams, those of every slice of keys, and with the norm q and k again."""
    NK: gl.constexpr = SIZES.K // WIDTH
    NV: gl.constexpr = SIZES.V // WIDTH
    BYTES: gl.constexpr = inputs.e.block_type.nbytes
    stage = 0
    phase = 1
    for i in range(NV):
        full = _open_stage(ring, stage, phase, 3 * BYTES)
        _load_values(inputs, ring, stage, full, i, SIZES.BT)
        stage, phase = next_stage(stage, phase, STAGES)
        if i == 0:
            mbarrier.expect(smem.tokens_ready, 2 * NK * BYTES)
            for h in gl.static_range(NK):
                tma_load(inputs.k, [inputs.token, inputs.column_k + h * WIDTH], smem.tokens_ready, smem.k.index(h))
                tma_load(inputs.q, [inputs.token, inputs.column_q + h * WIDTH], smem.tokens_ready, smem.q.index(h))
    for h in range(NK):
        for i in range(NV):
            full = _open_stage(ring, stage, phase, 5 * BYTES)
            row = inputs.tile * SIZES.V + i * WIDTH
            tma_load(inputs.S, [row, h * WIDTH], full, ring.S.index(stage))
            tma_load(inputs.dS, [row, h * WIDTH], full, ring.dS.index(stage))
            _load_values(inputs, ring, stage, full, i, SIZES.BT)
            stage, phase = next_stage(stage, phase, STAGES)
    if FLAGS.NORM:
        for h in range(NK):
            full = _open_stage(ring, stage, phase, 2 * BYTES)
            tma_load(inputs.q, [inputs.token, inputs.column_q + h * WIDTH], full, ring.S.index(stage))
            tma_load(inputs.k, [inputs.token, inputs.column_k + h * WIDTH], full, ring.dS.index(stage))
            stage, phase = next_stage(stage, phase, STAGES)


@gluon.jit
def _open_stage(ring, stage, phase, BYTES: gl.constexpr):
    """Wait until a stage is free; its barrier, which then expects so many bytes."""
    full = ring.full.index(stage)
    mbarrier.wait(ring.free.index(stage), phase)
    mbarrier.expect(full, BYTES)
    return full


@gluon.jit
def _load_values(inputs, ring, stage, full, i, BT: gl.constexpr):
    """Load value tile i of e, X and do."""
    row, column = inputs.tile * BT, i * WIDTH
    tma_load(inputs.e, [row, column], full, ring.e.index(stage))
    tma_load(inputs.X, [row, column], full, ring.X.index(stage))
    tma_load(inputs.do, [inputs.token, inputs.column_do + column], full, ring.do.index(stage))
