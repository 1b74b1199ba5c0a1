"""Exchange of gradients between the later and the earlier half of a block."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from wyfold.kernels.gradients.gluon.channel.tiles import load_quarter, per_sub_chunk, register_operand


class Later(NamedTuple):
    """16 tokens of the later half of a block, as rows of pairs. Tiles are [BK, 16].

    Attributes:
        q, k: Rows decayed since the border, as left operands.
        dq, dk: Accumulated gradients of the rows.
        x: q dq + k dk before the exchange; inside a quarter, their sum over the odd sub-chunk, [BK].
    """

    q: Any
    k: Any
    dq: Any
    dk: Any
    x: Any


class Earlier(NamedTuple):
    """16 tokens of the earlier half of a block, as columns of pairs. Tiles are [BK, 16].

    Attributes:
        k: Columns decayed until the border, as left operands.
        dw: Accumulated gradient of the columns.
        y: k dw before the exchange; inside a quarter, their sum over the even sub-chunk, [BK].
    """

    k: Any
    dw: Any
    y: Any


@gluon.jit
def later_quarter(t_q, t_k, I, i: gl.constexpr, dq, dk, before, since0, since1, ERASES: gl.constexpr, L: gl.constexpr):
    """Quarter i as the later half of a block, or a part of it.

    Args:
        dq, dk: [BK, 16] gradients from before the block.
        before: [BK] decay over the earlier half.
        since0, since1: [BK] decays from the border to the quarter's two sub-chunks.
    """
    decay = I[i].load(L) * per_sub_chunk(since0, since1, L)
    if ERASES:
        q, k = load_quarter(t_q, i, L) * decay, load_quarter(t_k, i, L) * decay
        dq, dk = dq * before[:, None], dk * before[:, None]
        x = gl.fma(q, dq, k * dk)
        return Later(register_operand(q, t_q.dtype, L), register_operand(k, t_k.dtype, L), dq, dk, x)
    else:
        q, dq = load_quarter(t_q, i, L) * decay, dq * before[:, None]
        rows = register_operand(q, t_q.dtype, L)
        return Later(rows, rows, dq, dq, gl.fma(q, dq, 0.0))


@gluon.jit
def earlier_quarter(t_k, Q, n: gl.constexpr, dw, after, until0, until1, L: gl.constexpr):
    """Quarter n as the earlier half of a block, or a part of it.

    Args:
        dw: [BK, 16] gradient from after the block.
        after: [BK] decay over the later half.
        until0, until1: [BK] decays from the ends of the quarter's two sub-chunks to the border.
    """
    k = load_quarter(t_k, n, L) * (Q[n].load(L) * per_sub_chunk(until0, until1, L))
    dw = dw * after[:, None]
    return Earlier(register_operand(k, t_k.dtype, L), dw, gl.fma(k, dw, 0.0))


@gluon.jit
def exchange(P, J, later, earlier, i: gl.constexpr, n: gl.constexpr, ERASES: gl.constexpr):
    """Add the contributions of quarters i (later) and n (earlier) to each other; the products are asynchronous."""
    P, J = P[n].slice(16 * i, 16), J[n].slice(16 * i, 16)
    dq = warpgroup_mma(earlier.k, P.permute((1, 0)), later.dq, is_async=True)
    dk, dw = dq, earlier.dw
    if ERASES:
        dk = warpgroup_mma(earlier.k, J.permute((1, 0)), later.dk, is_async=True)
        dw = warpgroup_mma(later.k, J, earlier.dw, is_async=True)
    dw = warpgroup_mma(later.q, P, dw, is_async=True)
    return Later(later.q, later.k, dq, dk, later.x), Earlier(earlier.k, dw, earlier.y)


@gluon.jit
def exchange_inside_quarter(
    P, J, t_q, t_k, i: gl.constexpr, I, Q, dq4, dk4, dw4, E, ERASES: gl.constexpr, L: gl.constexpr
):
    """Exchange between quarter i's odd sub-chunk, the later one, and its even one. x and y are sums over them."""
    is_even = gl.arange(0, 16, layout=gl.SliceLayout(0, L))[None, :] < 8
    # A 1 that the compiler cannot fold: E[0] is not a constant. With the constant 1, `dq4[i] * before` would be dq4[i]
    # itself in the even sub-chunk, not a new value. It would be copied to be accumulated to, and products wait for
    # that copy.
    one = gl.fma(E[0], 0.0, 1.0)
    before, after = per_sub_chunk(one, E[2 * i], L), per_sub_chunk(E[2 * i + 1], one, L)
    decay = I[i].load(L)
    q = load_quarter(t_q, i, L) * decay
    k = q
    if ERASES:
        k = load_quarter(t_k, i, L) * decay
    w = load_quarter(t_k, i, L) * Q[i].load(L)
    dq = dq4[i] * before
    dk, products = dq, gl.fma(q, dq, 0.0)
    if ERASES:
        dk = dk4[i] * before
    dw = dw4[i] * after
    if ERASES:
        products = gl.fma(q, dq, k * dk)
    x = gl.sum(gl.where(is_even, 0.0, products), axis=1)
    y = gl.sum(gl.where(is_even, gl.fma(w, dw, 0.0), 0.0), axis=1)
    later = Later(register_operand(q, t_q.dtype, L), register_operand(k, t_k.dtype, L), dq, dk, x)
    return exchange(P, J, later, Earlier(register_operand(w, t_k.dtype, L), dw, y), i, i, ERASES)
