"""`prepare` in Gluon, for Hopper: no gate or a scalar one, bfloat16, chunks of 64, unfolded.

A program owns a chunk of one value head, whatever its rows, full or not, packed or not, boxes or addresses. What it
leaves is what the Triton launch beside it leaves, to the accuracy of the same bfloat16 pairs, if not to the last bit.
What differs is that k and q are both under way before anything is waited for, that products are no larger than what
they are for, and that so little is held that five programs share a multiprocessor (docs/facts/hopper.md, SASS-6).

All tiles are [s, r], upper triangular, and (I + U)^-1 is found as in `tile.inverse.gluon`: each of the four warps has
16 rows, of W^T as of everything before it. W = (I + J diag(beta))^-1 is found and not A = diag(beta) W / beta: so the
weights of pairs have beta in their rows, for U as for P, and what the forward reads needs no more of it,

    F diag(beta) = (P diag(beta)) W

F is that over beta, which is held away from zero throughout, so that W has the same bits in both directions; what the
forward reads is zero where beta is.

Rows that are no tokens may hold anything; r at or past them is selected away with r before s, and so is s.
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
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import FLOOR, gate_flags, gate_kind, log_gate
from wyfold.tile.dot.gluon import add, exp2, mm_pairs_async, pair
from wyfold.tile.index.gluon import (
    barrier,
    clear_tokens,
    gluon_descriptors,
    quarters,
    tma_load,
    tma_store_upper,
    token_tile,
)
from wyfold.tile.index.triton import (
    all_or_none,
    chunk_span,
    require_descriptors,
    strides,
    token_descriptor,
    upper_descriptor,
)
from wyfold.tile.inverse.gluon import beside, columns, invert_columns, invert_near, joined
from wyfold.tile.inverse.triton import divisor


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
    """Factors of every chunk, from tokens where they lie.

    Arguments as of the Triton launch. Without a gate or with a scalar one, bfloat16, K = 128, chunks of 64, not folded,
    as the configurations' rows say.
    """
    (H, K), (HV, V), C = q.shape[2:], o.shape[2:], grid.chunk_size
    gate, tiles = gate_kind(g), grid.chunks * HV
    found = empty(q, g, tiles, C, folded=folded, backward=backward, forward=forward)
    factors = require_descriptors(
        "prepare", all_or_none(found[5:8], [None if x is None else upper_descriptor(x) for x in found[5:8]])
    )
    if clear and backward and grid.cu is not None:
        # As in the Triton launch: a registered operator must not return what happened to lie in memory.
        for x in found:
            if x is not None:
                x.zero_()
    key = launch_key(q.dtype, K, V, C, gate, folded) + (" norm" if options.qk_l2norm else "")
    config = tuned("prepare.gluon", key, q.device)
    rows = all_or_none((q, k), [token_descriptor(x, C, K) for x in (q, k)])
    launch_kernel(
        wyfold_prepare_gluon,
        tiles,
        *gluon_descriptors(rows or (q, k)),
        q.stride(),
        k.stride(),
        g,
        strides(g),
        beta,
        strides(beta),
        A_log,
        dt_bias,
        o,
        o.stride(),
        found.rows,
        found.total,
        found.back,
        *gluon_descriptors(factors),
        grid.cu,
        grid.first,
        grid.sequence,
        grid.sequences,
        grid.tokens,
        grid.per_sequence,
        options.lower_bound,
        options.clamp or FLOOR,
        options.beta_most,
        int(clear),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BV=tile_width(V),
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


class Numbers(NamedTuple):
    """Shared memory for one number a row: beta held away from zero, its inverse, 1 if it is beta itself, else 0; the
    gate's running sum, reciprocal norms of k and q."""

    over: Any
    under: Any
    share: Any
    G: Any
    r_k: Any
    r_q: Any


