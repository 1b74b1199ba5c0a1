"""`read` of `ttt` in Gluon: outputs of a segment, and what a backward needs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.ttt.gluon.program import parameter


@gluon.jit
def read_segments(
    gmem,
    smem,
    coords,
    scale,
    eps,
    HV: gl.constexpr,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    FOR_BACKWARD: gl.constexpr,
    ON_Q: gl.constexpr,
):
    """Compute the outputs of every segment.

        O = s q S + c - (steps * (s q k^T + 1)) N    out = O + w normalise(O) + u

    `steps`: inside its mini-batch a row reads earlier rows and itself with its own step, and earlier mini-batches with
    their closing steps.
    """
    LO: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LO, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LO, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    INVERSE: gl.constexpr = 1.0 / D
    tokens, results = gmem.tokens, gmem.results
    o_r = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, LO))[:, None]
    o_s = gl.arange(0, SEGMENT, layout=gl.SliceLayout(0, LO))[None, :]
    o_v = gl.arange(0, D, layout=gl.SliceLayout(0, LO))
    w = parameter(tokens.w, tokens.s_w, coords.hv, o_v)[None, :]
    u = parameter(tokens.u, tokens.s_u, coords.hv, o_v)[None, :]
    before = o_s // BT < o_r // BT
    own = (o_s // BT == o_r // BT) & (o_s <= o_r)
    zero_acc = gl.zeros([SEGMENT, SEGMENT], gl.float32, LO)
    zero_out = gl.zeros([SEGMENT, D], gl.float32, LO)
    tile = coords.tile
    stage = 0
    phase = 0
    for j in range(coords.segments):
        row_number = smem.row_numbers.index(stage)
        query = smem.q.index(stage)
        mbarrier.wait(smem.prepared.index(stage), phase)
        q = query.load(LEFT)
        weights = mma_v2(q, smem.k.index(stage).permute((1, 0)).load(RIGHT), zero_acc)
        closed = row_number.slice(SEGMENT, SEGMENT).load(gl.SliceLayout(0, LO))[None, :]
        steps = row_number.slice(2 * SEGMENT, SEGMENT).load(gl.SliceLayout(1, LO))[:, None]
        steps = gl.where(own, steps, gl.where(before, closed, 0.0))
        weights = gl.convert_layout(((weights * scale + 1.0) * steps).to(gl.bfloat16), LEFT)

        mbarrier.wait(smem.scanned.index(stage), phase)
        O = mma_v2(q, smem.S.index(stage).permute((1, 0)).load(RIGHT), zero_out)
        O = O * scale + smem.c.index(stage).load(gl.SliceLayout(0, LO))[None, :]
        O = mma_v2(weights, smem.N.index(stage).load(RIGHT), O)
        d = O - (gl.sum(O, 1) * INVERSE)[:, None]
        r = gl.rsqrt(gl.sum(d * d, 1) * INVERSE + eps)
        out = w * (d * r[:, None]) + u
        if ON_Q:
            out = query.load(LO).to(gl.float32) + out
        else:
            out = O + out
        smem.o.store(out.to(gl.bfloat16))

        token = coords.token + j * SEGMENT
        rows = gl.minimum(coords.length - j * SEGMENT, SEGMENT).to(gl.int32)
        _store_tokens(results.o, token, coords.hv, rows, smem.o.load(L), HV, D, SEGMENT, L)
        if FOR_BACKWARD:
            _store_for_backward(gmem, smem, coords, stage, token, rows, tile, HV, D, SEGMENT)
        # No fence: all data read from the stage is in registers, and a fence would wait for the stores above.
        mbarrier.arrive(smem.free.index(stage), count=1)
        tile += HV
        stage, phase = next_stage(stage, phase, STAGES)
    zeros = gl.zeros([SEGMENT, D], gl.bfloat16, L)
    token = (coords.token + coords.length).to(gl.int32)
    for j in range(((coords.padding + SEGMENT - 1) // SEGMENT).to(gl.int32)):
        rows = gl.minimum(coords.padding - j * SEGMENT, SEGMENT).to(gl.int32)
        _store_tokens(results.o, token + j * SEGMENT, coords.hv, rows, zeros, HV, D, SEGMENT, L)


@gluon.jit
def _store_for_backward(
    gmem, smem, coords, stage, token, rows, tile, HV: gl.constexpr, D: gl.constexpr, SEGMENT: gl.constexpr
):
    """Store the scan's results of a segment, and the state that enters it."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    LT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROW4: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    results = gmem.results
    _store_tokens(results.N, token, coords.hv, rows, smem.N.index(stage).load(L), HV, D, SEGMENT, L)
    _store_tokens(results.X, token, coords.hv, rows, smem.X.index(stage).load(L), HV, D, SEGMENT, L)
    xy = smem.row_stats[1].index(stage).load(LT)
    stats = gl.join(smem.row_stats[0].index(stage).load(LT), smem.row_stats[2].index(stage).load(LT))
    stats = gl.convert_layout(gl.join(stats, gl.join(xy, xy)).reshape((SEGMENT, 4)), ROW4)
    _store_tokens(results.rows, token, coords.hv, rows, stats, HV, 4, SEGMENT, ROW4)
    o_w = gl.arange(0, D, layout=gl.SliceLayout(1, L)) * D
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, L))
    gl.store(results.S + tile * (D * D) + (o_w[:, None] + o_k[None, :]), smem.S.index(stage).load(L))
    gl.store(results.c + tile * D + gl.arange(0, D, layout=LT), smem.c.index(stage).load(LT))


@gluon.jit
def _store_tokens(p, token, i_hv, rows, x, HV: gl.constexpr, W: gl.constexpr, SEGMENT: gl.constexpr, L: gl.constexpr):
    """Store the first `rows` rows of x [SEGMENT, W] in layout L to a contiguous [tokens, HV, W], from `token` on.

    Strides are not arguments: inside a warp group the compiler cannot see that one is 1, and stores would be scalar.
    """
    o_t = gl.arange(0, SEGMENT, layout=gl.SliceLayout(1, L))
    o_w = gl.arange(0, W, layout=gl.SliceLayout(0, L))
    first = (token.to(gl.int64) * HV + i_hv) * W
    gl.store(p + first + (o_t[:, None] * (HV * W) + o_w[None, :]), x, mask=(o_t < rows)[:, None] & (o_w >= 0)[None, :])
