"""Arguments of the kernel of `ttt` in Gluon, and what the partitions of a program share."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and v."""

    h_q: Any
    h_k: Any
    h_v: Any


class Results(NamedTuple):
    """Kernel argument: output and `SegmentBorders`, contiguous, written; the latter None where no backward follows."""

    o: Any
    N: Any
    X: Any
    S: Any
    c: Any
    rows: Any


class Smem(NamedTuple):
    """Shared memory, by stage, and the scan's exchange buffers.

    Attributes:
        q, k, v: [STAGES, SEGMENT, D] tokens.
        wt: [STAGES, SEGMENT, D] w (u - v + k).
        row_numbers: [STAGES, 4 * SEGMENT] factor, negative closing step, negative own step, and sum of wt, per token.
        N, X: [STAGES, SEGMENT, D] results of the scan.
        row_stats: Three tiles [STAGES, SEGMENT] from the scan: r, mean X Y and mean Y.
        S: [STAGES, D, D] state entering the segment, V-first.
        c: [STAGES, D] its bias.
        z: [BT, D] exchange buffer of predictions.
        high, low: [BT, D] exchange buffers of N times its step, as a bfloat16 pair.
        o: [SEGMENT, D] outputs.
        loaded, prepared, scanned, free: [STAGES, 1] mbarriers.
    """

    q: Any
    k: Any
    v: Any
    wt: Any
    row_numbers: Any
    N: Any
    X: Any
    row_stats: Any
    S: Any
    c: Any
    z: Any
    high: Any
    low: Any
    o: Any
    loaded: Any
    prepared: Any
    scanned: Any
    free: Any


class TmaInputs(NamedTuple):
    """TMA descriptors, and the program's first column in each.

    Attributes:
        q, k, v: Descriptors.
        column_q, column_k, column_v: First column of the head.
    """

    q: Any
    k: Any
    v: Any
    column_q: Any
    column_k: Any
    column_v: Any


class Globals(NamedTuple):
    """Arguments of the kernel that the groups of warps use without TMA; `results` are contiguous."""

    tokens: Any
    states: Any
    results: Any


class Coords(NamedTuple):
    """Coordinates of a program.

    Attributes:
        n: Sequence.
        hv: Value head.
        tile: Number of its first segment's tile.
        b: Row of the batch.
        t: First token in that row.
        token: First token over all rows.
        length: Number of tokens.
        segments: Number of segments.
        padding: Tokens after the last sequence's end that belong to no sequence; 0 in other programs.
    """

    n: Any
    hv: Any
    tile: Any
    b: Any
    t: Any
    token: Any
    length: Any
    segments: Any
    padding: Any


@gluon.jit
def parameter(p, strides, i_hv, o_v):
    """Load one head's row of a parameter [HV, D] as float32."""
    return gl.load(p + i_hv * strides[0] + o_v.to(gl.int64) * strides[1]).to(gl.float32)
