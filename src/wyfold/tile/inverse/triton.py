"""The inverse of a unit lower triangular tile on the device, transposed: substitution in 16 rows, then block merges.

Never powers of L: they explode where keys repeat (docs/numerics.md).
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm_exact


@triton.jit
def inverse_transposed(b_L, b_LT, BT: tl.constexpr, EXACT: tl.constexpr):
    """(I + L)^-T of a strictly lower L, given with its transpose.   [BT, BT] float32

        substitution, each 16 x 16 diagonal block D:   D[:, j] = e_j - D L[j, :]^T        j = 1 .. 15
        merge of two neighbours of h rows:             D <- D - (D L^T[upper, lower]) D    h = 16, 32

    A column depends on earlier columns alone: row r of the inverse does not depend on rows after r.
    """
    NB: tl.constexpr = BT // 16
    o_r = tl.arange(0, BT)
    b_D = _diagonal_inverses(_diagonal_blocks(b_L, BT), NB)
    same = (o_r[:, None] // 16) == (o_r[None, :] // 16)
    spread = tl.broadcast_to(b_D[:, :, None, :], (NB, 16, NB, 16)).reshape(BT, BT)
    b_D = tl.where(same, spread, 0.0)
    for level in tl.static_range(4, 6):
        h = 1 << level
        if h < BT:
            block = o_r // h
            meets = ((block % 2) == 0)[:, None] & (block[None, :] == block[:, None] + 1)
            b_W = mm_exact(b_D, tl.where(meets, b_LT, 0.0), None, EXACT)
            b_D -= mm_exact(b_W, b_D, None, EXACT)
    return b_D


@triton.jit
def _diagonal_blocks(b_x, BT: tl.constexpr):
    """The 16 x 16 blocks on the diagonal.   [BT / 16, 16, 16]"""
    NB: tl.constexpr = BT // 16
    blocks = b_x.reshape(NB, 16, NB, 16)
    i_b = tl.arange(0, NB)
    on = i_b[:, None, None, None] == i_b[None, None, :, None]
    return tl.sum(tl.where(on, blocks, 0.0), axis=2)


@triton.jit
def _diagonal_inverses(b_L, NB: tl.constexpr):
    """(I + L)^-T of each block by substitution, column after column.   [NB, 16, 16]"""
    i = tl.arange(0, 16)
    b_D = tl.where(i[:, None] == i[None, :], 1.0, 0.0)[None, :, :] + tl.zeros((NB, 16, 16), tl.float32)
    for j in range(1, 16):
        row = tl.sum(tl.where((i == j)[None, :, None], b_L, 0.0), axis=1)
        column = tl.sum(b_D * row[:, None, :], axis=2)
        b_D = tl.where((i == j)[None, None, :], b_D - column[:, :, None], b_D)
    return b_D
