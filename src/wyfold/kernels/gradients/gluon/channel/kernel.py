"""The kernel of `gradients` in Gluon under a channel gate."""

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

from wyfold.kernels.gradients.gluon.channel.arguments import GateActivation
from wyfold.kernels.gradients.gluon.channel.exchange import (
    earlier_quarter,
    exchange,
    exchange_inside_quarter,
    later_quarter,
)
from wyfold.kernels.gradients.gluon.channel.gate import log2_gate, store_log_gates, sums_inside_sub_chunks
from wyfold.kernels.gradients.gluon.channel.near import NearTiles, near_pairs_half
from wyfold.kernels.gradients.gluon.channel.norm import reciprocal_norms
from wyfold.kernels.gradients.gluon.channel.tiles import (
    allocate4,
    concat2_columns,
    concat_tuples,
    empty_tuple,
    load_quarter,
    own_sub_chunk_columns,
    split2_columns,
    split4_columns,
    stack4_columns,
)
from wyfold.kernels.gradients.gluon.tokens import (
    Coords,
    exp2,
    load_scalars,
    store_rows,
    store_scalars,
    store_token_tile,
)
from wyfold.tile.activation.triton import exp, sigmoid, sigmoid_bwd
from wyfold.tile.index.gluon import barrier, clear_rows, tma_load
from wyfold.tile.index.triton import chunk_span


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
            norms_q.store(reciprocal_norms(tokens.q, tokens.s_q, coords, ROWS, BT, K))
            norms_k.store(reciprocal_norms(tokens.k, tokens.s_k, coords, ROWS, BT, K))
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
        near_P, near_J = own_sub_chunk_columns(dP, o_r), own_sub_chunk_columns(dJ, o_r)
        is_far = o_r[:, None] // 8 > o_c[None, :] // 8
        far_P = split4_columns(gl.where(is_far, dP, 0.0).to(x_q.dtype), L)
        far_J = split4_columns(gl.where(is_far, dJ, 0.0).to(x_q.dtype), L)

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
        P, J = allocate4(x_q.dtype, BT, PAIRS), allocate4(x_q.dtype, BT, PAIRS)
        for n in gl.static_range(4):
            P[n].store(far_P[n])
            J[n].store(far_J[n])
        fence_async_shared()
        barrier()
        # Accumulators of the quarters, [BK, 16] each; so far they hold the gradients through the states.
        dq0, dq1, dq2, dq3 = split4_columns(dq * read[None, :], L)
        dk0, dk1, dk2, dk3 = split4_columns(dk * -erased[None, :], L)
        dw0, dw1, dw2, dw3 = split4_columns(dw * written[None, :], L)

        # Decays, in the shared memory of the states.
        mbarrier.wait(tokens_ready, r % 2)
        if not WHOLE:
            if rows < BT:
                clear_rows(t_q, rows, BT, BK)
                clear_rows(t_k, rows, BT, BK)
                clear_rows(t_g, rows, BT, BK)
        DECAYS: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 2, [1, 0])
        I, Q = allocate4(gl.float32, BK, DECAYS), allocate4(gl.float32, BK, DECAYS)
        logs = t_g
        if ACTIVATION != "given":
            logs = gl.allocate_shared_memory(gl.float32, [BT, BK], gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
            store_log_gates(logs, t_g, gate.dt_bias, value.h * K + column, activation, rows, ROLLED, ACTIVATION, BT, BK)
        E = empty_tuple()
        for n in gl.static_range(4):
            log_g = load_quarter(logs, n, L)
            if ACTIVATION == "given":
                log_g = log2_gate(log_g, 0.0, activation, True, ACTIVATION)
            E = concat_tuples(E, split2_columns(exp2(gl.sum(log_g.reshape([BK, 2, 8]), axis=2)), CH))
            since_start, until_end = sums_inside_sub_chunks(log_g)
            I[n].store(exp2(since_start))
            Q[n].store(exp2(until_end))
        E01, E23, E45, E67 = E[0] * E[1], E[2] * E[3], E[4] * E[5], E[6] * E[7]
        E03, E47 = E01 * E23, E45 * E67
        one = gl.full([BK], 1.0, gl.float32, CH)

        # Level 32: quarters 2 and 3 exchange with quarters 0 and 1.
        later2 = later_quarter(t_q, t_k, I, 2, dq2, dk2, E03, one, E[4], L)
        later3 = later_quarter(t_q, t_k, I, 3, dq3, dk3, E03, E45, E45 * E[6], L)
        earlier0 = earlier_quarter(t_k, Q, 0, dw0, E47, E23 * E[1], E23, L)
        earlier1 = earlier_quarter(t_k, Q, 1, dw1, E47, E[3], one, L)
        later_x, earlier_y = gl.sum(later2.x + later3.x, axis=1), gl.sum(earlier0.y + earlier1.y, axis=1)
        later2, earlier0 = exchange(P, J, later2, earlier0, 2, 0)
        later3, earlier0 = exchange(P, J, later3, earlier0, 3, 0)
        later2, earlier1 = exchange(P, J, later2, earlier1, 2, 1)
        later3, earlier1 = exchange(P, J, later3, earlier1, 3, 1)
        dq2, dk2, dq3, dk3, dw0, dw1 = warpgroup_mma_wait(
            0, deps=[later2.dq, later2.dk, later3.dq, later3.dk, earlier0.dw, earlier1.dw]
        )

        # Level 16: quarter 1 exchanges with 0, and 3 with 2.
        later1 = later_quarter(t_q, t_k, I, 1, dq1, dk1, E01, one, E[2], L)
        later3 = later_quarter(t_q, t_k, I, 3, dq3, dk3, E45, one, E[6], L)
        earlier0 = earlier_quarter(t_k, Q, 0, dw0, E23, E[1], one, L)
        earlier2 = earlier_quarter(t_k, Q, 2, dw2, E67, E[5], one, L)
        x1, y0, x3, y2 = (
            gl.sum(later1.x, axis=1),
            gl.sum(earlier0.y, axis=1),
            gl.sum(later3.x, axis=1),
            gl.sum(earlier2.y, axis=1),
        )
        later1, earlier0 = exchange(P, J, later1, earlier0, 1, 0)
        later3, earlier2 = exchange(P, J, later3, earlier2, 3, 2)
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
        halves = empty_tuple()
        for h in gl.static_range(2):
            # Level 8: the odd sub-chunk of each quarter exchanges with the even one; l and r are the half's two
            # quarters.
            later_l, earlier_l = exchange_inside_quarter(P, J, t_q, t_k, 2 * h, I, Q, dq4, dk4, dw4, E, L)
            later_r, earlier_r = exchange_inside_quarter(P, J, t_q, t_k, 2 * h + 1, I, Q, dq4, dk4, dw4, E, L)
            dq_l, dk_l, dq_r, dk_r, dw_l, dw_r = warpgroup_mma_wait(
                0, deps=[later_l.dq, later_l.dk, later_r.dq, later_r.dk, earlier_l.dw, earlier_r.dw]
            )
            I_l, I_r, Q_l, Q_r = I[2 * h].load(L), I[2 * h + 1].load(L), Q[2 * h].load(L), Q[2 * h + 1].load(L)
            dq_half, dk_half, dw_half = (
                concat2_columns(dq_l * I_l, dq_r * I_r),
                concat2_columns(dk_l * I_l, dk_r * I_r),
                concat2_columns(dw_l * Q_l, dw_r * Q_r),
            )
            over = stack4_columns(
                over_quarter[2 * h] + later_l.x,
                over_quarter[2 * h] + earlier_l.y,
                over_quarter[2 * h + 1] + later_r.x,
                over_quarter[2 * h + 1] + earlier_r.y,
            )
            halves = concat_tuples(halves, ((dq_half, dk_half, dw_half, over),))
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
                dA, dx = near_pairs_half(
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
                dA, dx = near_pairs_half(
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
