"""`prepare` in Gluon for Hopper with a channel gate: one program per chunk and value head, 32 channels at a time.

Sub-chunks have 16 rows, one warp each. Let P be the running sum of a sub-chunk's log gates (base 2) after its first
row, `first` the first row's log gate, and `rest` the sum over all rows after the first. The pair of rows r and s <= r
decays by

    2^P[r] 2^-P[s]                                     where both lie in one sub-chunk, or
    2^P[r] 2^(first + sums between) 2^(rest - P[s])    where s lies in an earlier one,

so all pairs of a chunk take three exponentials per row and channel: of P, -P and rest - P. Pairs inside a warp's
sub-chunk are products of operands in registers. For pairs with the three later sub-chunks, the warp has 2^(rest - P[s])
k[s] in registers, multiplies it by the decay between the sub-chunks, one number per channel, and reads the later rows
from shared memory. Multiplied by other such numbers, the same two tiles give the decayed rows that the scans read, and
the keys from which E is computed.

Only -P may be positive. One anchor serves it up to REACH. Fifteen gates exceed that if they average more than 5.08
nats; then further anchors follow, REACH apart. Rows are multiplied by 2^SHIFT more than the formula has, and keys by as
much less, so keys keep as much of float32's range as with a reach of 96. REACH is 1 more than is used: see
`_add_near_grams`.

Cost of a chunk. 64 KiB are loaded and 57 or 65 stored (gates in float32): 0.35 ms for 12,288 chunks at 4.3 TB/s. Each
multiprocessor computes 93 of these, so a chunk has 6,800 cycles at 1.8 GHz. Exponentials take 1,540 cycles of their
unit. Products take 800 cycles in TF32 between sub-chunks, 700 inside them, and 1,150 for E and F. Shared memory takes
some 4,000, and instructions 4,400 a warp, if each scheduler issues one every cycle. All of it may overlap, so memory
bandwidth is the bound if programs hide each other's latency. Two programs fit a multiprocessor: with three, at most 168
registers a thread, they spill and take longer.

Two programs hide little latency. So where all chunks are full, only as many programs are launched as fit the GPU at
once, and each loops over tiles. The gates of the next tile are loaded while the current one is inverted and folded, and
its k and q while results are stored. These stores are waited for only before the next sums are stored.

Shared memory: gates are loaded into a separate tile. After their sums are taken, that tile holds each sub-chunk's 2^P k
above its 2^P q, one slice of 32 channels after the other, so that one product reads both. A slice of the sums P has 8
KiB, and those of k and q 4 each. The memory of the sums is reused for the bfloat16 pairs from which E is computed, then
for E, F and W. The memory of k and q is reused for both, decayed from the chunk's start, which are stored, then for -U
and P^T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from wyfold.tile.activation.triton import LOG2_E, sigmoid
from wyfold.tile.decay.triton import FLOOR, Gate, activated, gate_kind
from wyfold.tile.dot.gluon import add, bf16_pair, bf16_parts, exp2, mm_pairs_async, stack_rows
from wyfold.tile.index.gluon import (
    ELEMENTS,
    barrier,
    clear_tokens,
    gluon_descriptors,
    quarters,
    reinterpret,
    tma_load,
    tma_store,
    tma_store_upper,
    token_tile,
)
from wyfold.tile.index.triton import Packing, TokenRows, chunk_span, strides
from wyfold.tile.index.triton.descriptors import (
    TmaDescriptor,
    all_or_none,
    require_descriptors,
    tile_descriptor,
    token_descriptor,
    upper_descriptor,
)
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.inverse.gluon import invert_columns, invert_diagonal_blocks, join4_columns
from wyfold.tile.inverse.triton import nonzero_beta

BK: gl.constexpr = gl.constexpr(32)
"""Channels of a slice."""

REACH: gl.constexpr = gl.constexpr(110.0)
"""Range of log2 decays that one anchor serves. With SHIFT, factors go from 2^-96 to 2^96, as in the Triton launch."""

RESIDENT = 2
"""Programs resident on a multiprocessor."""

SHIFT: gl.constexpr = gl.constexpr(14.0)
"""log2 of the factor moved from keys to rows inside a sub-chunk."""

NEAREST: gl.constexpr = gl.constexpr(0.000498066)
"""log2 of 1 + 2^-11.5: this factor adds about as much as TF32 truncates afterwards (`CUT_TO_NEAREST`)."""


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
    """Compute E and F of every chunk, and W where a backward follows; takes the arguments of the Triton launch.

    Channel gate, bfloat16, K = 128, chunks of 64.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    tiles = grid.chunks * HV
    found = empty(q, g, tiles, C, folded=folded, backward=backward, forward=forward)
    written = found if found.W is not None else found._replace(W=found.F)
    factors = require_descriptors("prepare", all_or_none(written[2:7], _tile_descriptors(written, C)))
    if clear and backward and grid.cu is not None:
        # As in the Triton launch: a registered operator must not return uninitialised memory.
        for x in found:
            if x is not None:
                x.zero_()
    config = tuned("prepare.gluon", launch_key(q.dtype, K, V, C, gate_kind(g), folded), q.device)
    rows = all_or_none((q, k, g), [token_descriptor(q, C, K), token_descriptor(k, C, K), _gate_descriptor(g, C)])
    full = grid.cu is None and grid.tokens % C == 0
    tokens = gluon_descriptors(rows[:2], 2 * BK.value) + gluon_descriptors(rows[2:]) if rows else (q, k, g)
    x_q, x_k, x_g = tokens
    x_qd, x_kd, x_E, x_F, x_W = gluon_descriptors(factors, 2 * BK.value)
    launch_kernel(
        wyfold_prepare_channel_gluon,
        min(tiles, RESIDENT * processors(q.device)) if full and rows is not None else tiles,
        x_q=x_q,
        x_k=x_k,
        x_g=x_g,
        x_qd=x_qd,
        x_kd=x_kd,
        x_E=x_E,
        x_F=x_F,
        x_W=x_W,
        tokens=Tokens(s_q=q.stride(), s_k=k.stride(), o=o, s_o=o.stride(), rows=found.rows, total=found.total),
        gate=Gate(
            s_g=strides(g), A_log=A_log, dt_bias=dt_bias, lower_bound=options.lower_bound, clamp=options.clamp or FLOOR
        ),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most, erases=float(options.erases)),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        tiles=tiles,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        with_w=int(found.W is not None),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BV=tile_width(V)),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            FULL=full,
            USE_TMA=rows is not None,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            LOGIT=options.beta_logit,
        ),
        **config.options(),
    )
    return found


