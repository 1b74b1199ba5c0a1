"""16 columns of -U and of P^T from the products of keys and queries."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.activation.triton import LOG2_E
from wyfold.tile.dot.gluon import bf16_pair, exp2
from wyfold.tile.index.gluon import reinterpret
from wyfold.tile.inverse.gluon import concat4_columns, split4_columns


@gluon.jit
def store_pairs(
    kk, kq, U, PT, near, numbers, erases, rows,
    FULL: gl.constexpr, SCALAR: gl.constexpr, NORM: gl.constexpr, LB: gl.constexpr,
):  # fmt: skip
    """Store -U and P^T as bfloat16 pairs, and the diagonal blocks of -U, from the products of keys and queries."""
    BT: gl.constexpr = kk.shape[0]
    ROW: gl.constexpr = gl.SliceLayout(1, LB)
    kk_0, kk_1, kk_2, kk_3 = split4_columns(kk, BT, LB)
    kq_0, kq_1, kq_2, kq_3 = split4_columns(kq, BT, LB)
    diagonal, u_3, p_3 = weighted_columns(kk_3, kq_3, kk_3, numbers, erases, rows, 3, FULL, SCALAR, NORM, BT, LB)
    diagonal, u_2, p_2 = weighted_columns(kk_2, kq_2, diagonal, numbers, erases, rows, 2, FULL, SCALAR, NORM, BT, LB)
    diagonal, u_1, p_1 = weighted_columns(kk_1, kq_1, diagonal, numbers, erases, rows, 1, FULL, SCALAR, NORM, BT, LB)
    diagonal, _, p_0 = weighted_columns(kk_0, kq_0, diagonal, numbers, erases, rows, 0, FULL, SCALAR, NORM, BT, LB)
    U.store(concat4_columns(u_1, u_1, u_2, u_3))  # products do not read the first columns of -U
    PT.store(concat4_columns(p_0, p_1, p_2, p_3))
    o_s = gl.arange(0, BT, layout=ROW)
    o_n = gl.arange(0, 16, layout=gl.SliceLayout(0, LB))
    diagonal = gl.where((o_s % 16)[:, None] < o_n[None, :], diagonal, 0.0)
    reinterpret(near, gl.float32, [BT, 16], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])).store(diagonal)


@gluon.jit
def weighted_columns(
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
