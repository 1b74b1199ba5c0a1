"""`gradients` in Gluon for Hopper under a channel gate: bfloat16, chunks of 64, K = V = 128.

One program computes one half of the channels of one chunk and key head, value head by value head. It issues all loads
of a value head before it computes with it. Its shared memory lets two programs fit a multiprocessor (a test of
`tests/compile/test_gradients_gluon.py`). Both programs of a chunk compute the gradients of the grams, which need all of
V. They are neighbours in the grid, so that the second load of e, X and do can hit L2. Tiles are [channel, token], so a
token's decay scales a left operand in registers, and no decayed row is ever stored.

dq and dk are sums over the value heads, in their order. Each thread adds what it computed for a head to its part of the
sums, in float32 in global memory (`sum_tile`), since the tiles of a head take all registers and shared memory.

**Letters** that docs/algorithm.md lacks, or uses for something else:

    dw          gradient of k as a column; dk' in docs/algorithm.md, section 7.2. dk is that of k as a row.
    x, y        products for the gate's gradient, per channel: x_r = q_r dq_r + k_r dk_r,  y_s = k_s dw_s
    P, J        in shared memory: the gradients of the grams P and J
    I, Q, E     decays, per channel: I of a token since its sub-chunk began, Q of a token until its sub-chunk ends, and
                E of a whole sub-chunk; not the identity, the queries and A^T Kt
    X           gradient of Y, as on that page; unrelated to x

**Sizes.** A program has BK = K / 2 = 64 channels and BT = 64 tokens. The code relies on BK = BT: accumulators over
channels and tokens, [BK, BT], share a layout and their zeros with the grams, [BT, BT]. Numbers in the code follow from
the tree below: 8 tokens of a sub-chunk, 16 of a quarter, 32 of half of the chunk, and 512 = 64 * 8 pairs (near) inside
sub-chunks.

**Tree of sub-chunks.** A chunk is 8 sub-chunks of 8 tokens. Two sub-chunks make a quarter of 16 tokens, the unit of one
tile. At each level, the rows of a block's later half and the columns of its earlier half exchange gradients across the
border (x) between the halves:

    sub-chunk       0   1   2   3   4   5   6   7
    quarter         [ 0   ] [ 1   ] [ 2   ] [ 3   ]

    level 32        [   earlier   ] x [   later   ]       quarters (2, 3) with (0, 1): 4 exchanges
    level 16        [ e   ]x[ l   ] [ e   ]x[ l   ]       quarters 1 with 0, and 3 with 2
    level 8         [e]x[l] [e]x[l] [e]x[l] [e]x[l]       odd with even sub-chunk, inside each quarter
    near pairs      [ ] [ ] [ ] [ ] [ ] [ ] [ ] [ ]       inside each sub-chunk

Each pair of a row r and a column s < r adds to dq_r and dk_r, the gradients of the row, and to dw_s, that of the
column. Levels run from far to near. Every row has one accumulator for dq and one for dk, and every column one for dw.
At each level the row accumulators of a later half first decay over the earlier half; then the exchange adds the pairs
with columns in the earlier half. The column accumulators of an earlier half first decay over the later half.

An exchange scales its operands by the decays between a token and the border, products of I, Q and E. Row accumulators
are multiplied by I, and column accumulators by Q, once at the end. So every decay is at most 1, and none is computed as
a difference of sums.

**The gate's gradient** of token i is a sum over the pairs with s < i <= r. The entering state counts as a column before
all tokens, the gradient of the leaving one as a row after them. Before an exchange, x of a later half holds the pairs
whose columns lie before the block. They span the whole earlier half, so the sum of x is added to each token of the
earlier half. In the same way y of an earlier half holds the pairs whose rows lie after the block, and its sum is added
to each token of the later half. The remaining pairs begin or end in the token's own sub-chunk, or lie inside it.

**Near pairs**, of one sub-chunk, are computed one by one in float32, as in `tile.decay.channel`. A warp then holds a
sub-chunk, and a thread all 8 rows of two of its channels.

**With the l2 norm**, q and k stay raw, as in `wyfold.kernels.gradients.gluon`. The pairs' gradients carry both norms,
and the gradients through the states carry the row's own norm. For a raw row u with normed row n = u/|u|, accumulators
then hold z = dn/|u| in place of dn. x and y do not change, since u z = n dn in every channel. The norm's adjoint,
du = z - u <u, z>/|u|^2, needs all channels: both programs store z, rounded, and their part of <u, z>, and
`wyfold_gradients_norm_gluon` follows.

Rows past a sequence's end are zeroed. Inputs that TMA cannot read are copied, as in `wyfold.kernels.gradients.gluon`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.tokens import (
    Coords,
    Outputs,
    exp2,
    load_rows,
    load_scalars,
    store_rows,
    store_scalars,
    store_token_tile,
    sum_tile,
)
from wyfold.kernels.gradients.triton.arguments import Factors
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import LN_2, LOG2_E, exp, sigmoid, sigmoid_bwd
from wyfold.tile.decay.triton import FLOOR, Gate, activated
from wyfold.tile.decay.triton.gradient import GateGradient, activated_bwd, softplus_gate_bwd
from wyfold.tile.index.gluon import ELEMENTS, barrier, clear_rows, gluon_descriptors, reinterpret, tma_load
from wyfold.tile.index.triton import Packing, chunk_span, strides
from wyfold.tile.index.triton.descriptors import tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter. Takes the arguments of the Triton launch.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator, with the sizes and dtypes that `key` implies.
        do: [B, T, HV, V] gradient of the output.
        borders: From `scan_bwd`.
        grid: The call's chunk grid, of chunks of 64.
        options: As given to `prepare`.
        key: Launch configuration key.
        out: Written, as by the Triton launch.
    """
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    config = tuned("gradients.gluon", key, q.device)
    read_q, read_k, read_do, read_g = reads = [_readable(x) for x in (q, k, do, g)]
    wanted = [(out.q, read_q), (out.k, read_k), (out.g, read_g)]
    out_q, out_k, out_g = (_output_buffer(to, like) for to, like in wanted)
    dA_log = ddt_bias = norm_dots = None
    if options.qk_l2norm:
        norm_dots = q.new_empty(grid.chunks * H, 2, 2, C, dtype=torch.float32)
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, 2, dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K, dtype=torch.float32)
    sums = q.new_empty(grid.chunks * H * 2, 4, C // 2, K // 2, dtype=torch.float32) if HV > H else None
    x_q, x_k, x_do, x_g, x_dq, x_dk, x_dg, x_S, x_dS, x_e, x_X = _descriptors(
        [*reads, out_q, out_k, out_g], borders, C, K // 2
    )
    launch_kernel(
        wyfold_gradients_channel_gluon,
        grid.chunks * H * 2,
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_g=x_g,
        x_dq=x_dq,
        x_dk=x_dk,
        x_dg=x_dg,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        tokens=Tokens(
            h_q=read_q.stride(2),
            h_k=read_k.stride(2),
            h_do=read_do.stride(2),
            h_g=read_g.stride(2),
            q=read_q,
            s_q=read_q.stride(),
            k=read_k,
            s_k=read_k.stride(),
            X=borders.X,
            norm_dots=norm_dots,
        ),
        gate=Gate(A_log=A_log, dt_bias=dt_bias, lower_bound=options.lower_bound, clamp=options.clamp or FLOOR),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most),
        outputs=Outputs(
            dq=out_q,
            s_dq=out_q.stride(),
            dk=out_k,
            s_dk=out_k.stride(),
            dv=out.v,
            s_dv=strides(out.v),
            dbeta=out.beta,
            s_dbeta=strides(out.beta),
            sums=sums,
        ),
        dgate=GateGradient(g=out_g, s_g=out_g.stride(), A_log=dA_log, dt_bias=ddt_bias),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        factors=Factors(options.scale, options.unit, options.unit * float(options.erases)),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            WHOLE=grid.cu is None and grid.tokens % C == 0,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
        ),
        **config.options(),
    )
    if norm_dots is not None:
        launch_kernel(
            wyfold_gradients_norm_gluon,
            grid.chunks * H,
            p_q=read_q,
            p_k=read_k,
            s_q=read_q.stride(),
            s_k=read_k.stride(),
            p_dq=out_q,
            p_dk=out_k,
            s_dq=out_q.stride(),
            s_dk=out_k.stride(),
            p_norm_dots=norm_dots,
            p_cu=grid.cu,
            p_first=grid.first,
            p_sequence=grid.sequence,
            N=grid.sequences,
            T=grid.tokens,
            per_sequence=grid.per_sequence,
            H=H,
            K=K,
            BT=C,
            PACKED=grid.cu is not None,
            **config.options(),
        )
    for to, (requested, _) in zip((out_q, out_k, out_g), wanted, strict=True):
        if requested is not None and requested is not to:
            requested.copy_(to)
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


