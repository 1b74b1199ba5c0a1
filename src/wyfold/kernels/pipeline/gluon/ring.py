"""Chunks of a program, the stages of its ring, and the start of its partitions."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from wyfold.kernels.pipeline.gluon.records import Ring, Span
from wyfold.tile.index.gluon import barrier, clear_lower, quarters
from wyfold.tile.index.triton import sequence_span


@gluon.jit
def span_of(i_n, i_hv, i_v, packing, T, per_sequence, SIZES: gl.constexpr):
    """Chunks of sequence i_n of the grid."""
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, SIZES.PACKED)
    return span_at(i_c, b, t, length, i_hv, i_v, T, SIZES)


@gluon.jit
def span_at(i_c, b, t, length, i_hv, i_v, T, SIZES: gl.constexpr):
    """The chunks from chunk i_c on, of `length` tokens from token t of row b on."""
    BT: gl.constexpr = SIZES.BT
    steps = (length // BT).to(gl.int32)
    tail_rows = (length - steps.to(gl.int64) * BT).to(gl.int32)
    column = (i_v * SIZES.BV).to(gl.int32)
    tile, token = i_c * SIZES.HV + i_hv, (b * T + t).to(gl.int32)
    return Span(i_hv, column, tile, b, t, token, length, steps, tail_rows)


@gluon.jit
def computed(span, wanted):
    """The span, without chunks to compute where `wanted` is 0."""
    steps, tail_rows = span.steps * wanted, span.tail_rows * wanted
    return Span(span.hv, span.column, span.tile, span.b, span.t, span.token, span.length, steps, tail_rows)


@gluon.jit
def after(span, chunks, steps, SIZES: gl.constexpr):
    """The span behind its first full chunks, with `steps` full ones of what is left."""
    rows = chunks * SIZES.BT
    tile, token, length = span.tile + chunks * SIZES.HV, span.token + rows, span.length - rows
    return Span(span.hv, span.column, tile, span.b, span.t + rows, token, length, steps, span.tail_rows)


@gluon.jit
def ring_of(inputs, SIZES: gl.constexpr):
    """Allocate the ring, initialise its barriers, and zero what no load of a triangle writes."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    STAGES: gl.constexpr = SIZES.STAGES
    VALUES: gl.constexpr = SIZES.STAGES * SIZES.PARTS
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    WRITE: gl.constexpr = SIZES.K if SIZES.FOLDED else SIZES.BT
    k = None
    if inputs.k is not None:
        k = gl.allocate_shared_memory(inputs.k.dtype, [STAGES, BT, K], inputs.k.layout)
    values = gl.allocate_shared_memory(inputs.x.dtype, [VALUES, BT, BW], inputs.x.layout)
    if k is None:
        k = values
    q, rows, total, write, square = k, k, k, k, k
    if inputs.q is not None:
        q = gl.allocate_shared_memory(inputs.q.dtype, [STAGES, BT, K], inputs.q.layout)
    if inputs.rows is not None:
        rows = gl.allocate_shared_memory(gl.float32, [STAGES, 4 * BT], inputs.rows.layout)
    if inputs.write is not None:
        write = gl.allocate_shared_memory(inputs.write.dtype, [STAGES, BT, WRITE], inputs.write.layout)
        if not SIZES.FOLDED:
            clear_lower(quarters(write, inputs.write, STAGES), STAGES)
    if inputs.square is not None:
        square = gl.allocate_shared_memory(inputs.square.dtype, [STAGES, BT, BT], inputs.square.layout)
        clear_lower(quarters(square, inputs.square, STAGES), STAGES)
    if SIZES.CHANNEL:
        total = gl.allocate_shared_memory(gl.float32, [STAGES, K], inputs.total.layout)
    full, free = barriers(STAGES, 1), barriers(STAGES, SIZES.PARTS)
    x_free = free
    if SIZES.IN_PLACE:
        x_free = barriers(STAGES, SIZES.PARTS)
    w = values
    if inputs.w is not None:
        w = gl.allocate_shared_memory(inputs.w.dtype, [VALUES, BT, BW], inputs.w.layout)
    return Ring(q, k, values, rows, total, write, square, full, free, x_free, w)


@gluon.jit
def barriers(STAGES: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate and initialise a barrier per stage, which completes after ARRIVALS arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(found.index(s), count=ARRIVALS)
    return found


@gluon.jit
def specialize(consumer: gl.constexpr, gmem, ring, smem, at, producer: gl.constexpr, produced, SIZES: gl.constexpr):
    """Run PARTS consumers(gmem, ring, smem, at, part, SIZES) and producer(*produced) side by side.

    What the program has stored to shared memory, and its barriers, are visible to all of them and to TMA.
    """
    fence_async_shared()
    barrier()
    if SIZES.PARTS == 1:
        gl.warp_specialize(
            [(_consume, (consumer, gmem, ring, smem, at, 0, SIZES)), (_produce, (producer, produced))], [1], [24]
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (consumer, gmem, ring, smem, at, 0, SIZES)),
                (_consume, (consumer, gmem, ring, smem, at, 1, SIZES)),
                (_produce, (producer, produced)),
            ],
            [4, 1],
            [240, 24],
        )


@gluon.jit
def _consume(consumer: gl.constexpr, gmem, ring, smem, at, part, SIZES: gl.constexpr):
    consumer(gmem, ring, smem, at, part, SIZES)


@gluon.jit
def _produce(producer: gl.constexpr, produced):
    producer(*produced)


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
def release(ring, stage, there, STAGES: gl.constexpr):
    """Consumer: free the stage before `stage`, if there is a chunk before; what it wrote there is visible to TMA."""
    fence_async_shared()
    mbarrier.arrive(ring.free.index(stage_before(stage, STAGES)), count=1, pred=there)
