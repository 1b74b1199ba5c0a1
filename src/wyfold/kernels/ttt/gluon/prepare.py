"""`prepare` of `ttt` in Gluon: what the scan reads of the tokens."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.ttt.gluon.program import parameter
from wyfold.tile.index.gluon import clear_rows


@gluon.jit
def prepare_segments(
    gmem, smem, coords, D: gl.constexpr, BT: gl.constexpr, SEGMENT: gl.constexpr, STAGES: gl.constexpr
):
    """Compute `wt` and `row_numbers` of every token, and zero k past the sequence's end.

    All results are zero in rows without a token.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    tokens = gmem.tokens
    o_v = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    w = parameter(tokens.w, tokens.s_w, coords.hv, o_v)[None, :]
    u = parameter(tokens.u, tokens.s_u, coords.hv, o_v)[None, :]
    o_t = gl.arange(0, SEGMENT, layout=LT)
    p_eta = tokens.eta + coords.b * tokens.s_eta[0] + coords.t * tokens.s_eta[1] + coords.hv * tokens.s_eta[2]
    stage = 0
    phase = 0
    for j in range(coords.segments):
        first = j * SEGMENT
        rows = gl.minimum(coords.length - first, SEGMENT).to(gl.int32)
        last = first + gl.minimum((o_t // BT + 1) * BT, rows) - 1
        own = gl.load(p_eta + (first + o_t).to(gl.int64) * tokens.s_eta[1], mask=o_t < rows, other=0.0)
        close = gl.load(p_eta + last.to(gl.int64) * tokens.s_eta[1], mask=o_t < rows, other=0.0)
        factor = gl.where(o_t < rows, 1.0, 0.0)
        if tokens.col is not None:
            p_col = tokens.col + coords.b * tokens.s_col[0] + coords.t * tokens.s_col[1] + coords.hv * tokens.s_col[2]
            offsets = (first + o_t).to(gl.int64) * tokens.s_col[1]
            factor = gl.load(p_col + offsets, mask=o_t < rows, other=0.0).to(gl.float32)
        row_number = smem.row_numbers.index(stage)
        mbarrier.wait(smem.loaded.index(stage), phase)
        row_number.slice(0, SEGMENT).store(factor)
        row_number.slice(SEGMENT, SEGMENT).store(-close.to(gl.float32))
        row_number.slice(2 * SEGMENT, SEGMENT).store(-own.to(gl.float32))
        for i in gl.static_range(SEGMENT // BT):
            k = smem.k.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            v = smem.v.index(stage).slice(i * BT, BT).load(L).to(gl.float32)
            is_token = i * BT + gl.arange(0, BT, layout=ROW) < rows
            wt = gl.where(is_token[:, None], w * (u - v + k), 0.0)
            smem.wt.index(stage).slice(i * BT, BT).store(wt)
            row_number.slice(3 * SEGMENT + i * BT, BT).store(gl.sum(wt, 1))
        if rows < SEGMENT:
            clear_rows(smem.k.index(stage), rows, SEGMENT, D)
        mbarrier.arrive(smem.prepared.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