@gluon.jit(do_not_specialize=["N", "T", "per_sequence", "lower_bound", "clamp", "beta_most", "clear"])
def wyfold_prepare_gluon(
    x_q,
    x_k,
    s_q,
    s_k,
    p_g,
    s_g,
    p_beta,
    s_beta,
    p_A_log,
    p_dt_bias,
    p_o,
    s_o,
    p_rows,
    p_total,
    p_back,
    x_F,
    x_W,
    x_FB,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    lower_bound,
    clamp,
    beta_most,
    clear,
    H: gl.constexpr,
    HV: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BT: gl.constexpr,
    BV: gl.constexpr,
    PACKED: gl.constexpr,
    FULL: gl.constexpr,
    USE_TMA: gl.constexpr,
    GATE: gl.constexpr,
    SCALAR: gl.constexpr,
    ACTIVATION: gl.constexpr,
    NORM: gl.constexpr,
    LOGIT: gl.constexpr,
):
    """One program owns a chunk of one value head; nothing lives longer than its tiles."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ONE: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    # Accumulators: a whole tile's, and that of 16 columns, whose registers are a part of it.
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, LB)

    pid = gl.program_id(0)
    i_tile = pid.to(gl.int64)
    i_c, i_hv = (pid // HV).to(gl.int64), (pid % HV).to(gl.int64)
    i_h = i_hv // (HV // H)
    # Where every chunk is full, a chunk's number is its place among tokens: no copy waits for a division.
    PLACED: gl.constexpr = FULL and USE_TMA
    if not PLACED:
        i_n, _, b, t, rows = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            if clear:
                clear_tokens(p_o, s_o, b, t, i_hv, rows, V, BT, BV)
            return

    k = gl.allocate_shared_memory(gl.bfloat16, [BT, K], WIDE)
    q = gl.allocate_shared_memory(gl.bfloat16, [BT, K], WIDE)
    D = gl.allocate_shared_memory(gl.bfloat16, [2 * BT, 16], SLIM)
    near = gl.allocate_shared_memory(gl.float32, [4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    numbers = Numbers(
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
        gl.allocate_shared_memory(gl.float32, [BT], FLAT),
    )
    come_k = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    come_q = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    if USE_TMA:
        mbarrier.init(come_k, count=1)
        mbarrier.init(come_q, count=1)
        mbarrier.expect(come_k, x_k.block_type.nbytes)
        mbarrier.expect(come_q, x_q.block_type.nbytes)
        fence_async_shared()
        barrier()
        token = (i_c * BT).to(gl.int32) if PLACED else (b * T + t).to(gl.int32)
        tma_load(x_k, [token, (i_h * s_k[2]).to(gl.int32)], come_k, k)
        tma_load(x_q, [token, (i_h * s_q[2]).to(gl.int32)], come_q, q)
        # Without a barrier the assembler asks for q when the gate, loaded below, has come
        # (docs/facts/hopper.md, SASS-6).
        barrier()
    else:
        k.store(token_tile(x_k, s_k, b, t, i_h, rows, K, BT))
        q.store(token_tile(x_q, s_q, b, t, i_h, rows, K, BT))
        fence_async_shared()
        barrier()
    if PLACED:
        i_n, _, b, t, _ = chunk_span(i_c, p_cu, p_first, p_sequence, T, per_sequence, PACKED, BT)
        rows = BT

    # One number a row, two of them in each lane of every warp; what is made of them does not hold up the products.
    o = gl.arange(0, BT, layout=ONE)
    beta, x = gl.where(o < rows, 1.0, 0.0), 0.0
    if p_beta is not None:
        at = p_beta + (b * s_beta[0] + t * s_beta[1] + i_hv * s_beta[2])
        beta = gl.load(at + o.to(gl.int64) * s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
    if SCALAR:
        at = p_g + (b * s_g[0] + t * s_g[1] + i_hv * s_g[2])
        x = gl.load(at + o.to(gl.int64) * s_g[1], mask=o < rows, other=0.0).to(gl.float32)

    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    if USE_TMA:
        mbarrier.wait(come_k, 0)
    kk = warpgroup_mma(k, k.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    if NORM:
        numbers.r_k.store(_reciprocal_norm(k, K, BT))
    if USE_TMA:
        mbarrier.wait(come_q, 0)
    if NORM:  # before the second product, as there are no registers for its result beside those for these rows
        numbers.r_q.store(_reciprocal_norm(q, K, BT))
    kq = warpgroup_mma(k, q.permute((1, 0)), zero_acc, use_acc=False, is_async=True)

    if LOGIT and p_beta is not None:
        beta = gl.where(o < rows, sigmoid(beta) * beta_most, 0.0)
    over = divisor(beta)
    numbers.over.store(over)
    if x_F is not None:
        numbers.under.store(1.0 / over)
    if x_FB is not None:
        numbers.share.store(gl.where(over == beta, 1.0, 0.0))
    if SCALAR:
        x = log_gate(x, p_A_log, p_dt_bias, i_hv, 0, lower_bound, clamp, GATE, ACTIVATION, K, K)
        numbers.G.store(gl.associative_scan(gl.where(o < rows, x, 0.0), 0, add))
    barrier()
    _store_rows(p_rows, p_back, p_total, numbers, beta, i_tile, rows, x_FB is not None, FULL, SCALAR, NORM, BT, ONE)
    kk, kq = warpgroup_mma_wait(0, deps=[kk, kq])
    barrier()

    # The places of q and of k are free: -U takes that of q, P^T that of k, both as bfloat16 pairs.
    U = q._reinterpret(gl.bfloat16, [2 * BT, BT], WIDE)
    PT = k._reinterpret(gl.bfloat16, [2 * BT, BT], WIDE)
    P = k._reinterpret(gl.bfloat16, [8, 16, BT], WIDE)
    kk_0, kk_1, kk_2, kk_3 = columns(kk, BT, LB)
    kq_0, kq_1, kq_2, kq_3 = columns(kq, BT, LB)
    own, u_3, p_3 = _pairs(kk_3, kq_3, kk_3, numbers, rows, 3, FULL, SCALAR, NORM, BT, LB)
    own, u_2, p_2 = _pairs(kk_2, kq_2, own, numbers, rows, 2, FULL, SCALAR, NORM, BT, LB)
    own, u_1, p_1 = _pairs(kk_1, kq_1, own, numbers, rows, 1, FULL, SCALAR, NORM, BT, LB)
    own, _, p_0 = _pairs(kk_0, kq_0, own, numbers, rows, 0, FULL, SCALAR, NORM, BT, LB)
    U.store(beside(u_1, u_1, u_2, u_3))  # no product reads -U's first columns
    PT.store(beside(p_0, p_1, p_2, p_3))
    o_s = gl.arange(0, BT, layout=ROW)
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    own = gl.where((o_s % 16)[:, None] < o_n[None, :], own, 0.0)
    near._reinterpret(gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(own)
    fence_async_shared()
    barrier()
    invert_near(near, D, BT)
    barrier()

    # W leaves its registers before F diag(beta) is found, by products with it.
    columns_W, highs, lows = invert_columns(D, U, BT, LB)
    # Every warp is past its last -U, whose place what leaves takes.
    barrier()
    out = q._reinterpret(gl.bfloat16, [2, BT, BT], HALF)
    parts = quarters(out, x_W, 2)
    out.index(1).store(joined(*columns_W, BT, LC).to(gl.bfloat16))
    F = mm_pairs_async(highs[0], lows[0], P.index(0), P.index(4), zero_acc, False, AC)
    for m in gl.static_range(1, 4):
        F = mm_pairs_async(highs[m], lows[m], P.index(m), P.index(4 + m), F, True, AC)
    F = warpgroup_mma_wait(0, deps=[F])
    if x_FB is not None:
        _send_weighed(x_FB, F, numbers.share, out.index(0), parts, pid, LC)
    else:
        _send_weighed(x_F, F, numbers.under, out.index(0), parts, pid, LC)
    tma_store_upper(x_W, pid, parts, 1)
    tma.store_wait(pendings=0)
    if x_F is not None and x_FB is not None:
        barrier()
        _send_weighed(x_F, F, numbers.under, out.index(0), parts, pid, LC)
        tma.store_wait(pendings=0)
    # Where a barrier has been, nothing else may be (docs/facts/hopper.md, KDA-NAN-1).
    come_k._keep_alive()
    come_q._keep_alive()


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
    i_tile,
    rows,
    FORWARD: gl.constexpr,
    FULL: gl.constexpr,
    SCALAR: gl.constexpr,
    NORM: gl.constexpr,
    BT: gl.constexpr,
    ONE: gl.constexpr,
):
    """What the scans multiply rows by: their decays from the chunk's start and to its end, norms, beta."""
    o = gl.arange(0, BT, layout=ONE)
    r_k, r_q = gl.full([BT], 1.0, gl.float32, ONE), gl.full([BT], 1.0, gl.float32, ONE)
    if NORM:
        r_k, r_q = numbers.r_k.load(ONE), numbers.r_q.load(ONE)
        if not FULL:  # a box brings rows of the next sequence too; what is made of them meets zeros, and may be NaN
            r_k, r_q = gl.where(o < rows, r_k, 1.0), gl.where(o < rows, r_q, 1.0)
    in_k, in_q, out = r_k, r_q, r_k
    total = 1.0
    if SCALAR:
        G = numbers.G.load(ONE)
        last = gl.sum(gl.where(o == BT - 1, G, 0.0), axis=0)
        before, after = gl.exp(G), gl.exp(last - G)
        in_k, in_q, out = before * r_k, before * r_q, after * r_k
        total = gl.exp(last)
    gl.store(p_total + i_tile, total)
    if p_back is not None:
        _store_four(p_back + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)
    if FORWARD:
        out = beta * out
    _store_four(p_rows + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)


