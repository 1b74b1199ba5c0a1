"""The kernel of `scan` in Gluon: its arguments, a program's coordinates, and its partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.pipeline.gluon import (
    IN_REGISTERS,
    ChunkInputs,
    Ends,
    computed,
    produce,
    ring_of,
    span_at,
    span_of,
    specialize,
)
from wyfold.kernels.scan.gluon.consumer import Globals, Smem, consumer
from wyfold.tile.index.gluon import clear_tokens, wait_for_launch_ahead
from wyfold.tile.index.triton import TokenRows
from wyfold.tile.index.triton.slots import even_segment, segment_coords, slot_coords


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        h_q, h_k, h_v: Distances between heads.
        o, s_o: Output, and its strides, for the partial chunk.
    """

    h_q: Any
    h_k: Any
    h_v: Any
    o: Any
    s_o: Any
    end: None = None


class Coords(NamedTuple):
    """Coordinates of a program: its chunks, and where its states come from and go to."""

    span: Any
    state: Any


@gluon.jit(do_not_specialize=["N", "shift", "s_source", "s_target", "slots", "pad", "T", "per_sequence", "scale"])
def wyfold_scan_gluon(
    x_q,
    x_k,
    x_v,
    x_rows,
    x_total,
    x_write,
    x_F,
    x_o,
    x_w,
    tokens,
    states,
    segments,
    pool,
    packing,
    N,
    shift,
    s_source,
    s_target,
    slots,
    pad,
    T,
    per_sequence,
    scale,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of one state; the tiles of a head are neighbours, so that they share k and q in
    L2.

    i_n is the program's sequence of the chunk grid: its number n, or selected[n] + shift. With segments, the grid's
    sequences are segments, and segments.sequence[i_n] is the sequence that segment i_n belongs to. States are indexed
    by sequence, or with slots by the sequence's slots. With both, only the leaving states are in slots.
    """
    BT: gl.constexpr = SIZES.BT
    PARTS: gl.constexpr = SIZES.PARTS
    OUT: gl.constexpr = SIZES.OUT
    BW: gl.constexpr = SIZES.BV // SIZES.PARTS
    NV: gl.constexpr = SIZES.V // SIZES.BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % SIZES.HV, pid // (NV * SIZES.HV)
    i_h = i_hv // (SIZES.HV // SIZES.H)
    if segments.selected is not None:
        i_n = gl.load(segments.selected + i_n) + shift
    # Before the loads that say where the states are: those of the chunks do not wait for them.
    i_border, begins, ends, i_to = i_n, None, None, None
    if SIZES.EVEN:
        each = gl.num_programs(0) // (NV * SIZES.HV) // N.to(gl.int32)
        i_c, t, length, i_n, i_border, begins, ends = even_segment(i_n, each, shift, N, T, per_sequence, BT)
        span = span_at(i_c, i_c * 0, t, length, i_hv, i_v, T, SIZES)
    else:
        span = span_of(i_n, i_hv, i_v, packing, T, per_sequence, SIZES)
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)
    if slots is not None:
        if segments.sequence is None and not SIZES.EVEN:
            i_n, begins, i_to, ends, live = slot_coords(
                i_n, pool.source, s_source, pool.target, s_target, pool.given, slots, pad
            )  # fmt: skip
        else:
            # States enter from S0 by sequence: a slot may be written before the first segment has read it.
            _, _, i_to, stored, live = slot_coords(
                gl.minimum(i_n, N - 1), pool.source, s_source, pool.target, s_target, None, slots, pad
            )  # fmt: skip
            ends = ends & stored
        if not live:
            # Each program zeroes its columns of the output; the consumers then see no token.
            for row in range(0, span.length, BT):
                at = TokenRows(span.b, span.t + row, span.length - row)
                clear_tokens(tokens.o + span.column, tokens.s_o, at, i_hv, SIZES.BV, BT, SIZES.BV)
        span = computed(span, live.to(gl.int32))
    inputs = ChunkInputs(
        span.tile.to(gl.int32), span.token, (i_h * tokens.h_q).to(gl.int32), (i_h * tokens.h_k).to(gl.int32),
        (i_hv * tokens.h_v).to(gl.int32) + span.column, x_q, x_k, x_v, x_rows, x_total, x_write, x_F, x_w,
    )  # fmt: skip
    ring = ring_of(inputs, SIZES)
    out = ring.x
    if OUT > 0:
        out = gl.allocate_shared_memory(x_o.dtype, [OUT * PARTS, BT, BW], x_o.layout)
    state = None
    if SIZES.K > IN_REGISTERS:
        state = gl.allocate_shared_memory(x_k.dtype, [PARTS, BW, SIZES.K], x_k.layout)
    gmem = Globals(x_total, x_o, x_w, scale, tokens, states, segments)
    count = span.steps + (span.tail_rows > 0).to(gl.int32)
    coords = Coords(span, Ends(i_n, i_border, i_n < N, begins, ends, i_to))
    AT_ONCE: gl.constexpr = segments.borders is not None
    specialize(consumer, gmem, ring, Smem(out, state), coords, _producer, (inputs, ring, count, AT_ONCE, SIZES), SIZES)


@gluon.jit
def _producer(inputs, ring, count, AT_ONCE: gl.constexpr, SIZES: gl.constexpr):
    """Producer: `produce`, at once in segments, whose factors are older than the launch ahead, else after that."""
    if not AT_ONCE:
        wait_for_launch_ahead()
    produce(inputs, ring, count, False, SIZES)
