"""`gradients` in Gluon for Hopper: no gate or a scalar one, bfloat16, chunks of 64, K = V = 128.

One program computes a chunk of one key head, value head by value head. It issues all loads of the first to shared
memory before it computes, in the order of use: four groups of tiles, each with its own mbarrier. States come in halves
of K; the second half is loaded after the first has been read. Shared memory is reused, so that two programs fit a
multiprocessor (a test of `tests/compile/test_gradients_gluon.py`):

    X       then dv, then the pair sums of a scalar gate, then dP and dJ, which products read both ways round
    q, k    then dq and dk, which are stored from there

With the l2 norm, q and k stay raw. The gradients of both grams then carry both norms, so their contribution to a row is
that row's gradient times its 1/|x|, as is the contribution through the states. The norm's adjoint uses exactly that,
with z = dy/|x| and y = x/|x|:

    dx = dy/|x| - y <y, dy>/|x| = z - x <x, z>/|x|^2

Here x is a raw row of q or k. The dot product sums over both halves of K. So the first half of z waits, rounded, in
the memory of x, and the first half of x is loaded again, into the memory of S (`_reload`).

With several value heads, q and k stay in shared memory for all of them, and the tiles of the next head are loaded into
the memory of the last one as its products end. dq and dk are sums over the heads, in the order of the heads. Registers
and shared memory are full with the tiles of one head, so a thread keeps its part of the sums in float32 in global
memory (`sum_tile`).

In a partial chunk, the rows past the sequence's end are zeroed, and results are stored without TMA. Results do not
depend on strides: inputs that TMA cannot read are copied, and gradients that are not requested go to temporaries.
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

from wyfold.kernels.gradients.gluon import channel
from wyfold.kernels.gradients.gluon.channel import wyfold_gradients_channel_gluon, wyfold_gradients_norm_gluon
from wyfold.kernels.gradients.gluon.tokens import (
    Coords,
    Outputs,
    exp2,
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
from wyfold.tile.activation.triton import LOG2_E, sigmoid, sigmoid_bwd
from wyfold.tile.decay.triton import gate_argument, gate_flags, log_gate
from wyfold.tile.decay.triton.gradient import GateGradient, log_gate_bwd
from wyfold.tile.index.gluon import barrier, gluon_descriptors, reinterpret, tma_load
from wyfold.tile.index.triton import Packing, chunk_span, strides
from wyfold.tile.index.triton.descriptors import tile_descriptor, token_descriptor
from wyfold.tile.index.triton.strength import Strength


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    if not key.per_channel:
        return (wyfold_gradients_gluon.fn.__name__,)
    kernels = (wyfold_gradients_channel_gluon, *([wyfold_gradients_norm_gluon] if key.norm else []))
    return tuple([kernel.fn.__name__ for kernel in kernels])


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
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
    flags = gate_flags(g)
    if flags["CHANNEL"] and g is not None:
        channel.gradients(q, k, g, beta, A_log, dt_bias, do, borders, grid, options, key, out)
        return
    (H, K), (HV, V), C = q.shape[2:], do.shape[2:], grid.chunk_size
    config = tuned("gradients.gluon", key, q.device)
    read_q, read_k, read_do = (
        x if _tma_readable(x) else x.clone(memory_format=torch.contiguous_format) for x in (q, k, do)
    )
    wanted = [(out.q, read_q), (out.k, read_k), (out.v, read_do)]
    out_q, out_k, out_v = (
        like.new_empty(like.shape) if to is None or not _tma_readable(to) else to for to, like in wanted
    )
    dA_log, ddt_bias = (
        None if x is None else q.new_empty(grid.chunks, HV, dtype=torch.float32) for x in (out.A_log, out.dt_bias)
    )
    sums = q.new_empty(grid.chunks * H, 4, C, K // 2, dtype=torch.float32) if HV > H else None
    tokens = (read_q, read_k, read_do, out_q, out_k, out_v)
    x_q, x_k, x_do, x_dq, x_dk, x_dv, x_S, x_dS, x_e, x_X = _descriptors(tokens, borders, C, K // 2)
    launch_kernel(
        wyfold_gradients_gluon,
        grid.chunks * H,
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_dq=x_dq,
        x_dk=x_dk,
        x_dv=x_dv,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        heads=Heads(h_q=read_q.stride(2), h_k=read_k.stride(2), h_do=read_do.stride(2)),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most),
        outputs=Outputs(
            dq=out_q,
            s_dq=out_q.stride(),
            dk=out_k,
            s_dk=out_k.stride(),
            dv=out_v,
            s_dv=out_v.stride(),
            dbeta=out.beta,
            s_dbeta=strides(out.beta),
            sums=sums,
        ),
        dgate=GateGradient(g=out.g, s_g=strides(out.g), A_log=dA_log, dt_bias=ddt_bias),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        factors=Factors(options.scale, options.unit, options.unit * float(options.erases)),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            WHOLE=grid.cu is None and grid.tokens % C == 0,
            SCALAR=g is not None,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
        ),
        **config.options(),
    )
    for to, (requested, _) in zip((out_q, out_k, out_v), wanted, strict=True):
        if requested is not None and requested is not to:
            requested.copy_(to)
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum(0).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))


def _tma_readable(x: Tensor) -> bool:
    """Whether TMA can read blocks of tokens of x."""
    return token_descriptor(x, 1, 64) is not None


def _descriptors(tokens: tuple[Tensor, ...], borders: TokenBorders, C: int, BK: int) -> list[Any]:
    """TMA descriptors in kernel argument order: q, k, do, dq, dk, dv, then S, dS, e and X."""
    V = tokens[2].shape[3]
    found = [token_descriptor(x, C, n) for x, n in zip(tokens, (BK, BK, V) * 2, strict=True)]
    found += [tile_descriptor(x, V, BK) for x in (borders.S, borders.dS)] + [
        tile_descriptor(x, C, V) for x in borders[2:]
    ]
    return gluon_descriptors(found)


class Heads(NamedTuple):
    """Kernel argument: distances between heads of q, k and do."""

    h_q: Any
    h_k: Any
    h_do: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED, WHOLE: Whether the batch is packed, and whether every chunk is full.
        SCALAR: Whether there is a gate.
        ACTIVATION, CLAMPED: The gate's activation, and whether a clamp is requested.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
    """

    PACKED: bool
    WHOLE: bool
    SCALAR: bool
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    LOGIT: bool


