"""(I + U)^-1 of a strictly upper tile U = L^T, its pieces where a program has four warps, each with 16 rows (Gluon).

With D the inverses of the blocks of I + U on the diagonal, the columns of A^T = (I + U)^-1 are found from the left, 16
at a time:

    A^T[:, j] = D[j] - (sum over m < j of A^T[:, m] U[m, j]) D[j]

so that what one column hands to the next stays in its warp's registers. A D is found by substitution, row after row, a
thread holding one of its rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.dot.gluon import mm_pairs, parts


@gluon.jit
def invert_near(near, D, BT: gl.constexpr):
    """Inverses of I + U of the blocks on the diagonal, from -U, [block, s, r], as bfloat16 pairs.

    A = (I + L)^-1 is found row after row, a thread holding a column; its transpose is what is wanted, in which a
    thread's numbers are a row.
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
    high, low = parts(A)
    D.store(gl.permute(gl.join(high, low), (3, 0, 2, 1)).reshape((2 * BT, 16)))


@gluon.jit
def add_exact(high, low, U, j: gl.constexpr, m: gl.constexpr, acc, LB: gl.constexpr):
    """acc + x (-U[m, j]) of a pair x [BT, 16]."""
    u_high = U.slice(16 * m, 16).slice(16 * j, 16, dim=1).load(gl.DotOperandLayout(1, LB, 2))
    u_low = U.slice(U.shape[0] // 2 + 16 * m, 16).slice(16 * j, 16, dim=1).load(gl.DotOperandLayout(1, LB, 2))
    return mm_pairs(high, low, u_high, u_low, acc, LB)


@gluon.jit
def times_own(y, D, j: gl.constexpr, acc, LB: gl.constexpr):
    """acc + y D[j]."""
    high, low = parts(y)
    d_high = D.slice(16 * j, 16).load(gl.DotOperandLayout(1, LB, 2))
    d_low = D.slice(D.shape[0] // 2 + 16 * j, 16).load(gl.DotOperandLayout(1, LB, 2))
    return mm_pairs(high, low, d_high, d_low, acc, LB)


@gluon.jit
def invert_columns(D, U, BT: gl.constexpr, LB: gl.constexpr):
    """(I + U)^-1 in columns of 16, left to right, from the inverses of its own blocks and -U, pairs both: the numbers,
    and their pairs.

    What a column gives to those after it is added as soon as it is known: of 27 products, each of which would wait for
    the one before, 18 do, and every sum is that of one column after another all the same.
    """
    d_high = gl.convert_layout(D.slice(0, BT).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    d_low = gl.convert_layout(D.slice(BT, BT).load(gl.DotOperandLayout(0, LB, 2)), LB, assert_trivial=True)
    d = d_high.to(gl.float32) + d_low.to(gl.float32)
    zero_acc = gl.zeros([BT, 16], gl.float32, LB)
    block = (gl.arange(0, BT, layout=gl.SliceLayout(1, LB)) // 16)[:, None]
    x_0 = gl.where(block == 0, d, 0.0)
    high_0, low_0 = gl.where(block == 0, d_high, 0.0), gl.where(block == 0, d_low, 0.0)
    y_1 = add_exact(high_0, low_0, U, 1, 0, zero_acc, LB)
    y_2 = add_exact(high_0, low_0, U, 2, 0, zero_acc, LB)
    y_3 = add_exact(high_0, low_0, U, 3, 0, zero_acc, LB)
    x_1 = times_own(y_1, D, 1, gl.where(block == 1, d, 0.0), LB)
    high_1, low_1 = parts(x_1)
    y_2 = add_exact(high_1, low_1, U, 2, 1, y_2, LB)
    y_3 = add_exact(high_1, low_1, U, 3, 1, y_3, LB)
    x_2 = times_own(y_2, D, 2, gl.where(block == 2, d, 0.0), LB)
    high_2, low_2 = parts(x_2)
    y_3 = add_exact(high_2, low_2, U, 3, 2, y_3, LB)
    x_3 = times_own(y_3, D, 3, gl.where(block == 3, d, 0.0), LB)
    high_3, low_3 = parts(x_3)
    return (x_0, x_1, x_2, x_3), (high_0, high_1, high_2, high_3), (low_0, low_1, low_2, low_3)


@gluon.jit
def columns(x, BT: gl.constexpr, LB: gl.constexpr):
    """A tile's columns, 16 each; nothing moves.   4 x [BT, 16]"""
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
def joined(x_0, x_1, x_2, x_3, BT: gl.constexpr, LC: gl.constexpr):
    """The tile of these columns; nothing moves."""
    return gl.convert_layout(beside(x_0, x_1, x_2, x_3), LC, assert_trivial=True)


@gluon.jit
def beside(x_0, x_1, x_2, x_3):
    """Four tiles side by side, in whatever layout that is."""
    x = gl.join(gl.join(x_0, x_1), gl.join(x_2, x_3))
    return gl.permute(x, (0, 3, 2, 1)).reshape((x_0.shape[0], 4 * x_0.shape[1]))
