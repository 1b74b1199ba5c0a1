"""Factors of a chunk from its transposed grams: rows of both columns, in products of 64 rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from wyfold.tile.dot.gluon import bf16_pair, bf16_parts, mm_pairs, mm_pairs_async
from wyfold.tile.index.gluon import barrier, reinterpret, tma_store
from wyfold.tile.inverse.gluon import invert_diagonal_blocks

L32: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
LB: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))


@gluon.jit
def fold(x_E, x_K, factors, i_tile, gram_0, gram_1, smem, columns, backward, K: gl.constexpr, BT: gl.constexpr):
    """Store F, P, E, K and, for a backward, A and R.

    Args:
        gram_0, gram_1: [2 BT, 2 BT] of the heads, from the kernel.
        smem: [2 BT, 128] float32 shared memory, overwritten.
        columns: Pairs of the columns decayed to the chunk's end; overwritten by E and K.
    """
    HEADS: gl.constexpr = 128 // K
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, L32))
    o_s, o_r = (o_row % BT)[:, None], gl.arange(0, BT, layout=gl.SliceLayout(0, L32))[None, :]
    first = (o_row < BT)[:, None]
    a_0, q_0 = _split_columns(gram_0, L32)
    a_1, q_1 = _split_columns(gram_1, L32)
    a_0, a_1 = gl.where(o_s < o_r, a_0, 0.0), gl.where(o_s < o_r, a_1, 0.0)
    q_0, q_1 = gl.where(o_s <= o_r, q_0, 0.0), gl.where(o_s <= o_r, q_1, 0.0)
    L, Pb = gl.where(first, a_0, 0.0), gl.where(first, q_0, 0.0)
    if HEADS == 2:
        L, Pb = gl.where(first, a_0, a_1), gl.where(first, q_0, q_1)
    pairs = reinterpret(smem, gl.bfloat16, [4, 4 * BT, BT], gl.NVMMASharedLayout(64, 16, 2))
    P_pair, A_pair = pairs.index(0), pairs.index(1)
    near = reinterpret(smem, gl.float32, [8, 4, 16, 16], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])).index(4)
    D = reinterpret(smem, gl.bfloat16, [8, 4 * BT, 16], gl.NVMMASharedLayout(32, 16, 2)).index(5)
    U = reinterpret(smem, gl.bfloat16, [8, 4 * BT, 16], gl.NVMMASharedLayout(32, 16, 2)).index(6)
    P_pair.store(bf16_pair(Pb))
    left, right = _split_columns(L, LB)
    odd = (gl.arange(0, 64, layout=gl.SliceLayout(1, LB)) // 16 % 2 == 1)[:, None]
    reinterpret(near, gl.float32, [64, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(gl.where(odd, right, left))
    U.store(bf16_pair(right))
    fence_async_shared()
    barrier()
    invert_diagonal_blocks(near, D, 2 * BT)
    barrier()
    A_pair.store(bf16_pair(inverse(D, U, BT)))
    fence_async_shared()
    barrier()
    eye = gl.where(o_s == o_r, 1.0, 0.0)
    one = gl.where(o_s == o_r, 1.0, 0.0).to(gl.bfloat16)
    zero = gl.zeros([64, BT], gl.bfloat16, L32)
    x_0, x_1 = gl.where(first, eye, a_0), gl.where(first, a_1, eye)
    W_0, W_1 = _product(x_0, A_pair, 0, BT), gl.zeros([64, BT], gl.float32, L32)
    if HEADS == 2:
        W_1 = _product(x_1, A_pair, BT, BT)
    W_0, W_1 = warpgroup_mma_wait(0, deps=[W_0, W_1])
    below, above = gl.where(first, zero, one), gl.where(first, one, zero)
    F_0, E_0 = factor_products(W_0, gl.where(first, 0.0, q_0), below, P_pair, columns, 0, K, BT)
    F_1, E_1 = gl.zeros([64, BT], gl.float32, L32), gl.zeros([64, K], gl.float32, LE)
    if HEADS == 2:
        F_1, E_1 = factor_products(W_1, gl.where(first, q_1, 0.0), above, P_pair, columns, 1, K, BT)
    if backward:
        _store_upper(factors.A, i_tile, W_0, False, BT)
        _store_upper(factors.R, i_tile, W_0, True, BT)
        if HEADS == 2:
            _store_upper(factors.A, i_tile + 1, W_1, True, BT)
            _store_upper(factors.R, i_tile + 1, W_1, False, BT)
    F_0, E_0, F_1, E_1 = warpgroup_mma_wait(0, deps=[F_0, E_0, F_1, E_1])
    _store_upper(factors.F, i_tile, F_0, False, BT)
    _store_upper(factors.P, i_tile, F_0, True, BT)
    if HEADS == 2:
        _store_upper(factors.F, i_tile + 1, F_1, True, BT)
        _store_upper(factors.P, i_tile + 1, F_1, False, BT)
    store_columns(x_E, x_K, i_tile, E_0, E_1, columns, K, BT)


@gluon.jit
def store_columns(x_E, x_K, i_tile, E_0, E_1, columns, K: gl.constexpr, BT: gl.constexpr):
    """Store E and K of all heads, which overwrite the first parts of their pairs."""
    HEADS: gl.constexpr = 128 // K
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier()
    out = reinterpret(columns, gl.bfloat16, [2 * HEADS, 2 * BT, K], WIDE)
    out.index(0).store(E_0.to(gl.bfloat16))
    if HEADS == 2:
        out.index(1).store(E_1.to(gl.bfloat16))
    fence_async_shared()
    barrier()
    slices = reinterpret(columns, gl.bfloat16, [4, 2 * BT, 64], WIDE)
    for j in gl.static_range(2):
        _store_slice(x_E, x_K, i_tile, slices.index(j), j * HEADS // 2, 64 * j % K, BT)


@gluon.jit
def _store_slice(x_E, x_K, i_tile, tile, i: gl.constexpr, column: gl.constexpr, BT: gl.constexpr):
    """Store 64 channels of E and K of head i."""
    row = ((i_tile + i) * BT).to(gl.int32)
    tma_store(x_E, [row, column], tile.slice(BT * i, BT))
    tma_store(x_K, [row, column], tile.slice(BT - BT * i, BT))


@gluon.jit
def inverse(D, U, BT: gl.constexpr):
    """(I - L^T)^-1 of two heads, from the inverses D of diagonal blocks and the blocks beside them.   [64, BT]"""
    d_high = gl.convert_layout(D.slice(0, 64).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    d_low = gl.convert_layout(D.slice(64, 64).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    o_row = gl.arange(0, 64, layout=gl.SliceLayout(1, LB))
    odd, head_0 = (o_row // 16 % 2 == 1)[:, None], (o_row < 32)[:, None]
    y = gl.where(head_0, _block_product(d_high, d_low, U, 0), _block_product(d_high, d_low, U, 32))
    y_high, y_low = bf16_parts(y)
    y = gl.where(head_0, _block_product(y_high, y_low, D, 16), _block_product(y_high, y_low, D, 48))
    d = d_high.to(gl.float32) + d_low.to(gl.float32)
    x = gl.permute(gl.join(gl.where(odd, 0.0, d), gl.where(odd, d, y)), (0, 2, 1)).reshape((64, BT))
    return gl.convert_layout(x, L32, assert_trivial=True)


@gluon.jit
def _block_product(high, low, pairs, row: gl.constexpr):
    """x times 16 rows of pairs [128, 16], with x [64, 16] a bfloat16 pair."""
    b_high = pairs.slice(row, 16).load(gl.DotOperandLayout(1, LB, 2))
    b_low = pairs.slice(64 + row, 16).load(gl.DotOperandLayout(1, LB, 2))
    return mm_pairs(high, low, b_high, b_low, gl.zeros([64, 16], gl.float32, LB), LB)


@gluon.jit
def _product(x, pairs, row: gl.constexpr, BT: gl.constexpr):
    """x times BT rows of pairs [4 BT, BT]; asynchronous."""
    high, low = bf16_parts(x)
    A: gl.constexpr = gl.DotOperandLayout(0, L32, 2)
    acc = gl.zeros([64, BT], gl.float32, L32)
    return mm_pairs_async(high, low, pairs.slice(row, BT), pairs.slice(2 * BT + row, BT), acc, False, A)


@gluon.jit
def factor_products(W, Pk, one, P_pair, columns, i: gl.constexpr, K: gl.constexpr, BT: gl.constexpr):
    """F above P, and E above K, of head i, in the second head below; asynchronous.

    Args:
        W: [A^T; R^T], in the second head [R^T; A^T].
        Pk: Pk^T in the rows of R^T, zeros elsewhere.
        one: [0; I], in the second head [I; 0].
    """
    HEADS: gl.constexpr = 128 // K
    LE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, L32, 2)
    AE: gl.constexpr = gl.DotOperandLayout(0, LE, 2)
    b_row: gl.constexpr = BT * i
    k_row: gl.constexpr = BT - BT * i
    high, low = bf16_parts(W)
    F = mm_pairs_async(high, low, P_pair.slice(b_row, BT), P_pair.slice(2 * BT + b_row, BT), Pk, True, A)
    tiles = reinterpret(columns, gl.bfloat16, [2 * HEADS, 2 * BT, K], gl.NVMMASharedLayout(128, 16, 2))
    c_high, c_low = tiles.index(i), tiles.index(HEADS + i)
    E = gl.zeros([64, K], gl.float32, LE)
    one = gl.convert_layout(one, AE, assert_trivial=True)
    E = mm_pairs_async(high, low, c_high.slice(b_row, BT), c_low.slice(b_row, BT), E, False, AE)
    E = warpgroup_mma(one, c_low.slice(k_row, BT), E, is_async=True)
    E = warpgroup_mma(one, c_high.slice(k_row, BT), E, is_async=True)
    return F, E


@gluon.jit
def _store_upper(p, i_tile, x, LOWER: gl.constexpr, BT: gl.constexpr):
    """Store the upper or the lower BT rows of x [2 BT, BT] as an upper triangular tile, in quarters."""
    h: gl.constexpr = BT // 2
    o_row = gl.arange(0, 2 * BT, layout=gl.SliceLayout(1, L32))
    s, r = (o_row % BT)[:, None], gl.arange(0, BT, layout=gl.SliceLayout(0, L32))[None, :]
    wanted = ((o_row >= BT) == LOWER)[:, None] & (s // h <= r // h)
    offsets = (s // h + r // h) * (h * h) + (s % h) * h + r % h
    gl.store(p + i_tile * (3 * h * h) + offsets, x.to(p.dtype.element_ty), mask=wanted)


@gluon.jit
def _split_columns(x, LAYOUT: gl.constexpr):
    """The left and the right half of the columns; moves no data."""
    left, right = gl.split(gl.permute(x.reshape((x.shape[0], 2, x.shape[1] // 2)), (0, 2, 1)))
    return gl.convert_layout(left, LAYOUT, assert_trivial=True), gl.convert_layout(right, LAYOUT, assert_trivial=True)
