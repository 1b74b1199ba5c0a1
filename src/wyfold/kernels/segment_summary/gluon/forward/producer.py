"""Producer of `segment_summary` in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import load_rows, load_squares, load_values, next_stage, tile_bytes
from wyfold.kernels.segment_summary.gluon.forward.zeros import next_check, read_flag, write_flag


@gluon.jit
def producer(inputs, ring, smem, of_H, count, SIZES: gl.constexpr):
    """Producer: load the tiles of every chunk as soon as a stage is free; values only for H.

    Once M is zeros in all parts, it stops at the next check: it writes the reduced count and completes `full` without a
    load.
    """
    PARTS: gl.constexpr = SIZES.PARTS
    WITH_VALUES: gl.constexpr = tile_bytes(SIZES, *inputs)
    BYTES: gl.constexpr = WITH_VALUES - PARTS * inputs.x.block_type.nbytes
    tile, token = inputs.tile, inputs.token
    stage = 0
    phase = 1
    i = 0
    check = next_check(i)
    while i < count:
        full = ring.full.index(stage)
        mbarrier.wait(ring.free.index(stage), phase)
        map_is_zero = 0
        if not SIZES.CHANNEL:
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
                mbarrier.expect(full, WITH_VALUES)
            else:
                mbarrier.expect(full, BYTES)
            load_rows(inputs, ring, stage, tile, token, SIZES)
            if of_H != 0:
                load_values(inputs, ring, stage, token, SIZES)
            load_squares(inputs, ring, stage, tile, SIZES)
            tile += SIZES.HV
            token += SIZES.BT
            i += 1
            stage, phase = next_stage(stage, phase, SIZES.STAGES)