def _readable(x: Tensor) -> Tensor:
    """x in a layout and dtype that TMA can read; a copy where x has another."""
    x = x if x.dtype in ELEMENTS else x.float()
    return x if _tma_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _tma_readable(x: Tensor) -> bool:
    """Whether TMA can read blocks of tokens of x."""
    return token_descriptor(x, 1, 64) is not None


def _output_buffer(to: Tensor | None, like: Tensor) -> Tensor:
    """Output buffer of a gradient: `to` where TMA can write it, else a temporary."""
    return to if to is not None and to.dtype == like.dtype and _tma_readable(to) else like.new_empty(like.shape)


def _descriptors(tokens: list[Tensor], borders: TokenBorders, C: int, BK: int) -> list[Any]:
    """TMA descriptors in kernel argument order: q, k, do, g, the gradients of q, k and g, then S, dS, e and X."""
    V = borders.e.shape[2]
    found = [token_descriptor(x, C, n) for x, n in zip(tokens, (BK, BK, V, BK, BK, BK, BK), strict=True)]
    found += [tile_descriptor(x, V, BK) for x in (borders.S, borders.dS)] + [
        tile_descriptor(x, C, V) for x in borders[2:]
    ]
    return gluon_descriptors(found)


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and what is accessed through pointers.

    Attributes:
        h_q, h_k, h_do, h_g: Distances between heads.
        q, s_q, k, s_k: Rows of q and k, and their strides, for the norms.
        X: [tiles, BT, V] of `TokenBorders`.
        norm_dots: [chunks and key heads, 2, 2, BT] products of rows and gradients, written for
            `wyfold_gradients_norm_gluon`; None without a norm.
    """

    h_q: Any
    h_k: Any
    h_do: Any
    h_g: Any
    q: Any
    s_q: Any
    k: Any
    s_k: Any
    X: Any
    norm_dots: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel; see the kernel for scalar gates."""

    PACKED: bool
    WHOLE: bool
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    LOGIT: bool


