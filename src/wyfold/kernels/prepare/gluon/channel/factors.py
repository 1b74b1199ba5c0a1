"""Columns of -U, P^T and W, the columns of A^T, and their products, E and F."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma_wait

from wyfold.kernels.prepare.gluon.channel.gates import end_decays
from wyfold.tile.dot.gluon import bf16_pair, bf16_parts, mm_pairs_async
from wyfold.tile.index.gluon import barrier, reinterpret
from wyfold.tile.inverse.gluon import (
    add_diagonal_product,
    add_product,
    invert_diagonal_blocks,
    join4_columns,
    load_diagonal_inverses,
    split4_columns,
)


@gluon.jit
def write_factors(kk, kq, qk, smem, erases, whole, with_w, BT: gl.constexpr, K: gl.constexpr):
    """Write E, F and, if it is wanted, W to shared memory, from the grams.

    -U and P^T, as bfloat16 pairs, overwrite the stored rows; the diagonal blocks of -U overwrite the border decays.
    """
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    SLIM: gl.constexpr = gl.NVMMASharedLayout(32, 16, 2)
    CUBE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    U = reinterpret(smem.keys, gl.bfloat16, [2 * BT, BT], WIDE)
    PT = reinterpret(smem.queries, gl.bfloat16, [8, 16, BT], WIDE)
    near = reinterpret(smem.border_decays, gl.float32, [2, 4, 16, 16], CUBE).index(0)
    D = reinterpret(smem.border_decays, gl.bfloat16, [2, 2 * BT, 16], SLIM).index(1)
    store_U(kk, smem, U, near, erases, BT)
    # The inversion is a chain of dependent steps, so P^T is computed beside it.
    invert_diagonal_blocks(near, D, BT)
    store_P(kq, qk, smem, BT)
    fence_async_shared()
    barrier()
    _multiply(smem, U, PT, D, whole, with_w, BT, K)


@gluon.jit
def store_U(kk, smem, U, near, erases, BT: gl.constexpr):
    """Store the diagonal blocks of -U to `near`, visibly to all, then -U as bfloat16 pairs over the stored rows."""
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    o_s = gl.arange(0, BT, layout=ROW)
    block = (o_s // 16)[:, None]
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    kk_0, kk_1, kk_2, kk_3 = split4_columns(kk, BT, LB)
    u_0 = negative_U_columns(kk_0, smem.safe_beta, erases, 0, LB)
    u_1 = negative_U_columns(kk_1, smem.safe_beta, erases, 1, LB)
    u_2 = negative_U_columns(kk_2, smem.safe_beta, erases, 2, LB)
    u_3 = negative_U_columns(kk_3, smem.safe_beta, erases, 3, LB)
    own = gl.where((o_s % 16)[:, None] < o_n[None, :], own_block(u_0, u_1, u_2, u_3, block), 0.0)
    reinterpret(near, gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(own)
    tma.store_wait(pendings=0)
    barrier()
    U.store(bf16_pair(join4_columns(u_0, u_1, u_2, u_3, BT, LC)))


@gluon.jit
def store_P(kq, qk, smem, BT: gl.constexpr):
    """Store P^T as bfloat16 pairs over the queries."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    reinterpret(smem.queries, gl.bfloat16, [2 * BT, BT], WIDE).store(bf16_pair(transposed_P(kq, qk, BT)))


@gluon.jit
def write_readings(kq, qk, smem, BT: gl.constexpr):
    """Write F to shared memory, where writes erase nothing: it is P. Waits until TMA has read the decayed rows."""
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    F = transposed_P(kq, qk, BT).to(gl.bfloat16)
    reinterpret(smem.border_decays, gl.bfloat16, [BT, BT], HALF).store(F)
    tma.store_wait(pendings=0)


@gluon.jit
def transposed_P(kq, qk, BT: gl.constexpr):
    """P^T from its gram and the rows' <q, k>.   [BT, BT]"""
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    kq_0, kq_1, kq_2, kq_3 = split4_columns(kq, BT, LB)
    s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))[:, None]
    block, r = s // 16, gl.arange(0, 16, layout=gl.SliceLayout(0, LB))[None, :]
    # The diagonal, <q, k> of each row, comes from a float32 sum. After a reset it is a token's whole output, and as a
    # sum of products of either sign it may cancel.
    own = gl.where(s % 16 == r, qk[:, None], gl.where(s % 16 < r, own_block(kq_0, kq_1, kq_2, kq_3, block), 0.0))
    p_0, p_1 = P_columns(own, kq_0, block, 0), P_columns(own, kq_1, block, 1)
    p_2, p_3 = P_columns(own, kq_2, block, 2), P_columns(own, kq_3, block, 3)
    return join4_columns(p_0, p_1, p_2, p_3, BT, LC)