@gluon.jit
def _store_four(p, in_k, in_q, out, beta, BT: gl.constexpr):
    gl.store(p, in_k)
    gl.store(p + BT, in_q)
    gl.store(p + 2 * BT, out)
    gl.store(p + 3 * BT, beta)


@gluon.jit
def _pairs(
    kk,
    kq,
    own,
    numbers,
    rows,
    j: gl.constexpr,
    FULL: gl.constexpr,
    SCALAR: gl.constexpr,
    NORM: gl.constexpr,
    BT: gl.constexpr,
    LB: gl.constexpr,
):
    """16 columns of -U where they lie on the diagonal, beside those before; then theirs and those of P^T, as pairs."""
    weight = _weight(numbers, j, SCALAR, NORM, BT, LB)
    p = _up_to(kq, weight, numbers, rows, j, FULL, NORM, BT, LB)
    u = _strictly_before(kk, weight, numbers, rows, j, FULL, NORM, LB)
    block = (gl.arange(0, BT, layout=gl.SliceLayout(1, LB)) // 16)[:, None]
    return gl.where(block == j, u, own), pair(u), pair(p)


@gluon.jit
def _weight(numbers, j: gl.constexpr, SCALAR: gl.constexpr, NORM: gl.constexpr, BT: gl.constexpr, LB: gl.constexpr):
    """What products of keys with 16 columns of rows are multiplied by: beta, norm and decay of the keys."""
    weight = numbers.over.load(gl.SliceLayout(1, LB))
    if NORM:
        weight = weight * numbers.r_k.load(gl.SliceLayout(1, LB))
    weight = weight[:, None]
    if SCALAR:
        G_s = numbers.G.load(gl.SliceLayout(1, LB))
        G_r = numbers.G.slice(16 * j, 16).load(gl.SliceLayout(0, LB))
        weight = exp2((G_r[None, :] - G_s[:, None]) * 1.4426950408889634) * weight
    return weight


@gluon.jit
def _strictly_before(
    x, weight, numbers, rows, j: gl.constexpr, FULL: gl.constexpr, NORM: gl.constexpr, LB: gl.constexpr
):
    """-U of 16 columns, from products of keys, where s < r: zero where r is no token's; elsewhere anything."""
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    x = -(x * weight)
    if NORM:
        x = x * numbers.r_k.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return x if FULL else gl.where((o_r < rows)[None, :], x, 0.0)


@gluon.jit
def _up_to(
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
    """(P diag(beta))^T of 16 columns, from products of keys and queries: zero unless s <= r < rows."""
    o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    last = o_r if FULL else gl.where(o_r < rows, o_r, -1)
    x = x * weight
    if NORM:
        x = x * numbers.r_q.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return gl.where(o_s[:, None] <= last[None, :], x, 0.0)


@gluon.jit
def _send_weighed(x_out, x, by, place, parts, pid, LC: gl.constexpr):
    """A tile leaves by way of the first tile in shared memory, with one number for each of its rows."""
    place.store((x * by.load(gl.SliceLayout(1, LC))[:, None]).to(gl.bfloat16))
    fence_async_shared()
    barrier()
    tma_store_upper(x_out, pid, parts, 0)