def _tile_descriptors(found: Prepared, C: int) -> list[TmaDescriptor | None]:
    """TMA descriptors of decayed q and k, E, F and W."""
    widths = (BK.value, BK.value, found.total.shape[1])
    tiles = [None if x is None else tile_descriptor(x, C, width) for x, width in zip(found[2:5], widths, strict=True)]
    return [*tiles, *(None if x is None else upper_descriptor(x) for x in found[5:7])]


def _gate_descriptor(x: Tensor | None, C: int) -> TmaDescriptor | None:
    """TMA descriptor of all channels of a gate; None where its layout or dtype does not allow one."""
    return None if x is None or x.dtype not in ELEMENTS else token_descriptor(x, C, x.shape[3])


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and the fields of `Prepared` that are written through pointers.

    Attributes:
        s_q, s_k: Strides of q and k.
        o, s_o: Output of the call, and its strides.
        rows, total: See `Prepared`.
    """

    s_q: Any
    s_k: Any
    o: Any
    s_o: Any
    rows: Any
    total: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED, FULL: Whether the batch is packed, and whether every chunk is full.
        USE_TMA: Whether q, k and g are descriptors.
        ACTIVATION: The gate's activation.
        NORM, LOGIT: Whether q and k are normalised, and whether beta is a logit.
    """

    PACKED: bool
    FULL: bool
    USE_TMA: bool
    ACTIVATION: str
    NORM: bool
    LOGIT: bool


