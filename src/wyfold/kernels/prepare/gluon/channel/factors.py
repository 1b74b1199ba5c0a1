"""Columns of -U, P^T and W, and the product that folds the keys into E."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from wyfold.kernels.prepare.gluon.channel.grams import gram_columns, split_key_query
from wyfold.tile.dot.gluon import bf16_pair, mm_pairs_async
from wyfold.tile.index.gluon import barrier, reinterpret
from wyfold.tile.inverse.gluon import invert_columns, join4_columns


@gluon.jit
def store_pairs(grams, smem, U, near, erases, BT: gl.constexpr):
    """Store -U and P^T as bfloat16 pairs over keys and queries, and the diagonal blocks of -U to `near`."""
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    kk_1, kq_1 = split_key_query(grams.gram_1, LB, BT)
    kk_2, kq_2 = split_key_query(grams.gram_2, LB, BT)
    kk_3, kq_3 = split_key_query(grams.gram_3, LB, BT)
    o_s = gl.arange(0, BT, layout=ROW)
    block = (o_s // 16)[:, None]
    kk = gl.convert_layout(grams.kk_own.reshape((BT, 16)), LB, assert_trivial=True)
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    u_0 = negative_U_columns(kk, kk, smem.safe_beta, erases, 0, LB)
    u_1 = negative_U_columns(kk, kk_1, smem.safe_beta, erases, 1, LB)
    u_2 = negative_U_columns(kk, kk_2, smem.safe_beta, erases, 2, LB)
    u_3 = negative_U_columns(kk, kk_3, smem.safe_beta, erases, 3, LB)
    own = gl.where(block == 0, u_0, gl.where(block == 1, u_1, gl.where(block == 2, u_2, u_3)))
    own = gl.where((o_s % 16)[:, None] < o_n[None, :], own, 0.0)
    reinterpret(near, gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(own)
    kq = gl.convert_layout(grams.kq_own.reshape((BT, 16)), LB, assert_trivial=True)
    p_0, p_1 = P_columns(kq, kq, grams.qk, 0, BT, LB), P_columns(kq, kq_1, grams.qk, 1, BT, LB)
    p_2, p_3 = P_columns(kq, kq_2, grams.qk, 2, BT, LB), P_columns(kq, kq_3, grams.qk, 3, BT, LB)
    tma.store_wait(pendings=0)
    barrier()
    U.store(bf16_pair(join4_columns(u_0, u_1, u_2, u_3, BT, LC)))
    reinterpret(smem.queries, gl.bfloat16, [2 * BT, BT], WIDE).store(
        bf16_pair(join4_columns(p_0, p_1, p_2, p_3, BT, LC))
    )


@gluon.jit
def write_readings(grams, smem, BT: gl.constexpr):
    """Write F to shared memory, where writes erase nothing: it is P. Waits until TMA has read the decayed rows."""
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    kq = gl.convert_layout(grams.kq_own.reshape((BT, 16)), LB, assert_trivial=True)
    kq_1 = gl.convert_layout(grams.gram_1, LB, assert_trivial=True)
    kq_2 = gl.convert_layout(grams.gram_2, LB, assert_trivial=True)
    kq_3 = gl.convert_layout(grams.gram_3, LB, assert_trivial=True)
    p_0, p_1 = P_columns(kq, kq, grams.qk, 0, BT, LB), P_columns(kq, kq_1, grams.qk, 1, BT, LB)
    p_2, p_3 = P_columns(kq, kq_2, grams.qk, 2, BT, LB), P_columns(kq, kq_3, grams.qk, 3, BT, LB)
    F = join4_columns(p_0, p_1, p_2, p_3, BT, LC).to(gl.bfloat16)
    reinterpret(smem.border_decays, gl.bfloat16, [BT, BT], HALF).store(F)
    tma.store_wait(pendings=0)


@gluon.jit
def write_factors(smem, U, PT, D, with_w, BT: gl.constexpr, K: gl.constexpr):
    """Write E, F and, if it is wanted, W to shared memory, by products with A^T."""
    HALF: gl.constexpr = gl.NVMMASharedLayout(64, 16, 2)
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    LB: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BT, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    AC: gl.constexpr = gl.DotOperandLayout(0, LC, 2)
    columns_A, highs, lows = invert_columns(D, U, BT, LB)
    F = gl.zeros([BT, BT], gl.float32, LC)
    F = mm_pairs_async(highs[0], lows[0], PT.index(0), PT.index(4), F, False, AC)
    for m in gl.static_range(1, 4):
        F = mm_pairs_async(highs[m], lows[m], PT.index(m), PT.index(4 + m), F, True, AC)
    # In a tile of all channels, the channels of a slice are contiguous, as they were stored.
    E = fold_keys(highs, lows, reinterpret(smem.gates, gl.bfloat16, [2 * BT, K], HALF), LE, BT, K)
    F, E = warpgroup_mma_wait(0, deps=[F, E])
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
def negative_U_columns(near, later, safe_beta, erases, j: gl.constexpr, LB: gl.constexpr):
    """16 columns of -U; valid where s < r."""
    factor = safe_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB)) * -erases
    return gram_columns(near, later, j, LB) * factor[None, :]


@gluon.jit
def P_columns(near, later, qk, j: gl.constexpr, BT: gl.constexpr, LB: gl.constexpr):
    """16 columns of P^T; zero unless s <= r.

    The diagonal, <q, k> of each row, comes from a float32 sum. After a reset it is a token's whole output, and as a sum
    of products of either sign it may cancel.
    """
    o_s = gl.arange(0, BT, layout=gl.SliceLayout(1, LB))
    o_r = 16 * j + gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    before = gl.where(o_s[:, None] < o_r[None, :], gram_columns(near, later, j, LB), 0.0)
    return gl.where(o_s[:, None] == o_r[None, :], qk[:, None], before)


@gluon.jit
def fold_keys(highs, lows, keys, LE: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """E = A^T times the keys decayed to the chunk's end; the products are asynchronous."""
    A: gl.constexpr = gl.DotOperandLayout(0, LE, 2)
    E = gl.zeros([BT, K], gl.float32, LE)
    E = mm_pairs_async(highs[0], lows[0], keys.slice(0, 16), keys.slice(BT, 16), E, False, A)
    for m in gl.static_range(1, 4):
        E = mm_pairs_async(highs[m], lows[m], keys.slice(16 * m, 16), keys.slice(BT + 16 * m, 16), E, True, A)
    return E


@gluon.jit
def W_columns(x, safe_beta_s, inverse_beta, j: gl.constexpr, LB: gl.constexpr):
    """Columns of W from columns of A^T."""
    inverse_beta_r = inverse_beta.slice(16 * j, 16).load(gl.SliceLayout(0, LB))[None, :]
    return ((x * safe_beta_s) * inverse_beta_r).to(gl.bfloat16)


@gluon.jit
def concat_columns(x, y):
    """Concatenate x and y along columns."""
    return gl.permute(gl.join(x, y), (0, 2, 1)).reshape((x.shape[0], 2 * x.shape[1]))
