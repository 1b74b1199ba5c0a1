"""The producer, and the TMA loads of a chunk."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon.records import ChunkInputs
from wyfold.kernels.pipeline.gluon.ring import next_stage
from wyfold.tile.index.gluon import quarters, tma_load, tma_load_upper


@gluon.jit
def produce(inputs, ring, count, BACKWARD: gl.constexpr, SIZES: gl.constexpr):
    """Producer: load the tiles of `count` chunks, from the first or from the last one, each as a stage is free."""
    BYTES: gl.constexpr = tile_bytes(SIZES, *inputs)
    STEP: gl.constexpr = -1 if BACKWARD else 1
    tile, token = inputs.tile, inputs.token
    if BACKWARD:
        tile += (count - 1) * SIZES.HV
        token += (count - 1) * SIZES.BT
    stage = 0
    phase = 1
    for _ in range(count):
        mbarrier.wait(ring.free.index(stage), phase)
        mbarrier.expect(ring.full.index(stage), BYTES)
        load_rows(inputs, ring, stage, tile, token, SIZES)
        if SIZES.IN_PLACE:
            mbarrier.wait(ring.x_free.index(stage), phase)
        load_values(inputs, ring, stage, token, SIZES)
        load_squares(inputs, ring, stage, tile, SIZES)
        tile += STEP * SIZES.HV
        token += STEP * SIZES.BT
        stage, phase = next_stage(stage, phase, SIZES.STAGES)


@gluon.constexpr_function
def tile_bytes(SIZES, *fields):
    """Bytes of a chunk's tiles, from the fields of `ChunkInputs` (a record as an argument loses their names)."""
    x, triangle = ChunkInputs(*fields), 3  # quarters
    once = [x.q, x.k, x.rows] + [x.total] * SIZES.CHANNEL
    tiles = once + [x.x, x.w] * SIZES.PARTS + [x.write] * (1 if SIZES.FOLDED else triangle) + [x.square] * triangle
    return sum(tile.block_type.nbytes for tile in tiles if tile is not None)


@gluon.jit
def load_rows(inputs, ring, stage, tile, token, SIZES: gl.constexpr):
    """Load k, q, the decay under a channel gate, and the row factors of a chunk."""
    full = ring.full.index(stage)
    if SIZES.CHANNEL:
        if inputs.k is not None:
            tma_load(inputs.k, [tile * SIZES.BT, 0], full, ring.k.index(stage))
        if inputs.q is not None:
            tma_load(inputs.q, [tile * SIZES.BT, 0], full, ring.q.index(stage))
        if inputs.total is not None:
            tma_load(inputs.total, [tile * SIZES.K], full, ring.total.index(stage))
    else:
        if inputs.k is not None:
            tma_load(inputs.k, [token, inputs.column_k], full, ring.k.index(stage))
        if inputs.q is not None:
            tma_load(inputs.q, [token, inputs.column_q], full, ring.q.index(stage))
    if inputs.rows is not None:
        tma_load(inputs.rows, [tile * (4 * SIZES.BT)], full, ring.rows.index(stage))


@gluon.jit
def load_values(inputs, ring, stage, token, SIZES: gl.constexpr):
    """Load v or do of a chunk, and the factors of v, for all parts."""
    PARTS: gl.constexpr = SIZES.PARTS
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    for part in gl.static_range(PARTS):
        buffer = ring.x.index(stage * PARTS + part)
        tma_load(inputs.x, [token, inputs.column_x + part * BW], ring.full.index(stage), buffer)
        if inputs.w is not None:
            factors = ring.w.index(stage * PARTS + part)
            tma_load(inputs.w, [token, inputs.column_x + part * BW], ring.full.index(stage), factors)


@gluon.jit
def load_squares(inputs, ring, stage, tile, SIZES: gl.constexpr):
    """Load E and the triangles of a chunk."""
    full = ring.full.index(stage)
    if inputs.write is not None:
        if SIZES.FOLDED:
            tma_load(inputs.write, [tile * SIZES.BT, 0], full, ring.write.index(stage))
        else:
            tma_load_upper(inputs.write, tile, full, quarters(ring.write, inputs.write, SIZES.STAGES), stage)
    if inputs.square is not None:
        tma_load_upper(inputs.square, tile, full, quarters(ring.square, inputs.square, SIZES.STAGES), stage)
