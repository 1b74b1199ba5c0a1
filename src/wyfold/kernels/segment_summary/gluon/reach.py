"""The horizon of a summary under a channel gate, in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon import ChunkInputs, Ring, load_rows, load_squares, next_stage, tile_bytes
from wyfold.tile.decay.horizon.gluon import follow, transition_power
from wyfold.tile.index.gluon import barrier


@gluon.jit
def channels_in_reach(inputs, ring, loaded, tile, step, count, SIZES: gl.constexpr):
    """`channels_in_reach` of the Triton kernels, in the stages of the ring, before its partitions start.

    Args:
        inputs, ring: Of the kernel.
        loaded: Barriers of the stages.
        tile: Tile of the chunk at that end, int32.
        step: From the tile of a chunk to that of the next one, away from that end.
        count: Number of chunks of the segment.
    """
    BT: gl.constexpr = SIZES.BT
    K: gl.constexpr = SIZES.K
    STAGES: gl.constexpr = SIZES.STAGES
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    wanted = ChunkInputs(0, 0, None, None, None, None, None, None, None, inputs.total, None, None)
    if SIZES.ERASES:
        wanted = ChunkInputs(
            0, 0, None, None, None, None, inputs.k, None, inputs.rows, inputs.total, inputs.write, None
        )
    stages = Ring(ring.q, ring.k, ring.x, ring.rows, ring.total, ring.write, ring.square, loaded, ring.free, ring.free)
    fence_async_shared()
    barrier()
    for i in gl.static_range(STAGES):
        if i < count:
            _load(wanted, stages, i, tile + i * step, SIZES)
    needed, power, i, ahead = count, count * 0, count * 0, gl.minimum(count, STAGES)
    stage = 0
    phase = 0
    proceed = i < count
    while proceed:
        mbarrier.wait(loaded.index(stage), phase)
        total = ring.total.index(stage).load(gl.SliceLayout(0, L))
        k, E, beta = None, None, None
        if SIZES.ERASES:
            k, E = ring.k.index(stage).load(L), ring.write.index(stage).load(L)
            beta = ring.rows.index(stage).slice(3 * BT, BT).load(gl.SliceLayout(1, L))
        i += 1
        power += transition_power(total, k, E, beta)
        needed, proceed = follow(power, i, needed, count)
        if proceed & (ahead < count):
            barrier()
            _load(wanted, stages, stage, tile + ahead * step, SIZES)
            ahead += 1
        stage, phase = next_stage(stage, phase, STAGES)
    # Nothing may be on its way to the ring's memory when the partitions start.
    for _ in range(i, ahead):
        mbarrier.wait(loaded.index(stage), phase)
        stage, phase = next_stage(stage, phase, STAGES)
    barrier()
    return needed


@gluon.jit
def _load(wanted, stages, stage, tile, SIZES: gl.constexpr):
    """Issue the loads of what bounds a chunk's transition."""
    mbarrier.expect(stages.full.index(stage), tile_bytes(SIZES, *wanted))
    load_rows(wanted, stages, stage, tile, 0, SIZES)
    load_squares(wanted, stages, stage, tile, SIZES)
