"""The kernel of `gradients` in Gluon without a gate or with a scalar gate."""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.gradients.gluon.scalar.arguments import Smem, TmaInputs
from wyfold.kernels.gradients.gluon.scalar.loads import (
    clear_rows,
    load_again,
    load_states,
    load_tokens,
    load_values,
    load_X,
)
from wyfold.kernels.gradients.gluon.scalar.pairs import add, pair_sums, reciprocal_norms
from wyfold.kernels.gradients.gluon.tokens import (
    Coords,
    exp2,
    load_scalars,
    store_rows,
    store_scalars,
    store_token_tile,
    sum_tile,
)
from wyfold.tile.activation.triton import LOG2_E, sigmoid, sigmoid_bwd
from wyfold.tile.decay.triton import log_gate
from wyfold.tile.decay.triton.gradient import log_gate_bwd
from wyfold.tile.index.gluon import barrier, reinterpret
from wyfold.tile.index.triton import chunk_span


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
    load_X(inputs, smem, 0, BT)
    load_values(inputs, smem, 0, BT)
    load_tokens(inputs, smem, BK)
    load_states(inputs, smem, 0, 0, V, BK)

    r_q, r_k = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
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
            log_g = log_gate(load_scalars(gate.g, gate.s_g, value, o_1), gate, value.h, 0, "scalar", ACTIVATION, K, BK)
            numbers.slice(BT, BT).store(gl.associative_scan(gl.where(is_token, log_g, 0.0), 0, add))
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
                clear_rows(s_do, rows, BT, V)
        dJ = warpgroup_mma(X_operand, s_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        dP = warpgroup_mma(s_do, s_e.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
        s_X.store(
            (X.to(gl.float32) * (numbers.slice(0, BT).load(gl.SliceLayout(1, LV)) * factors.unit)[:, None]).to(X.dtype)
        )
        fence_async_shared()
        barrier()
        store_token_tile(x_dv, outputs.dv, outputs.s_dv, value, 0, s_X, WHOLE, BT, V)
        if r == 0:
            mbarrier.wait(smem.tokens_ready, 0)
            if not WHOLE:
                if rows < BT:
                    for h in gl.static_range(2):
                        clear_rows(s_q.index(h), rows, BT, BK)
                        clear_rows(s_k.index(h), rows, BT, BK)
            if NORM:
                r_q, r_k = reciprocal_norms(s_q, LC, BT), reciprocal_norms(s_k, LC, BT)
        if NORM:
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
            dg = pair_sums(dJ, dP, s_q, s_k, pair, opaque_zero, BT)
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
                load_states(inputs, smem, r, 1, V, BK)
            elif GR > 1 and r < GR - 1:
                load_values(inputs, smem, r + 1, BT)
                load_states(inputs, smem, r + 1, 0, V, BK)
            elif NORM:
                load_again(inputs, smem, BT, BK)
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
                    load_X(inputs, smem, r + 1, BT)
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
            dx, dA = log_gate_bwd(raw, dg, gate, value.h, 0, CLAMPED, "scalar", ACTIVATION, K, BK)
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
