"""(I + U)^-1 of a strictly upper triangular tile U = L^T in Gluon, for programs of four warps with 16 rows each.

With D the inverses of the diagonal blocks of I + U, the columns of A^T = (I + U)^-1 are computed from the left, 16 at a
time:

    A^T[:, j] = D[j] - (sum over m < j of A^T[:, m] U[m, j]) D[j]

so the data passed from one column block to the next stays in the warp's registers. D is computed by substitution, row
after row, with one of its rows per thread.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.dot.gluon import bf16_parts, mm_pairs


@gluon.jit
def invert_diagonal_blocks(near, D, BT: gl.constexpr):
    """Invert the diagonal blocks of I + U, given -U [block, s, r] in `near`; stores bfloat16 pairs to D.

    A = (I + L)^-1 is computed row after row, with a column per thread. Its transpose is stored, in which a thread holds
    a row.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 16, 1], [2, 1, 16], [4, 1, 1], [2, 1, 0])
    STEP: gl.constexpr = gl.BlockedLayout([1, 1, 16], [2, 16, 1], [4, 1, 1], [1, 2, 0])
    r = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    c = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    A = gl.where(r == c, 1.0, 0.0) + gl.zeros([4, 16, 16], gl.float32, L)
    for s in gl.static_range(15):
        l = gl.convert_layout(gl.permute(near.slice(s, 1, dim=1).load(STEP), (0, 2, 1)), L, assert_trivial=True)
        row = gl.expand_dims(gl.sum(gl.where(r == s, A, 0.0), 1), 1)
        A = gl.where(r > s, gl.fma(*gl.broadcast(l, row), A), A)
    high, low = bf16_parts(A)
    D.store(gl.permute(gl.join(high, low), (3, 0, 2, 1)).reshape((2 * BT, 16)))


@gluon.jit
def add_product(high, low, U, j: gl.constexpr, m: gl.constexpr, acc, LB: gl.constexpr):
    """acc + x (-U[m, j]), with x [BT, 16] a bfloat16 pair."""
    u_high = U.slice(16 * m, 16).slice(16 * j, 16, dim=1).load(gl.DotOperandLayout(1, LB, 2))
    u_low = U.slice(U.shape[0] // 2 + 16 * m, 16).slice(16 * j, 16, dim=1).load(gl.DotOperandLayout(1, LB, 2))
    return mm_pairs(high, low, u_high, u_low, acc, LB)


@gluon.jit
def add_diagonal_product(y, D, j: gl.constexpr, acc, LB: gl.constexpr):
    """acc + y D[j], with y split into a bfloat16 pair."""
    high, low = bf16_parts(y)
    d_high = D.slice(16 * j, 16).load(gl.DotOperandLayout(1, LB, 2))
    d_low = D.slice(D.shape[0] // 2 + 16 * j, 16).load(gl.DotOperandLayout(1, LB, 2))
    return mm_pairs(high, low, d_high, d_low, acc, LB)


@gluon.jit
def invert_columns(D, U, BT: gl.constexpr, LB: gl.constexpr):
    """(I + U)^-1 in four blocks of 16 columns, left to right, from D and -U, both bfloat16 pairs.

    A block's contribution to later blocks is added as soon as it is known. So the dependent chain has 18 products
    instead of 27, and every sum still adds one column block after another.

    Returns:
        The column blocks in float32, and the high and low parts of their bfloat16 pairs.
    """
    d_high = gl.convert_layout(D.slice(0, BT).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    d_low = gl.convert_layout(D.slice(BT, BT).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    d = d_high.to(gl.float32) + d_low.to(gl.float32)
    zero_acc = gl.zeros([BT, 16], gl.float32, LB)
    block = (gl.arange(0, BT, layout=gl.SliceLayout(1, LB)) // 16)[:, None]
    x_0 = gl.where(block == 0, d, 0.0)
    high_0, low_0 = gl.where(block == 0, d_high, 0.0), gl.where(block == 0, d_low, 0.0)
    y_1 = add_product(high_0, low_0, U, 1, 0, zero_acc, LB)
    y_2 = add_product(high_0, low_0, U, 2, 0, zero_acc, LB)
    y_3 = add_product(high_0, low_0, U, 3, 0, zero_acc, LB)
    x_1 = add_diagonal_product(y_1, D, 1, gl.where(block == 1, d, 0.0), LB)
    high_1, low_1 = bf16_parts(x_1)
    y_2 = add_product(high_1, low_1, U, 2, 1, y_2, LB)
    y_3 = add_product(high_1, low_1, U, 3, 1, y_3, LB)
    x_2 = add_diagonal_product(y_2, D, 2, gl.where(block == 2, d, 0.0), LB)
    high_2, low_2 = bf16_parts(x_2)
    y_3 = add_product(high_2, low_2, U, 3, 2, y_3, LB)
    x_3 = add_diagonal_product(y_3, D, 3, gl.where(block == 3, d, 0.0), LB)
    high_3, low_3 = bf16_parts(x_3)
    return (x_0, x_1, x_2, x_3), (high_0, high_1, high_2, high_3), (low_0, low_1, low_2, low_3)


@gluon.jit
def split4_columns(x, BT: gl.constexpr, LB: gl.constexpr):
    """Split a tile into blocks of 16 columns; moves no data.   [BT, 64] -> 4 x [BT, 16]"""
    even, odd = gl.split(gl.permute(x.reshape((BT, 2, 2, 16)), (0, 3, 1, 2)))
    x_0, x_2 = gl.split(even)
    x_1, x_3 = gl.split(odd)
    return (
        gl.convert_layout(x_0, LB, assert_trivial=True),
        gl.convert_layout(x_1, LB, assert_trivial=True),
        gl.convert_layout(x_2, LB, assert_trivial=True),
        gl.convert_layout(x_3, LB, assert_trivial=True),
    )


@gluon.jit
def join4_columns(x_0, x_1, x_2, x_3, BT: gl.constexpr, LC: gl.constexpr):
    """Inverse of `split4_columns`; moves no data."""
    return gl.convert_layout(concat4_columns(x_0, x_1, x_2, x_3), LC, assert_trivial=True)


@gluon.jit
def concat4_columns(x_0, x_1, x_2, x_3):
    """Concatenate four tiles along columns, in the layout that results."""
    x = gl.join(gl.join(x_0, x_1), gl.join(x_2, x_3))
    return gl.permute(x, (0, 3, 2, 1)).reshape((x_0.shape[0], 4 * x_0.shape[1]))
