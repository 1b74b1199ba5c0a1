"""The kernel of `segment_summary` in Gluon: its arguments, a program's coordinates, and its partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.pipeline.gluon import ChunkInputs, after, computed, ring_of, span_at, span_of, specialize
from wyfold.kernels.segment_summary.gluon.forward.consumer import Globals, consumer
from wyfold.kernels.segment_summary.gluon.forward.producer import producer
from wyfold.kernels.segment_summary.gluon.forward.zeros import Smem, write_flag
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
from wyfold.tile.index.gluon import start_next_launch, wait_for_launch_ahead
from wyfold.tile.index.triton import TokenRows
from wyfold.tile.index.triton.slots import even_segment, segment_coords, slot_coords


class Heads(NamedTuple):
    """Kernel argument: distances between heads of k and v."""

    h_k: Any
    h_v: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        of_H: 1 if the program computes H, 0 if M.
        needed: 1 if the segment ends at a border, else 0.
        span: Its chunks, all of which are full.
        n: Sequence.
        border: Border at which the segment ends.
        begins: The sequence begins in this segment; of H with its initial state, of M with zeros.
        slot, given, first: With slots, that of the initial state; whether it holds one for this call; whether the
            segment is its sequence's first one. Else None.
    """

    of_H: Any
    needed: Any
    span: Any
    n: Any
    border: Any
    begins: Any
    slot: Any
    given: Any
    first: Any


@gluon.jit(do_not_specialize=["s_source", "slots", "pad", "N", "T", "length"])
def wyfold_segment_summary_gluon(
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    bounds,
    heads,
    maps,
    segments,
    packing,
    pool,
    s_source,
    slots,
    pad,
    N,
    T,
    length,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2.

    Programs of H come first. If there are at most as many as multiprocessors, each gets one, which it has to itself
    once the programs of M have stopped.

    With slots, which only `EvenSegments` have, those of M that begin a sequence copy its initial state.
    """
    HV: gl.constexpr = SIZES.HV
    NV: gl.constexpr = SIZES.V // SIZES.BV
    NK: gl.constexpr = SIZES.K // SIZES.BV
    pid = gl.program_id(0).to(gl.int64)
    slot, given, first = None, None, None
    of_M = gl.num_programs(0) // (NV + NK) * NV
    of_H = (pid < of_M).to(gl.int32)
    pid = gl.where(of_H != 0, pid, pid - of_M)
    width = gl.where(of_H != 0, NV, NK)
    i_v, i_hv, i_border = pid % width, (pid // width) % HV, pid // (width * HV)
    i_h = i_hv // (HV // SIZES.H)
    if SIZES.EVEN:
        each = gl.num_programs(0) // ((NV + NK) * HV) // N.to(gl.int32)
        i_c, t, tokens, i_n, i_border, begins, ends = even_segment(i_border, each, 0, N, T, length, SIZES.BT)
        span = span_at(i_c, i_c * 0, t, tokens, i_hv, i_v, T, SIZES)
        if slots is not None:
            # Before the wait: written before the first launch, which has not started early.
            slot, given, _, _, _ = slot_coords(i_n, pool.source, s_source, None, None, pool.given, slots, pad)
            first = begins
        wait_for_launch_ahead()
    else:
        wait_for_launch_ahead()
        i_s = gl.load(segments.leading + i_border)
        i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
        span = span_of(i_s, i_hv, i_v, packing, T, 0, SIZES)
    start_next_launch()
    needed = ((i_n < N) & (ends == 0)).to(gl.int32)
    # The first segment needs no M: its entering state is known.
    span = computed(span, needed * gl.where(begins, of_H, 1))
    if bounds.rows is not None:
        last = span.tile + (span.steps - 1) * HV
        at = TokenRows(span.b, span.token + (span.steps - 1) * SIZES.BT, T, T)
        reach = chunks_in_reach(bounds, last, -HV, span.steps, at, i_h, SIZES)
        # What enters the segment is lost: H begins as if its sequence did not begin here, and M is zeros.
        skipped = span.steps - reach
        begins = gl.where(skipped > 0, of_H == 0, begins)
        span = after(span, skipped, gl.where((skipped > 0) & (of_H == 0), 0, reach), SIZES)
    inputs = ChunkInputs(
        span.tile.to(gl.int32), span.token, None, (i_h * heads.h_k).to(gl.int32),
        (i_hv * heads.h_v).to(gl.int32) + span.column, None, x_k, x_v, x_rows, x_total, x_write, None,
    )  # fmt: skip
    ring = ring_of(inputs, SIZES)
    smem = _flags(ring, of_H, span.steps, SIZES)
    gmem = Globals(x_total, maps)
    coords = Coords(of_H, needed, span, i_n, i_border, begins, slot, given, first)
    specialize(consumer, gmem, ring, smem, coords, producer, (inputs, ring, smem, of_H, span.steps, SIZES), SIZES)
    # Keep the barriers' memory allocated: no other buffer may reuse it (docs/facts/hopper.md, KDA-NAN-1).
    ring.full._keep_alive()
    ring.free._keep_alive()


@gluon.jit
def _flags(ring, of_H, steps, SIZES: gl.constexpr):
    """Initialise the flags, and for M the values, which the producer loads for H alone."""
    PARTS: gl.constexpr = SIZES.PARTS
    VALUES: gl.constexpr = SIZES.STAGES * SIZES.PARTS
    BT: gl.constexpr = SIZES.BT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    FLAG: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    map_is_zero = gl.allocate_shared_memory(gl.int32, [PARTS, 1], FLAG)
    count = gl.allocate_shared_memory(gl.int32, [1], FLAG)
    for part in gl.static_range(PARTS):
        write_flag(map_is_zero.index(part), 0)
    write_flag(count, steps)
    if of_H == 0:
        L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
        for i in gl.static_range(VALUES):
            ring.x.index(i).store(gl.zeros([BT, BW], ring.x.dtype, L))
    return Smem(map_is_zero, count)
