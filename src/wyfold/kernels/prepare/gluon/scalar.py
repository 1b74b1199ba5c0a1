"""`prepare` in Gluon for Hopper: no gate or a scalar gate, bfloat16, chunks of 64, unfolded.

One program computes a chunk of one value head: full or partial, packed or not, loaded by TMA or by pointer. Its results
have the accuracy of the Triton launch, with the same bfloat16 pairs, but not its bits. The differences: the loads of k
and q are both issued before any wait, products are no larger than needed, and five programs fit a multiprocessor
(docs/facts/hopper.md, SASS-6).

All tiles are [s, r], upper triangular, and (I + U)^-1 is computed as in `tile.inverse.gluon`: each of the four warps
holds 16 rows. The result is W = (I + J diag(beta))^-1, not A = diag(beta) W / beta. So the weights of pairs have beta
in their rows, for U as for P, and the forward's factor needs no further scaling:

    F diag(beta) = (P diag(beta)) W

F is that divided by beta, which is held away from zero throughout, so that W has the same bits in both directions. The
forward's factor is exactly zero where beta is.

Rows past the last token may hold anything. Results with such an r or s are masked, like those with r before s.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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

from wyfold.kernels.prepare.triton import empty, launch_key
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.triton import LOG2_E, sigmoid
from wyfold.tile.decay.triton import gate_argument, gate_flags, gate_kind, log_gate
from wyfold.tile.dot.gluon import add, bf16_pair, exp2, mm_pairs_async
from wyfold.tile.index.gluon import (
    barrier,
    clear_tokens,
    gluon_descriptors,
    quarters,
    reinterpret,
    tma_load,
    tma_store_upper,
    token_tile,
)
from wyfold.tile.index.triton import Packing, TokenRows, chunk_span, strides
from wyfold.tile.index.triton.descriptors import all_or_none, require_descriptors, token_descriptor, upper_descriptor
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.inverse.gluon import (
    concat4_columns,
    invert_columns,
    invert_diagonal_blocks,
    join4_columns,
    split4_columns,
)
from wyfold.tile.inverse.triton import nonzero_beta


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
    """Compute the factors of every chunk; takes the arguments of the Triton launch.

    No gate or a scalar gate, bfloat16, K = 128, chunks of 64, unfolded.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    gate, tiles = gate_kind(g), grid.chunks * HV
    found = empty(q, g, tiles, C, folded=folded, backward=backward, forward=forward)
    factors = require_descriptors(
        "prepare", all_or_none(found[5:8], [None if x is None else upper_descriptor(x) for x in found[5:8]])
    )
    if clear and backward and grid.cu is not None:
        # As in the Triton launch: a registered operator must not return uninitialised memory.
        for x in found:
            if x is not None:
                x.zero_()
    key = launch_key(q.dtype, K, V, C, gate, folded)._replace(norm=options.qk_l2norm)
    config = tuned("prepare.gluon", key, q.device)
    rows = all_or_none((q, k), [token_descriptor(x, C, K) for x in (q, k)])
    x_q, x_k = gluon_descriptors(rows or (q, k))
    x_F, x_W, x_FB = gluon_descriptors(factors)
    launch_kernel(
        wyfold_prepare_gluon,
        tiles,
        x_q=x_q,
        x_k=x_k,
        x_F=x_F,
        x_W=x_W,
        x_FB=x_FB,
        tokens=Tokens(s_q=q.stride(), s_k=k.stride(), o=o, s_o=o.stride()),
        gate=gate_argument(g, A_log, dt_bias, options),
        strength=Strength(beta=beta, s_beta=strides(beta), most=options.beta_most, erases=float(options.erases)),
        factors=RowFactors(rows=found.rows, rows_bwd=found.rows_bwd, total=found.total),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BV=tile_width(V)),
        PACKED=grid.cu is not None,
        FULL=grid.cu is None and grid.tokens % C == 0,
        USE_TMA=rows is not None,
        GATE=gate,
        SCALAR=gate_flags(g)["SCALAR"],
        ACTIVATION=options.activation,
        NORM=options.qk_l2norm,
        LOGIT=options.beta_logit,
        **config.options(),
    )
    return found


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory.

    Attributes:
        s_q, s_k: Strides of q and k.
        o, s_o: Output of the call, and its strides.
    """

    s_q: Any
    s_k: Any
    o: Any
    s_o: Any
    end: None = None


class RowFactors(NamedTuple):
    """Kernel argument: the fields of `Prepared` that are written through pointers."""

    rows: Any
    rows_bwd: Any
    total: Any


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BV: int


class RowNumbers(NamedTuple):
    """Shared memory for per-row numbers, [BT] each.

    Attributes:
        safe_beta: beta, held away from zero.
        inverse_beta: 1 / safe_beta.
        beta_mask: 1 where safe_beta is beta itself, else 0.
        G: Running sum of the log gate.
        r_k, r_q: Reciprocal norms of k and q.
    """

    safe_beta: Any
    inverse_beta: Any
    beta_mask: Any
    G: Any
    r_k: Any
    r_q: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "clear"])
def wyfold_prepare_gluon(
    x_q,
    x_k,
    x_F,
    x_W,
    x_FB,
    tokens,
    gate,
    strength,
    factors,
    packing,
    N,
    T,
    per_sequence,
    clear,
    SIZES: gl.constexpr,
    PACKED: gl.constexpr,
    FULL: gl.constexpr,
    USE_TMA: gl.constexpr,
    GATE: gl.constexpr,
    SCALAR: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
):
    """One program computes the factors of a chunk of one value head."""
    H: gl.constexpr = SIZES.H
    HV: gl.constexpr = SIZES.HV
    K: gl.constexpr = SIZES.K
    V: gl.constexpr = SIZES.V
    BT: gl.constexpr = SIZES.BT
    BV: gl.constexpr = SIZES.BV
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    # Accumulator layouts: of a whole tile, and of 16 of its columns, whose registers are a subset.
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LB)

    pid = gl.program_id(0)
    i_tile = pid.to(gl.int64)
    i_c, i_hv = (pid // HV).to(gl.int64), (pid % HV).to(gl.int64)
    i_h = i_hv // (HV // H)
    # Where every chunk is full, the chunk's number gives its first token: no load waits for a division.
    TOKEN_FROM_PID: gl.constexpr = FULL and USE_TMA
    b, t, rows = None, None, BT
    if not TOKEN_FROM_PID:
        i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
        if PACKED:
            if i_n == N:
                if clear:
                    clear_tokens(tokens.o, tokens.s_o, TokenRows(b, t, rows), i_hv, V, BT, BV)
                return

    k = gl.allocate_shared_memory(gl.bfloat16, [BT, K], WIDE)
    q = gl.allocate_shared_memory(gl.bfloat16, [BT, K], WIDE)
    D = gl.allocate_shared_memory(gl.bfloat16, [2 * BT, 16], SLIM)
    near = gl.allocate_shared_memory(gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    numbers = RowNumbers(
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
    )
    k_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if USE_TMA:
        mbarrier.init(k_ready, count=1)
        mbarrier.init(q_ready, count=1)
        mbarrier.expect(k_ready, x_k.block_type.nbytes)
        mbarrier.expect(q_ready, x_q.block_type.nbytes)
        fence_async_shared()
        barrier()
        token = (i_c * BT).to(gl.int32) if TOKEN_FROM_PID else (b * T + t).to(gl.int32)
        tma_load(x_k, [token, (i_h * tokens.s_k[2]).to(gl.int32)], k_ready, k)
        tma_load(x_q, [token, (i_h * tokens.s_q[2]).to(gl.int32)], q_ready, q)
        # Without this barrier the assembler moves the load of q behind the gate's arrival (docs/facts/hopper.md,
        # SASS-6).
        barrier()
    else:
        k.store(token_tile(x_k, tokens.s_k, TokenRows(b, t, rows), i_h, K, BT))
        q.store(token_tile(x_q, tokens.s_q, TokenRows(b, t, rows), i_h, K, BT))
        fence_async_shared()
        barrier()
    if TOKEN_FROM_PID:
        _, _, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)

    # Per-row numbers, two in each lane of every warp. Their arithmetic comes after the first products are issued.
    o = gl.arange(0, BT, layout=ONE)
    beta, x = gl.where(o < rows, 1.0, 0.0), 0.0
    if strength.beta is not None:
        first = strength.beta + (b * strength.s_beta[0] + t * strength.s_beta[1] + i_hv * strength.s_beta[2])
        beta = gl.load(first + o.to(gl.int64) * strength.s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
    if SCALAR:
        first = gate.g + (b * gate.s_g[0] + t * gate.s_g[1] + i_hv * gate.s_g[2])
        x = gl.load(first + o.to(gl.int64) * gate.s_g[1], mask=o < rows, other=0.0).to(gl.float32)

    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    if USE_TMA:
        mbarrier.wait(k_ready, 0)
    kk = warpgroup_mma(k, k.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    if NORM:
        numbers.r_k.store(_reciprocal_norm(k, K, BT))
    if USE_TMA:
        mbarrier.wait(q_ready, 0)
    if NORM:  # before the second product: there are not enough registers for its result and these rows
        numbers.r_q.store(_reciprocal_norm(q, K, BT))
    kq = warpgroup_mma(k, q.permute((1, 0)), zero_acc, use_acc=False, is_async=True)

    if LOGIT and strength.beta is not None:
        beta = gl.where(o < rows, sigmoid(beta) * strength.most, 0.0)
    safe_beta = nonzero_beta(beta)
    numbers.safe_beta.store(safe_beta)
    if x_F is not None:
        numbers.inverse_beta.store(1.0 / safe_beta)
    if x_FB is not None:
        numbers.beta_mask.store(gl.where(safe_beta == beta, 1.0, 0.0))
    if SCALAR:
        x = log_gate(x, gate, i_hv, 0, GATE, ACTIVATION, K, K)
        numbers.G.store(gl.associative_scan(gl.where(o < rows, x, 0.0), 0, add))
    barrier()
    _store_rows(
        factors.rows,
        factors.rows_bwd,
        factors.total,
        numbers,
        beta,
        strength.erases,
        i_tile,
        rows,
        x_FB is not None,
        FULL,
        SCALAR,
        NORM,
        BT,
        ONE,
    )
    kk, kq = warpgroup_mma_wait(0, deps=[kk, kq])
    barrier()

    # The memory of q and k is free: -U overwrites q, and P^T overwrites k, both as bfloat16 pairs.
    U = reinterpret(q, gl.bfloat16, [2 * BT, BT], WIDE)
    PT = reinterpret(k, gl.bfloat16, [2 * BT, BT], WIDE)
    P = reinterpret(k, gl.bfloat16, [8, 16, BT], WIDE)
    kk_0, kk_1, kk_2, kk_3 = split4_columns(kk, BT, LB)
    kq_0, kq_1, kq_2, kq_3 = split4_columns(kq, BT, LB)
    diagonal, u_3, p_3 = _weighted_columns(
        kk_3, kq_3, kk_3, numbers, strength.erases, rows, 3, FULL, SCALAR, NORM, BT, LB
    )
    diagonal, u_2, p_2 = _weighted_columns(
        kk_2, kq_2, diagonal, numbers, strength.erases, rows, 2, FULL, SCALAR, NORM, BT, LB
    )
    diagonal, u_1, p_1 = _weighted_columns(
        kk_1, kq_1, diagonal, numbers, strength.erases, rows, 1, FULL, SCALAR, NORM, BT, LB
    )
    diagonal, _, p_0 = _weighted_columns(
        kk_0, kq_0, diagonal, numbers, strength.erases, rows, 0, FULL, SCALAR, NORM, BT, LB
    )
    U.store(concat4_columns(u_1, u_1, u_2, u_3))  # products do not read the first columns of -U
    PT.store(concat4_columns(p_0, p_1, p_2, p_3))
    o_s = gl.arange(0, BT, layout=ROW)
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    diagonal = gl.where((o_s % 16)[:, None] < o_n[None, :], diagonal, 0.0)
    reinterpret(near, gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(diagonal)
    fence_async_shared()
    barrier()
    invert_diagonal_blocks(near, D, BT)
    barrier()

    # W is stored to shared memory before F diag(beta) is computed by products with it.
    columns_W, highs, lows = invert_columns(D, U, BT, LB)
    # Every warp has read its last block of -U; results overwrite its memory.
    barrier()
    out = reinterpret(q, gl.bfloat16, [2, BT, BT], HALF)
    quarter_tiles = quarters(out, x_W, 2)
    out.index(1).store(join4_columns(*columns_W, BT, LC).to(gl.bfloat16))
    F = mm_pairs_async(highs[0], lows[0], P.index(0), P.index(4), zero_acc, False, AC)
    for m in gl.static_range(1, 4):
        F = mm_pairs_async(highs[m], lows[m], P.index(m), P.index(4 + m), F, True, AC)
    F = warpgroup_mma_wait(0, deps=[F])
    if x_FB is not None:
        _store_scaled(x_FB, F, numbers.beta_mask, out.index(0), quarter_tiles, pid, LC)
    else:
        _store_scaled(x_F, F, numbers.inverse_beta, out.index(0), quarter_tiles, pid, LC)
    tma_store_upper(x_W, pid, quarter_tiles, 1)
    tma.store_wait(pendings=0)
    if x_F is not None and x_FB is not None:
        barrier()
        _store_scaled(x_F, F, numbers.inverse_beta, out.index(0), quarter_tiles, pid, LC)
        tma.store_wait(pendings=0)
    # The memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1).
    k_ready._keep_alive()
    q_ready._keep_alive()


@gluon.jit
def _reciprocal_norm(x, K: gl.constexpr, BT: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of each row of a tile in shared memory.   [BT]"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    y = x.load(L).to(gl.float32)
    return gl.rsqrt(gl.sum(y * y, axis=1) + 1e-6)


@gluon.jit
def _store_rows(
    p_rows,
    p_back,
    p_total,
    numbers,
    beta,
    erases,
    i_tile,
    rows,
    FORWARD: gl.constexpr,
    FULL: gl.constexpr,
    SCALAR: gl.constexpr,
    NORM: gl.constexpr,
    BT: gl.constexpr,
    ONE: gl.constexpr,
):
    """Store the scans' row factors: decays from the chunk's start and to its end, norms, and beta."""
    o = gl.arange(0, BT, layout=ONE)
    r_k, r_q = gl.full([BT], 1.0, gl.float32, ONE), gl.full([BT], 1.0, gl.float32, ONE)
    if NORM:
        r_k, r_q = numbers.r_k.load(ONE), numbers.r_q.load(ONE)
        if not FULL:  # TMA also loads rows of the next sequence; their norms are multiplied by zeros, but may be NaN
            r_k, r_q = gl.where(o < rows, r_k, 1.0), gl.where(o < rows, r_q, 1.0)
    in_k, in_q, out = r_k, r_q, r_k
    total = 1.0
    if SCALAR:
        G = numbers.G.load(ONE)
        last = gl.sum(gl.where(o == BT - 1, G, 0.0), axis=0)
        before, after = gl.exp(G), gl.exp(last - G)
        in_k, in_q, out = before * r_k, before * r_q, after * r_k
        total = gl.exp(last)
    in_k = in_k * erases
    gl.store(p_total + i_tile, total)
    if p_back is not None:
        _store_row_numbers(p_back + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)
    if FORWARD:
        out = beta * out
    _store_row_numbers(p_rows + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)


@gluon.jit
def _store_row_numbers(p, in_k, in_q, out, beta, BT: gl.constexpr):
    """Store four numbers per row, `Prepared.rows`."""
    gl.store(p, in_k)
    gl.store(p + BT, in_q)
    gl.store(p + 2 * BT, out)
    gl.store(p + 3 * BT, beta)


@gluon.jit
def _weighted_columns(
    kk,
    kq,
    diagonal,
    numbers,
    erases,
    rows,
    j: gl.constexpr,
    FULL: gl.constexpr,
    SCALAR: gl.constexpr,
    NORM: gl.constexpr,
    BT: gl.constexpr,
    LB: gl.constexpr,
):
    """16 columns of -U and of P^T.

    Returns:
        The diagonal blocks of -U so far, and the columns of -U and of P^T as bfloat16 pairs.
    """
    weight = _pair_weight(numbers, j, SCALAR, NORM, BT, LB)
    p = _P_columns(kq, weight, numbers, rows, j, FULL, NORM, BT, LB)
    u = _negative_U_columns(kk, weight, numbers, erases, rows, j, FULL, NORM, LB)
    block = (gl.arange(0, BT, layout=gl.SliceLayout(1, LB)) // 16)[:, None]
    return gl.where(block == j, u, diagonal), bf16_pair(u), bf16_pair(p)


@gluon.jit
def _pair_weight(
    numbers, j: gl.constexpr, SCALAR: gl.constexpr, NORM: gl.constexpr, BT: gl.constexpr, LB: gl.constexpr
):
    """Factor of the gram entries in 16 columns: beta and norm of the key s, and the decay from s to r."""
    weight = numbers.safe_beta.load(gl.SliceLayout(1, LB))
    if NORM:
        weight = weight * numbers.r_k.load(gl.SliceLayout(1, LB))
    weight = weight[:, None]
    if SCALAR:
        G_s = numbers.G.load(gl.SliceLayout(1, LB))
        G_r = numbers.G.slice(16 * j, 16).load(gl.SliceLayout(0, LB))
        weight = exp2((G_r[None, :] - G_s[:, None]) * LOG2_E) * weight
    return weight


@gluon.jit
def _negative_U_columns(
    x, weight, numbers, erases, rows, j: gl.constexpr, FULL: gl.constexpr, NORM: gl.constexpr, LB: gl.constexpr
):
    """16 columns of -U from products of keys; valid where s < r, zero where r is past the last token."""
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    x = (x * weight) * -erases
    if NORM:
        x = x * numbers.r_k.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return x if FULL else gl.where((o_r < rows)[None, :], x, 0.0)


@gluon.jit
def _P_columns(
    x,
    weight,
    numbers,
    rows,
    j: gl.constexpr,
    FULL: gl.constexpr,
    NORM: gl.constexpr,
    BT: gl.constexpr,
    LB: gl.constexpr,
):
    """16 columns of (P diag(beta))^T from products of keys and queries; zero unless s <= r < rows."""
    o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    last = o_r if FULL else gl.where(o_r < rows, o_r, -1)
    x = x * weight
    if NORM:
        x = x * numbers.r_q.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return gl.where(o_s[:, None] <= last[None, :], x, 0.0)


@gluon.jit
def _store_scaled(x_out, x, row_scale, buffer, quarter_tiles, pid, LC: gl.constexpr):
    """Scale a tile's rows and store it by TMA through a shared memory buffer."""
    buffer.store((x * row_scale.load(gl.SliceLayout(1, LC))[:, None]).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma_store_upper(x_out, pid, quarter_tiles, 0)