class TmaInputs(NamedTuple):
    """TMA descriptors, and this program's coordinates in them.

    Attributes:
        q, k, do, S, dS, e, X: Descriptors.
        token: First token of the chunk, over all buffer rows.
        tile: Number of the tile of the chunk and of the first value head.
        column_q, column_k, column_do: First column of the key head, and of its first value head.
        next_do: Columns from a value head to the next.
    """

    q: Any
    k: Any
    do: Any
    S: Any
    dS: Any
    e: Any
    X: Any
    token: Any
    tile: Any
    column_q: Any
    column_k: Any
    column_do: Any
    next_do: Any


class Smem(NamedTuple):
    """Shared memory tiles and their mbarriers.

    Attributes:
        q, k: [2, BT, K/2] halves of K.
        do, e, X: [BT, V].
        S, dS: [V, K/2], one half at a time.
        values_ready: Barrier of do and e.
        rows_ready: Barrier of X.
        tokens_ready: Barrier of q and k.
        states_ready: Barrier of S and dS, and of the reloaded q and k.
    """

    q: Any
    k: Any
    do: Any
    e: Any
    X: Any
    S: Any
    dS: Any
    values_ready: Any
    rows_ready: Any
    tokens_ready: Any
    states_ready: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_gluon(
    x_q,
    x_k,
    x_do,
    x_dq,
    x_dk,
    x_dv,
    x_S,
    x_dS,
    x_e,
    x_X,
    heads,
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
    """One program computes a chunk of one key head. For each of its value heads it first computes the gradients of the
    grams, then K in two halves.
    """
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PACKED: gl.constexpr = FLAGS.PACKED
    WHOLE: gl.constexpr = FLAGS.WHOLE
    SCALAR: gl.constexpr = FLAGS.SCALAR
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    CLAMPED: gl.constexpr = FLAGS.CLAMPED
    NORM: gl.constexpr = FLAGS.NORM
    LOGIT: gl.constexpr = FLAGS.LOGIT
    GR: gl.constexpr = HV // H
    BK: gl.constexpr = K // 2
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, BT, 16])
    LV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, V, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LC)
    COL: gl.constexpr = gl.SliceLayout(0, LC)
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    o_r, o_c, o_1 = gl.arange(0, BT, layout=ROW), gl.arange(0, BT, layout=COL), gl.arange(0, BT, layout=ONE)
    if PACKED:
        if i_n == N:
            for r in range(GR):
                value = Coords(b, t, coords.token, i_h * GR + r, rows)
                store_rows(outputs.dv, outputs.s_dv, value, 0, gl.zeros([BT, V], gl.float32, LV), LV, BT, V)
            for h in range(2):
                store_rows(outputs.dq, outputs.s_dq, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
                store_rows(outputs.dk, outputs.s_dk, coords, h * BK, gl.zeros([BT, BK], gl.float32, LC), LC, BT, BK)
            for r in range(GR):
                value = Coords(b, t, coords.token, i_h * GR + r, rows)
                store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_1, gl.zeros([BT], gl.float32, ONE))
                store_scalars(dgate.g, dgate.s_g, value, o_1, gl.zeros([BT], gl.float32, ONE))
                if dgate.A_log is not None:
                    gl.store(dgate.A_log + pid * GR + r, 0.0)
                if dgate.dt_bias is not None:
                    gl.store(dgate.dt_bias + pid * GR + r, 0.0)
            return

    s_q = gl.allocate_shared_memory(x_q.dtype, [2, BT, BK], x_q.layout)
    s_k = gl.allocate_shared_memory(x_k.dtype, [2, BT, BK], x_k.layout)
    s_do = gl.allocate_shared_memory(x_do.dtype, [BT, V], x_do.layout)
    s_e = gl.allocate_shared_memory(x_e.dtype, [BT, V], x_e.layout)
    s_X = gl.allocate_shared_memory(x_X.dtype, [BT, V], x_X.layout)
    s_S = gl.allocate_shared_memory(x_S.dtype, [V, BK], x_S.layout)
    s_dS = gl.allocate_shared_memory(x_dS.dtype, [V, BK], x_dS.layout)
    pair = reinterpret(s_X, x_q.dtype, [2, BT, BT], x_q.layout)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * BT], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(bars.index(i), count=1)
    fence_async_shared()
    barrier()
    smem = Smem(s_q, s_k, s_do, s_e, s_X, s_S, s_dS, bars.index(0), bars.index(1), bars.index(2), bars.index(3))
    inputs = TmaInputs(
        x_q, x_k, x_do, x_S, x_dS, x_e, x_X, coords.token, (pid * GR).to(gl.int32),
        (i_h * heads.h_q).to(gl.int32), (i_h * heads.h_k).to(gl.int32), (i_h * GR * heads.h_do).to(gl.int32),
        heads.h_do,
    )  # fmt: skip
    _load_rows(inputs, smem, 0, BT)
    _load_values(inputs, smem, 0, BT)
    _load_tokens(inputs, smem, BK)
    _load_states(inputs, smem, 0, 0, V, BK)

    for r in tl.range(GR, disable_licm=True):
        value = Coords(b, t, coords.token, i_h * GR + r, rows)
        # Per-token numbers, needed in both the row and the column layout.
        is_token = o_1 < rows
        beta = gl.where(is_token, 1.0, 0.0)
        if strength.beta is not None:
            beta = load_scalars(strength.beta, strength.s_beta, value, o_1)
            if LOGIT:
                beta = gl.where(is_token, sigmoid(beta) * strength.most, 0.0)
        numbers.slice(0, BT).store(beta)
        if SCALAR:
            log_g = log_gate(
                load_scalars(gate.g, gate.s_g, value, o_1),
                gate,
                value.h,
                0,
                "scalar",
                ACTIVATION,
                K,
                BK,
            )
            numbers.slice(BT, BT).store(gl.associative_scan(gl.where(is_token, log_g, 0.0), 0, _add))
        barrier()
        beta_r, beta_c = numbers.slice(0, BT).load(ROW), numbers.slice(0, BT).load(COL)
        zero_acc = gl.zeros([BT, BT], gl.float32, LC)
        weight = zero_acc + beta_c[None, :]
        scale_q, scale_k, scale_w = (
            gl.full([BT], factors.scale, gl.float32, ROW),
            -beta_r * factors.erased_unit,
            beta_r * factors.unit,
        )
        total = 1.0
        if SCALAR:
            G_r, G_c = numbers.slice(BT, BT).load(ROW), numbers.slice(BT, BT).load(COL)
            last = gl.sum(gl.where(o_c == BT - 1, G_c, 0.0), axis=0)
            weight = exp2((G_r[:, None] - G_c[None, :]) * LOG2_E) * beta_c[None, :]
            total = gl.exp(last)
            scale_q, scale_k, scale_w = scale_q * gl.exp(G_r), scale_k * gl.exp(G_r), scale_w * gl.exp(last - G_r)

        # Gradients of the grams, and dv, which overwrites X.
        mbarrier.wait(smem.rows_ready, r % 2)
        X = s_X.load(LV)
        X_operand = gl.convert_layout(X, gl.DotOperandLayout(0, LV, 2), assert_trivial=True)
        mbarrier.wait(smem.values_ready, r % 2)
        if not WHOLE:
            if rows < BT:
                _clear_rows(s_do, rows, BT, V)
        dJ = warpgroup_mma(X_operand, s_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        dP = warpgroup_mma(s_do, s_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        s_X.store(
            (X.to(gl.float32) * (numbers.slice(0, BT).load(gl.SliceLayout(1, LV)) * factors.unit)[:, None]).to(X.dtype)
        )
        fence_async_shared()
        barrier()
        store_token_tile(x_dv, outputs.dv, outputs.s_dv, value, 0, s_X, WHOLE, BT, V)
        mbarrier.wait(smem.tokens_ready, 0)
        if not WHOLE:
            if rows < BT:
                for h in gl.static_range(2):
                    _clear_rows(s_q.index(h), rows, BT, BK)
                    _clear_rows(s_k.index(h), rows, BT, BK)
        r_q, r_k = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
        if NORM:
            r_q, r_k = _reciprocal_norms(s_q, LC, BT), _reciprocal_norms(s_k, LC, BT)
            numbers.slice(0, BT).store(r_k)
            barrier()
            weight *= numbers.slice(0, BT).load(COL)[None, :]
            scale_q, scale_k, scale_w = scale_q * r_q, scale_k * r_k, scale_w * r_k
        dJ, dP = warpgroup_mma_wait(0, deps=[dJ, dP])
        if outputs.dbeta is not None:
            dbeta = gl.sum(gl.where(o_r[:, None] == o_c[None, :], dJ, 0.0), axis=1) * factors.unit
            if LOGIT:
                dbeta = sigmoid_bwd(load_scalars(strength.beta, strength.s_beta, value, o_r), dbeta) * strength.most
            store_scalars(outputs.dbeta, outputs.s_dbeta, value, o_r, dbeta)
        dJ = gl.where(o_r[:, None] > o_c[None, :], dJ * weight * -(beta_r * factors.erased_unit * r_k)[:, None], 0.0)
        dP = gl.where(o_r[:, None] >= o_c[None, :], dP * weight * (factors.scale * r_q)[:, None], 0.0)
        J_operand, P_operand = dJ.to(X.dtype), dP.to(X.dtype)
        opaque_zero = (gl.minimum(T, 0) - gl.minimum(per_sequence, 0)).to(gl.int32)
        dg = beta_r  # never read without a gate
        if SCALAR:
            dg = _pair_sums(dJ, dP, s_q, s_k, pair, opaque_zero, BT)
        else:
            tma.store_wait(pendings=0)
            barrier()
        pair.index(0).store(P_operand)
        pair.index(1).store(J_operand)
        fence_async_shared()
        barrier()

        # Through the states and the grams.
        read, write, traced = (
            gl.zeros([BT], gl.float32, ROW),
            gl.zeros([BT], gl.float32, ROW),
            gl.zeros([BT], gl.float32, ROW),
        )
        dot_q, dot_k = gl.zeros([BT], gl.float32, ROW), gl.zeros([BT], gl.float32, ROW)
        for h in range(2):
            mbarrier.wait(smem.states_ready, h)
            h_zero = h * opaque_zero
            e, do, S, dS = (
                _recomputed_address(s_e, h_zero),
                _recomputed_address(s_do, h_zero),
                _recomputed_address(s_S, h_zero),
                _recomputed_address(s_dS, h_zero),
            )
            P_tile, J_tile = pair.index(h_zero), pair.index(h_zero + 1)
            dw = warpgroup_mma(e, dS, zero_acc, use_acc=False, is_async=True)
            if SCALAR:
                trace = warpgroup_mma(S.permute((1, 0)), dS, zero_acc, use_acc=False, is_async=True)
            dk = warpgroup_mma(X_operand, S, zero_acc, use_acc=False, is_async=True)
            dq = warpgroup_mma(do, S, zero_acc, use_acc=False, is_async=True)
            q, k = s_q.index(h), s_k.index(h)
            if SCALAR:
                dw, trace = warpgroup_mma_wait(2, deps=[dw, trace])
                traced += gl.sum(gl.where(o_r[:, None] == o_c[None, :], trace, 0.0), axis=1)
                dw = dw * scale_w[:, None]
                write += gl.sum(k.load(LC).to(gl.float32) * dw, axis=1)
                dk, dq = warpgroup_mma_wait(0, deps=[dk, dq])
            else:
                dw, dk, dq = warpgroup_mma_wait(0, deps=[dw, dk, dq])
                dw = dw * scale_w[:, None]
            barrier()
            if h == 0:
                _load_states(inputs, smem, r, 1, V, BK)
            elif GR > 1 and r < GR - 1:
                _load_values(inputs, smem, r + 1, BT)
                _load_states(inputs, smem, r + 1, 0, V, BK)
            elif NORM:
                _reload(inputs, smem, BT, BK)
            dq = dq * scale_q[:, None]
            if SCALAR:
                k_dk = k.load(LC).to(gl.float32) * (dk * scale_k[:, None])
                read += gl.sum(gl.fma(q.load(LC).to(gl.float32), dq, k_dk), axis=1)
            dk = gl.fma(dk, scale_k[:, None], dw)
            dq = warpgroup_mma(P_tile, k, dq, is_async=True)
            dk = warpgroup_mma(J_tile, k, dk, is_async=True)
            dk = warpgroup_mma(J_tile.permute((1, 0)), k, dk, is_async=True)
            dk = warpgroup_mma(P_tile.permute((1, 0)), q, dk, is_async=True)
            sum_q, sum_k, earlier_q, earlier_k = pid, pid, zero_acc, zero_acc  # never read with one value head
            if GR > 1:  # loaded while the products run
                sum_q = sum_tile(outputs.sums, pid * 4 + h, LC, BT, BK)
                sum_k = sum_tile(outputs.sums, pid * 4 + h + 2, LC, BT, BK)
                is_later = gl.zeros([BT, BK], gl.int32, LC) + r > 0
                earlier_q, earlier_k = gl.load(sum_q, is_later, 0.0), gl.load(sum_k, is_later, 0.0)
            dq, dk = warpgroup_mma_wait(0, deps=[dq, dk])
            if GR > 1:
                dq, dk = dq + earlier_q, dk + earlier_k
            if GR > 1 and r < GR - 1:
                gl.store(sum_q, dq)
                gl.store(sum_k, dk)
                barrier()
                if h == 1:
                    _load_rows(inputs, smem, r + 1, BT)
            else:
                if NORM:
                    row_q, row_k = q.load(LC).to(gl.float32), k.load(LC).to(gl.float32)
                    dot_q += gl.sum(row_q * dq, axis=1)
                    dot_k += gl.sum(row_k * dk, axis=1)
                    if h == 1:
                        dot_q, dot_k = -(dot_q * r_q * r_q), -(dot_k * r_k * r_k)
                        dq, dk = gl.fma(row_q, dot_q[:, None], dq), gl.fma(row_k, dot_k[:, None], dk)
                barrier()
                q.store(dq.to(q.dtype))
                k.store(dk.to(k.dtype))
                fence_async_shared()
                barrier()
                if not NORM or h == 1:
                    store_token_tile(x_dq, outputs.dq, outputs.s_dq, coords, h * BK, q, WHOLE, BT, BK)
                    store_token_tile(x_dk, outputs.dk, outputs.s_dk, coords, h * BK, k, WHOLE, BT, BK)
        if NORM:
            if GR == 1 or r == GR - 1:
                mbarrier.wait(smem.states_ready, 0)
                reloaded = reinterpret(s_S, x_q.dtype, [2, BT, BK], x_q.layout)
                q, k = s_q.index(0), s_k.index(0)
                dq = gl.fma(reloaded.index(0).load(LC).to(gl.float32), dot_q[:, None], q.load(LC).to(gl.float32))
                dk = gl.fma(reloaded.index(1).load(LC).to(gl.float32), dot_k[:, None], k.load(LC).to(gl.float32))
                q.store(dq.to(q.dtype))
                k.store(dk.to(k.dtype))
                fence_async_shared()
                barrier()
                store_token_tile(x_dq, outputs.dq, outputs.s_dq, coords, 0, q, WHOLE, BT, BK)
                store_token_tile(x_dk, outputs.dk, outputs.s_dk, coords, 0, k, WHOLE, BT, BK)
        # Cross-warp reductions may be given shared memory that TMA stores still read, so the stores must end first.
        tma.store_wait(pendings=0)
        barrier()
        if SCALAR:
            numbers.slice(0, BT).store(read)
            numbers.slice(BT, BT).store(write)
            barrier()
            read_c, write_c = numbers.slice(0, BT).load(COL), numbers.slice(BT, BT).load(COL)
            dg += gl.sum(gl.where(o_c[None, :] >= o_r[:, None], read_c[None, :], write_c[None, :]), axis=1)
            dg = gl.fma(gl.zeros([BT], gl.float32, ROW) + gl.sum(traced, axis=0), total * factors.unit, dg)
            raw = load_scalars(gate.g, gate.s_g, value, o_r)
            dx, dA = log_gate_bwd(
                raw,
                dg,
                gate,
                value.h,
                0,
                CLAMPED,
                "scalar",
                ACTIVATION,
                K,
                BK,
            )
            store_scalars(dgate.g, dgate.s_g, value, o_r, dx)
            if dgate.A_log is not None:
                gl.store(dgate.A_log + pid * GR + r, gl.sum(gl.where(o_r < rows, dA, 0.0), axis=0))
            if dgate.dt_bias is not None:
                gl.store(dgate.dt_bias + pid * GR + r, gl.sum(gl.where(o_r < rows, dx, 0.0), axis=0))
        if GR > 1:
            barrier()
    bars._keep_alive()  # the memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1)


@gluon.jit
def _recomputed_address(tile, h_zero):
    """The same shared memory tile, with its address computed again; `h_zero` is a 0 that the compiler cannot fold.

    The compiler would hoist the tile's matrix descriptors out of the loop. They take two registers for every 16
    columns, so they would spill to local memory and be reloaded in every iteration (docs/facts/hopper.md, SASS-7).
    """
    return reinterpret(tile, tile.dtype, [1, tile.shape[0], tile.shape[1]], tile.layout).index(h_zero)


@gluon.jit
def _pair_sums(dJ, dP, s_q, s_k, pair, opaque_zero, BT: gl.constexpr):
    """Contribution of the pairs to a scalar gate's dg: a pair adds to all tokens after its column up to its row.   [BT]

    The pairs are stored in the memory of dv as two bfloat16 parts, after dv's TMA store has finished.

    Args:
        opaque_zero: A 0 that the compiler cannot fold. A constant in a left operand would be written to its register
            after the product has begun (docs/facts/compilers.md, PTXAS-2).
    """
    LC: gl.constexpr = dJ.type.layout
    o_r = gl.arange(0, BT, layout=gl.SliceLayout(1, LC))
    o_c = gl.arange(0, BT, layout=gl.SliceLayout(0, LC))
    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    kk, qk = zero_acc, zero_acc
    for h in gl.static_range(2):
        kk = warpgroup_mma(s_k.index(h), s_k.index(h).permute((1, 0)), kk, use_acc=h > 0, is_async=True)
        qk = warpgroup_mma(s_q.index(h), s_k.index(h).permute((1, 0)), qk, use_acc=h > 0, is_async=True)
    after = gl.where((o_r + opaque_zero)[:, None] <= o_c[None, :], 1.0, 0.0).to(s_q.dtype)
    after = gl.convert_layout(after, gl.DotOperandLayout(0, LC, 2), assert_trivial=True)
    kk, qk = warpgroup_mma_wait(0, deps=[kk, qk])
    high, low = _bf16_high_low(gl.fma(dP, qk, dJ * kk))
    tma.store_wait(pendings=0)
    barrier()
    pair.index(0).store(high)
    pair.index(1).store(low)
    fence_async_shared()
    barrier()
    sums = warpgroup_mma(after, pair.index(1), zero_acc, use_acc=False, is_async=True)
    sums = warpgroup_mma(after, pair.index(0), sums, is_async=True)
    sums = warpgroup_mma_wait(0, deps=[sums])
    dg = gl.sum(gl.where(o_c[None, :] < o_r[:, None], sums, 0.0), axis=1)
    barrier()
    return dg


@gluon.jit
def _reciprocal_norms(smem, LC: gl.constexpr, BT: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of rows stored in two halves.   [BT]"""
    square = gl.full([BT], 1e-6, gl.float32, gl.SliceLayout(1, LC))
    for h in gl.static_range(2):
        x = smem.index(h).load(LC).to(gl.float32)
        square += gl.sum(x * x, axis=1)
    return gl.rsqrt(square)


@gluon.jit
def _load_rows(inputs, smem, r, BT: gl.constexpr):
    """Issue the load of the X of a key head's value head r."""
    row = (inputs.tile + r) * BT
    mbarrier.expect(smem.rows_ready, inputs.X.block_type.nbytes)
    tma_load(inputs.X, [row, 0], smem.rows_ready, smem.X)


@gluon.jit
def _load_values(inputs, smem, r, BT: gl.constexpr):
    """Issue the loads of the e and do of value head r."""
    mbarrier.expect(smem.values_ready, inputs.do.block_type.nbytes + inputs.e.block_type.nbytes)
    tma_load(inputs.e, [(inputs.tile + r) * BT, 0], smem.values_ready, smem.e)
    tma_load(inputs.do, [inputs.token, inputs.column_do + r * inputs.next_do], smem.values_ready, smem.do)


@gluon.jit
def _load_tokens(inputs, smem, BK: gl.constexpr):
    """Issue the loads of q and k."""
    mbarrier.expect(smem.tokens_ready, 2 * (inputs.q.block_type.nbytes + inputs.k.block_type.nbytes))
    for h in gl.static_range(2):
        tma_load(inputs.q, [inputs.token, inputs.column_q + h * BK], smem.tokens_ready, smem.q.index(h))
        tma_load(inputs.k, [inputs.token, inputs.column_k + h * BK], smem.tokens_ready, smem.k.index(h))


@gluon.jit
def _load_states(inputs, smem, r, h, V: gl.constexpr, BK: gl.constexpr):
    """Issue the loads of half h of both states of value head r."""
    mbarrier.expect(smem.states_ready, inputs.S.block_type.nbytes + inputs.dS.block_type.nbytes)
    tma_load(inputs.S, [(inputs.tile + r) * V, h * BK], smem.states_ready, smem.S)
    tma_load(inputs.dS, [(inputs.tile + r) * V, h * BK], smem.states_ready, smem.dS)


@gluon.jit
def _reload(inputs, smem, BT: gl.constexpr, BK: gl.constexpr):
    """Issue the loads of the first halves of q and k again, into the memory of S."""
    reloaded = reinterpret(smem.S, inputs.q.dtype, [2, BT, BK], inputs.q.layout)
    mbarrier.expect(smem.states_ready, inputs.q.block_type.nbytes + inputs.k.block_type.nbytes)
    tma_load(inputs.q, [inputs.token, inputs.column_q], smem.states_ready, reloaded.index(0))
    tma_load(inputs.k, [inputs.token, inputs.column_k], smem.states_ready, reloaded.index(1))


@gluon.jit
def _clear_rows(tile, rows, BT: gl.constexpr, BW: gl.constexpr):
    """Zero the rows of a shared memory tile past the sequence's end, since 0 times NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // BW, BW // 8], [gl.num_warps(), 1], [1, 0])
    x = tile.load(L)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((o_t < rows)[:, None], x, gl.zeros([BT, BW], x.dtype, L)))
    fence_async_shared()
    barrier()


@gluon.jit
def _bf16_high_low(x):
    """Split x into a sum of two bfloat16, exact up to 2^-17 of x."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 u, v; .reg .f32 s, t;"
        " cvt.rn.bf16x2.f32 $0, $3, $2; shl.b32 u, $0, 16; and.b32 v, $0, 0xffff0000;"
        " mov.b32 s, u; mov.b32 t, v; sub.f32 s, $2, s; sub.f32 t, $3, t; cvt.rn.bf16x2.f32 $1, t, s; }",
        "=&r,=&r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def _add(a, b):
    return a + b