@gluon.jit(do_not_specialize=["N", "tiles", "T", "per_sequence", "clear", "with_w"])
def wyfold_prepare_channel_gluon(
    x_q,
    x_k,
    x_g,
    x_qd,
    x_kd,
    x_E,
    x_F,
    x_W,
    tokens,
    gate,
    strength,
    packing,
    N,
    tiles,
    T,
    per_sequence,
    clear,
    with_w,
    SIZES: gl.constexpr,
    FLAGS: gl.constexpr,
):
    """One program computes a chunk of one value head, or loops over such tiles where every chunk is full."""
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BV: gl.constexpr = SIZES.BV
    PACKED: gl.constexpr = FLAGS.PACKED
    FULL: gl.constexpr = FLAGS.FULL
    USE_TMA: gl.constexpr = FLAGS.USE_TMA
    ACTIVATION: gl.constexpr = FLAGS.ACTIVATION
    NORM: gl.constexpr = FLAGS.NORM
    LOGIT: gl.constexpr = FLAGS.LOGIT
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    FULL32: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    # Layouts: rows of a warp's own sub-chunk (LB, LN); accumulators of a later sub-chunk's rows (LJ), of E (LE), and of
    # a square tile (LC).
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LN: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LJ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 8])
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    NB: gl.constexpr = K // BK

    pid = gl.program_id(0)
    # Where every chunk is full, the chunk's number gives its first token: no load waits for a division.
    TOKEN_FROM_PID: gl.constexpr = FULL and USE_TMA
    b, t, rows = None, None, BT
    if not TOKEN_FROM_PID:
        i_n, _, b, t, rows = chunk_span((pid // HV).to(gl.int64), packing, T, per_sequence, PACKED, BT)
        if PACKED:
            if i_n == N:
                if clear:
                    clear_tokens(tokens.o, tokens.s_o, TokenRows(b, t, rows), (pid % HV).to(gl.int64), V, BT, BV)
                return

    gate_buffer = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    gates = gl.allocate_shared_memory(gl.float32, [BT, K], FULL32)
    keys = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    queries = gl.allocate_shared_memory(gl.bfloat16, [BT, K], HALF)
    border_decays = gl.allocate_shared_memory(gl.float32, [NB, 16, BK], CUBE)
    rest_sums = gl.allocate_shared_memory(gl.float32, [NB, 4, BK], CUBE)
    safe_beta = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    inverse_beta = gl.allocate_shared_memory(gl.float32, [BT], FLAT)
    gates_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    tokens_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_slices = reinterpret(keys, gl.bfloat16, [NB, BT, BK], HALF)
    q_slices = reinterpret(queries, gl.bfloat16, [NB, BT, BK], HALF)
    if USE_TMA:
        G = gate_buffer if x_g.dtype == gl.float32 else reinterpret(gate_buffer, x_g.dtype, [2, BT, K], WIDE).index(0)
        mbarrier.init(gates_ready, count=1)
        mbarrier.init(tokens_ready, count=1)
        fence_async_shared()
        barrier()
        token, head = pid // HV * BT if TOKEN_FROM_PID else (b * T + t).to(gl.int32), pid % HV
        _load_gates(x_g, gate.s_g, token, head, gates_ready, G)
        _load_tokens(x_k, tokens.s_k, x_q, tokens.s_q, token, head // (HV // H), tokens_ready, keys, queries)
        barrier()  # as in `scalar`: otherwise the assembler moves the last load behind beta's arrival
    else:
        head = (pid % HV).to(gl.int64)
        G = gate_buffer
        G.store(token_tile(x_g, gate.s_g, TokenRows(b, t, rows), head, K, BT).to(gl.float32))
        keys.store(token_tile(x_k, tokens.s_k, TokenRows(b, t, rows), head // (HV // H), K, BT))
        queries.store(token_tile(x_q, tokens.s_q, TokenRows(b, t, rows), head // (HV // H), K, BT))
    phase = 0
    last = tiles if TOKEN_FROM_PID else pid + 1
    # No hoisting: values common to all tiles, mostly addresses of lanes, would spill if they were kept.
    for tile in tl.range(pid, last, gl.num_programs(0), disable_licm=True):
        i_tile, i_hv = tile.to(gl.int64), (tile % HV).to(gl.int64)
        i_b, i_t = b, t
        if TOKEN_FROM_PID:
            _, _, i_b, i_t, _ = chunk_span((tile // HV).to(gl.int64), packing, T, per_sequence, PACKED, BT)

        # Per-row numbers, two in each lane of every warp.
        o = gl.arange(0, BT, layout=ONE)
        beta = gl.where(o < rows, 1.0, 0.0)
        if strength.beta is not None:
            first = strength.beta + (i_b * strength.s_beta[0] + i_t * strength.s_beta[1] + i_hv * strength.s_beta[2])
            beta = gl.load(first + o.to(gl.int64) * strength.s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
            if LOGIT:
                beta = gl.where(o < rows, sigmoid(beta) * strength.most, 0.0)

        if USE_TMA:
            mbarrier.wait(gates_ready, phase)
        else:
            barrier()
        # Swizzled so that one access reads pairs of channels of eight rows without bank conflicts: groups of four rows
        # are 32 bytes apart.
        P = reinterpret(gates, gl.float32, [NB, BT, BK], gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
        anchors = _sum_gates(
            G,
            reinterpret(gates, gl.float32, [NB, BT, BK], gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0])),
            border_decays,
            rest_sums,
            gate.A_log,
            gate.dt_bias,
            tokens.total,
            i_tile,
            i_hv,
            rows,
            gate.lower_bound,
            gate.clamp,
            FULL,
            ACTIVATION,
            K,
        )
        nonzero = nonzero_beta(beta)
        safe_beta.store(nonzero)
        inverse_beta.store(1.0 / nonzero)
        p_row = tokens.rows + i_tile * (4 * BT) + o
        gl.store(p_row, gl.full([BT], strength.erases, gl.float32, ONE))
        gl.store(p_row + BT, gl.full([BT], 1.0, gl.float32, ONE))
        gl.store(p_row + 2 * BT, gl.full([BT], 1.0, gl.float32, ONE))
        gl.store(p_row + 3 * BT, beta)
        r_k, r_q = gl.full([BT], 1.0, gl.float32, ROW), gl.full([BT], 1.0, gl.float32, ROW)
        if USE_TMA:
            mbarrier.wait(tokens_ready, phase)
        if NORM:
            r_k = _reciprocal_norm(k_slices, rows, BT, NB, FULL, LB)
            r_q = _reciprocal_norm(q_slices, rows, BT, NB, FULL, LB)
        barrier()

        # Grams of keys, and of keys with queries: of each warp's sub-chunk with itself, and with three later ones.
        later = reinterpret(gate_buffer, gl.float32, [NB // 2, 2 * BT, BK], FULL32).index(0)
        blocks = reinterpret(gate_buffer, gl.float32, [2 * NB, 32, BK], FULL32)
        pairs = reinterpret(gates, gl.bfloat16, [NB, 2 * BT, BK], HALF)
        kk_own, kq_own = gl.zeros([4, 16, 16], gl.float32, LN), gl.zeros([4, 16, 16], gl.float32, LN)
        gram_1, gram_2, gram_3 = _zeros(LJ, BT), _zeros(LJ, BT), _zeros(LJ, BT)
        qk = gl.zeros([BT], gl.float32, ROW)
        for c in range(NB):
            sums = P.index(c).load(LB)
            b_k, b_q = _load_slice(k_slices, c, rows, FULL, LB), _load_slice(q_slices, c, rows, FULL, LB)
            if NORM:
                b_k, b_q = b_k * r_k[:, None], b_q * r_q[:, None]
            lanes = _partial_row_sums(gl.fma(b_q, b_k, 0.0))
            decay = exp2(sums)
            kf, qf = b_k * decay, b_q * decay
            kk_own, kq_own = _add_near_grams(kk_own, kq_own, b_k, b_q, kf, qf, sums, anchors, LN)
            numbers = reinterpret(
                border_decays, gl.float32, [NB, 16, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
            ).index(c)
            rest = reinterpret(rest_sums, gl.float32, [NB, 4, BK], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).index(c)
            kt = b_k * exp2(_broadcast_to_rows(rest, 0, 4, LB, LN) - sums)
            later.store(_stack_sub_chunks(_tf32_channel_order(kf, BT), _tf32_channel_order(qf, BT)))
            before = _broadcast_to_rows(numbers, 8, 4, LB, LN)
            kd, qd = (kf * before).to(gl.bfloat16), (qf * before).to(gl.bfloat16)
            kt_1 = kt * _broadcast_to_rows(numbers, 2, 1, LB, LN)
            fence_async_shared()
            barrier()
            gram_1 = _add_far_grams(gram_1, kt_1, blocks.index(1), LJ, BT)
            gram_2 = _add_far_grams(gram_2, kt * _broadcast_to_rows(numbers, 0, 4, LB, LN), blocks.index(2), LJ, BT)
            gram_3 = _add_far_grams(gram_3, kt * _broadcast_to_rows(numbers, 4, 4, LB, LN), blocks.index(3), LJ, BT)
            qk += gl.convert_layout(gl.sum(lanes, axis=1), ROW, assert_trivial=True)
            high, low = bf16_parts(kt * _broadcast_to_rows(numbers, 12, 4, LB, LN))
            gram_1, gram_2, gram_3 = warpgroup_mma_wait(0, deps=[gram_1, gram_2, gram_3])
            k_slices.index(c).store(kd)
            q_slices.index(c).store(qd)
            pairs.index(c).store(stack_rows(high, low))
            barrier()
            # The previous slice: the fence above covers its stores too.
            if c > 0:
                tma_store(x_kd, [tile * BT, BK * (c - 1)], k_slices.index(c - 1))
                tma_store(x_qd, [tile * BT, BK * (c - 1)], q_slices.index(c - 1))
        fence_async_shared()
        barrier()
        tma_store(x_kd, [tile * BT, BK * (NB - 1)], k_slices.index(NB - 1))
        tma_store(x_qd, [tile * BT, BK * (NB - 1)], q_slices.index(NB - 1))
        after = tile + gl.num_programs(0)
        if TOKEN_FROM_PID:
            if after < tiles:
                _load_gates(x_g, gate.s_g, after // HV * BT, after % HV, gates_ready, G)
        kk_1, kq_1 = _split_key_query(gram_1, LB, BT)
        kk_2, kq_2 = _split_key_query(gram_2, LB, BT)
        kk_3, kq_3 = _split_key_query(gram_3, LB, BT)

        # -U and P^T, as bfloat16 pairs, overwrite the stored rows; the diagonal blocks of -U overwrite the border
        # decays.
        U = reinterpret(keys, gl.bfloat16, [2 * BT, BT], WIDE)
        PT = reinterpret(queries, gl.bfloat16, [8, 16, BT], WIDE)
        near = reinterpret(border_decays, gl.float32, [2, 4, 16, 16], CUBE).index(0)
        D = reinterpret(border_decays, gl.bfloat16, [2, 2 * BT, 16], SLIM).index(1)
        o_s = gl.arange(0, BT, layout=ROW)
        block = (o_s // 16)[:, None]
        kk = gl.convert_layout(kk_own.reshape((BT, 16)), LB, assert_trivial=True)
        o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
        u_0 = _negative_U_columns(kk, kk, safe_beta, strength.erases, 0, LB)
        u_1 = _negative_U_columns(kk, kk_1, safe_beta, strength.erases, 1, LB)
        u_2 = _negative_U_columns(kk, kk_2, safe_beta, strength.erases, 2, LB)
        u_3 = _negative_U_columns(kk, kk_3, safe_beta, strength.erases, 3, LB)
        own = gl.where(block == 0, u_0, gl.where(block == 1, u_1, gl.where(block == 2, u_2, u_3)))
        own = gl.where((o_s % 16)[:, None] < o_n[None, :], own, 0.0)
        reinterpret(near, gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(own)
        kq = gl.convert_layout(kq_own.reshape((BT, 16)), LB, assert_trivial=True)
        p_0, p_1 = _P_columns(kq, kq, qk, 0, BT, LB), _P_columns(kq, kq_1, qk, 1, BT, LB)
        p_2, p_3 = _P_columns(kq, kq_2, qk, 2, BT, LB), _P_columns(kq, kq_3, qk, 3, BT, LB)
        tma.store_wait(pendings=0)
        barrier()
        U.store(bf16_pair(join4_columns(u_0, u_1, u_2, u_3, BT, LC)))
        reinterpret(queries, gl.bfloat16, [2 * BT, BT], WIDE).store(
            bf16_pair(join4_columns(p_0, p_1, p_2, p_3, BT, LC))
        )
        fence_async_shared()
        barrier()
        invert_diagonal_blocks(near, D, BT)
        barrier()

        # F and E by products with A^T.
        AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
        columns_A, highs, lows = invert_columns(D, U, BT, LB)
        F = gl.zeros([BT, BT], gl.float32, LC)
        F = mm_pairs_async(highs[0], lows[0], PT.index(0), PT.index(4), F, False, AC)
        for m in gl.static_range(1, 4):
            F = mm_pairs_async(highs[m], lows[m], PT.index(m), PT.index(4 + m), F, True, AC)
        # In a tile of all channels, the channels of a slice are contiguous, as they were stored.
        E = _fold(highs, lows, reinterpret(gates, gl.bfloat16, [2 * BT, K], HALF), LE, BT, K)
        F, E = warpgroup_mma_wait(0, deps=[F, E])
        barrier()
        # All products are done. Results overwrite the pairs of keys, so k and q of the next tile may be loaded.
        zeros = gl.zeros([BT, 16], gl.bfloat16, LB)
        w_0, w_1, w_2, w_3 = zeros, zeros, zeros, zeros
        if with_w:
            safe_beta_s = safe_beta.load(ROW)[:, None]
            w_0, w_1 = (
                _W_columns(columns_A[0], safe_beta_s, inverse_beta, 0, LB),
                _W_columns(columns_A[1], safe_beta_s, inverse_beta, 1, LB),
            )
            w_2, w_3 = (
                _W_columns(columns_A[2], safe_beta_s, inverse_beta, 2, LB),
                _W_columns(columns_A[3], safe_beta_s, inverse_beta, 3, LB),
            )
        W = join4_columns(w_0, w_1, w_2, w_3, BT, LC)
        squares = gl.convert_layout(_concat_columns(F.to(gl.bfloat16), W), LE, assert_trivial=True)
        reinterpret(gates, gl.bfloat16, [BT, 2 * K], HALF).store(_concat_columns(E.to(gl.bfloat16), squares))
        out_E = reinterpret(gates, gl.bfloat16, [2, BT, K], HALF).index(0)
        out = quarters(gates, x_F, 4)
        fence_async_shared()
        barrier()
        if TOKEN_FROM_PID:
            if after < tiles:
                i_h = after % HV // (HV // H)
                _load_tokens(x_k, tokens.s_k, x_q, tokens.s_q, after // HV * BT, i_h, tokens_ready, keys, queries)
        tma_store_upper(x_F, tile, out, 2)
        tma_store(x_E, [tile * BT, 0], out_E)
        if with_w:
            tma_store_upper(x_W, tile, out, 3)
        phase = phase ^ 1
    tma.store_wait(pendings=0)
    # The memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1).
    gates_ready._keep_alive()
    tokens_ready._keep_alive()


@gluon.jit
def _load_gates(x_g, s_g, token, i_hv, gates_ready, G):
    """Issue the load of a chunk's gates."""
    mbarrier.expect(gates_ready, x_g.block_type.nbytes)
    tma_load(x_g, [token, (i_hv.to(gl.int64) * s_g[2]).to(gl.int32)], gates_ready, G)


@gluon.jit
def _load_tokens(x_k, s_k, x_q, s_q, token, i_h, tokens_ready, keys, queries):
    """Issue the loads of a chunk's k and q."""
    mbarrier.expect(tokens_ready, x_k.block_type.nbytes + x_q.block_type.nbytes)
    tma_load(x_k, [token, (i_h.to(gl.int64) * s_k[2]).to(gl.int32)], tokens_ready, keys)
    tma_load(x_q, [token, (i_h.to(gl.int64) * s_q[2]).to(gl.int32)], tokens_ready, queries)


@gluon.jit
def _sum_gates(
    G,
    P,
    border_decays,
    rest_sums,
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
    """Compute the sums P of a chunk's gates and the decays between sub-chunks; a thread holds all rows of a channel.

    Returns:
        Number of anchors that the pairs inside a sub-chunk need.
    """
    L: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [1, 4], [1, 0])
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    rate, bias = 1.0, 0.0
    if ACTIVATION != "given":
        if p_A_log is not None:
            rate = gl.exp(gl.load(p_A_log + h).to(gl.float32))
        if p_dt_bias is not None:
            bias = gl.load(p_dt_bias + h * K + o_k).to(gl.float32)[None, :]
    P_0, f_0, r_0 = _sub_chunk_sums(G, 0, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_1, f_1, r_1 = _sub_chunk_sums(G, 1, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_2, f_2, r_2 = _sub_chunk_sums(G, 2, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    P_3, f_3, r_3 = _sub_chunk_sums(G, 3, rate, bias, rows, lower_bound, clamp, FULL, ACTIVATION, L)
    tma.store_wait(pendings=0)  # the sums overwrite memory from which the previous tile's results are stored
    barrier()
    x = gl.permute(gl.join(gl.join(P_0, P_1), gl.join(P_2, P_3)), (3, 2, 0, 1)).reshape((4 * 16, K // BK, BK))
    P.store(gl.permute(x, (1, 0, 2)))
    t_0, t_1, t_2, t_3 = f_0 + r_0, f_1 + r_1, f_2 + r_2, f_3 + r_3
    # Decays from the end of a sub-chunk to the first row of a later one: 0 and 1 to 2; 0 to 1; 0, 1 and 2 to 3. Unused
    # entries hold any finite number.
    one, three = exp2(f_1 - SHIFT), exp2(f_3 - SHIFT)
    two = _stack4(exp2(t_1 + f_2 - SHIFT), exp2(f_2 - SHIFT), one, one)
    three = _stack4(exp2(t_1 + t_2 + f_3 - SHIFT), exp2(t_2 + f_3 - SHIFT), three, three)
    # Decays from the chunk's start to a sub-chunk's first row, and from the sub-chunk's end to the chunk's end.
    before = _stack4(
        exp2(f_0 - (SHIFT + NEAREST)),
        exp2(t_0 + f_1 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + f_2 - (SHIFT + NEAREST)),
        exp2(t_0 + t_1 + t_2 + f_3 - (SHIFT + NEAREST)),
    )
    after = _stack4(
        exp2(t_1 + t_2 + t_3 - NEAREST),
        exp2(t_2 + t_3 - NEAREST),
        exp2(t_3 - NEAREST),
        exp2(t_3 * 0.0 - NEAREST),
    )
    numbers = gl.join(gl.join(two, three), gl.join(before, after))  # [K, of four, odd, late]
    border_decays.store(gl.permute(numbers.reshape((K // BK, BK, 4, 2, 2)), (0, 4, 3, 2, 1)).reshape((K // BK, 16, BK)))
    more = SHIFT + 2.0 * NEAREST
    rest = _stack4(r_0 + more, r_1 + more, r_2 + more, r_3 + more)
    rest_sums.store(gl.permute(rest.reshape((K // BK, BK, 4)), (0, 2, 1)))
    gl.store(p_total + i_tile * K + o_k, exp2(t_0 + t_1 + t_2 + t_3))
    most = -gl.min(gl.minimum(gl.minimum(r_0, r_1), gl.minimum(r_2, r_3)), axis=0)
    # Rounded up: an anchor too many costs time, one too few loses a pair.
    return gl.where(most > 0.0, most / REACH + 0.01, 0.0).to(gl.int32) + 1


@gluon.jit
def _sub_chunk_sums(
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
    """Running sums of a sub-chunk's log gates (shifted for their use), the first row's gate, and the sum of the others.

    [16, K], [K] and [K].
    """
    o_r = gl.arange(0, 16, layout=gl.SliceLayout(1, L))
    x = G.slice(16 * w, 16).load(L).to(gl.float32)
    # Rows without a token must have a log gate of 0; an activation does not map 0 to 0, so it is masked afterwards.
    if ACTIVATION == "given" and not FULL:
        x = gl.where((o_r + 16 * w < rows)[:, None], x, 0.0)
    g = activated(x, rate, bias, lower_bound, clamp, ACTIVATION)
    if ACTIVATION != "given":
        g = gl.where((o_r + 16 * w < rows)[:, None], g, 0.0)
    # Rounded before it is added: docs/facts/compilers.md, LLVM-1.
    g = gl.fma(g, gl.full(g.shape, LOG2_E, gl.float32, L), gl.zeros(g.shape, gl.float32, L))
    sums = gl.associative_scan(gl.where((o_r == 0)[:, None], 0.0, g), 0, add)
    return sums + (SHIFT + NEAREST), _select_row(g, 0, L), _select_row(sums, 15, L)


@gluon.jit
def _select_row(x, i: gl.constexpr, L: gl.constexpr):
    """Row i of a tile whose rows one thread holds; summed as integers, so that it is an exact selection."""
    o_r = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, L))
    return gl.sum(gl.where((o_r == i)[:, None], x.to(gl.int32, bitcast=True), 0), axis=0).to(gl.float32, bitcast=True)


@gluon.jit
def _stack4(x_0, x_1, x_2, x_3):
    """Stack four numbers per channel.   4 x [K] -> [K, 4]"""
    x = gl.join(gl.join(x_0, x_1), gl.join(x_2, x_3))
    return gl.permute(x, (0, 2, 1)).reshape((x_0.shape[0], 4))


@gluon.jit
def _broadcast_to_rows(numbers, j: gl.constexpr, count: gl.constexpr, LB: gl.constexpr, LN: gl.constexpr):
    """Broadcast `count` (4 or 1) numbers per channel, from row j on, to the 16 rows of every sub-chunk.   [64, BK]"""
    x = numbers.slice(j, count).load(gl.SliceLayout(1, LN))
    x, _ = gl.broadcast(gl.expand_dims(x, 1), gl.zeros([4, 16, BK], gl.float32, LN))
    return gl.convert_layout(x.reshape((64, BK)), LB, assert_trivial=True)


@gluon.jit
def _load_slice(slices, i, rows, FULL: gl.constexpr, LB: gl.constexpr):
    """Load slice i of the channels of k or q; zero past the last token.   [BT, BK]"""
    x = gl.convert_layout(slices.index(i).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    o_s = gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LB))
    x = x if FULL else gl.where((o_s < rows)[:, None], x, gl.zeros(x.shape, gl.bfloat16, LB))
    return x.to(gl.float32)


@gluon.jit
def _reciprocal_norm(slices, rows, BT: gl.constexpr, NB: gl.constexpr, FULL: gl.constexpr, LB: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of each row of k or q.   [BT]"""
    squares = gl.zeros([BT, BK], gl.float32, LB)
    for c in gl.static_range(NB):
        x = _load_slice(slices, c, rows, FULL, LB)
        squares = gl.fma(x, x, squares)
    return gl.rsqrt(gl.sum(squares, axis=1) + 1e-6)


@gluon.jit
def _partial_row_sums(x):
    """Partial row sums of the four lanes that hold a row.   [BT, BK] -> [BT, 4]"""
    x = gl.permute(x.reshape((x.shape[0], BK // 8, 4, 2)), (0, 2, 1, 3))
    return gl.sum(x.reshape((x.shape[0], 4, BK // 4)), axis=2)


@gluon.jit
def _tf32_channel_order(x, BT: gl.constexpr):
    """Reorder channels so that a TF32 product reads them from the threads that hold them; moves no data.   [BT, BK]

    Of 8 channels, thread t holds 2 t and 2 t + 1, and the product reads t and t + 4 from it.
    """
    return gl.permute(x.reshape((BT, BK // 8, 4, 2)), (0, 1, 3, 2)).reshape((BT, BK))


@gluon.jit
def _add_near_grams(kk, kq, b_k, b_q, kf, qf, sums, anchors, LN: gl.constexpr):
    """Add some channels to the grams of every sub-chunk with itself, [sub-chunk, s, r]; valid where s <= r."""
    if anchors == 1:
        kk, kq = _add_sub_chunk_grams(kk, kq, b_k * exp2(2.0 * NEAREST - sums), kf, qf, LN)
    else:
        for anchor in range(anchors):
            # Each anchor takes the keys in its reach. Other keys are zeros, so the products with them add nothing.
            shifted, top = sums + anchor * REACH, SHIFT + 1.0
            decay = exp2(gl.minimum(shifted, top + NEAREST))
            in_reach = (sums < top - anchor * REACH) & (sums >= top - (anchor + 1) * REACH)
            key_decay = exp2(gl.where(in_reach, 2.0 * NEAREST - shifted, -1024.0))
            kk, kq = _add_sub_chunk_grams(kk, kq, b_k * key_decay, b_k * decay, b_q * decay, LN)
    return kk, kq


@gluon.jit
def _add_sub_chunk_grams(kk, kq, ks, kf, qf, LN: gl.constexpr):
    """kk + ks kf^T and kq + ks qf^T of every sub-chunk, in TF32."""
    A: gl.constexpr = gl.DotOperandLayout(0, LN, 1)
    B: gl.constexpr = gl.DotOperandLayout(1, LN, 1)
    a = gl.convert_layout(_tf32_channel_order(ks, 64).reshape((4, 16, BK)), A, assert_trivial=True)
    b_k = gl.convert_layout(
        gl.permute(_tf32_channel_order(kf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True
    )
    b_q = gl.convert_layout(
        gl.permute(_tf32_channel_order(qf, 64).reshape((4, 16, BK)), (0, 2, 1)), B, assert_trivial=True
    )
    return mma_v2(a, b_k, kk, input_precision="tf32"), mma_v2(a, b_q, kq, input_precision="tf32")


@gluon.jit
def _stack_sub_chunks(x, y):
    """Interleave sub-chunks: 16 rows of x, then 16 rows of y, and so on.   [2 BT, BK]"""
    gram = gl.join(x, y).reshape((4, 16, BK, 2))
    return gl.permute(gram, (0, 3, 1, 2)).reshape((2 * x.shape[0], BK))


@gluon.jit
def _concat_columns(x, y):
    """Concatenate x and y along columns."""
    return gl.permute(gl.join(x, y), (0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))


@gluon.jit
def _zeros(LJ: gl.constexpr, BT: gl.constexpr):
    return gl.zeros([BT, 32], gl.float32, LJ)


@gluon.jit
def _add_far_grams(gram, ks, rows, LJ: gl.constexpr, BT: gl.constexpr):
    """Add some channels to the grams of all rows s with a later sub-chunk's rows r; the product is asynchronous.

    Columns are the sub-chunk's 16 keys, then its 16 queries.
    """
    a = gl.convert_layout(_tf32_channel_order(ks, BT), gl.DotOperandLayout(0, LJ, 1), assert_trivial=True)
    return warpgroup_mma(a, rows.permute((1, 0)), gram, is_async=True)


@gluon.jit
def _split_key_query(gram, LB: gl.constexpr, BT: gl.constexpr):
    """Split a gram's 32 columns into those of keys and of queries; moves no data."""
    kk, kq = gl.split(gl.permute(gram.reshape((BT, 2, 16)), (0, 2, 1)))
    return gl.convert_layout(kk, LB, assert_trivial=True), gl.convert_layout(kq, LB, assert_trivial=True)


@gluon.jit
def _gram(near, later, j: gl.constexpr, LB: gl.constexpr):
    """The 16 columns of sub-chunk j of a gram: `near` where s is in the same sub-chunk, `later` elsewhere."""
    o_s = gl.arange(0, near.shape[0], layout=gl.SliceLayout(1, LB))
    return gl.where((o_s // 16 == j)[:, None], near, later)


@gluon.jit
def _negative_U_columns(near, later, safe_beta, erases, j: gl.constexpr, LB: gl.constexpr):
    """16 columns of -U; valid where s < r."""
    factor = safe_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB)) * -erases
    return _gram(near, later, j, LB) * factor[None, :]


@gluon.jit
def _P_columns(near, later, qk, j: gl.constexpr, BT: gl.constexpr, LB: gl.constexpr):
    """16 columns of P^T; zero unless s <= r.

    The diagonal, <q, k> of each row, comes from a float32 sum. After a reset it is a token's whole output, and as a sum
    of products of either sign it may cancel.
    """
    o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    before = gl.where(o_s[:, None] < o_r[None, :], _gram(near, later, j, LB), 0.0)
    return gl.where(o_s[:, None] == o_r[None, :], qk[:, None], before)


@gluon.jit
def _fold(highs, lows, keys, LE: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """E = A^T times the keys decayed to the chunk's end; the products are asynchronous."""
    A: gl.constexpr = gl.DotOperandLayout(0, LE, 2)
    E = gl.zeros([BT, K], gl.float32, LE)
    E = mm_pairs_async(highs[0], lows[0], keys.slice(0, 16), keys.slice(BT, 16), E, False, A)
    for m in gl.static_range(1, 4):
        E = mm_pairs_async(highs[m], lows[m], keys.slice(16 * m, 16), keys.slice(BT + 16 * m, 16), E, True, A)
    return E


@gluon.jit
def _W_columns(x, safe_beta_s, inverse_beta, j: gl.constexpr, LB: gl.constexpr):
    """Columns of W from columns of A^T."""
    inverse_beta_r = inverse_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return ((x * safe_beta_s) * inverse_beta_r).to(gl.bfloat16)
