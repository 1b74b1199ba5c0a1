"""Producer of `scan_bwd` in Gluon: the tiles of every chunk, in either direction."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.tile.index.gluon import quarters, tma_load, tma_load_upper


@gluon.constexpr_function
def block_bytes(descriptor):
    """Bytes of a descriptor's block; 0 for None."""
    return 0 if descriptor is None else descriptor.block_type.nbytes


@gluon.jit
def producer(inputs, smem, back, count, SIZES: gl.constexpr):
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
        block_bytes(inputs.k)
        + inputs.rows.block_type.nbytes
        + (inputs.total.block_type.nbytes if CHANNEL else 0)
        + (inputs.E.block_type.nbytes if FOLDED else 0)
    )
    FORWARD: gl.constexpr = BYTES + inputs.v.block_type.nbytes * PARTS + block_bytes(inputs.W) * 3
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
            if inputs.k is not None:
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
            if inputs.W is not None:
                tma_load_upper(inputs.W, tile, full, squares, stage)
        tile += ahead * HV
        token += ahead * BT
        stage, phase = next_stage(stage, phase, SIZES.STAGES)
