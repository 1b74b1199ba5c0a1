"""The kernel of `prepare` in Gluon without a gate or with a scalar gate."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from wyfold.kernels.prepare.gluon.scalar.arguments import RowNumbers
from wyfold.kernels.prepare.gluon.scalar.columns import store_pairs
from wyfold.kernels.prepare.gluon.scalar.loads import load_tokens
from wyfold.kernels.prepare.gluon.scalar.rows import (
    load_row_numbers,
    reciprocal_norm,
    store_row_factors,
    store_row_numbers,
)
from wyfold.kernels.prepare.gluon.scalar.stores import store_factors
from wyfold.tile.activation.triton import sigmoid
from wyfold.tile.decay.triton import log_gate
from wyfold.tile.dot.gluon import add, mm_pairs_async
from wyfold.tile.index.gluon import barrier, clear_tokens, reinterpret
from wyfold.tile.index.triton import TokenRows, chunk_span
from wyfold.tile.inverse.gluon import invert_columns, invert_diagonal_blocks, join4_columns


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

    k, free_k = _allocate_rows(K, BT, WIDE)
    q, free_q = _allocate_rows(K, BT, WIDE)
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
    load_tokens(x_q, x_k, tokens, q, k, q_ready, k_ready, i_c, i_h, b, t, T, rows, SIZES, USE_TMA, TOKEN_FROM_PID)
    if TOKEN_FROM_PID:
        _, _, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)

    # Per-row numbers, two in each lane of every warp. Their arithmetic comes after the first products are issued.
    o = gl.arange(0, BT, layout=ONE)
    beta, x = load_row_numbers(strength, gate, b, t, i_hv, o, rows, SCALAR)

    zero_acc = gl.zeros([BT, BT], gl.float32, LC)
    if USE_TMA:
        mbarrier.wait(k_ready, 0)
    kk = warpgroup_mma(k, k.permute((1, 0)), zero_acc, use_acc=False, is_async=True)
    if NORM:
        numbers.r_k.store(reciprocal_norm(k, K, BT))
    if USE_TMA:
        mbarrier.wait(q_ready, 0)
    if NORM:  # before the second product: there are not enough registers for its result and these rows
        numbers.r_q.store(reciprocal_norm(q, K, BT))
    kq = warpgroup_mma(k, q.permute((1, 0)), zero_acc, use_acc=False, is_async=True)

    if LOGIT and strength.beta is not None:
        beta = gl.where(o < rows, sigmoid(beta) * strength.most, 0.0)
    store_row_numbers(numbers, beta, x_F is not None, x_FB is not None)
    if SCALAR:
        x = log_gate(x, gate, i_hv, 0, GATE, ACTIVATION, K, K)
        numbers.G.store(gl.associative_scan(gl.where(o < rows, x, 0.0), 0, add))
    barrier()
    store_row_factors(factors, numbers, beta, strength.erases, i_tile, rows, x_FB is not None, FULL, SCALAR, NORM, ONE)
    kk, kq = warpgroup_mma_wait(0, deps=[kk, kq])
    barrier()

    # The memory of q and k is free: -U overwrites q, and P^T overwrites k, both as bfloat16 pairs.
    U = reinterpret(free_q, gl.bfloat16, [2 * BT, BT], WIDE)
    PT = reinterpret(free_k, gl.bfloat16, [2 * BT, BT], WIDE)
    P = reinterpret(free_k, gl.bfloat16, [8, 16, BT], WIDE)
    store_pairs(kk, kq, U, PT, near, numbers, strength.erases, rows, FULL, SCALAR, NORM, LB)
    fence_async_shared()
    barrier()
    invert_diagonal_blocks(near, D, BT)
    barrier()

    # W is stored to shared memory before F diag(beta) is computed by products with it.
    columns_W, highs, lows = invert_columns(D, U, BT, LB)
    # Every warp has read its last block of -U; results overwrite its memory.
    barrier()
    out = reinterpret(free_q, gl.bfloat16, [2, BT, BT], HALF)
    out.index(1).store(join4_columns(*columns_W, BT, LC).to(gl.bfloat16))
    F = mm_pairs_async(highs[0], lows[0], P.index(0), P.index(4), zero_acc, False, AC)
    for m in gl.static_range(1, 4):
        F = mm_pairs_async(highs[m], lows[m], P.index(m), P.index(4 + m), F, True, AC)
    F = warpgroup_mma_wait(0, deps=[F])
    store_factors(x_F, x_W, x_FB, F, numbers, out, pid, LC)
    # The memory of an mbarrier must not be reused (docs/facts/hopper.md, KDA-NAN-1).
    k_ready._keep_alive()
    q_ready._keep_alive()


@gluon.jit
def _allocate_rows(K: gl.constexpr, BT: gl.constexpr, WIDE: gl.constexpr):
    """Allocate memory for rows [BT, K], and a view of it that has at least the size of a float32 tile [BT, BT]."""
    ENOUGH: gl.constexpr = 2 * BT
    if K < ENOUGH:
        tile = gl.allocate_shared_memory(gl.bfloat16, [BT, ENOUGH], WIDE)
        return reinterpret(tile, gl.bfloat16, [ENOUGH // K, BT, K], WIDE).index(0), tile
    else:
        rows = gl.allocate_shared_memory(gl.bfloat16, [BT, K], WIDE)
        tile = rows
        if K > ENOUGH:
            tile = reinterpret(rows, gl.bfloat16, [K // ENOUGH, BT, ENOUGH], WIDE).index(0)
        return rows, tile
