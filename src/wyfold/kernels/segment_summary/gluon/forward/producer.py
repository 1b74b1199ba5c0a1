"""Producer of `segment_summary` in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.segment_summary.gluon.forward.zeros import next_check, read_flag, write_flag
from wyfold.tile.index.gluon import quarters, tma_load, tma_load_upper


@gluon.jit
def producer(inputs, smem, of_H, count, SIZES: gl.constexpr):
    """Producer: load the tiles of every chunk as soon as a stage is free; values only for H.

    Once M is zeros in all parts, it stops at the next check: it writes the reduced count and completes `full` without a
    load.
    """
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    PARTS: gl.constexpr = SIZES.PARTS
    CHANNEL: gl.constexpr = SIZES.CHANNEL
    FOLDED: gl.constexpr = SIZES.FOLDED
    STAGES: gl.constexpr = SIZES.STAGES
    WRITE: gl.constexpr = inputs.write.block_type.nbytes * (1 if FOLDED else 3)
    SCALAR: gl.constexpr = inputs.k.block_type.nbytes + inputs.rows.block_type.nbytes + WRITE
    BYTES: gl.constexpr = SCALAR + inputs.total.block_type.nbytes if CHANNEL else SCALAR
    tile, token = inputs.tile, inputs.token
    stage = 0
    phase = 1
    i = 0
    check = next_check(i)
    while i < count:
        full = smem.full.index(stage)
        mbarrier.wait(smem.free.index(stage), phase)
        map_is_zero = 0
        if not CHANNEL:
            if (of_H == 0) & (i == check):
                check = next_check(i)
                for part in gl.static_range(PARTS):
                    map_is_zero += read_flag(smem.map_is_zero.index(part))
        if map_is_zero == PARTS:
            write_flag(smem.count, i)
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
            stage, phase = next_stage(stage, phase, STAGES)
