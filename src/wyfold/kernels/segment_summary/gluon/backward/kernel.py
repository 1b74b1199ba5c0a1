"""The kernel of `segment_summary_bwd` in Gluon: its arguments, a program's coordinates, and its partitions."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.pipeline.gluon import ChunkInputs, computed, produce, ring_of, span_of, specialize
from wyfold.kernels.segment_summary.gluon.backward.consumer import Globals, consumer
from wyfold.tile.decay.horizon.gluon import chunks_in_reach
from wyfold.tile.index.triton import TokenRows
from wyfold.tile.index.triton.slots import segment_coords


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and do."""

    h_q: Any
    h_k: Any
    h_do: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        needed: 1 if the segment has a c, else 0.
        span: Its chunks.
        n: Sequence.
        border: Border at which the segment begins.
        ends: The sequence ends in this segment.
        count: Number of chunks, with a partial one.
        tail_rows: Tokens of the partial last chunk, or 0.
    """

    needed: Any
    span: Any
    n: Any
    border: Any
    ends: Any
    count: Any
    tail_rows: Any


@gluon.jit(do_not_specialize=["N", "T", "unit", "scale"])
def wyfold_segment_summary_bwd_gluon(
    x_q,
    x_k,
    x_do,
    x_rows,
    x_total,
    x_F,
    x_write,
    bounds,
    heads,
    gradients,
    segments,
    packing,
    N,
    T,
    unit,
    scale,
    SIZES: gl.constexpr,
):
    """One program owns BV value rows of c."""
    HV: gl.constexpr = SIZES.HV
    NV: gl.constexpr = SIZES.V // SIZES.BV
    pid = gl.program_id(0).to(gl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, gl.load(segments.leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // SIZES.H)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    needed = ((i_n < N) & (begins == 0)).to(gl.int32)
    span = computed(span_of(i_s, i_hv, i_v, packing, T, 0, SIZES), needed)
    count, tail_rows = span.steps + (span.tail_rows > 0).to(gl.int32), span.tail_rows
    if bounds.rows is not None:
        at = TokenRows(span.b, span.token, T, T)
        reach = chunks_in_reach(bounds, span.tile, HV, count, at, i_h, SIZES)
        # Nothing of the final state's gradient or of the chunks behind the reach is left at the border.
        ends = ends & (reach == count)
        tail_rows = gl.where(reach < count, 0, tail_rows)
        count = reach
    inputs = ChunkInputs(
        span.tile.to(gl.int32), span.token, (i_h * heads.h_q).to(gl.int32), (i_h * heads.h_k).to(gl.int32),
        (i_hv * heads.h_do).to(gl.int32) + span.column, x_q, x_k, x_do, x_rows, x_total, x_write, x_F,
    )  # fmt: skip
    ring = ring_of(inputs, SIZES)
    gmem = Globals(x_total, unit, scale, gradients)
    coords = Coords(needed, span, i_n, i_border - 1, ends, count, tail_rows)
    specialize(consumer, gmem, ring, None, coords, produce, (inputs, ring, count, True, SIZES), SIZES)
