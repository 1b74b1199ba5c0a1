"""`prepare` with a gate over channels: a program takes a chunk of one value head, 32 of its channels K at a time.

Sub-chunks have 16 rows, a warp each. With P the sum of a sub-chunk's log gates (base 2) after its first row up to each
row, `first` that of its first row and `rest` all after it, the pair of rows r and s <= r decays by

    2^P[r] 2^-P[s]                                     where both lie in one sub-chunk, or
    2^P[r] 2^(first + sums between) 2^(rest - P[s])    where s lies in an earlier one,

so that all pairs of a chunk take three exponentials a row and channel: of P, -P and rest - P. Pairs inside a warp's
sub-chunk are products of what it has in registers. To those with three later sub-chunks it brings 2^(rest - P[s]) k[s]
in registers as well, times what lies between, one number a channel, and reads the later rows from shared memory. Up to
such numbers the same two tiles are the decayed rows that the scans read, and the keys that E is made of.

Only -P may be positive. One anchor serves it up to REACH, which 15 gates pass if they average more than 5.08 nats; then
more of them follow, REACH apart. Rows carry 2^SHIFT more than the formula has, and keys as much less, so that of the
range of float32 keys are left what they had with a reach of 96. REACH is 1 more than is used: see `_add_near`.

What a chunk costs. 64 KiB come and 57 or 65 go (gates in float32): 0.35 ms for 12,288 chunks at 4.3 TB/s, of which each
multiprocessor has 93, so 6,800 cycles for one at 1.8 GHz. Exponentials take 1,540 cycles of their unit; products 800 in
TF32 between sub-chunks, 700 inside them, 1,150 for E and F; shared memory some 4,000; instructions, 4,400 a warp, as
many if each scheduler issued in every one. All of it may overlap: bytes are the bound if programs cover each other's
waits, two of them on a multiprocessor: three, with at most 168 registers a thread, spill and take longer.

Two programs cover little, so where all chunks are full there are no more of them than a card has at a time, and each
has one tile after another: the next one's gates come while this one is inverted and folded, its k and q while results
leave, which nothing waits for before the next sums are stored.

Shared memory: gates come into a tile of their own, in which, when their sums have been taken, each sub-chunk's 2^P k
lie above its 2^P q, a slice of 32 channels after the other, so that one product reads both. A slice of the sums P has 8
KiB, those of k and q 4 each. Where sums lay follow the pairs of bfloat16 that E is made of, then E, F and W; where k
and q lay, both decayed from the chunk's start, which leave; then -U and P^T.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.prepare.triton import empty, launch_key
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import processors, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import FLOOR, activated, gate_kind
from wyfold.tile.dot.gluon import above, add, exp2, mm_pairs_async, pair, parts
from wyfold.tile.index.gluon import (
    ELEMENTS,
    barrier,
    clear_tokens,
    gluon_descriptors,
    quarters,
    tma_load,
    tma_store,
    tma_store_upper,
    token_tile,
)
from wyfold.tile.index.triton import (
    TmaDescriptor,
    all_or_none,
    chunk_span,
    require_descriptors,
    strides,
    tile_descriptor,
    token_descriptor,
    upper_descriptor,
)
from wyfold.tile.inverse.gluon import invert_columns, invert_near, joined
from wyfold.tile.inverse.triton import divisor

BK: gl.constexpr = gl.constexpr(32)
"""Channels of a slice."""

REACH: gl.constexpr = gl.constexpr(110.0)
"""Span of log2 decays that one anchor serves: with SHIFT, factors go from 2^-96 to 2^96, as of the Triton launch."""

RESIDENT = 2
"""Programs that a multiprocessor has at a time."""

SHIFT: gl.constexpr = gl.constexpr(14.0)
"""Power of two that rows are given for their own sub-chunk, and keys lack."""

NEAREST: gl.constexpr = gl.constexpr(0.000498066)
"""log2 of 1 + 2^-11.5: of what is multiplied by it TF32 cuts off about as much as it adds (`CUT_TO_NEAREST`)."""


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    folded: bool,
    backward: bool,
    forward: bool = True,
    clear: bool = True,
) -> Prepared:
    """Factors E and F of every chunk, from tokens where they lie, and W where a backward follows.

    Arguments as of the Triton launch. bfloat16, K = 128, chunks of 64, as the configurations' row says.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    tiles = grid.chunks * HV
    found = empty(q, g, tiles, C, folded=folded, backward=backward, forward=forward)
    written = found if found.W is not None else found._replace(W=found.F)
    factors = require_descriptors("prepare", all_or_none(written[2:7], _tile_descriptors(written, C)))
    if clear and backward and grid.cu is not None:
        # As in the Triton launch: a registered operator must not return what happened to lie in memory.
        for x in found:
            if x is not None:
                x.zero_()
    config = tuned("prepare.gluon", launch_key(q.dtype, K, V, C, gate_kind(g), folded), q.device)
    rows = all_or_none((q, k, g), [token_descriptor(q, C, K), token_descriptor(k, C, K), _gate_descriptor(g, C)])
    full = grid.cu is None and grid.tokens % C == 0
    launch_kernel(
        wyfold_prepare_channel_gluon,
        min(tiles, RESIDENT * processors(q.device)) if full and rows is not None else tiles,
        *(gluon_descriptors(rows[:2], 2 * BK.value) + gluon_descriptors(rows[2:]) if rows else (q, k, g)),
        q.stride(),
        k.stride(),
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        o,
        o.stride(),
        found.rows,
        found.total,
        *gluon_descriptors(factors, 2 * BK.value),
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        tiles,
        grid.tokens,
        grid.per_sequence,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        int(clear),
        int(found.W is not None),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BV=tile_width(V),
        PACKED=grid.cu is not None,
        FULL=full,
        USE_TMA=rows is not None,
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **config.options(),
    )
    return found


