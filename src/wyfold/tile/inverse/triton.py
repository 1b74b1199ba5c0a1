"""The inverse of a unit lower triangular tile on the device: substitution in blocks of 16 rows, then block merges.

Never powers of L: they explode where keys repeat (docs/numerics.md).

Substitution has 15 steps, and each combines one column of L with every column of the result. In the tiles below, a
thread holds all 16 rows of one column of a block. A step is then one multiplication and one addition per row, and the
column of L is shuffled among 16 neighbouring lanes without a barrier. Another layout would only be slower.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm_exact


@triton.jit
def inverse_transposed(b_L, b_LT, BT: tl.constexpr, EXACT: tl.constexpr, WARPS: tl.constexpr):
    """(I + L)^-T of a strictly lower triangular L, given with its transpose.   [BT, BT] float32

    Only the entries of L below the diagonal are read. WARPS is at most the program's number of warps: each substitutes
    in a separate block, or repeats another warp's.
    """
    NB: tl.constexpr = BT // 16
    i_b = tl.arange(0, NB)[:, None, None]
    b_0, b_1, b_2, b_3 = _column_blocks(b_L, NB)
    b_D = tl.where(i_b == 0, b_0, tl.where(i_b == 1, b_1, tl.where(i_b == 2, b_2, b_3)))
    b_D = _substitute_across_warps(b_D.permute(1, 0, 2), NB, WARPS).permute(1, 2, 0)
    if NB == 1:
        return b_D.reshape(16, 16)
    else:
        _, b_1, _, b_3 = _column_blocks(b_LT, NB)
        b_upper, _ = split_even_odd(tl.where(i_b < 2, b_1, b_3), NB, 16)
        b_low, b_high = split_even_odd(b_D, NB, 16)
        b_X = off_diagonal_block_transposed(b_low, b_upper, b_high, EXACT)
        b_D = _upper_from_halves(b_low, b_X, b_high, NB // 2, 16)
        if NB == 2:
            return b_D.reshape(32, 32)
        else:
            _, b_upper = b_LT.reshape(2, 32, 2, 32).permute(0, 1, 3, 2).split()
            b_upper, _ = b_upper.permute(1, 2, 0).split()
            b_low, b_high = b_D.permute(1, 2, 0).split()
            b_X = off_diagonal_block_transposed(b_low, b_upper, b_high, EXACT)
            return _upper_from_halves(b_low[None], b_X[None], b_high[None], 1, 32).reshape(64, 64)


@triton.jit
def inverse_transposed_whole(b_L, b_LT, BT: tl.constexpr, EXACT: tl.constexpr, WARPS: tl.constexpr):
    """`inverse_transposed` by products of whole tiles, for matrix units that multiply at least BT rows.

    D holds the transposed inverses of the diagonal blocks of h rows, and zeros elsewhere. The blocks to their right are
    those of -(D LT) D; all other entries of the products are masked.
    """
    NB: tl.constexpr = BT // 16
    o = tl.arange(0, BT)
    i_b = tl.arange(0, NB)[:, None, None]
    b_0, b_1, b_2, b_3 = _column_blocks(b_L, NB)
    b_D = tl.where(i_b == 0, b_0, tl.where(i_b == 1, b_1, tl.where(i_b == 2, b_2, b_3)))
    b_D = _substitute_across_warps(b_D.permute(1, 0, 2), NB, WARPS).permute(1, 2, 0)
    on = tl.arange(0, NB)[:, None, None, None] == tl.arange(0, NB)[None, None, :, None]
    b_M = tl.where(on, b_D[:, :, None, :], b_LT.reshape(NB, 16, NB, 16)).reshape(BT, BT)
    on = (o // 16)[:, None] == (o // 16)[None, :]
    b_D, b_LT = tl.where(on, b_M, 0.0), tl.where(on, 0.0, b_M)
    for h in tl.static_range(16, BT // 2 + 16, 16):
        right = (o // h)[:, None] + 1 == (o // h)[None, :]
        right = right & ((o // h) % 2 == 0)[:, None]
        b_X = tl.where(right, mm_exact(b_D, b_LT, None, EXACT), 0.0)
        b_D -= mm_exact(b_X, b_D, None, EXACT)
    return b_D


@triton.jit
def nonzero_beta(b_beta):
    """beta, held 2^-60 away from zero.

    With it, A = (I + diag(beta) J)^-1 and W = (I + J diag(beta))^-1 are computed from each other:
    diag(beta) W = A diag(beta). Results that beta itself multiplies (y, written values, gradients of v) stay exactly
    zero where beta is.
    """
    return tl.where(tl.abs(b_beta) < 2.0**-60, 2.0**-60, b_beta)


@triton.jit
def inverse_by_substitution(b_L, A: tl.constexpr, B: tl.constexpr):
    """(I + L)^-1 of the 16 x 16 blocks [a, :, b, :]; only entries below the diagonal are read.   [A, 16, B, 16]

        X[r, :] -= L[r, s] X[s, :]      r > s;  s = 0 .. 14

    Row r does not depend on rows after r. A or B must be even: the 32 lanes of a warp hold 16 columns of two blocks.
    """
    o_r = tl.arange(0, 16)[None, :, None, None]
    o_c = tl.arange(0, 16)[None, None, None, :]
    b_L = tl.where(o_r > o_c, b_L, 0.0)
    b_X = tl.where(o_r == o_c, 1.0, 0.0) + tl.zeros((A, 16, B, 16), tl.float32)
    for s in tl.static_range(15):
        b_column = tl.gather(b_L, tl.full((A, 16, B, 1), s, tl.int32), 3)
        b_row = tl.sum(tl.where(o_r == s, b_X, 0.0), axis=1)[:, None]
        b_X = tl.where(o_r > s, b_X - b_column * b_row, b_X)
    return b_X


@triton.jit
def _substitute_across_warps(b_L, NB: tl.constexpr, WARPS: tl.constexpr):
    """`inverse_by_substitution` with one block per warp, computed twice in its lanes: cheaper than moving data.

    [16, NB, 16] -> [16, NB, 16]
    """
    TIMES: tl.constexpr = WARPS // NB if WARPS > NB else 1
    B: tl.constexpr = TIMES * NB * 2
    b_L = tl.broadcast_to(b_L[:, None, :, None, :], (16, TIMES, NB, 2, 16)).reshape(1, 16, B, 16)
    b_X = inverse_by_substitution(b_L, 1, B).reshape(16, TIMES, NB, 2, 16)
    if TIMES == 2:
        b_X, _ = b_X.permute(0, 2, 3, 4, 1).split()
    elif TIMES > 1:
        b_X = tl.sum(tl.where(tl.arange(0, TIMES)[None, :, None, None, None] == 0, b_X, 0.0), axis=1)
    b_X = b_X.reshape(16, NB, 2, 16)
    return tl.sum(tl.where(tl.arange(0, 2)[None, None, :, None] == 0, b_X, 0.0), axis=2)


@triton.jit
def merge_halves(b_low, b_lower, b_high, P: tl.constexpr, h: tl.constexpr, EXACT: tl.constexpr):
    """Inverses [low, 0; X, high] of P tiles, from the inverses of their halves and the block below.   [P, 2h, 2h]"""
    b_X = off_diagonal_block(b_low, b_lower, b_high, EXACT)
    b_x = tl.join(tl.join(b_low, tl.zeros_like(b_low)), tl.join(b_X, b_high))
    return b_x.permute(0, 4, 1, 3, 2).reshape(P, 2 * h, 2 * h)


@triton.jit
def off_diagonal_block(b_low, b_lower, b_high, EXACT: tl.constexpr):
    """Off-diagonal block of a merged inverse, X = -high (lower low)."""
    return -mm_exact(b_high, mm_exact(b_lower, b_low, None, EXACT), None, EXACT)


@triton.jit
def off_diagonal_block_transposed(b_low, b_upper, b_high, EXACT: tl.constexpr):
    """`off_diagonal_block` for transposed tiles: X = -(low upper) high."""
    return -mm_exact(mm_exact(b_low, b_upper, None, EXACT), b_high, None, EXACT)


@triton.jit
def _upper_from_halves(b_low, b_X, b_high, P: tl.constexpr, h: tl.constexpr):
    """Assemble [low, X; 0, high] of P tiles.   [P, 2h, 2h]"""
    b_x = tl.join(tl.join(b_low, b_X), tl.join(tl.zeros_like(b_low), b_high))
    return b_x.permute(0, 4, 1, 3, 2).reshape(P, 2 * h, 2 * h)


@triton.jit
def split_even_odd(b_x, N: tl.constexpr, h: tl.constexpr):
    """Split tiles by even and odd number.   [N, h, h] -> two [N / 2, h, h]"""
    return b_x.reshape(N // 2, 2, h, h).permute(0, 2, 3, 1).split()


@triton.jit
def _column_blocks(b_x, NB: tl.constexpr):
    """Split into four tiles of 16 columns, each as blocks of 16 rows; repeats tiles where NB < 4.   4 x [NB, 16, 16]

    Moves no data between threads where a thread holds a whole row of blocks.
    """
    if NB == 4:
        b_01, b_23 = b_x.reshape(4, 16, 2, 2, 16).permute(0, 1, 4, 3, 2).split()
        b_0, b_1 = b_01.split()
        b_2, b_3 = b_23.split()
        return b_0, b_1, b_2, b_3
    elif NB == 2:
        b_0, b_1 = b_x.reshape(2, 16, 2, 16).permute(0, 1, 3, 2).split()
        return b_0, b_1, b_0, b_1
    else:
        b_0 = b_x.reshape(1, 16, 16)
        return b_0, b_0, b_0, b_0