class GateActivation(NamedTuple):
    """Parameters of the gate's activation.

    Attributes:
        rate: exp(A_log), or 1.
        lower_bound: Lower bound of a bounded gate.
        clamp: Smallest log gate.
    """

    rate: Any
    lower_bound: Any
    clamp: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_channel_gluon(
    x_q,
    x_k,
    x_do,
    x_g,
    x_dq,
    x_dk,
    x_dg,
    x_S,
    x_dS,
    x_e,
    x_X,
    tokens,
    gate,
    strength,
    outputs,
    dgate,
    packing,
    factors,
    N,
    T,
    per_sequence,
    SIZES: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """One program computes a chunk of one key head, for half of its channels."""
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PACKED: gl.constexpr = FLAGS.PACKED
    WHOLE: gl.constexpr = FLAGS.WHOLE
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    CLAMPED: gl.constexpr = FLAGS.CLAMPED
    NORM: gl.constexpr = FLAGS.NORM
    LOGIT: gl.constexpr = FLAGS.LOGIT
    GR: gl.constexpr = HV // H
    BK: gl.constexpr = K // 2
    # An activation unrolled for all tokens exceeds the instruction cache and is fetched again for every chunk.
    ROLLED: gl.constexpr = ACTIVATION != "given" and x_g.dtype == gl.bfloat16
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 16, 16])
    CH: gl.constexpr = gl.SliceLayout(1, L)
    NEAR: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pid = gl.program_id(0).to(gl.int64)
    i_key, half = pid // 2, (pid % 2).to(gl.int32)
    i_c, i_h = i_key // H, i_key % H
    column = half * BK
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    o_1 = gl.arange(0, BT, layout=ONE)
    if PACKED:
        if i_n == N:
            zeros = gl.zeros([BT, BK], gl.float32, ROWS)
            for r in range(GR):
                value = Coords(b, t, coords.token, i_h * GR + r, rows)
                if outputs.dv is not None:
                    store_rows(outputs.dv, outputs.s_dv, value, column, zeros, ROWS, BT, BK)
            store_rows(outputs.dq, outputs.s_dq, coords, column, zeros, ROWS, BT, BK)
            store_rows(outputs.dk, outputs.s_dk, coords, column, zeros, ROWS, BT, BK)
            for r in range(GR):
                value, i_tile = Coords(b, t, coords.token, i_h * GR + r, rows), i_key * GR + r
                store_rows(dgate.g, dgate.s_g, value, column, zeros, ROWS, BT, BK)
                if half == 0:
                    store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_1, gl.zeros([BT], gl.float32, ONE))
                if dgate.A_log is not None:
                    gl.store(dgate.A_log + _half_tile(pid, i_tile, half, GR), 0.0)
                if dgate.dt_bias is not None:
                    o_k = gl.arange(0, BK, layout=ONE)
                    gl.store(dgate.dt_bias + i_tile * K + column + o_k, gl.zeros([BK], gl.float32, ONE))
            return

    t_q = gl.allocate_shared_memory(x_q.dtype, [BT, BK], x_q.layout)
    t_k = gl.allocate_shared_memory(x_k.dtype, [BT, BK], x_k.layout)
    t_g = gl.allocate_shared_memory(x_g.dtype, [BT, BK], x_g.layout)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    betas = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    for r in tl.range(GR, disable_licm=True):
        value, i_tile = Coords(b, t, coords.token, i_h * GR + r, rows), i_key * GR + r
        t_do = gl.allocate_shared_memory(x_do.dtype, [BT, V], x_do.layout)
        t_e = gl.allocate_shared_memory(x_e.dtype, [BT, V], x_e.layout)
        t_X = gl.allocate_shared_memory(x_X.dtype, [BT, V], x_X.layout)
        t_S = gl.allocate_shared_memory(x_S.dtype, [V, BK], x_S.layout)
        t_dS = gl.allocate_shared_memory(x_dS.dtype, [V, BK], x_dS.layout)
        tile, values_ready, states_ready, tokens_ready = (
            i_tile.to(gl.int32),
            bars.index(0),
            bars.index(1),
            bars.index(2),
        )
        column_q, column_k = (i_h * tokens.h_q).to(gl.int32) + column, (i_h * tokens.h_k).to(gl.int32) + column
        column_g, column_do = (value.h * tokens.h_g).to(gl.int32) + column, (value.h * tokens.h_do).to(gl.int32)
        mbarrier.expect(values_ready, x_X.block_type.nbytes + x_e.block_type.nbytes + x_do.block_type.nbytes)
        tma_load(x_X, [tile * BT, 0], values_ready, t_X)
        tma_load(x_e, [tile * BT, 0], values_ready, t_e)
        tma_load(x_do, [coords.token, column_do], values_ready, t_do)
        mbarrier.expect(states_ready, x_S.block_type.nbytes + x_dS.block_type.nbytes)
        tma_load(x_S, [tile * V, column], states_ready, t_S)
        tma_load(x_dS, [tile * V, column], states_ready, t_dS)
        if GR == 1 or r == 0:
            mbarrier.expect(tokens_ready, x_g.block_type.nbytes + x_q.block_type.nbytes + x_k.block_type.nbytes)
            tma_load(x_g, [coords.token, column_g], tokens_ready, t_g)
            tma_load(x_q, [coords.token, column_q], tokens_ready, t_q)
            tma_load(x_k, [coords.token, column_k], tokens_ready, t_k)
        else:
            mbarrier.expect(tokens_ready, x_g.block_type.nbytes)
            tma_load(x_g, [coords.token, column_g], tokens_ready, t_g)

        beta = gl.where(o_1 < rows, 1.0, 0.0)
        if strength.beta is not None:
            beta = load_scalars(strength.beta, strength.s_beta, value, o_1)
            if LOGIT:
                beta = gl.where(o_1 < rows, sigmoid(beta) * strength.most, 0.0)
        betas.store(beta)
        norms_q, norms_k = betas, betas
        if NORM:
            norms_q = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
            norms_k = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
            norms_q.store(_reciprocal_norms(tokens.q, tokens.s_q, coords, ROWS, BT, K))
            norms_k.store(_reciprocal_norms(tokens.k, tokens.s_k, coords, ROWS, BT, K))
        rate = 1.0
        if gate.A_log is not None:
            rate = exp(gl.load(gate.A_log + value.h).to(gl.float32))
        activation = GateActivation(rate, gate.lower_bound, gate.clamp)
        if outputs.dv is not None:
            # Half of v's columns, loaded from global memory: only dv needs X in this layout.
            o_t, o_v = (
                gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS)),
                gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS)),
            )
            X = gl.load(tokens.X + i_tile * (BT * V) + column + o_t[:, None] * V + o_v[None, :]).to(gl.float32)
            barrier()
            X = X * (betas.load(gl.SliceLayout(1, ROWS)) * factors.unit)[:, None]
            store_rows(outputs.dv, outputs.s_dv, value, column, X, ROWS, BT, BK)
        else:
            barrier()

        # Gradients of the grams, and rows through the states.
        zero_acc = gl.zeros([BT, BT], gl.float32, LC)  # also of [BK, BT] and [BK, BK] products: BK = BT
        mbarrier.wait(values_ready, r % 2)
        if not WHOLE:
            if rows < BT:
                clear_rows(t_do, rows, BT, V)
        dJ = warpgroup_mma(t_X, t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        dP = warpgroup_mma(t_do, t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        mbarrier.wait(states_ready, r % 2)
        # Only the diagonal is used: <S, dS> of every channel. A product reads both states from shared memory;
        # elementwise, both would be loaded into registers.
        trace = warpgroup_mma(t_S.permute((1, 0)), t_dS, zero_acc, use_acc=False, is_async=True)
        dJ, dP, trace = warpgroup_mma_wait(0, deps=[dJ, dP, trace])
        dq = warpgroup_mma(t_S.permute((1, 0)), t_do.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        dk = warpgroup_mma(t_S.permute((1, 0)), t_X.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        dw = warpgroup_mma(t_dS.permute((1, 0)), t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        o_r, o_c = gl.arange(0, BT, layout=gl.SliceLayout(1, LC)), gl.arange(0, BT, layout=gl.SliceLayout(0, LC))
        carried = gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1) * factors.unit
        carried = gl.convert_layout(carried, CH, assert_trivial=True)
        beta_r, beta_c = betas.load(gl.SliceLayout(1, LC)), betas.load(gl.SliceLayout(0, LC))
        if outputs.dbeta is not None:
            if half == 0:
                dbeta = gl.sum(gl.where(o_r[:, None] == o_c[None, :], dJ, 0.0), axis=1) * factors.unit
                if LOGIT:
                    dbeta = sigmoid_bwd(load_scalars(strength.beta, strength.s_beta, value, o_r), dbeta) * strength.most
                store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_r, dbeta)
        read, written = gl.full([BT], factors.scale, gl.float32, gl.SliceLayout(0, LC)), beta_c * factors.unit
        erased = beta_c * factors.erased_unit
        dP, dJ = (
            dP * (factors.scale * beta_c)[None, :],
            dJ * (beta_c[None, :] * (-beta_r * factors.erased_unit)[:, None]),
        )
        if NORM:
            r_c = norms_k.load(gl.SliceLayout(0, LC))
            read, written, erased = read * norms_q.load(gl.SliceLayout(0, LC)), written * r_c, erased * r_c
            dP = dP * r_c[None, :] * norms_q.load(gl.SliceLayout(1, LC))[:, None]
            dJ = dJ * r_c[None, :] * norms_k.load(gl.SliceLayout(1, LC))[:, None]
        near_P, near_J = _own_sub_chunk_columns(dP, o_r), _own_sub_chunk_columns(dJ, o_r)
        is_far = o_r[:, None] // 8 > o_c[None, :] // 8
        far_P = _split4_columns(gl.where(is_far, dP, 0.0).to(x_q.dtype), L)
        far_J = _split4_columns(gl.where(is_far, dJ, 0.0).to(x_q.dtype), L)

        dq, dk, dw = warpgroup_mma_wait(0, deps=[dq, dk, dw])
        # Only from here on may the allocator reuse these tiles. It tracks a tile's last textual use, but an
        # asynchronous product reads its operands longer; `_keep_alive` is that last use.
        barrier()
        t_S._keep_alive()
        t_dS._keep_alive()
        t_e._keep_alive()
        t_X._keep_alive()
        t_do._keep_alive()
        near = gl.allocate_shared_memory(gl.float32, [8 * BT, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        near.store(gl.join(near_P, near_J).permute((1, 0, 2)).reshape([8 * BT, 2]))
        PAIRS: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
        P, J = _allocate4(x_q.dtype, BT, PAIRS), _allocate4(x_q.dtype, BT, PAIRS)
        for n in gl.static_range(4):
            P[n].store(far_P[n])
            J[n].store(far_J[n])
        fence_async_shared()
        barrier()
        # Accumulators of the quarters, [BK, 16] each; so far they hold the gradients through the states.
        dq0, dq1, dq2, dq3 = _split4_columns(dq * read[None, :], L)
        dk0, dk1, dk2, dk3 = _split4_columns(dk * -erased[None, :], L)
        dw0, dw1, dw2, dw3 = _split4_columns(dw * written[None, :], L)

        # Decays, in the shared memory of the states.
        mbarrier.wait(tokens_ready, r % 2)
        if not WHOLE:
            if rows < BT:
                clear_rows(t_q, rows, BT, BK)
                clear_rows(t_k, rows, BT, BK)
                clear_rows(t_g, rows, BT, BK)
        DECAYS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
        I, Q = _allocate4(gl.float32, BK, DECAYS), _allocate4(gl.float32, BK, DECAYS)
        logs = t_g
        if ACTIVATION != "given":
            logs = gl.allocate_shared_memory(gl.float32, [BT, BK], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
            _store_log_gates(
                logs, t_g, gate.dt_bias, value.h * K + column, activation, rows, ROLLED, ACTIVATION, BT, BK
            )
        E = _empty_tuple()
        for n in gl.static_range(4):
            log_g = _load_quarter(logs, n, L)
            if ACTIVATION == "given":
                log_g = _log_gate(log_g, 0.0, activation, True, ACTIVATION)
            E = _concat_tuples(E, _split2_columns(exp2(gl.sum(log_g.reshape([BK, 2, 8]), axis=2)), CH))
            since_start, until_end = _sums_inside_sub_chunks(log_g)
            I[n].store(exp2(since_start))
            Q[n].store(exp2(until_end))
        E01, E23, E45, E67 = E[0] * E[1], E[2] * E[3], E[4] * E[5], E[6] * E[7]
        E03, E47 = E01 * E23, E45 * E67
        one = gl.full([BK], 1.0, gl.float32, CH)

        # Level 32: quarters 2 and 3 exchange with quarters 0 and 1.
        later2 = _later_quarter(t_q, t_k, I, 2, dq2, dk2, E03, one, E[4], L)
        later3 = _later_quarter(t_q, t_k, I, 3, dq3, dk3, E03, E45, E45 * E[6], L)
        earlier0 = _earlier_quarter(t_k, Q, 0, dw0, E47, E23 * E[1], E23, L)
        earlier1 = _earlier_quarter(t_k, Q, 1, dw1, E47, E[3], one, L)
        later_x, earlier_y = gl.sum(later2.x + later3.x, axis=1), gl.sum(earlier0.y + earlier1.y, axis=1)
        later2, earlier0 = _exchange(P, J, later2, earlier0, 2, 0)
        later3, earlier0 = _exchange(P, J, later3, earlier0, 3, 0)
        later2, earlier1 = _exchange(P, J, later2, earlier1, 2, 1)
        later3, earlier1 = _exchange(P, J, later3, earlier1, 3, 1)
        dq2, dk2, dq3, dk3, dw0, dw1 = warpgroup_mma_wait(
            0, deps=[later2.dq, later2.dk, later3.dq, later3.dk, earlier0.dw, earlier1.dw]
        )

        # Level 16: quarter 1 exchanges with 0, and 3 with 2.
        later1 = _later_quarter(t_q, t_k, I, 1, dq1, dk1, E01, one, E[2], L)
        later3 = _later_quarter(t_q, t_k, I, 3, dq3, dk3, E45, one, E[6], L)
        earlier0 = _earlier_quarter(t_k, Q, 0, dw0, E23, E[1], one, L)
        earlier2 = _earlier_quarter(t_k, Q, 2, dw2, E67, E[5], one, L)
        x1, y0, x3, y2 = (
            gl.sum(later1.x, axis=1),
            gl.sum(earlier0.y, axis=1),
            gl.sum(later3.x, axis=1),
            gl.sum(earlier2.y, axis=1),
        )
        later1, earlier0 = _exchange(P, J, later1, earlier0, 1, 0)
        later3, earlier2 = _exchange(P, J, later3, earlier2, 3, 2)
        dq1, dk1, dq3, dk3, dw0, dw2 = warpgroup_mma_wait(
            0, deps=[later1.dq, later1.dk, later3.dq, later3.dk, earlier0.dw, earlier2.dw]
        )

        dq4, dk4, dw4 = (dq0, dq1, dq2, dq3), (dk0, dk1, dk2, dk3), (dw0, dw1, dw2, dw3)

        # Part of the gate's gradient from pairs that span a token's whole quarter, by quarters.
        decay = E03 * E47
        later_x, earlier_y = gl.fma(carried, decay, later_x), gl.fma(carried, decay, earlier_y)
        over_quarter = (later_x + x1, later_x + y0, earlier_y + x3, earlier_y + y2)
        # Rows of 32 numbers, swizzled in groups of four: free of bank conflicts both for the stores, of four rows at
        # once, and for the loads, of every second one of 16 rows.
        TRANSPOSED: gl.constexpr = gl.SharedLinearLayout(
            [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 8], [2, 16], [4, 8], [8, 4], [16, 0], [32, 0]]
        )
        halves = _empty_tuple()
        for h in gl.static_range(2):
            # Level 8: the odd sub-chunk of each quarter exchanges with the even one; l and r are the half's two
            # quarters.
            later_l, earlier_l = _exchange_inside_quarter(P, J, t_q, t_k, 2 * h, I, Q, dq4, dk4, dw4, E, L)
            later_r, earlier_r = _exchange_inside_quarter(P, J, t_q, t_k, 2 * h + 1, I, Q, dq4, dk4, dw4, E, L)
            dq_l, dk_l, dq_r, dk_r, dw_l, dw_r = warpgroup_mma_wait(
                0, deps=[later_l.dq, later_l.dk, later_r.dq, later_r.dk, earlier_l.dw, earlier_r.dw]
            )
            I_l, I_r, Q_l, Q_r = I[2 * h].load(L), I[2 * h + 1].load(L), Q[2 * h].load(L), Q[2 * h + 1].load(L)
            dq_half, dk_half, dw_half = (
                _concat2_columns(dq_l * I_l, dq_r * I_r),
                _concat2_columns(dk_l * I_l, dk_r * I_r),
                _concat2_columns(dw_l * Q_l, dw_r * Q_r),
            )
            over = _stack4_columns(
                over_quarter[2 * h] + later_l.x,
                over_quarter[2 * h] + earlier_l.y,
                over_quarter[2 * h + 1] + later_r.x,
                over_quarter[2 * h + 1] + earlier_r.y,
            )
            halves = _concat_tuples(halves, ((dq_half, dk_half, dw_half, over),))
        # Both halves move to the shared memory of the decays and pairs: the near pairs need the registers.
        barrier()
        for n in gl.static_range(4):
            P[n]._keep_alive()
            J[n]._keep_alive()
        t_dq = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
        t_dk = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
        t_dw = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TRANSPOSED)
        t_over = gl.allocate_shared_memory(gl.float32, [2, BK, 4], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
        for h in gl.static_range(2):
            t_dq.index(h).store(halves[h][0])
            t_dk.index(h).store(halves[h][1])
            t_dw.index(h).store(halves[h][2])
            t_over.index(h).store(halves[h][3])
        near_bias = 0.0
        if gate.dt_bias is not None:
            o_b = gl.arange(0, BK, layout=gl.SliceLayout(0, NEAR))
            near_bias = gl.load(gate.dt_bias + value.h * K + column + o_b).to(gl.float32)[None, :]
        tiles = NearTiles(near, t_dq, t_dk, t_dw, t_over, t_q, t_k, t_g, logs)
        p_dots = tokens.norm_dots
        if NORM:
            p_dots = tokens.norm_dots + pid * (2 * BT)
        sum_A, sum_x = 0.0, gl.zeros([BK], gl.float32, gl.SliceLayout(0, NEAR))
        if ROLLED:
            for h in range(2):
                dA, dx = _near_pairs_half(
                    tiles,
                    h,
                    outputs.sums,
                    pid * 4 + h,
                    r,
                    GR,
                    p_dots,
                    near_bias,
                    activation,
                    rows,
                    ROLLED,
                    ACTIVATION,
                    CLAMPED,
                    NORM,
                    NEAR,
                )
                sum_A, sum_x = sum_A + dA, sum_x + dx
        else:
            for h in gl.static_range(2):
                dA, dx = _near_pairs_half(
                    tiles,
                    h,
                    outputs.sums,
                    pid * 4 + h,
                    r,
                    GR,
                    p_dots,
                    near_bias,
                    activation,
                    rows,
                    ROLLED,
                    ACTIVATION,
                    CLAMPED,
                    NORM,
                    NEAR,
                )
                sum_A, sum_x = sum_A + dA, sum_x + dx
        if dgate.dt_bias is not None:
            gl.store(dgate.dt_bias + i_tile * K + column + gl.arange(0, BK, layout=gl.SliceLayout(0, NEAR)), sum_x)
        if dgate.A_log is not None:
            gl.store(dgate.A_log + _half_tile(pid, i_tile, half, GR), sum_A)
        fence_async_shared()
        barrier()
        if GR == 1 or r == GR - 1:
            store_token_tile(x_dq, outputs.dq, outputs.s_dq, coords, column, t_q, WHOLE, BT, BK)
            store_token_tile(x_dk, outputs.dk, outputs.s_dk, coords, column, t_k, WHOLE, BT, BK)
        store_token_tile(x_dg, dgate.g, dgate.s_g, value, column, t_g, WHOLE, BT, BK)
        tma.store_wait(pendings=0)
        if GR > 1:
            barrier()
    bars._keep_alive()  # the memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1)


@gluon.jit
def _half_tile(pid, i_tile, half, GR: gl.constexpr):
    """Number of half of the channels of a value head's tile."""
    if GR == 1:
        return pid
    else:
        return i_tile * 2 + half


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_norm_gluon(
    p_q,
    p_k,
    s_q,
    s_k,
    p_dq,
    p_dk,
    s_dq,
    s_dk,
    p_norm_dots,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    H: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Adjoint of the l2 norm, one program per chunk and key head: du = z - u <u, z>/|u|^2, in place of z.

    Args:
        p_norm_dots: [chunks and key heads, half of the channels, q or k, BT] partial sums of <u, z>.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, Packing(p_cu, p_first, p_sequence), T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    coords = Coords(b, t, 0, i_h, rows)
    o = p_norm_dots + pid * (4 * BT) + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    _norm_bwd(p_q, s_q, p_dq, s_dq, coords, gl.load(o) + gl.load(o + 2 * BT), L, BT, K)
    _norm_bwd(p_k, s_k, p_dk, s_dk, coords, gl.load(o + BT) + gl.load(o + 3 * BT), L, BT, K)


@gluon.jit
def _norm_bwd(p_x, s_x, p_dx, s_dx, coords, dot, L: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """Apply the norm's adjoint to q or k. x is the raw row u, and p_dx holds z, then du."""
    x = load_rows(p_x, s_x, coords, 0, L, BT, K)
    r = gl.rsqrt(gl.sum(gl.fma(x, x, 0.0), axis=1) + 1e-6)
    z = load_rows(p_dx, s_dx, coords, 0, L, BT, K)
    store_rows(p_dx, s_dx, coords, 0, gl.fma(x, -(dot * r * r)[:, None], z), L, BT, K)


@gluon.jit
def _reciprocal_norms(p, s, coords, L: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of whole rows, loaded from global memory.   [BT]"""
    x, y = load_rows(p, s, coords, 0, L, BT, K // 2), load_rows(p, s, coords, K // 2, L, BT, K // 2)
    return gl.rsqrt(gl.sum(gl.fma(x, x, y * y), axis=1) + 1e-6)


@gluon.jit
def _own_sub_chunk_columns(pairs, o_r):
    """Select each row's 8 columns in its own sub-chunk, also those after the row.   [64, 64] -> [64, 8]"""
    pairs = pairs.reshape([pairs.shape[0], 8, 8])
    own = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout)))
    mine = gl.convert_layout(o_r, gl.SliceLayout(1, gl.SliceLayout(2, pairs.type.layout)), assert_trivial=True) // 8
    return gl.sum(gl.where((mine[:, None] == own[None, :])[:, :, None], pairs, 0.0), axis=1)


class Later(NamedTuple):
    """16 tokens of the later half of a block, as rows of pairs. Tiles are [BK, 16].

    Attributes:
        q, k: Rows decayed since the border, as left operands.
        dq, dk: Accumulated gradients of the rows.
        x: q dq + k dk before the exchange; inside a quarter, their sum over the odd sub-chunk, [BK].
    """

    q: Any
    k: Any
    dq: Any
    dk: Any
    x: Any


class Earlier(NamedTuple):
    """16 tokens of the earlier half of a block, as columns of pairs. Tiles are [BK, 16].

    Attributes:
        k: Columns decayed until the border, as left operands.
        dw: Accumulated gradient of the columns.
        y: k dw before the exchange; inside a quarter, their sum over the even sub-chunk, [BK].
    """

    k: Any
    dw: Any
    y: Any


@gluon.jit
def _later_quarter(t_q, t_k, I, i: gl.constexpr, dq, dk, before, since0, since1, L: gl.constexpr):
    """Quarter i as the later half of a block, or a part of it.

    Args:
        dq, dk: [BK, 16] gradients from before the block.
        before: [BK] decay over the earlier half.
        since0, since1: [BK] decays from the border to the quarter's two sub-chunks.
    """
    decay = I[i].load(L) * _per_sub_chunk(since0, since1, L)
    q, k = _load_quarter(t_q, i, L) * decay, _load_quarter(t_k, i, L) * decay
    dq, dk = dq * before[:, None], dk * before[:, None]
    x = gl.fma(q, dq, k * dk)
    return Later(_register_operand(q, t_q.dtype, L), _register_operand(k, t_k.dtype, L), dq, dk, x)


@gluon.jit
def _earlier_quarter(t_k, Q, n: gl.constexpr, dw, after, until0, until1, L: gl.constexpr):
    """Quarter n as the earlier half of a block, or a part of it.

    Args:
        dw: [BK, 16] gradient from after the block.
        after: [BK] decay over the later half.
        until0, until1: [BK] decays from the ends of the quarter's two sub-chunks to the border.
    """
    k = _load_quarter(t_k, n, L) * (Q[n].load(L) * _per_sub_chunk(until0, until1, L))
    dw = dw * after[:, None]
    return Earlier(_register_operand(k, t_k.dtype, L), dw, gl.fma(k, dw, 0.0))


@gluon.jit
def _exchange(P, J, later, earlier, i: gl.constexpr, n: gl.constexpr):
    """Add the contributions of quarters i (later) and n (earlier) to each other; the products are asynchronous."""
    P, J = P[n].slice(16 * i, 16), J[n].slice(16 * i, 16)
    dq = warpgroup_mma(earlier.k, P.permute((1, 0)), later.dq, is_async=True)
    dk = warpgroup_mma(earlier.k, J.permute((1, 0)), later.dk, is_async=True)
    dw = warpgroup_mma(later.k, J, earlier.dw, is_async=True)
    dw = warpgroup_mma(later.q, P, dw, is_async=True)
    return Later(later.q, later.k, dq, dk, later.x), Earlier(earlier.k, dw, earlier.y)


@gluon.jit
def _exchange_inside_quarter(P, J, t_q, t_k, i: gl.constexpr, I, Q, dq4, dk4, dw4, E, L: gl.constexpr):
    """Exchange between quarter i's odd sub-chunk, the later one, and its even one. x and y are sums over them."""
    is_even = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    # A 1 that the compiler cannot fold: E[0] is not a constant. With the constant 1, `dq4[i] * before` would be dq4[i]
    # itself in the even sub-chunk, not a new value. It would be copied to be accumulated to, and products wait for
    # that copy.
    one = gl.fma(E[0], 0.0, 1.0)
    before, after = _per_sub_chunk(one, E[2 * i], L), _per_sub_chunk(E[2 * i + 1], one, L)
    decay = I[i].load(L)
    q, k = _load_quarter(t_q, i, L) * decay, _load_quarter(t_k, i, L) * decay
    w = _load_quarter(t_k, i, L) * Q[i].load(L)
    dq, dk, dw = dq4[i] * before, dk4[i] * before, dw4[i] * after
    x = gl.sum(gl.where(is_even, 0.0, gl.fma(q, dq, k * dk)), axis=1)
    y = gl.sum(gl.where(is_even, gl.fma(w, dw, 0.0), 0.0), axis=1)
    later = Later(_register_operand(q, t_q.dtype, L), _register_operand(k, t_k.dtype, L), dq, dk, x)
    return _exchange(P, J, later, Earlier(_register_operand(w, t_k.dtype, L), dw, y), i, i)


class NearTiles(NamedTuple):
    """Shared memory that the near pairs read and write.

    Attributes:
        near: [8 * 64, 2] gradients of P and J of every pair inside a sub-chunk.
        dq, dk, dw: [2, BK, 32] accumulated gradients of rows and columns, by halves of the tokens.
        over: [2, BK, 4] part of the gate's gradient from pairs that span a sub-chunk.
        q, k, g: [64, BK] inputs, overwritten with their gradients.
        logs: [64, BK] log gates to base 2; `g` where no activation is applied.
    """

    near: Any
    dq: Any
    dk: Any
    dw: Any
    over: Any
    q: Any
    k: Any
    g: Any
    logs: Any


@gluon.jit
def _store_log_gates(
    logs,
    t_g,
    p_dt_bias,
    parameters,
    activation,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BT: gl.constexpr,
    BK: gl.constexpr,
):
    """Apply the gate's activation to a chunk, 16 tokens at a time, and store the log gates to base 2."""
    G: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 16, layout=gl.SliceLayout(1, G))
    bias = 0.0
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + parameters + gl.arange(0, BK, layout=gl.SliceLayout(0, G))).to(gl.float32)[None, :]
    if ROLLED:
        for n in range(BT // 16):
            raw = _row_block(t_g, n, 16).load(G).to(gl.float32)
            _row_block(logs, n, 16).store(_log_gate(raw, bias, activation, (16 * n + o_t < rows)[:, None], ACTIVATION))
    else:
        for n in gl.static_range(BT // 16):
            raw = t_g.slice(16 * n, 16).load(G).to(gl.float32)
            logs.slice(16 * n, 16).store(_log_gate(raw, bias, activation, (16 * n + o_t < rows)[:, None], ACTIVATION))


@gluon.jit
def _row_block(tile, n, size: gl.constexpr):
    """The n-th block of `size` rows of a shared memory tile, with n a runtime value.

    Rows must not be longer than one TMA swizzle block.
    """
    return reinterpret(tile, tile.dtype, [tile.shape[0] // size, size, tile.shape[1]], tile.layout).index(n)


@gluon.jit
def _near_pairs_half(
    tiles,
    h,
    p_sums,
    tile,
    r,
    GR: gl.constexpr,
    p_dots,
    bias,
    activation,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMPED: gl.constexpr,
    NORM: gl.constexpr,
    NEAR: gl.constexpr,
):
    """Finish 32 tokens of a value head: add the near pairs, and overwrite the tokens with their gradients.

    q and k are overwritten after the last value head of their key head, with the sums over its heads.

    Args:
        p_sums: Sums over the value heads so far.
        tile: Number of this half's sum for q; that for k is the second after it.
        r: Value head, of the GR heads of its key head.

    Returns:
        The half's terms of dA_log, and of ddt_bias by channel.
    """
    ROW: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    BT: gl.constexpr = tiles.q.shape[0]
    o_t = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, NEAR))
    is_token = o_t[:, None] < rows
    t_q, t_k = _row_block(tiles.q, h, 32), _row_block(tiles.k, h, 32)
    if ROLLED:
        t_g = _row_block(tiles.g, h, 32)
    else:
        t_g = tiles.g.slice(32 * h, 32)
    raw = None
    if ACTIVATION == "given":
        raw = t_g.load(NEAR).to(gl.float32)
        a = exp2(_log_gate(raw, 0.0, activation, True, ACTIVATION))
    else:
        a = exp2(_row_block(tiles.logs, h, 32).load(NEAR))
    dq, dk = tiles.dq.index(h).permute((1, 0)).load(NEAR), tiles.dk.index(h).permute((1, 0)).load(NEAR)
    dw, over = tiles.dw.index(h).permute((1, 0)).load(NEAR), tiles.over.index(h).permute((1, 0)).load(ROW)
    q, k = t_q.load(NEAR).to(gl.float32), t_k.load(NEAR).to(gl.float32)
    dq, dk, dg = _near_pairs(tiles.near, h, q, k, a, dq, dk, dw, over, NEAR)
    if GR > 1:
        p_q = sum_tile(p_sums, tile, NEAR, dq.shape[0], dq.shape[1])
        p_k = sum_tile(p_sums, tile + 2, NEAR, dq.shape[0], dq.shape[1])
        is_later = gl.zeros(dq.shape, gl.int32, NEAR) + r > 0
        dq, dk = dq + gl.load(p_q, is_later, 0.0), dk + gl.load(p_k, is_later, 0.0)
        if r < GR - 1:
            gl.store(p_q, dq)
            gl.store(p_k, dk)
    if GR == 1 or r == GR - 1:
        if NORM:
            # p_dots is [tile, half of the channels, q or k, token].
            gl.store(p_dots + o_t, gl.sum(gl.fma(q, dq, 0.0), axis=1))
            gl.store(p_dots + o_t + BT, gl.sum(gl.fma(k, dk, 0.0), axis=1))
        t_q.store(dq.to(t_q.dtype))
        t_k.store(dk.to(t_k.dtype))
    if raw is None:
        raw = t_g.load(NEAR).to(gl.float32)
    if ACTIVATION == "softplus" and not CLAMPED:
        g = _row_block(tiles.logs, h, 32).load(NEAR) * LN_2  # a load costs less than another softplus
        dx, dA = softplus_gate_bwd(raw + bias, g, dg, activation.rate)
    else:
        dx, dA = activated_bwd(
            raw, dg, activation.rate, bias, activation.lower_bound, activation.clamp, CLAMPED, ACTIVATION
        )
    t_g.store(dx.to(t_g.dtype))
    dA = gl.sum(gl.sum(gl.where(is_token, dA, 0.0), axis=1), axis=0)
    return dA, gl.sum(gl.where(is_token, dx, 0.0), axis=0)


@gluon.jit
def _near_pairs(near, h, q, k, a, dq, dk, dw, over, NEAR: gl.constexpr):
    """Add the pairs inside each sub-chunk to the gradients of 32 tokens, and compute the gate's gradient.

    z and b are those of `add_near_pairs` in `tile.decay.channel.triton`; z is not that of the norm.

    Args:
        near: Gradients of P and J of the pairs.
        h: Half of the chunk's tokens.
        q, k: [32, 64] rows.
        a: [32, 64] decays of single tokens.
        dq, dk: [32, 64] gradients of rows, from before their sub-chunk.
        dw: [32, 64] gradients of columns, from after their sub-chunk.
        over: [4, 64] part of the gate's gradient from pairs that span the sub-chunk.

    Returns:
        dq, dk and the log gate's gradient, [32, 64] each.
    """
    q, k, a = _split8_rows(q), _split8_rows(k), _split8_rows(a)
    dq, dk, dw = _split8_rows(dq), _split8_rows(dk), _split8_rows(dw)
    dg, suffix_sum = (), over
    for i in gl.static_range(8):
        suffix_sum = gl.fma(q[7 - i], dq[7 - i], gl.fma(k[7 - i], dk[7 - i], suffix_sum))
        dg = _concat_tuples((suffix_sum,), dg)
    prefix_sum = over * 0.0
    for s in gl.static_range(8):
        dk = _add_to_row(dk, s, dw[s])
        dg = _add_to_row(dg, s, prefix_sum)
        prefix_sum = gl.fma(k[s], dw[s], prefix_sum)
    for s in gl.static_range(8):
        P, J = _load_coefficients(_row_block(near, 2 * s + h, 32), NEAR)
        dq = _add_to_row(dq, s, P[s] * k[s])
        dk = _add_to_row(dk, s, P[s] * q[s])
        z, z_rows = k[s], ()
        for r in gl.static_range(s + 1, 8):
            z = z * a[r]
            dq, dk = _add_to_row(dq, r, P[r] * z), _add_to_row(dk, r, J[r] * z)
            z_rows = _concat_tuples(z_rows, (z,))
        b = over * 0.0
        for i in gl.static_range(7 - s):
            b = gl.fma(P[7 - i], q[7 - i], gl.fma(J[7 - i], k[7 - i], b))
            dg = _add_to_row(dg, 7 - i, z_rows[6 - s - i] * b)
            b = b * a[7 - i]
        dk = _add_to_row(dk, s, b)
    return _join8_rows(dq, NEAR), _join8_rows(dk, NEAR), _join8_rows(dg, NEAR)


@gluon.jit
def _load_coefficients(pairs, NEAR: gl.constexpr):
    """Gradients of P and J for one column of every sub-chunk and its 8 rows.   [32, 2] -> 2 x 8 x [4, 1]"""
    P, J = gl.split(pairs.load(NEAR))
    return _split8_numbers(P), _split8_numbers(J)


@gluon.jit
def _add_to_row(rows, i: gl.constexpr, x):
    """Add x to element i of a tuple of rows."""
    return rows[:i] + (rows[i] + x,) + rows[i + 1 :]


@gluon.jit
def _empty_tuple():
    """An empty tuple, as a value of the kernel language."""
    return ()


@gluon.jit
def _concat_tuples(rows, x):
    """Concatenate two tuples."""
    return rows + x


@gluon.jit
def _split8_rows(x):
    """Split 4 sub-chunks of 8 rows into 8 tiles, one per position in the sub-chunk.   [32, 64] -> 8 x [4, 64]"""
    x = x.reshape([4, 2, 2, 2, x.shape[1]]).permute((0, 4, 1, 2, 3))
    even, odd = gl.split(x)
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return (
        _to_sub_chunk_layout(x0),
        _to_sub_chunk_layout(x1),
        _to_sub_chunk_layout(x2),
        _to_sub_chunk_layout(x3),
        _to_sub_chunk_layout(x4),
        _to_sub_chunk_layout(x5),
        _to_sub_chunk_layout(x6),
        _to_sub_chunk_layout(x7),
    )


@gluon.jit
def _to_sub_chunk_layout(x):
    """Name the layout of a tile with one token per sub-chunk; moves no data.   [4, 64]"""
    return gl.convert_layout(x, gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0]), assert_trivial=True)


@gluon.jit
def _join8_rows(x, NEAR: gl.constexpr):
    """Inverse of `_split8_rows`.   8 x [4, 64] -> [32, 64]"""
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    x = gl.join(even, odd).permute((0, 2, 3, 4, 1))
    return gl.convert_layout(x.reshape([32, x.shape[4]]), NEAR, assert_trivial=True)


@gluon.jit
def _split8_numbers(x):
    """`_split8_rows` for one number per token.   [32] -> 8 x [4, 1]"""
    even, odd = gl.split(x.reshape([4, 2, 2, 2]))
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return (
        _to_column(x0), _to_column(x1), _to_column(x2), _to_column(x3),
        _to_column(x4), _to_column(x5), _to_column(x6), _to_column(x7),
    )  # fmt: skip


@gluon.jit
def _to_column(x):
    """Column vector in the layout of `_to_sub_chunk_layout`; moves no data.   [4] -> [4, 1]"""
    R: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(x, gl.SliceLayout(1, R), assert_trivial=True)[:, None]


@gluon.jit
def _split4_columns(x, L: gl.constexpr):
    """Split a tile into blocks of 16 columns.   [M, 64] -> 4 x [M, 16]"""
    x = x.reshape([x.shape[0], 2, 2, 16]).permute((0, 3, 1, 2))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return (
        gl.convert_layout(x0, L, assert_trivial=True),
        gl.convert_layout(x1, L, assert_trivial=True),
        gl.convert_layout(x2, L, assert_trivial=True),
        gl.convert_layout(x3, L, assert_trivial=True),
    )


@gluon.jit
def _split2_columns(x, CH: gl.constexpr):
    """Split a tile into its two columns.   [M, 2] -> 2 x [M]"""
    x0, x1 = gl.split(x)
    return gl.convert_layout(x0, CH, assert_trivial=True), gl.convert_layout(x1, CH, assert_trivial=True)


@gluon.jit
def _stack4_columns(x0, x1, x2, x3):
    """Stack four vectors as columns.   4 x [M] -> [M, 4]"""
    return gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([x0.shape[0], 4])


@gluon.jit
def _concat2_columns(x0, x1):
    """Concatenate two tiles along columns.   2 x [M, 16] -> [M, 32]"""
    return gl.join(x0, x1).permute((0, 2, 1)).reshape([x0.shape[0], 32])


@gluon.jit
def _allocate4(dtype: gl.constexpr, M: gl.constexpr, S: gl.constexpr):
    """Allocate four separate shared memory tiles [M, 16]: a store to one needs no barrier for the others."""
    return (
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
    )


@gluon.jit
def _per_sub_chunk(x0, x1, L: gl.constexpr):
    """Broadcast one vector over the columns of each of two sub-chunks.   2 x [M] -> [M, 16]"""
    first = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    return gl.where(first, x0[:, None], x1[:, None])


@gluon.jit
def _load_quarter(tile, i: gl.constexpr, L: gl.constexpr):
    """Load quarter i of a [token, channel] tile, transposed, as float32.   [M, 16]"""
    return tile.slice(16 * i, 16).permute((1, 0)).load(L).to(gl.float32)


@gluon.jit
def _register_operand(x, dtype: gl.constexpr, L: gl.constexpr):
    """Left operand in registers; moves no data."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True)


@gluon.jit
def _log_gate(x, bias, activation, is_token, ACTIVATION: gl.constexpr):
    """Log gate to base 2; zero in rows without a token, where x is zero."""
    g = activated(x, activation.rate, bias, activation.lower_bound, activation.clamp, ACTIVATION)
    if ACTIVATION != "given":
        g = gl.where(is_token, g, 0.0)
    return gl.fma(g, LOG2_E, 0.0)  # rounded here, so that no later addition is fused with the product


@gluon.jit
def _sums_inside_sub_chunks(x):
    """Inclusive prefix sums inside each sub-chunk, and exclusive suffix sums. x has a product result's layout.

    A thread holds two adjacent tokens of a sub-chunk, and four adjacent threads hold its 8 tokens.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .f32 s, a, b;"
        " add.f32 s, $4, $5; mov.f32 b, s;"
        " shfl.sync.up.b32 a|p, b, 1, 0x1c00, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.up.b32 a|p, b, 2, 0x1c00, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.up.b32 a|p, b, 1, 0x1c00, 0xffffffff; @!p mov.f32 a, 0f00000000;"
        " add.f32 $0, a, $4; add.f32 $1, $0, $5; mov.f32 b, s;"
        " shfl.sync.down.b32 a|p, b, 1, 0x1c03, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.down.b32 a|p, b, 2, 0x1c03, 0xffffffff; @p add.f32 b, b, a;"
        " shfl.sync.down.b32 a|p, b, 1, 0x1c03, 0xffffffff; @!p mov.f32 a, 0f00000000;"
        " mov.f32 $3, a; add.f32 $2, a, $5; }",
        "=&f,=&f,=&f,=&f,f,f", [x], dtype=(gl.float32, gl.float32), is_pure=True, pack=2,
    )  # fmt: skip
