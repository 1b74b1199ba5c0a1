"""`gradients` in Gluon for Hopper under a channel gate: bfloat16, chunks of 64, K = V = 128, as many heads as keys.

One program has a chunk of one head and half of its channels, and asks for all it reads when it begins. Two fill a
multiprocessor. What both halves want, the gradients of the grams, both make: that is a tenth of the work, and what it
reads lies in the second-level cache. Tiles are [channel, token]: a token's decay then stands in a left operand, which
comes out of registers, and no decayed row is ever stored.

**From far to near.** Tokens lie in sub-chunks of 8, n = 0 to 7. I and Q are the decays of a token since its sub-chunk
began and until it ends, E those of whole sub-chunks. What a row gets from before its block of 64, 32, 16, 8 tokens is
gathered in that order, in one accumulator: on the way from one block to the half of it that comes later, what is there
decays over the half that comes earlier, and then what the earlier half gives is added by a product. In the end I is
multiplied once. Columns, which get from after their block, likewise with Q. So each product's decays, products of E
and I or Q, are those to the border between two halves, none is more than 1, and none is a difference.

**The gate's gradient** of token i is the sum over pairs r >= i > s. With x_r = q_r dq_r + k_r dk_r of what a row has so
far, and y_s = k_s dk_s of a column, at each border: the later half's x goes to all tokens of the earlier half, whose
pairs span it, and the earlier half's y to all of the later one. What is left are pairs that end or begin in the token's
own sub-chunk, and those inside it.

**Near pairs**, of one sub-chunk, meet one by one in float32, as in `tile.decay.channel`. A warp then has a sub-chunk,
and a thread all rows of two of its channels.

**Rows that are normalised here** stay raw, as in the launch beside this one: with both norms in the pairs' gradients
and a row's own in what comes through the states, all sums are z = dy/|x|, and x_r z_r is y_r dy_r. The norm's adjoint,
z - x <x, z>/|x|^2, wants all channels: both programs leave z, rounded, and their share of <x, z>, and a launch follows.

Rows that a sequence does not fill are cleared. What has no boxes is copied, as in the launch beside this one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
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
    exp2,
    load_rows,
    load_scalars,
    store_rows,
    store_scalars,
    store_token_tile,
)
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import exp, sigmoid, sigmoid_bwd
from wyfold.tile.decay.triton import FLOOR, activated, activated_bwd
from wyfold.tile.index.gluon import ELEMENTS, barrier, clear_rows, gluon_descriptors, tma_load
from wyfold.tile.index.triton import chunk_span, strides, tile_descriptor, token_descriptor


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
    key: str,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter. Arguments as of the Triton launch.

    Args:
        q, k, g, beta, A_log, dt_bias: As given to the operator, as the table's rows for `key` say.
        do: [B, T, HV, V] gradient of the output.
        borders: From `scan_bwd`.
        grid: The call's chunk grid, of chunks of 64.
        options: As given to `prepare`.
        key: Of the launch configuration.
        out: Written, as by the Triton launch.
    """
    (HV, V), K, C = do.shape[2:], q.shape[3], grid.chunk_size
    config = tuned("gradients.gluon", key, q.device)
    read_q, read_k, _, read_g = reads = [_readable(x) for x in (q, k, do, g)]
    wanted = [(out.q, read_q), (out.k, read_k), (out.g, read_g)]
    to_q, to_k, to_g = (_written(to, like) for to, like in wanted)
    dA_log = ddt_bias = along = None
    if options.qk_l2norm:
        along = q.new_empty(grid.chunks * HV, 2, 2, C, dtype=torch.float32)
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, 2, dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K, dtype=torch.float32)
    launch_kernel(
        wyfold_gradients_channel_gluon,
        grid.chunks * HV * 2,
        *_descriptors([*reads, to_q, to_k, to_g], borders, C, K // 2),
        *(x.stride(2) for x in reads),
        *(to_q, to_k, out.v, to_g),
        *(to_q.stride(), to_k.stride(), strides(out.v), to_g.stride()),
        borders.X,
        *(read_q, read_k, read_q.stride(), read_k.stride(), along),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        out.beta,
        strides(out.beta),
        dA_log,
        ddt_bias,
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        options.unit,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        PACKED=grid.cu is not None,
        WHOLE=grid.cu is None and grid.tokens % C == 0,
        ACTIVATION=options.activation,
        CLAMPED=options.clamp != 0,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **config.options(),
    )
    if along is not None:
        launch_kernel(
            wyfold_gradients_norm_gluon,
            grid.chunks * HV,
            *(read_q, read_k, read_q.stride(), read_k.stride(), to_q, to_k, to_q.stride(), to_k.stride(), along),
            *(grid.cu, grid.first, grid.sequence, grid.sequences, grid.tokens, grid.per_sequence),
            HV=HV,
            K=K,
            BT=C,
            PACKED=grid.cu is not None,
            **config.options(),
        )
    for to, (wished, _) in zip((to_q, to_k, to_g), wanted, strict=True):
        if wished is not None and wished is not to:
            wished.copy_(to)
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


def _readable(x: Tensor) -> Tensor:
    """x as a box can hold it, copied if memory is laid out otherwise, or holds what no box does."""
    x = x if x.dtype in ELEMENTS else x.float()
    return x if _tma_readable(x) else x.clone(memory_format=torch.contiguous_format)


def _tma_readable(x: Tensor) -> bool:
    """Whether memory is laid out for boxes of tokens."""
    return token_descriptor(x, 1, 64) is not None


def _written(to: Tensor | None, like: Tensor) -> Tensor:
    """Where a gradient can leave to: its own place, or memory from which it is copied, if it is wanted."""
    return to if to is not None and to.dtype == like.dtype and _tma_readable(to) else like.new_empty(like.shape)


def _descriptors(tokens: list[Tensor], borders: TokenBorders, C: int, BK: int) -> list[Any]:
    """The kernel's first arguments: boxes of q, k, do, g, of the gradients of q, k and g, and of tiles."""
    V = borders.e.shape[2]
    found = [token_descriptor(x, C, n) for x, n in zip(tokens, (BK, BK, V, BK, BK, BK, BK), strict=True)]
    found += [tile_descriptor(x, V, BK) for x in (borders.S, borders.dS)] + [
        tile_descriptor(x, C, V) for x in borders[2:]
    ]
    return gluon_descriptors(found)


class Gate(NamedTuple):
    """How a gate becomes a log gate: exp(A_log), what is added first, and where it ends."""

    rate: Any
    lower_bound: Any
    clamp: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "scale", "unit", "lower_bound", "clamp", "beta_most"])
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
    h_q,
    h_k,
    h_do,
    h_g,
    p_dq,
    p_dk,
    p_dv,
    p_dg,
    s_dq,
    s_dk,
    s_dv,
    s_dg,
    p_X,
    p_q,
    p_k,
    s_q,
    s_k,
    p_along,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_dbeta,
    s_dbeta,
    p_dA_log,
    p_ddt_bias,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    scale,
    unit,
    lower_bound,
    clamp,
    beta_most,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    PACKED: gl.constexpr,
    WHOLE: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMPED: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
):
    """One program owns a chunk of one head and half of its channels."""
    BK: gl.constexpr = K // 2
    # The code of an activation is long, and instructions that do not fit into their cache are fetched for every chunk.
    ROLLED: gl.constexpr = ACTIVATION != "given" and x_g.dtype == gl.bfloat16
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 16, 16])
    CH: gl.constexpr = gl.SliceLayout(1, L)
    NEAR: gl.constexpr = gl.BlockedLayout([8, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pid = gl.program_id(0).to(gl.int64)
    i_tile, half = pid // 2, (pid % 2).to(gl.int32)
    i_c, i_h = i_tile // HV, i_tile % HV
    column = half * BK
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    o_1 = gl.arange(0, BT, layout=ONE)
    if PACKED:
        if i_n == N:
            zeros = gl.zeros([BT, BK], gl.float32, ROWS)
            if p_dv is not None:
                store_rows(p_dv, s_dv, coords, column, zeros, ROWS, BT, BK)
            store_rows(p_dq, s_dq, coords, column, zeros, ROWS, BT, BK)
            store_rows(p_dk, s_dk, coords, column, zeros, ROWS, BT, BK)
            store_rows(p_dg, s_dg, coords, column, zeros, ROWS, BT, BK)
            if half == 0:
                store_scalars(p_dbeta, s_dbeta, coords, o_1, gl.zeros([BT], gl.float32, ONE))
            if p_dA_log is not None:
                gl.store(p_dA_log + pid, 0.0)
            if p_ddt_bias is not None:
                o_k = gl.arange(0, BK, layout=ONE)
                gl.store(p_ddt_bias + i_tile * K + column + o_k, gl.zeros([BK], gl.float32, ONE))
            return

    t_q = gl.allocate_shared_memory(x_q.dtype, [BT, BK], x_q.layout)
    t_k = gl.allocate_shared_memory(x_k.dtype, [BT, BK], x_k.layout)
    t_g = gl.allocate_shared_memory(x_g.dtype, [BT, BK], x_g.layout)
    t_do = gl.allocate_shared_memory(x_do.dtype, [BT, V], x_do.layout)
    t_e = gl.allocate_shared_memory(x_e.dtype, [BT, V], x_e.layout)
    t_X = gl.allocate_shared_memory(x_X.dtype, [BT, V], x_X.layout)
    t_S = gl.allocate_shared_memory(x_S.dtype, [V, BK], x_S.layout)
    t_dS = gl.allocate_shared_memory(x_dS.dtype, [V, BK], x_dS.layout)
    NUMBERS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    betas = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
    bars = gl.allocate_shared_memory(gl.int64, [3, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(3):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    tile, here_v, here_s, here_t = i_tile.to(gl.int32), bars.index(0), bars.index(1), bars.index(2)
    column_q, column_k = (i_h * h_q).to(gl.int32) + column, (i_h * h_k).to(gl.int32) + column
    column_g, column_do = (i_h * h_g).to(gl.int32) + column, (i_h * h_do).to(gl.int32)
    mbarrier.expect(here_v, x_X.block_type.nbytes + x_e.block_type.nbytes + x_do.block_type.nbytes)
    tma_load(x_X, [tile * BT, 0], here_v, t_X)
    tma_load(x_e, [tile * BT, 0], here_v, t_e)
    tma_load(x_do, [coords.token, column_do], here_v, t_do)
    mbarrier.expect(here_s, x_S.block_type.nbytes + x_dS.block_type.nbytes)
    tma_load(x_S, [tile * V, column], here_s, t_S)
    tma_load(x_dS, [tile * V, column], here_s, t_dS)
    mbarrier.expect(here_t, x_g.block_type.nbytes + x_q.block_type.nbytes + x_k.block_type.nbytes)
    tma_load(x_g, [coords.token, column_g], here_t, t_g)
    tma_load(x_q, [coords.token, column_q], here_t, t_q)
    tma_load(x_k, [coords.token, column_k], here_t, t_k)

    beta = gl.where(o_1 < rows, 1.0, 0.0)
    if p_beta is not None:
        beta = load_scalars(p_beta, s_beta, coords, o_1)
        if LOGIT:
            beta = gl.where(o_1 < rows, sigmoid(beta) * beta_most, 0.0)
    betas.store(beta)
    if NORM:
        norms_q = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
        norms_k = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
        norms_q.store(_reciprocal_norms(p_q, s_q, coords, ROWS, BT, K))
        norms_k.store(_reciprocal_norms(p_k, s_k, coords, ROWS, BT, K))
    rate = 1.0
    if p_A_log is not None:
        rate = exp(gl.load(p_A_log + i_h).to(gl.float32))
    gate = Gate(rate, lower_bound, clamp)
    if p_dv is not None:
        # Half of v's columns, by address: nothing else wants X so.
        o_t, o_v = gl.arange(0, BT, layout=gl.SliceLayout(1, ROWS)), gl.arange(0, BK, layout=gl.SliceLayout(0, ROWS))
        X = gl.load(p_X + i_tile * (BT * V) + column + o_t[:, None] * V + o_v[None, :]).to(gl.float32)
        barrier()
        X = X * (betas.load(gl.SliceLayout(1, ROWS)) * unit)[:, None]
        store_rows(p_dv, s_dv, coords, column, X, ROWS, BT, BK)
    else:
        barrier()

    # Gradients of the grams, and rows through the states.
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    mbarrier.wait(here_v, 0)
    if not WHOLE:
        if rows < BT:
            clear_rows(t_do, rows, BT, V)
    dJ = warpgroup_mma(t_X, t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dP = warpgroup_mma(t_do, t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    mbarrier.wait(here_s, 0)
    trace = warpgroup_mma(t_S.permute((1, 0)), t_dS, zero_acc, use_acc=False, is_async=True)
    dJ, dP, trace = warpgroup_mma_wait(0, deps=[dJ, dP, trace])
    dq = warpgroup_mma(t_S.permute((1, 0)), t_do.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dk = warpgroup_mma(t_S.permute((1, 0)), t_X.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    dw = warpgroup_mma(t_dS.permute((1, 0)), t_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    o_r, o_c = gl.arange(0, BT, layout=gl.SliceLayout(1, LC)), gl.arange(0, BT, layout=gl.SliceLayout(0, LC))
    carried = gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1) * unit
    carried = gl.convert_layout(carried, CH, assert_trivial=True)
    beta_r, beta_c = betas.load(gl.SliceLayout(1, LC)), betas.load(gl.SliceLayout(0, LC))
    if p_dbeta is not None:
        if half == 0:
            dbeta = gl.sum(gl.where(o_r[:, None] == o_c[None, :], dJ, 0.0), axis=1) * unit
            if LOGIT:
                dbeta = sigmoid_bwd(load_scalars(p_beta, s_beta, coords, o_r), dbeta) * beta_most
            store_scalars(p_dbeta, s_dbeta, coords, o_r, dbeta)
    read, written = gl.full([BT], scale, gl.float32, gl.SliceLayout(0, LC)), beta_c * unit
    dP, dJ = dP * (scale * beta_c)[None, :], dJ * (beta_c[None, :] * (-beta_r * unit)[:, None])
    if NORM:
        r_c = norms_k.load(gl.SliceLayout(0, LC))
        read, written = read * norms_q.load(gl.SliceLayout(0, LC)), written * r_c
        dP = dP * r_c[None, :] * norms_q.load(gl.SliceLayout(1, LC))[:, None]
        dJ = dJ * r_c[None, :] * norms_k.load(gl.SliceLayout(1, LC))[:, None]
    near_P, near_J = _near(dP, o_r), _near(dJ, o_r)
    apart = o_r[:, None] // 8 > o_c[None, :] // 8
    far_P = _quarters(gl.where(apart, dP, 0.0).to(x_q.dtype), L)
    far_J = _quarters(gl.where(apart, dJ, 0.0).to(x_q.dtype), L)

    dq, dk, dw = warpgroup_mma_wait(0, deps=[dq, dk, dw])
    # What has been read so far may be written from here on, and not before: all that the allocator knows of a tile is
    # its last name in the code, and a product reads on.
    barrier()
    t_S._keep_alive()
    t_dS._keep_alive()
    t_e._keep_alive()
    t_X._keep_alive()
    t_do._keep_alive()
    near = gl.allocate_shared_memory(gl.float32, [8 * BT, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    near.store(gl.join(near_P, near_J).permute((1, 0, 2)).reshape([8 * BT, 2]))
    PAIRS: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    P, J = _tiles(x_q.dtype, BT, PAIRS), _tiles(x_q.dtype, BT, PAIRS)
    for n in gl.static_range(4):
        P[n].store(far_P[n])
        J[n].store(far_J[n])
    fence_async_shared()
    barrier()
    r_q, r_k = _quarters(dq * read[None, :], L), _quarters(dk * -written[None, :], L)
    c = _quarters(dw * written[None, :], L)

    # Decays, where states were.
    mbarrier.wait(here_t, 0)
    if not WHOLE:
        if rows < BT:
            clear_rows(t_q, rows, BT, BK)
            clear_rows(t_k, rows, BT, BK)
            clear_rows(t_g, rows, BT, BK)
    DECAYS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
    I, Q = _tiles(gl.float32, BK, DECAYS), _tiles(gl.float32, BK, DECAYS)
    logs = t_g
    if ACTIVATION != "given":
        logs = gl.allocate_shared_memory(gl.float32, [BT, BK], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
        _activate(logs, t_g, p_dt_bias, i_h * K + column, gate, rows, ROLLED, ACTIVATION, BT, BK)
    E = _none()
    for n in gl.static_range(4):
        log_g = _rows(logs, n, L)
        if ACTIVATION == "given":
            log_g = _log_gate(log_g, 0.0, gate, True, ACTIVATION)
        E = _also(E, _two(exp2(gl.sum(log_g.reshape([BK, 2, 8]), axis=2)), CH))
        since, until = _sums_inside(log_g)
        I[n].store(exp2(since))
        Q[n].store(exp2(until))
    E01, E23, E45, E67 = E[0] * E[1], E[2] * E[3], E[4] * E[5], E[6] * E[7]
    E03, E47 = E01 * E23, E45 * E67
    whole = gl.full([BK], 1.0, gl.float32, CH)

    # From far to near: halves of 32 tokens, of 16, of 8.
    a = _later(t_q, t_k, I, 2, r_q[2], r_k[2], E03, whole, E[4], L)
    b = _later(t_q, t_k, I, 3, r_q[3], r_k[3], E03, E45, E45 * E[6], L)
    d = _earlier(t_k, Q, 0, c[0], E47, E23 * E[1], E23, L)
    f = _earlier(t_k, Q, 1, c[1], E47, E[3], whole, L)
    x32, y32 = gl.sum(a.x + b.x, axis=1), gl.sum(d.x + f.x, axis=1)
    a, d = _exchange(P, J, a, d, 2, 0)
    b, d = _exchange(P, J, b, d, 3, 0)
    a, f = _exchange(P, J, a, f, 2, 1)
    b, f = _exchange(P, J, b, f, 3, 1)
    q2, k2, q3, k3, c0, c1 = warpgroup_mma_wait(0, deps=[a.to_q, a.to_k, b.to_q, b.to_k, d.to, f.to])

    a = _later(t_q, t_k, I, 1, r_q[1], r_k[1], E01, whole, E[2], L)
    b = _later(t_q, t_k, I, 3, q3, k3, E45, whole, E[6], L)
    d = _earlier(t_k, Q, 0, c0, E23, E[1], whole, L)
    f = _earlier(t_k, Q, 2, c[2], E67, E[5], whole, L)
    x01, y01, x23, y23 = gl.sum(a.x, axis=1), gl.sum(d.x, axis=1), gl.sum(b.x, axis=1), gl.sum(f.x, axis=1)
    a, d = _exchange(P, J, a, d, 1, 0)
    b, f = _exchange(P, J, b, f, 3, 2)
    q1, k1, q3, k3, c0, c2 = warpgroup_mma_wait(0, deps=[a.to_q, a.to_k, b.to_q, b.to_k, d.to, f.to])

    all_q, all_k, all_c = (r_q[0], q1, q2, q3), (r_k[0], k1, k2, k3), (c0, c1, c2, c[3])

    # Of a token's gate, pairs that span its sub-chunk.
    decay = E03 * E47
    x32, y32 = gl.fma(carried, decay, x32), gl.fma(carried, decay, y32)
    base = (x32 + x01, x32 + y01, y32 + x23, y32 + y23)
    # Rows of 32 numbers, four neighbours staying together: in no bank meet four rows at once, as they are stored, nor
    # every second one of 16, as they are read.
    TURNED: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [1, 8], [2, 16], [4, 8], [8, 4], [16, 0], [32, 0]]
    )
    turned = _none()
    for h in gl.static_range(2):
        a, d = _inside(P, J, t_q, t_k, 2 * h, I, Q, all_q, all_k, all_c, E, L)
        b, f = _inside(P, J, t_q, t_k, 2 * h + 1, I, Q, all_q, all_k, all_c, E, L)
        a_q, a_k, b_q, b_k, c_d, c_f = warpgroup_mma_wait(0, deps=[a.to_q, a.to_k, b.to_q, b.to_k, d.to, f.to])
        a_I, b_I, a_Q, b_Q = I[2 * h].load(L), I[2 * h + 1].load(L), Q[2 * h].load(L), Q[2 * h + 1].load(L)
        rows_q, rows_k, columns = (
            _merged(a_q * a_I, b_q * b_I),
            _merged(a_k * a_I, b_k * b_I),
            _merged(c_d * a_Q, c_f * b_Q),
        )
        over = _fourths(base[2 * h] + a.x, base[2 * h] + d.x, base[2 * h + 1] + b.x, base[2 * h + 1] + f.x)
        turned = _also(turned, ((rows_q, rows_k, columns, over),))
    # Both halves lie where decays and pairs were, before near pairs want registers.
    barrier()
    for n in gl.static_range(4):
        P[n]._keep_alive()
        J[n]._keep_alive()
    to_q = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TURNED)
    to_k = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TURNED)
    to_c = gl.allocate_shared_memory(gl.float32, [2, BK, 32], TURNED)
    overs = gl.allocate_shared_memory(gl.float32, [2, BK, 4], gl.SwizzledSharedLayout(1, 1, 1, [0, 1]))
    for h in gl.static_range(2):
        to_q.index(h).store(turned[h][0])
        to_k.index(h).store(turned[h][1])
        to_c.index(h).store(turned[h][2])
        overs.index(h).store(turned[h][3])
    near_bias = 0.0
    if p_dt_bias is not None:
        o_b = gl.arange(0, BK, layout=gl.SliceLayout(0, NEAR))
        near_bias = gl.load(p_dt_bias + i_h * K + column + o_b).to(gl.float32)[None, :]
    tiles = NearTiles(near, to_q, to_k, to_c, overs, t_q, t_k, t_g, logs)
    p_z = p_along
    if NORM:
        p_z = p_along + pid * (2 * BT)
    sum_A, sum_x = 0.0, gl.zeros([BK], gl.float32, gl.SliceLayout(0, NEAR))
    if ROLLED:
        for h in range(2):
            dA, dx = _near_half(tiles, h, p_z, near_bias, gate, rows, ROLLED, ACTIVATION, CLAMPED, NORM, NEAR)
            sum_A, sum_x = sum_A + dA, sum_x + dx
    else:
        for h in gl.static_range(2):
            dA, dx = _near_half(tiles, h, p_z, near_bias, gate, rows, ROLLED, ACTIVATION, CLAMPED, NORM, NEAR)
            sum_A, sum_x = sum_A + dA, sum_x + dx
    if p_ddt_bias is not None:
        gl.store(p_ddt_bias + i_tile * K + column + gl.arange(0, BK, layout=gl.SliceLayout(0, NEAR)), sum_x)
    if p_dA_log is not None:
        gl.store(p_dA_log + pid, sum_A)
    fence_async_shared()
    barrier()
    store_token_tile(x_dq, p_dq, s_dq, coords, column, t_q, WHOLE, BT, BK)
    store_token_tile(x_dk, p_dk, s_dk, coords, column, t_k, WHOLE, BT, BK)
    store_token_tile(x_dg, p_dg, s_dg, coords, column, t_g, WHOLE, BT, BK)
    tma.store_wait(pendings=0)
    bars._keep_alive()  # where a barrier has been, nothing else may be (docs/facts/hopper.md, KDA-NAN-1)


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
    p_along,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    HV: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    PACKED: gl.constexpr,
):
    """One program owns a chunk of one head: dx = z - x <x, z>/|x|^2, where z stands.

    Args:
        p_along: [tiles, 2, 2, BT] shares of <x, z>, by halves of the channels, of q and k.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // HV, pid % HV
    i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    coords = Coords(b, t, 0, i_h, rows)
    o = p_along + pid * (4 * BT) + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    _norm_bwd(p_q, s_q, p_dq, s_dq, coords, gl.load(o) + gl.load(o + 2 * BT), L, BT, K)
    _norm_bwd(p_k, s_k, p_dk, s_dk, coords, gl.load(o + BT) + gl.load(o + 3 * BT), L, BT, K)


@gluon.jit
def _norm_bwd(p_x, s_x, p_dx, s_dx, coords, along, L: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """`wyfold_gradients_norm_gluon` of one of q and k."""
    x = load_rows(p_x, s_x, coords, 0, L, BT, K)
    r = gl.rsqrt(gl.sum(gl.fma(x, x, 0.0), axis=1) + 1e-6)
    z = load_rows(p_dx, s_dx, coords, 0, L, BT, K)
    store_rows(p_dx, s_dx, coords, 0, gl.fma(x, -(along * r * r)[:, None], z), L, BT, K)


@gluon.jit
def _reciprocal_norms(p, s, coords, L: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of whole rows, read by address.   [BT]"""
    x, y = load_rows(p, s, coords, 0, L, BT, K // 2), load_rows(p, s, coords, K // 2, L, BT, K // 2)
    return gl.rsqrt(gl.sum(gl.fma(x, x, y * y), axis=1) + 1e-6)


@gluon.jit
def _near(pairs, o_r):
    """Of each row the pairs with its own sub-chunk, those among them that are none as well.   [64, 64] -> [64, 8]"""
    pairs = pairs.reshape([pairs.shape[0], 8, 8])
    own = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, pairs.type.layout)))
    mine = gl.convert_layout(o_r, gl.SliceLayout(1, gl.SliceLayout(2, pairs.type.layout)), assert_trivial=True) // 8
    return gl.sum(gl.where((mine[:, None] == own[None, :])[:, :, None], pairs, 0.0), axis=1)


class Later(NamedTuple):
    """Of 16 tokens that come after a border: rows decayed from it, what they gather, and q dq + k dk so far."""

    q: Any
    k: Any
    to_q: Any
    to_k: Any
    x: Any


class Earlier(NamedTuple):
    """Of 16 tokens that come before a border: rows decayed to it, what they gather, and k dk so far."""

    k: Any
    to: Any
    x: Any


@gluon.jit
def _later(t_q, t_k, I, i: gl.constexpr, to_q, to_k, before, c0, c1, L: gl.constexpr):
    """16 tokens after a border, whose sub-chunks begin c0 and c1 after it, as they leave a block for its later half.

    `before`: [64] decay over the earlier half.
    """
    decay = I[i].load(L) * _both(c0, c1, L)
    q, k = _rows(t_q, i, L) * decay, _rows(t_k, i, L) * decay
    to_q, to_k = to_q * before[:, None], to_k * before[:, None]
    return Later(_operand(q, t_q.dtype, L), _operand(k, t_k.dtype, L), to_q, to_k, gl.fma(q, to_q, k * to_k))


@gluon.jit
def _earlier(t_k, Q, n: gl.constexpr, to, after, c0, c1, L: gl.constexpr):
    """16 tokens before a border, whose sub-chunks end c0 and c1 before it, as they leave a block for its earlier half.

    `after`: [64] decay over the later half.
    """
    k = _rows(t_k, n, L) * (Q[n].load(L) * _both(c0, c1, L))
    to = to * after[:, None]
    return Earlier(_operand(k, t_k.dtype, L), to, gl.fma(k, to, 0.0))


@gluon.jit
def _exchange(P, J, later, earlier, i: gl.constexpr, n: gl.constexpr):
    """What tokens i and n, 16 each on either side of a border, give each other; under way."""
    P, J = P[n].slice(16 * i, 16), J[n].slice(16 * i, 16)
    to_q = warpgroup_mma(earlier.k, P.permute((1, 0)), later.to_q, is_async=True)
    to_k = warpgroup_mma(earlier.k, J.permute((1, 0)), later.to_k, is_async=True)
    to = warpgroup_mma(later.k, J, earlier.to, is_async=True)
    to = warpgroup_mma(later.q, P, to, is_async=True)
    return Later(later.q, later.k, to_q, to_k, later.x), Earlier(earlier.k, to, earlier.x)


@gluon.jit
def _inside(P, J, t_q, t_k, i: gl.constexpr, I, Q, to_q, to_k, to, E, L: gl.constexpr):
    """16 tokens whose second sub-chunk meets the first; x of the second and y of the first, summed."""
    first = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    # 1, for all a compiler knows: a number that a product adds to and that is no new one has to be copied first, and
    # products wait for that.
    whole = gl.fma(E[0], 0.0, 1.0)
    before, after = _both(whole, E[2 * i], L), _both(E[2 * i + 1], whole, L)
    decay = I[i].load(L)
    q, k, w = _rows(t_q, i, L) * decay, _rows(t_k, i, L) * decay, _rows(t_k, i, L) * Q[i].load(L)
    to_q, to_k, to = to_q[i] * before, to_k[i] * before, to[i] * after
    x = gl.sum(gl.where(first, 0.0, gl.fma(q, to_q, k * to_k)), axis=1)
    y = gl.sum(gl.where(first, gl.fma(w, to, 0.0), 0.0), axis=1)
    later = Later(_operand(q, t_q.dtype, L), _operand(k, t_k.dtype, L), to_q, to_k, x)
    return _exchange(P, J, later, Earlier(_operand(w, t_k.dtype, L), to, y), i, i)


class NearTiles(NamedTuple):
    """Shared memory of the near pairs: their coefficients; of both halves of the tokens what rows and columns have
    gathered, and the gate's gradient that spans sub-chunks; tiles that are read and written; log gates to base 2."""

    near: Any
    to_q: Any
    to_k: Any
    to_c: Any
    overs: Any
    q: Any
    k: Any
    g: Any
    logs: Any


@gluon.jit
def _activate(
    logs,
    t_g,
    p_dt_bias,
    parameters,
    gate,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BT: gl.constexpr,
    BK: gl.constexpr,
):
    """Log gates to base 2 of a chunk, 16 tokens at a time."""
    G: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_t = gl.arange(0, 16, layout=gl.SliceLayout(1, G))
    bias = 0.0
    if p_dt_bias is not None:
        bias = gl.load(p_dt_bias + parameters + gl.arange(0, BK, layout=gl.SliceLayout(0, G))).to(gl.float32)[None, :]
    if ROLLED:
        for n in range(BT // 16):
            raw = _part(t_g, n, 16).load(G).to(gl.float32)
            _part(logs, n, 16).store(_log_gate(raw, bias, gate, (16 * n + o_t < rows)[:, None], ACTIVATION))
    else:
        for n in gl.static_range(BT // 16):
            raw = t_g.slice(16 * n, 16).load(G).to(gl.float32)
            logs.slice(16 * n, 16).store(_log_gate(raw, bias, gate, (16 * n + o_t < rows)[:, None], ACTIVATION))


@gluon.jit
def _part(tile, n, size: gl.constexpr):
    """The n-th rows of a tile, `size` together; its rows are no longer than the copy engine's."""
    return tile._reinterpret(tile.dtype, [tile.shape[0] // size, size, tile.shape[1]], tile.layout).index(n)


@gluon.jit
def _near_half(
    tiles,
    h,
    p_z,
    bias,
    gate,
    rows,
    ROLLED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    CLAMPED: gl.constexpr,
    NORM: gl.constexpr,
    NEAR: gl.constexpr,
):
    """Gradients of 32 tokens, where the tokens were; their share of the parameters' sums."""
    ROW: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    BT: gl.constexpr = tiles.q.shape[0]
    o_t = 32 * h + gl.arange(0, 32, layout=gl.SliceLayout(1, NEAR))
    real = o_t[:, None] < rows
    t_q, t_k = _part(tiles.q, h, 32), _part(tiles.k, h, 32)
    if ROLLED:
        t_g = _part(tiles.g, h, 32)
    else:
        t_g = tiles.g.slice(32 * h, 32)
    if ACTIVATION == "given":
        raw = t_g.load(NEAR).to(gl.float32)
        a = exp2(_log_gate(raw, 0.0, gate, True, ACTIVATION))
    else:
        a = exp2(_part(tiles.logs, h, 32).load(NEAR))
    n_q, n_k = tiles.to_q.index(h).permute((1, 0)).load(NEAR), tiles.to_k.index(h).permute((1, 0)).load(NEAR)
    n_c, over = tiles.to_c.index(h).permute((1, 0)).load(NEAR), tiles.overs.index(h).permute((1, 0)).load(ROW)
    q, k = t_q.load(NEAR).to(gl.float32), t_k.load(NEAR).to(gl.float32)
    n_q, n_k, n_g = _near_pairs(tiles.near, h, q, k, a, n_q, n_k, n_c, over, NEAR)
    if NORM:
        # [tile, half, q or k, token]
        gl.store(p_z + o_t, gl.sum(gl.fma(q, n_q, 0.0), axis=1))
        gl.store(p_z + o_t + BT, gl.sum(gl.fma(k, n_k, 0.0), axis=1))
    t_q.store(n_q.to(t_q.dtype))
    t_k.store(n_k.to(t_k.dtype))
    if ACTIVATION != "given":
        raw = t_g.load(NEAR).to(gl.float32)
    dx, dA = activated_bwd(raw, n_g, gate.rate, bias, gate.lower_bound, gate.clamp, CLAMPED, ACTIVATION)
    t_g.store(dx.to(t_g.dtype))
    dA = gl.sum(gl.sum(gl.where(real, dA, 0.0), axis=1), axis=0)
    return dA, gl.sum(gl.where(real, dx, 0.0), axis=0)


@gluon.jit
def _near_pairs(near, h, q, k, a, dq, dk, dw, over, NEAR: gl.constexpr):
    """32 tokens' gradients plus what pairs inside sub-chunks give, and the gate's; z, u and b of `add_near_pairs`.

    Args:
        q, k: [32, 64] rows.
        a: [32, 64] decays of single tokens.
        dq, dk, dw: [32, 64] of rows from before their sub-chunk, and of columns from after it.
        over: [4, 64] gate gradient of what spans a sub-chunk.
    """
    q, k, a = _tokens(q), _tokens(k), _tokens(a)
    dq, dk, dw = _tokens(dq), _tokens(dk), _tokens(dw)
    dg, later = (), over
    for i in gl.static_range(8):
        later = gl.fma(q[7 - i], dq[7 - i], gl.fma(k[7 - i], dk[7 - i], later))
        dg = _also((later,), dg)
    earlier = over * 0.0
    for s in gl.static_range(8):
        dk = _add(dk, s, dw[s])
        dg = _add(dg, s, earlier)
        earlier = gl.fma(k[s], dw[s], earlier)
    for s in gl.static_range(8):
        P, J = _coefficients(_part(near, 2 * s + h, 32), NEAR)
        dq = _add(dq, s, P[s] * k[s])
        dk = _add(dk, s, P[s] * q[s])
        z, zs = k[s], ()
        for r in gl.static_range(s + 1, 8):
            z = z * a[r]
            dq, dk = _add(dq, r, P[r] * z), _add(dk, r, J[r] * z)
            zs = _also(zs, (z,))
        b = over * 0.0
        for i in gl.static_range(7 - s):
            b = gl.fma(P[7 - i], q[7 - i], gl.fma(J[7 - i], k[7 - i], b))
            dg = _add(dg, 7 - i, zs[6 - s - i] * b)
            b = b * a[7 - i]
        dk = _add(dk, s, b)
    return _tile(dq, NEAR), _tile(dk, NEAR), _tile(dg, NEAR)


@gluon.jit
def _coefficients(pairs, NEAR: gl.constexpr):
    """Gradients of P and J of 8 rows each with one of their tokens.   [32, 2] -> 2 x 8 x [4, 1]"""
    P, J = gl.split(pairs.load(NEAR))
    return _column(P), _column(J)


@gluon.jit
def _add(rows, i: gl.constexpr, x):
    """The rows, x added to one of them."""
    return rows[:i] + (rows[i] + x,) + rows[i + 1 :]


@gluon.jit
def _none():
    """No rows yet."""
    return ()


@gluon.jit
def _also(rows, x):
    """The rows and some more."""
    return rows + x


@gluon.jit
def _tokens(x):
    """The 8 tokens of every sub-chunk.   [32, 64] -> 8 x [4, 64]"""
    x = x.reshape([4, 2, 2, 2, x.shape[1]]).permute((0, 4, 1, 2, 3))
    even, odd = gl.split(x)
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return _row(x0), _row(x1), _row(x2), _row(x3), _row(x4), _row(x5), _row(x6), _row(x7)


@gluon.jit
def _row(x):
    """One token of every sub-chunk, where it is.   [4, 64]"""
    return gl.convert_layout(x, gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0]), assert_trivial=True)


@gluon.jit
def _tile(x, NEAR: gl.constexpr):
    """`_tokens` undone."""
    even = gl.join(gl.join(x[0], x[4]), gl.join(x[2], x[6]))
    odd = gl.join(gl.join(x[1], x[5]), gl.join(x[3], x[7]))
    x = gl.join(even, odd).permute((0, 2, 3, 4, 1))
    return gl.convert_layout(x.reshape([32, x.shape[4]]), NEAR, assert_trivial=True)


@gluon.jit
def _column(x):
    """8 tokens of every sub-chunk.   [32] -> 8 x [4, 1]"""
    even, odd = gl.split(x.reshape([4, 2, 2, 2]))
    e0, e2 = gl.split(even)
    o1, o3 = gl.split(odd)
    x0, x4 = gl.split(e0)
    x2, x6 = gl.split(e2)
    x1, x5 = gl.split(o1)
    x3, x7 = gl.split(o3)
    return (
        _wide(x0), _wide(x1), _wide(x2), _wide(x3), _wide(x4), _wide(x5), _wide(x6), _wide(x7),
    )  # fmt: skip


@gluon.jit
def _wide(x):
    """[4] -> [4, 1], as tokens of sub-chunks lie"""
    R: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(x, gl.SliceLayout(1, R), assert_trivial=True)[:, None]


@gluon.jit
def _quarters(x, L: gl.constexpr):
    """[M, 64] -> 4 x [M, 16]"""
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
def _two(x, CH: gl.constexpr):
    """[M, 2] -> 2 x [M]"""
    x0, x1 = gl.split(x)
    return gl.convert_layout(x0, CH, assert_trivial=True), gl.convert_layout(x1, CH, assert_trivial=True)


@gluon.jit
def _fourths(x0, x1, x2, x3):
    """4 x [M] -> [M, 4]"""
    return gl.join(gl.join(x0, x2), gl.join(x1, x3)).reshape([x0.shape[0], 4])


@gluon.jit
def _merged(x0, x1):
    """2 x [M, 16] -> [M, 32]"""
    return gl.join(x0, x1).permute((0, 2, 1)).reshape([x0.shape[0], 32])


@gluon.jit
def _tiles(dtype: gl.constexpr, M: gl.constexpr, S: gl.constexpr):
    """Four tiles [M, 16] of shared memory, known apart: what is stored to one waits for no other."""
    return (
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
        gl.allocate_shared_memory(dtype, [M, 16], S),
    )


@gluon.jit
def _both(x0, x1, L: gl.constexpr):
    """A number for each of two sub-chunks.   2 x [M] -> [M, 16]"""
    first = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    return gl.where(first, x0[:, None], x1[:, None])


@gluon.jit
def _rows(tile, i: gl.constexpr, L: gl.constexpr):
    """16 tokens of a tile, transposed, float32.   [M, 16]"""
    return tile.slice(16 * i, 16).permute((1, 0)).load(L).to(gl.float32)


@gluon.jit
def _operand(x, dtype: gl.constexpr, L: gl.constexpr):
    """A left operand that lies in registers, where it is."""
    return gl.convert_layout(x.to(dtype), gl.DotOperandLayout(0, L, 2), assert_trivial=True)


@gluon.jit
def _log_gate(x, bias, gate, here, ACTIVATION: gl.constexpr):
    """Log gate to base 2, zero where no token is, as x is there."""
    g = activated(x, gate.rate, bias, gate.lower_bound, gate.clamp, ACTIVATION)
    if ACTIVATION != "given":
        g = gl.where(here, g, 0.0)
    return gl.fma(g, 1.4426950408889634, 0.0)  # rounded, whatever it is added to


@gluon.jit
def _sums_inside(x):
    """Sums over the tokens of a sub-chunk up to each, and after each.   [M, 64] as a product's result lies

    A thread has two tokens in a row of 8, and of four threads in a row each has another two.
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