@gluon.jit
def _multiply(smem, U, PT, D, whole, with_w, BT: gl.constexpr, K: gl.constexpr):
    """Write E, F and, if it is wanted, W to shared memory, by products with A^T, the inverse of I + U."""
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    keys = reinterpret(smem.gates, gl.bfloat16, [2 * BT, K], HALF)
    # Each block of columns goes into the products as soon as it is known, while the next ones are computed.
    block = (gl.arange(0, BT, layout=gl.SliceLayout(1, LB)) // 16)[:, None]
    zeros = gl.zeros([BT, 16], gl.float32, LB)
    F, E = gl.zeros([BT, BT], gl.float32, LC), gl.zeros([BT, K], gl.float32, LE)
    d_high, d_low, d = load_diagonal_inverses(D, BT, LB)
    x_0 = gl.where(block == 0, d, 0.0)
    high, low = gl.where(block == 0, d_high, 0.0), gl.where(block == 0, d_low, 0.0)
    F, E = _add_columns(high, low, PT, keys, F, E, 0, BT, LC, LE)
    y_1 = add_product(high, low, U, 1, 0, zeros, LB)
    y_2 = add_product(high, low, U, 2, 0, zeros, LB)
    y_3 = add_product(high, low, U, 3, 0, zeros, LB)
    x_1 = add_diagonal_product(y_1, D, 1, gl.where(block == 1, d, 0.0), LB)
    high, low = bf16_parts(x_1)
    F, E = _add_columns(high, low, PT, keys, F, E, 1, BT, LC, LE)
    y_2 = add_product(high, low, U, 2, 1, y_2, LB)
    y_3 = add_product(high, low, U, 3, 1, y_3, LB)
    x_2 = add_diagonal_product(y_2, D, 2, gl.where(block == 2, d, 0.0), LB)
    high, low = bf16_parts(x_2)
    F, E = _add_columns(high, low, PT, keys, F, E, 2, BT, LC, LE)
    y_3 = add_product(high, low, U, 3, 2, y_3, LB)
    x_3 = add_diagonal_product(y_3, D, 3, gl.where(block == 3, d, 0.0), LB)
    high, low = bf16_parts(x_3)
    F, E = _add_columns(high, low, PT, keys, F, E, 3, BT, LC, LE)
    columns_A = (x_0, x_1, x_2, x_3)
    F, E = warpgroup_mma_wait(0, deps=[F, E])
    if whole:
        E = E * end_decays(smem, K).load(gl.SliceLayout(0, LE))[None, :]
    barrier()
    # All products are done. Results overwrite the pairs of keys, so k and q of the next tile may be loaded.
    zeros = gl.zeros([BT, 16], gl.bfloat16, LB)
    w_0, w_1, w_2, w_3 = zeros, zeros, zeros, zeros
    if with_w:
        safe_beta_s = smem.safe_beta.load(ROW)[:, None]
        w_0, w_1 = (
            W_columns(columns_A[0], safe_beta_s, smem.inverse_beta, 0, LB),
            W_columns(columns_A[1], safe_beta_s, smem.inverse_beta, 1, LB),
        )
        w_2, w_3 = (
            W_columns(columns_A[2], safe_beta_s, smem.inverse_beta, 2, LB),
            W_columns(columns_A[3], safe_beta_s, smem.inverse_beta, 3, LB),
        )
    W = join4_columns(w_0, w_1, w_2, w_3, BT, LC)
    squares = gl.convert_layout(concat_columns(F.to(gl.bfloat16), W), LE, assert_trivial=True)
    reinterpret(smem.gates, gl.bfloat16, [BT, 2 * K], HALF).store(concat_columns(E.to(gl.bfloat16), squares))


@gluon.jit
def negative_U_columns(kk, safe_beta, erases, j: gl.constexpr, LB: gl.constexpr):
    """16 columns of -U; valid where s < r."""
    factor = safe_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB)) * -erases
    return kk * factor[None, :]


@gluon.jit
def own_block(x_0, x_1, x_2, x_3, block):
    """The columns of a row's own sub-chunk, of four blocks of columns."""
    return gl.where(block == 0, x_0, gl.where(block == 1, x_1, gl.where(block == 2, x_2, x_3)))


@gluon.jit
def P_columns(own, kq, block, j: gl.constexpr):
    """16 columns of P^T, from the diagonal block and what lies above it; zeros below."""
    return gl.where(block == j, own, gl.where(block < j, kq, 0.0))


@gluon.jit
def _add_columns(
    high, low, PT, keys, F, E, m: gl.constexpr, BT: gl.constexpr, LC: gl.constexpr, LE: gl.constexpr
):  # fmt: skip
    """Add columns m of A^T, a bfloat16 pair, times their rows of P^T and of the keys; the products are asynchronous."""
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    AE: gl.constexpr = gl.DotOperandLayout(0, LE, 2)
    F = mm_pairs_async(high, low, PT.index(m), PT.index(4 + m), F, m > 0, AC)
    return F, mm_pairs_async(high, low, keys.slice(16 * m, 16), keys.slice(BT + 16 * m, 16), E, m > 0, AE)


@gluon.jit
def W_columns(x, safe_beta_s, inverse_beta, j: gl.constexpr, LB: gl.constexpr):
    """Columns of W from columns of A^T."""
    inverse_beta_r = inverse_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return ((x * safe_beta_s) * inverse_beta_r).to(gl.bfloat16)


@gluon.jit
def concat_columns(x, y):
    """Concatenate x and y along columns."""
    return gl.permute(gl.join(x, y), (0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))
