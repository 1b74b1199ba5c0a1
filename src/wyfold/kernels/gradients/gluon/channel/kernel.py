"""The kernel of `gradients` in Gluon under a channel gate."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from wyfold.kernels.gradients.gluon.channel.gate import gate_activation, store_decays
from wyfold.kernels.gradients.gluon.channel.grams import gram_gradients, store_pair_gradients
from wyfold.kernels.gradients.gluon.channel.levels import exchange_quarters, exchange_sub_chunks
from wyfold.kernels.gradients.gluon.channel.loads import allocate_head, load_head
from wyfold.kernels.gradients.gluon.channel.near import near_pairs_sums, store_halves
from wyfold.kernels.gradients.gluon.channel.tiles import concat_tuples, empty_tuple, split4_columns
from wyfold.kernels.gradients.gluon.channel.values import load_beta, store_dv
from wyfold.kernels.gradients.gluon.channel.zeros import store_zeros
from wyfold.kernels.gradients.gluon.tokens import Coords, store_token_tile
from wyfold.tile.index.gluon import barrier, clear_rows
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
    """One program computes a chunk of one value head, for half of its channels."""
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    PACKED: gl.constexpr = FLAGS.PACKED
    WHOLE: gl.constexpr = FLAGS.WHOLE
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    NORM: gl.constexpr = FLAGS.NORM
    LOGIT: gl.constexpr = FLAGS.LOGIT
    ERASES: gl.constexpr = FLAGS.ERASES
    GR: gl.constexpr = HV // SIZES.H
    BK: gl.constexpr = K // 2
    # An activation unrolled for all tokens exceeds the instruction cache and is fetched again for every chunk.
    ROLLED: gl.constexpr = ACTIVATION != "given" and x_g.dtype == gl.bfloat16
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, 16, 16])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    pid = gl.program_id(0).to(gl.int64)
    i_tile, half = pid // 2, (pid % 2).to(gl.int32)
    i_c, i_h = i_tile // HV, i_tile % HV
    column = half * BK
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    coords = Coords(b, t, (b * T + t).to(gl.int32), i_h, rows)
    o_1 = gl.arange(0, BT, layout=ONE)
    if PACKED:
        if i_n == N:
            store_zeros(outputs, dgate, coords, o_1, pid, SIZES)
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
    head = allocate_head(x_do, x_e, x_X, x_S, x_dS, ERASES, SIZES)
    load_head(
        x_q, x_k, x_do, x_g, x_S, x_dS, x_e, x_X, tokens, head, t_q, t_k, t_g, bars, coords, i_tile, column,
        ERASES, SIZES,
    )  # fmt: skip

    beta = load_beta(strength, coords, o_1, LOGIT)
    betas.store(beta)
    norms_q, norms_k = betas, betas
    if NORM:
        norms_q = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
        norms_k = gl.allocate_shared_memory(gl.float32, [BT], NUMBERS)
        p_norms = tokens.norms + i_tile * (2 * BT) + o_1
        norms_q.store(gl.load(p_norms))
        norms_k.store(gl.load(p_norms + BT))
    activation = gate_activation(gate, i_h)
    if outputs.dv is not None:
        store_dv(tokens, outputs, betas, coords, i_tile, column, factors.unit, SIZES)
    else:
        barrier()

    dq, dk, dw, carried, read, written, erased, near_P, near_J, far_P, far_J = gram_gradients(
        head, betas, norms_q, norms_k, bars, strength, outputs, factors, coords, half, SIZES, FLAGS
    )
    if ERASES:
        dq, dk, dw = warpgroup_mma_wait(0, deps=[dq, dk, dw])
    else:
        dq, dw = warpgroup_mma_wait(0, deps=[dq, dw])
    # Only from here on may the allocator reuse these tiles. It tracks a tile's last textual use, but an
    # asynchronous product reads its operands longer; `_keep_alive` is that last use.
    barrier()
    head.S._keep_alive()
    head.dS._keep_alive()
    head.e._keep_alive()
    head.X._keep_alive()
    head.do._keep_alive()
    near, P, J = store_pair_gradients(near_P, near_J, far_P, far_J, ERASES)
    # Accumulators of the quarters, [BK, 16] each; so far they hold the gradients through the states.
    dq4 = split4_columns(dq * read[None, :], L)
    dk4 = dq4
    if ERASES:
        dk4 = split4_columns(dk * -erased[None, :], L)
    dw4 = split4_columns(dw * written[None, :], L)

    # Decays, in the shared memory of the states.
    mbarrier.wait(bars.index(2), 0)
    if not WHOLE:
        if rows < BT:
            clear_rows(t_q, rows, BT, BK)
            clear_rows(t_k, rows, BT, BK)
            clear_rows(t_g, rows, BT, BK)
    I, Q, E, logs = store_decays(t_g, gate.dt_bias, i_h * K + column, activation, rows, ROLLED, ACTIVATION, SIZES)
    dq4, dk4, dw4, over_quarter = exchange_quarters(P, J, t_q, t_k, I, Q, E, dq4, dk4, dw4, carried, ERASES, L)
    halves = empty_tuple()
    for h in gl.static_range(2):
        half_tiles = exchange_sub_chunks(P, J, t_q, t_k, h, I, Q, E, dq4, dk4, dw4, over_quarter, ERASES, L)
        halves = concat_tuples(halves, (half_tiles,))
    # Both halves move to the shared memory of the decays and pairs: the near pairs need the registers.
    barrier()
    for n in gl.static_range(4):
        P[n]._keep_alive()
        J[n]._keep_alive()
    tiles = store_halves(near, halves, t_q, t_k, t_g, logs, ERASES)
    sum_A, sum_x = near_pairs_sums(tiles, tokens, gate, activation, coords, column, pid, ROLLED, SIZES, FLAGS)
    if dgate.dt_bias is not None:
        o_b = gl.arange(0, BK, layout=gl.SliceLayout(0, sum_x.type.layout))
        gl.store(dgate.dt_bias + i_tile * K + column + o_b, gl.sum(sum_x, axis=0))
    if dgate.A_log is not None:
        gl.store(dgate.A_log + pid, gl.sum(gl.sum(sum_A, axis=0), axis=0))
    fence_async_shared()
    barrier()
    # Where dq and dk are stored: at the tokens of the head, or in its tile of S.
    place = coords
    if GR > 1:
        place = Coords(b * 0, i_tile * V, (i_tile * V).to(gl.int32), i_h * 0, rows)
    store_token_tile(x_dq, outputs.dq, outputs.s_dq, place, column, t_q, WHOLE, BT, BK)
    store_token_tile(x_dk, outputs.dk, outputs.s_dk, place, column, t_k, WHOLE, BT, BK)
    store_token_tile(x_dg, dgate.g, dgate.s_g, coords, column, t_g, WHOLE, BT, BK)
    tma.store_wait(pendings=0)
    bars._keep_alive()  # the memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1)
