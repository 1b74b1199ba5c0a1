"""`scan` of `ttt` in Gluon: the mini-batches in order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from wyfold.kernels.pipeline.gluon import next_stage
from wyfold.kernels.ttt.gluon.program import parameter
from wyfold.tile.dot.triton import bf16_parts
from wyfold.tile.inner.triton import add_five
from wyfold.tile.state.gluon import state_offsets


@gluon.jit
def scan_segments(
    gmem,
    smem,
    coords,
    eps,
    D: gl.constexpr,
    BT: gl.constexpr,
    SEGMENT: gl.constexpr,
    STAGES: gl.constexpr,
    FOR_BACKWARD: gl.constexpr,
):
    """Scan the mini-batches in order.

        Z = k S + c    N = gradient of the inner loss    S <- S - e_n k^T N    c <- c - e_n sum(N)

    N is computed as in `tile/inner`, except that d is relative to the first value of its token. With m the mean of d:

        sum (d - m)^2 = sum d^2 - m sum d        sum a (d - m) = sum a d - m sum a
        sum w^2 (d - m)^2 = sum w^2 d^2 - m (sum w^2 d + sum w^2 (d - m))
    """
    LS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, LS, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, LS, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROW: gl.constexpr = gl.SliceLayout(1, L)
    tokens, states = gmem.tokens, gmem.states
    o_v = gl.arange(0, D, layout=gl.SliceLayout(1, LS))
    o_k = gl.arange(0, D, layout=gl.SliceLayout(0, LS))
    S = gl.zeros([D, D], gl.float32, LS)
    c = gl.zeros([D, BT], gl.float32, LS)
    if states.S0 is not None:
        S = gl.load(states.S0 + state_offsets(states.s_S0, coords.n, coords.hv, o_v, o_k)).to(gl.float32)
    if states.c0 is not None:
        p_c0 = states.c0 + coords.n * states.s_c0[0] + coords.hv * states.s_c0[1]
        c += gl.load(p_c0 + o_v.to(gl.int64) * states.s_c0[3]).to(gl.float32)[:, None]
    w = parameter(tokens.w, tokens.s_w, coords.hv, gl.arange(0, D, layout=gl.SliceLayout(0, L)))
    ww = (w * w)[None, :]
    sum_ww = gl.sum(w * w, 0)
    ones = gl.full([BT, BT], 1.0, gl.bfloat16, RIGHT)
    S_operand = gl.convert_layout(S.to(gl.bfloat16), LEFT)
    stage = 0
    phase = 0
    for _ in range(coords.segments):
        row_number = smem.row_numbers.index(stage)
        mbarrier.wait(smem.prepared.index(stage), phase)
        smem.S.index(stage).store(S.to(gl.bfloat16))
        smem.c.index(stage).store(gl.reduce(c, 1, _first))
        for i in gl.static_range(SEGMENT // BT):
            key = smem.k.index(stage).slice(i * BT, BT)
            Z = mma_v2(S_operand, key.permute((1, 0)).load(RIGHT), c)
            # Operands for Z and N are loaded during the product.
            keys = key.load(RIGHT)
            wt = smem.wt.index(stage).slice(i * BT, BT).load(L)
            factor = row_number.slice(i * BT, BT).load(ROW)
            step = row_number.slice(SEGMENT + i * BT, BT).load(ROW)
            sum_t = row_number.slice(3 * SEGMENT + i * BT, BT).load(ROW)
            smem.z.permute((1, 0)).store(Z)

            d = _from_first(smem.z.load(L))
            N, d, r, xy, y = _inner_gradient(d, wt, ww, sum_ww, sum_t, factor, eps)
            written = N * step[:, None]
            high, low = bf16_parts(written)
            smem.high.store(high)
            smem.low.store(low)
            smem.N.index(stage).slice(i * BT, BT).store(N.to(gl.bfloat16))
            if FOR_BACKWARD:
                smem.X.index(stage).slice(i * BT, BT).store((d * r[:, None]).to(gl.bfloat16))
                smem.row_stats[0].index(stage).slice(i * BT, BT).store(r)
                smem.row_stats[1].index(stage).slice(i * BT, BT).store(xy)
                smem.row_stats[2].index(stage).slice(i * BT, BT).store(y)
            high_operand = smem.high.permute((1, 0)).load(LEFT)
            low_operand = smem.low.permute((1, 0)).load(LEFT)
            S = mma_v2(high_operand, keys, S)
            c = mma_v2(low_operand, ones, mma_v2(high_operand, ones, c))
            S_operand = gl.convert_layout(S.to(gl.bfloat16), LEFT)
        mbarrier.arrive(smem.scanned.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    _store_state(gmem, coords, S, c, o_v, o_k)


@gluon.jit
def _inner_gradient(d, wt, ww, sum_ww, sum_t, factor, eps):
    """Gradient N of a mini-batch's inner loss, with what a backward reads: N, d - m, r, mean X Y and mean Y."""
    INVERSE: gl.constexpr = 1.0 / d.shape[1]
    wwd = ww * d
    m, dd, y, yy, xy = gl.reduce((d, d * d, wwd, wwd * d, wt * d), 1, add_five)
    mean = m * INVERSE
    r = gl.rsqrt((dd - mean * m) * INVERSE + eps)
    yy = yy - mean * y
    y = y - mean * sum_ww
    yy = yy - mean * y
    xy = xy - mean * sum_t
    y = (r * y + sum_t) * INVERSE
    xy = (r * r * yy + r * xy) * INVERSE
    factor = factor * r
    rr = r * factor
    d = d - mean[:, None]
    N = d * (rr[:, None] * ww - (rr * xy)[:, None]) + (factor[:, None] * wt - (factor * y)[:, None])
    return N, d, r, xy, y


@gluon.jit
def _store_state(gmem, coords, S, c, o_v, o_k):
    """Store the state and the bias that leave the sequence, if they are wanted."""
    states = gmem.states
    if states.ST is not None:
        offsets = state_offsets(states.s_ST, coords.n, coords.hv, o_v, o_k)
        gl.store(states.ST + offsets, S.to(states.ST.dtype.element_ty))
    if states.cT is not None:
        p_cT = states.cT + coords.n * states.s_cT[0] + coords.hv * states.s_cT[1]
        gl.store(p_cT + o_v.to(gl.int64) * states.s_cT[3], gl.reduce(c, 1, _first).to(states.cT.dtype.element_ty))


@gluon.jit
def _first(a, b):
    """Combine function of a reduction that selects the first element."""
    return a


@gluon.jit
def _from_first(z):
    """Subtract the first value of each row; eight lanes hold a row, eight numbers each."""
    SUBTRACT: gl.constexpr = """
    {
    .reg .f32 first;
    shfl.sync.idx.b32 first, $8, 0, 0x181f, 0xffffffff;
    sub.f32 $0, $8, first;
    sub.f32 $1, $9, first;
    sub.f32 $2, $10, first;
    sub.f32 $3, $11, first;
    sub.f32 $4, $12, first;
    sub.f32 $5, $13, first;
    sub.f32 $6, $14, first;
    sub.f32 $7, $15, first;
    }
    """
    return gl.inline_asm_elementwise(
        SUBTRACT, "=f,=f,=f,=f,=f,=f,=f,=f,f,f,f,f,f,f,f,f", [z], dtype=gl.float32, is_pure=True, pack=8
    )