def _tile_descriptors(found: Prepared, C: int) -> list[TmaDescriptor | None]:
    """Of decayed q and k, E, F and W."""
    widths = (BK.value, BK.value, found.total.shape[1])
    tiles = [None if x is None else tile_descriptor(x, C, width) for x, width in zip(found[2:5], widths, strict=True)]
    return [*tiles, *(None if x is None else upper_descriptor(x) for x in found[5:7])]


def _gate_descriptor(x: Tensor | None, C: int) -> TmaDescriptor | None:
    """Boxes of all channels of a gate; None where they may not be, or hold what is not brought as it is."""
    return None if x is None or x.dtype not in ELEMENTS else token_descriptor(x, C, x.shape[3])


@gluon.jit(
    do_not_specialize=["N", "tiles", "T", "per_sequence", "lower_bound", "clamp", "beta_most", "clear", "with_w"]
)
def wyfold_prepare_channel_gluon(
    x_q,
    x_k,
    x_g,
    s_q,
    s_k,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_o,
    s_o,
    p_rows,
    p_total,
    x_qd,
    x_kd,
    x_E,
    x_F,
    x_W,
    p_cu,
    p_first,
    p_sequence,
    N,
    tiles,
    T,
    per_sequence,
    lower_bound,
    clamp,
    beta_most,
    clear,
    with_w,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    PACKED: gl.constexpr,
    FULL: gl.constexpr,
    USE_TMA: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
):
    """A program has a chunk of one value head, or, where every chunk is full, one after another."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    FULL32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    # Rows of a warp's own sub-chunk; accumulators of a later sub-chunk's rows, of E, of a square tile.
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8])
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    NB: gl.constexpr = K // BK

    pid = gl.program_id(0)
    # Where every chunk is full, a chunk's number is its place among tokens: no copy waits for a division.
    PLACED: gl.constexpr = FULL and USE_TMA
    if not PLACED:
        i_n, _, b, t, rows = chunk_span(
            (pid // HV).to(gl.int64), p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT
        )
    if PACKED:
        if i_n == N:
            if clear:
                clear_tokens(p_o, s_o, b, t, (pid % HV).to(gl.int64), rows, V, BT, BV)
            return

    come_in = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    gates = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    table = gl.allocate_shared_memory(gl.float32, [NB, 16, BK], CUBE)
    rests = gl.allocate_shared_memory(gl.float32, [NB, 4, BK], CUBE)
    over = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    under = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    come_g = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    come = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_pieces = keys._reinterpret(gl.bfloat16, [NB, BT, BK], HALF)
    q_pieces = queries._reinterpret(gl.bfloat16, [NB, BT, BK], HALF)
    if USE_TMA:
        G = come_in if x_g.dtype == gl.float32 else come_in._reinterpret(x_g.dtype, [BT, K], WIDE)
        mbarrier.init(come_g, count=1)
        mbarrier.init(come, count=1)
        fence_async_shared()
        barrier()
        token, head = pid // HV * BT if PLACED else (b * T + t).to(gl.int32), pid % HV
        _ask_gates(x_g, s_g, token, head, come_g, G)
        _ask_tokens(x_k, s_k, x_q, s_q, token, head // (HV // H), come, keys, queries)
        barrier()  # as in the launch of a scalar gate: or the assembler asks for the last when beta has come
    else:
        head = (pid % HV).to(gl.int64)
        G = come_in
        G.store(token_tile(x_g, s_g, b, t, head, rows, K, BT).to(gl.float32))
        keys.store(token_tile(x_k, s_k, b, t, head // (HV // H), rows, K, BT))
        queries.store(token_tile(x_q, s_q, b, t, head // (HV // H), rows, K, BT))
    phase = 0
    last = tiles if PLACED else pid + 1
    # What every tile wants, addresses of lanes above all, is found anew for each: kept, it would spill.
    for tile in tl.range(pid, last, gl.num_programs(0), disable_licm=True):
        i_tile, i_hv = tile.to(gl.int64), (tile % HV).to(gl.int64)
        if PLACED:
            i_n, _, b, t, _ = chunk_span(
                (tile // HV).to(gl.int64), p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT
            )
            rows = BT

        # One number a row, two of them in each lane of every warp.
        o = gl.arange(0, BT, layout=ONE)
        beta = gl.where(o < rows, 1.0, 0.0)
        if p_beta is not None:
            at = p_beta + (b * s_beta[0] + t * s_beta[1] + i_hv * s_beta[2])
            beta = gl.load(at + o.to(gl.int64) * s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
            if LOGIT:
                beta = gl.where(o < rows, sigmoid(beta) * beta_most, 0.0)

        if USE_TMA:
            mbarrier.wait(come_g, phase)
        else:
            barrier()
        # Rows of four are 32 bytes apart in the banks, for pairs of channels of eight rows to be read at once.
        P = gates._reinterpret(gl.float32, [NB, BT, BK], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
        anchors = _sum_gates(
            G,
            gates._reinterpret(gl.float32, [NB, BT, BK], gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])),
            table,
            rests,
            p_A_log,
            p_dt_bias,
            p_total,
            i_tile,
            i_hv,
            rows,
            lower_bound,
            clamp,
            FULL,
            ACTIVATION,
            K,
        )
        apart = divisor(beta)
        over.store(apart)
        under.store(1.0 / apart)
        p_row = p_rows + i_tile * (4 * BT) + o
        gl.store(p_row, gl.full([BT], 1.0, gl.float32, ONE))
        gl.store(p_row + BT, gl.full([BT], 1.0, gl.float32, ONE))
        gl.store(p_row + 2 * BT, gl.full([BT], 1.0, gl.float32, ONE))
        gl.store(p_row + 3 * BT, beta)
        r_k, r_q = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
        if USE_TMA:
            mbarrier.wait(come, phase)
        if NORM:
            r_k = _reciprocal_norm(k_pieces, rows, BT, NB, FULL, LB)
            r_q = _reciprocal_norm(q_pieces, rows, BT, NB, FULL, LB)
        barrier()

        # Grams of keys, and of keys with queries: of each warp's sub-chunk, and of three later ones'.
        later = come_in._reinterpret(gl.float32, [2 * BT, BK], FULL32)
        blocks = come_in._reinterpret(gl.float32, [4, 32, BK], FULL32)
        pairs = gates._reinterpret(gl.bfloat16, [NB, 2 * BT, BK], HALF)
        kk_own, kq_own = gl.zeros([4, 16, 16], gl.float32, LN), gl.zeros([4, 16, 16], gl.float32, LN)
        both_1, both_2, both_3 = _zeros(LJ, BT), _zeros(LJ, BT), _zeros(LJ, BT)
        qk = gl.zeros([BT], gl.float32, ROW)
        for c in range(NB):
            sums = P.index(c).load(LB)
            b_k, b_q = _piece(k_pieces, c, rows, FULL, LB), _piece(q_pieces, c, rows, FULL, LB)
            if NORM:
                b_k, b_q = b_k * r_k[:, None], b_q * r_q[:, None]
            lanes = _over_lanes(gl.fma(b_q, b_k, 0.0))
            decay = exp2(sums)
            kf, qf = b_k * decay, b_q * decay
            kk_own, kq_own = _add_near(kk_own, kq_own, b_k, b_q, kf, qf, sums, anchors, LN)
            numbers = table._reinterpret(gl.float32, [NB, 16, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(c)
            rest = rests._reinterpret(gl.float32, [NB, 4, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(c)
            kt = b_k * exp2(_over_rows(rest, 0, 4, LB, LN) - sums)
            later.store(_beside(_by_steps(kf, BT), _by_steps(qf, BT)))
            before = _over_rows(numbers, 8, 4, LB, LN)
            kd, qd = (kf * before).to(gl.bfloat16), (qf * before).to(gl.bfloat16)
            kt_1 = kt * _over_rows(numbers, 2, 1, LB, LN)
            fence_async_shared()
            barrier()
            both_1 = _add_far(both_1, kt_1, blocks.index(1), LJ, BT)
            both_2 = _add_far(both_2, kt * _over_rows(numbers, 0, 4, LB, LN), blocks.index(2), LJ, BT)
            both_3 = _add_far(both_3, kt * _over_rows(numbers, 4, 4, LB, LN), blocks.index(3), LJ, BT)
            qk += gl.convert_layout(gl.sum(lanes, axis=1), ROW, assert_trivial=True)
            high, low = parts(kt * _over_rows(numbers, 12, 4, LB, LN))
            both_1, both_2, both_3 = warpgroup_mma_wait(0, deps=[both_1, both_2, both_3])
            k_pieces.index(c).store(kd)
            q_pieces.index(c).store(qd)
            pairs.index(c).store(above(high, low))
            barrier()
            # The slice before this one, for whose stores the fence was as well.
            if c > 0:
                tma_store(x_kd, [tile * BT, BK * (c - 1)], k_pieces.index(c - 1))
                tma_store(x_qd, [tile * BT, BK * (c - 1)], q_pieces.index(c - 1))
        fence_async_shared()
        barrier()
        tma_store(x_kd, [tile * BT, BK * (NB - 1)], k_pieces.index(NB - 1))
        tma_store(x_qd, [tile * BT, BK * (NB - 1)], q_pieces.index(NB - 1))
        after = tile + gl.num_programs(0)
        if PLACED:
            if after < tiles:
                _ask_gates(x_g, s_g, after // HV * BT, after % HV, come_g, G)
        kk_1, kq_1 = _halves(both_1, LB, BT)
        kk_2, kq_2 = _halves(both_2, LB, BT)
        kk_3, kq_3 = _halves(both_3, LB, BT)

        # -U and P^T, both as bfloat16 pairs, in the place of what was sent; -U's own blocks in that of the vectors.
        U = keys._reinterpret(gl.bfloat16, [2 * BT, BT], WIDE)
        PT = queries._reinterpret(gl.bfloat16, [8, 16, BT], WIDE)
        near = table._reinterpret(gl.float32, [4, 16, 16], CUBE)
        D = table._reinterpret(gl.bfloat16, [2, 2 * BT, 16], SLIM).index(1)
        o_s = gl.arange(0, BT, layout=ROW)
        block = (o_s // 16)[:, None]
        kk = gl.convert_layout(kk_own.reshape((BT, 16)), LB, assert_trivial=True)
        o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
        u_0 = _strictly_before(kk, kk, over, 0, LB)
        u_1 = _strictly_before(kk, kk_1, over, 1, LB)
        u_2 = _strictly_before(kk, kk_2, over, 2, LB)
        u_3 = _strictly_before(kk, kk_3, over, 3, LB)
        own = gl.where(block == 0, u_0, gl.where(block == 1, u_1, gl.where(block == 2, u_2, u_3)))
        own = gl.where((o_s % 16)[:, None] < o_n[None, :], own, 0.0)
        near._reinterpret(gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(own)
        kq = gl.convert_layout(kq_own.reshape((BT, 16)), LB, assert_trivial=True)
        p_0, p_1 = _up_to(kq, kq, qk, 0, BT, LB), _up_to(kq, kq_1, qk, 1, BT, LB)
        p_2, p_3 = _up_to(kq, kq_2, qk, 2, BT, LB), _up_to(kq, kq_3, qk, 3, BT, LB)
        tma.store_wait(pendings=0)
        barrier()
        U.store(pair(joined(u_0, u_1, u_2, u_3, BT, LC)))
        queries._reinterpret(gl.bfloat16, [2 * BT, BT], WIDE).store(pair(joined(p_0, p_1, p_2, p_3, BT, LC)))
        fence_async_shared()
        barrier()
        invert_near(near, D, BT)
        barrier()

        # F and E by products with A^T.
        AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
        columns_A, highs, lows = invert_columns(D, U, BT, LB)
        F = gl.zeros([BT, BT], gl.float32, LC)
        F = mm_pairs_async(highs[0], lows[0], PT.index(0), PT.index(4), F, False, AC)
        for m in gl.static_range(1, 4):
            F = mm_pairs_async(highs[m], lows[m], PT.index(m), PT.index(4 + m), F, True, AC)
        # A tile of all channels has those of each slice in one piece, as they were stored.
        E = _fold(highs, lows, gates._reinterpret(gl.bfloat16, [2 * BT, K], HALF), LE, BT, K)
        F, E = warpgroup_mma_wait(0, deps=[F, E])
        barrier()
        # Every product has been. Results leave from where the pairs of keys were: k and q of the next tile may come.
        zeros = gl.zeros([BT, 16], gl.bfloat16, LB)
        w_0, w_1, w_2, w_3 = zeros, zeros, zeros, zeros
        if with_w:
            over_s = over.load(ROW)[:, None]
            w_0, w_1 = _weighed(columns_A[0], over_s, under, 0, LB), _weighed(columns_A[1], over_s, under, 1, LB)
            w_2, w_3 = _weighed(columns_A[2], over_s, under, 2, LB), _weighed(columns_A[3], over_s, under, 3, LB)
        W = joined(w_0, w_1, w_2, w_3, BT, LC)
        squares = gl.convert_layout(_side_by_side(F.to(gl.bfloat16), W), LE, assert_trivial=True)
        gates._reinterpret(gl.bfloat16, [BT, 2 * K], HALF).store(_side_by_side(E.to(gl.bfloat16), squares))
        out_E = gates._reinterpret(gl.bfloat16, [BT, K], HALF)
        out = quarters(gates, x_F, 4)
        fence_async_shared()
        barrier()
        if PLACED:
            if after < tiles:
                i_h = after % HV // (HV // H)
                _ask_tokens(x_k, s_k, x_q, s_q, after // HV * BT, i_h, come, keys, queries)
        tma_store_upper(x_F, tile, out, 2)
        tma_store(x_E, [tile * BT, 0], out_E)
        if with_w:
            tma_store_upper(x_W, tile, out, 3)
        phase = phase ^ 1
    tma.store_wait(pendings=0)
    # Where a barrier has been, nothing else may be (docs/facts/hopper.md, KDA-NAN-1).
    come_g._keep_alive()
    come._keep_alive()


@gluon.jit
def _ask_gates(x_g, s_g, token, i_hv, come_g, G):
    mbarrier.expect(come_g, x_g.block_type.nbytes)
    tma_load(x_g, [token, (i_hv.to(gl.int64) * s_g[2]).to(gl.int32)], come_g, G)


@gluon.jit
def _ask_tokens(x_k, s_k, x_q, s_q, token, i_h, come, keys, queries):
    mbarrier.expect(come, x_k.block_type.nbytes + x_q.block_type.nbytes)
    tma_load(x_k, [token, (i_h.to(gl.int64) * s_k[2]).to(gl.int32)], come, keys)
    tma_load(x_q, [token, (i_h.to(gl.int64) * s_q[2]).to(gl.int32)], come, queries)


@gluon.jit
def _sum_gates(
    G,
    P,
    table,
    rests,
    p_A_log,
    p_dt_bias,
    p_total,
    i_tile,
    h,
    rows,
    lower_bound,
    clamp,
    FULL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    K: gl.constexpr,
):
    """Gates to sums P, and to a slice's numbers a channel; a thread has a channel, all of its rows.

    Returns how many anchors the pairs inside a sub-chunk take.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        if p_A_log is not None:
            rate = gl.exp(gl.load(p_A_log + h).to(gl.float32))
        if p_dt_bias is not None:
            bias = gl.load(p_dt_bias + h * K + o_k).to(gl.float32)[None, :]
    P_0, f_0, r_0 = _sub_chunk(G, 0, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_1, f_1, r_1 = _sub_chunk(G, 1, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_2, f_2, r_2 = _sub_chunk(G, 2, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_3, f_3, r_3 = _sub_chunk(G, 3, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    tma.store_wait(pendings=0)  # what the tile before left lies where the sums go
    barrier()
    x = gl.permute(gl.join(gl.join(P_0, P_1), gl.join(P_2, P_3)), (3, 2, 0, 1)).reshape((4 * 16, K // BK, BK))
    P.store(gl.permute(x, (1, 0, 2)))
    t_0, t_1, t_2, t_3 = f_0 + r_0, f_1 + r_1, f_2 + r_2, f_3 + r_3
    # From the end of a sub-chunk to the first row of a later one: of 0 and 1 to 2; of 0 to 1; of 0, 1 and 2 to 3. What
    # has no such row takes anything finite.
    one, three = exp2(f_1 - SHIFT), exp2(f_3 - SHIFT)
    two = _four(exp2(t_1 + f_2 - SHIFT), exp2(f_2 - SHIFT), one, one)
    three = _four(exp2(t_1 + t_2 + f_3 - SHIFT), exp2(t_2 + f_3 - SHIFT), three, three)
    # From the chunk's start to a sub-chunk's first row, and from its end to the chunk's.
    before = _four(
        exp2(f_0 - (SHIFT + NEAREST)),
        exp2(t_0 + f_1 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + f_2 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + t_2 + f_3 - (SHIFT + NEAREST)),
    )
    after = _four(
        exp2(t_1 + t_2 + t_3 - NEAREST),
        exp2(t_2 + t_3 - NEAREST),
        exp2(t_3 - NEAREST),
        exp2(t_3 * 0.0 - NEAREST),
    )
    numbers = gl.join(gl.join(two, three), gl.join(before, after))  # [K, of four, odd, late]
    table.store(gl.permute(numbers.reshape((K // BK, BK, 4, 2, 2)), (0, 4, 3, 2, 1)).reshape((K // BK, 16, BK)))
    more = SHIFT + 2.0 * NEAREST
    rest = _four(r_0 + more, r_1 + more, r_2 + more, r_3 + more)
    rests.store(gl.permute(rest.reshape((K // BK, BK, 4)), (0, 2, 1)))
    gl.store(p_total + i_tile * K + o_k, exp2(t_0 + t_1 + t_2 + t_3))
    most = -gl.min(gl.minimum(gl.minimum(r_0, r_1), gl.minimum(r_2, r_3)), axis=0)
    # Rounded up at a multiple of REACH: one too many costs time, one too few a pair.
    return gl.where(most > 0.0, most / REACH + 0.01, 0.0).to(gl.int32) + 1


@gluon.jit
def _sub_chunk(
    G,
    w: gl.constexpr,
    rate,
    bias,
    rows,
    lower_bound,
    clamp,
    FULL: gl.constexpr,
    ACTIVATION: gl.constexpr,
    L: gl.constexpr,
):
    """Sums of a sub-chunk's log gates, shifted as they are used, the first row's, and that of the others.

    [16, K], [K], [K]
    """
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    x = G.slice(16 * w, 16).load(L).to(gl.float32)
    # A gate of 0 stays 0 if it was given; an activation makes something of it.
    if ACTIVATION == "given" and not FULL:
        x = gl.where((o_r + 16 * w < rows)[:, None], x, 0.0)
    g = activated(x, rate, bias, lower_bound, clamp, ACTIVATION)
    if ACTIVATION != "given":
        g = gl.where((o_r + 16 * w < rows)[:, None], g, 0.0)
    # Rounded before it is added: docs/facts/compilers.md, LLVM-1.
    g = gl.fma(g, gl.full(g.shape, 1.4426950408889634, gl.float32, L), gl.zeros(g.shape, gl.float32, L))
    sums = gl.associative_scan(gl.where((o_r == 0)[:, None], 0.0, g), 0, add)
    return sums + (SHIFT + NEAREST), _row(g, 0, L), _row(sums, 15, L)


@gluon.jit
def _row(x, i: gl.constexpr, L: gl.constexpr):
    """Row i of a tile whose rows a thread holds; as integers, so that it is nothing but a choice."""
    o_r = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    return gl.sum(gl.where((o_r == i)[:, None], x.to(gl.int32, bitcast=True), 0), axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _four(x_0, x_1, x_2, x_3):
    """Four numbers a channel.   [K, 4]"""
    x = gl.join(gl.join(x_0, x_1), gl.join(x_2, x_3))
    return gl.permute(x, (0, 2, 1)).reshape((x_0.shape[0], 4))


@gluon.jit
def _over_rows(numbers, j: gl.constexpr, count: gl.constexpr, LB: gl.constexpr, LN: gl.constexpr):
    """Four of a slice's numbers a channel, from row j on, or one, for all 16 rows of every sub-chunk.   [64, BK]"""
    x = numbers.slice(j, count).load(gl.SliceLayout(1, LN))
    x, _ = gl.broadcast(gl.expand_dims(x, 1), gl.zeros([4, 16, BK], gl.float32, LN))
    return gl.convert_layout(x.reshape((64, BK)), LB, assert_trivial=True)


@gluon.jit
def _piece(pieces, i, rows, FULL: gl.constexpr, LB: gl.constexpr):
    """Rows of k or q, some channels, zero where there is no token.   [BT, BK]"""
    x = gl.convert_layout(pieces.index(i).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    o_s = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LB))
    x = x if FULL else gl.where((o_s < rows)[:, None], x, gl.zeros(x.shape, gl.bfloat16, LB))
    return x.to(gl.float32)


@gluon.jit
def _reciprocal_norm(pieces, rows, BT: gl.constexpr, NB: gl.constexpr, FULL: gl.constexpr, LB: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of each row of k or q.   [BT]"""
    squares = gl.zeros([BT, BK], gl.float32, LB)
    for c in gl.static_range(NB):
        x = _piece(pieces, c, rows, FULL, LB)
        squares = gl.fma(x, x, squares)
    return gl.rsqrt(gl.sum(squares, axis=1) + 1e-6)


@gluon.jit
def _over_lanes(x):
    """What each of the four lanes that hold a row has of its sum.   [BT, 4]"""
    x = gl.permute(x.reshape((x.shape[0], BK // 8, 4, 2)), (0, 2, 1, 3))
    return gl.sum(x.reshape((x.shape[0], 4, BK // 4)), axis=2)


@gluon.jit
def _by_steps(x, BT: gl.constexpr):
    """x, its channels in the order in which a TF32 product takes from a thread those that it has.   [BT, BK]

    A thread has neighbours, 2 t and 2 t + 1 of 8; it is asked for t and t + 4. Nothing moves.
    """
    return gl.permute(x.reshape((BT, BK // 8, 4, 2)), (0, 1, 3, 2)).reshape((BT, BK))


@gluon.jit
def _add_near(kk, kq, b_k, b_q, kf, qf, sums, anchors, LN: gl.constexpr):
    """Grams of every sub-chunk with itself, [sub-chunk, s, r], plus what some channels give: right where s <= r."""
    if anchors == 1:
        kk, kq = _add_own(kk, kq, b_k * exp2(2.0 * NEAREST - sums), kf, qf, LN)
    else:
        for anchor in range(anchors):
            # Each takes the keys in its reach; to others those are zeros, so that only their own rows feel them.
            past, top = sums + anchor * REACH, SHIFT + 1.0
            decay = exp2(gl.minimum(past, top + NEAREST))
            here = (sums < top - anchor * REACH) & (sums >= top - (anchor + 1) * REACH)
            into = exp2(gl.where(here, 2.0 * NEAREST - past, -1024.0))
            kk, kq = _add_own(kk, kq, b_k * into, b_k * decay, b_q * decay, LN)
    return kk, kq


@gluon.jit
def _add_own(kk, kq, ks, kf, qf, LN: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(0, LN, 1)
    B: gl.constexpr = gl.DotOperandLayout(1, LN, 1)
    a = gl.convert_layout(_by_steps(ks, 64).reshape((4, 16, BK)), A, assert_trivial=True)
    b_k = gl.convert_layout(gl.permute(_by_steps(kf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True)
    b_q = gl.convert_layout(gl.permute(_by_steps(qf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True)
    return mma_v2(a, b_k, kk, input_precision="tf32"), mma_v2(a, b_q, kq, input_precision="tf32")


@gluon.jit
def _beside(x, y):
    """Each sub-chunk's rows of x, then of y.   [2 BT, BK]"""
    both = gl.join(x, y).reshape((4, 16, BK, 2))
    return gl.permute(both, (0, 3, 1, 2)).reshape((2 * x.shape[0], BK))


@gluon.jit
def _side_by_side(x, y):
    """Columns of x, then those of y."""
    return gl.permute(gl.join(x, y), (0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))


@gluon.jit
def _zeros(LJ: gl.constexpr, BT: gl.constexpr):
    return gl.zeros([BT, 32], gl.float32, LJ)


@gluon.jit
def _add_far(both, ks, rows, LJ: gl.constexpr, BT: gl.constexpr):
    """Grams of all rows s with a later sub-chunk's rows r, keys and then queries, plus what some channels give, under
    way."""
    a = gl.convert_layout(_by_steps(ks, BT), gl.DotOperandLayout(0, LJ, 1), assert_trivial=True)
    return warpgroup_mma(a, rows.permute((1, 0)), both, is_async=True)


@gluon.jit
def _halves(both, LB: gl.constexpr, BT: gl.constexpr):
    """Its first 16 columns and its others; nothing moves."""
    kk, kq = gl.split(gl.permute(both.reshape((BT, 2, 16)), (0, 2, 1)))
    return gl.convert_layout(kk, LB, assert_trivial=True), gl.convert_layout(kq, LB, assert_trivial=True)


@gluon.jit
def _gram(near, later, j: gl.constexpr, LB: gl.constexpr):
    """Columns j of a gram, from the products of every sub-chunk with itself and those with sub-chunk j."""
    o_s = gl.arange(0, near.shape[0], layout=gl.SliceLayout(1, LB))
    return gl.where((o_s // 16 == j)[:, None], near, later)


@gluon.jit
def _strictly_before(near, later, over, j: gl.constexpr, LB: gl.constexpr):
    """-U of 16 columns, where s < r; elsewhere anything."""
    factor = over.slice(16 * j, 16).load(gl.SliceLayout(0, LB)) * -1.0
    return _gram(near, later, j, LB) * factor[None, :]


@gluon.jit
def _up_to(near, later, qk, j: gl.constexpr, BT: gl.constexpr, LB: gl.constexpr):
    """P^T of 16 columns: zero unless s <= r. Where gates leave a token nothing but itself, its output is its own q k, a
    sum of products of either sign: so that is one of float32."""
    o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    before = gl.where(o_s[:, None] < o_r[None, :], _gram(near, later, j, LB), 0.0)
    return gl.where(o_s[:, None] == o_r[None, :], qk[:, None], before)


@gluon.jit
def _fold(highs, lows, keys, LE: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """A^T times keys decayed to the chunk's end, under way."""
    A: gl.constexpr = gl.DotOperandLayout(0, LE, 2)
    E = gl.zeros([BT, K], gl.float32, LE)
    E = mm_pairs_async(highs[0], lows[0], keys.slice(0, 16), keys.slice(BT, 16), E, False, A)
    for m in gl.static_range(1, 4):
        E = mm_pairs_async(highs[m], lows[m], keys.slice(16 * m, 16), keys.slice(BT + 16 * m, 16), E, True, A)
    return E


@gluon.jit
def _weighed(x, over_s, under, j: gl.constexpr, LB: gl.constexpr):
    """Columns of W from those of A^T."""
    under_r = under.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return ((x * over_s) * under_r).to(gl.bfloat16)
