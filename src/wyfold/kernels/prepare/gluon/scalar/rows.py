"""Numbers of rows: loaded, kept in shared memory, and stored as the factors that the scans read."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.tile.inverse.triton import nonzero_beta


@gluon.jit
def load_row_numbers(strength, gate, b, t, i_hv, o, rows, SCALAR: gl.constexpr):
    """Load beta, or ones, and the raw scalar gate, or 0.0; zero past the last token.   [BT] float32"""
    beta, x = gl.where(o < rows, 1.0, 0.0), 0.0
    if strength.beta is not None:
        first = strength.beta + (b * strength.s_beta[0] + t * strength.s_beta[1] + i_hv * strength.s_beta[2])
        beta = gl.load(first + o.to(gl.int64) * strength.s_beta[1], mask=o < rows, other=0.0).to(gl.float32)
    if SCALAR:
        first = gate.g + (b * gate.s_g[0] + t * gate.s_g[1] + i_hv * gate.s_g[2])
        x = gl.load(first + o.to(gl.int64) * gate.s_g[1], mask=o < rows, other=0.0).to(gl.float32)
    return beta, x


@gluon.jit
def reciprocal_norm(x, K: gl.constexpr, BT: gl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of each row of a tile in shared memory.   [BT]"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    HALF: gl.constexpr = 2 * BT
    if K > HALF:  # two halves one after the other, since a row has the registers of one
        low, high = x.slice(0, HALF, dim=1).load(L).to(gl.float32), x.slice(HALF, HALF, dim=1).load(L).to(gl.float32)
        return gl.rsqrt(gl.sum(low * low, axis=1) + gl.sum(high * high, axis=1) + 1e-6)
    else:
        y = x.load(L).to(gl.float32)
        return gl.rsqrt(gl.sum(y * y, axis=1) + 1e-6)


@gluon.jit
def store_row_numbers(numbers, beta, INVERSE: gl.constexpr, MASK: gl.constexpr):
    """Store what the factors need of beta to shared memory."""
    safe_beta = nonzero_beta(beta)
    numbers.safe_beta.store(safe_beta)
    if INVERSE:
        numbers.inverse_beta.store(1.0 / safe_beta)
    if MASK:
        numbers.beta_mask.store(gl.where(safe_beta == beta, 1.0, 0.0))


@gluon.jit
def store_row_factors(
    factors, numbers, beta, erases, i_tile, rows,
    FORWARD: gl.constexpr, FULL: gl.constexpr, SCALAR: gl.constexpr, NORM: gl.constexpr, ONE: gl.constexpr,
):  # fmt: skip
    """Store the scans' row factors: decays from the chunk's start and to its end, norms, and beta."""
    BT: gl.constexpr = beta.shape[0]
    o = gl.arange(0, BT, layout=ONE)
    r_k, r_q = gl.full([BT], 1.0, gl.float32, ONE), gl.full([BT], 1.0, gl.float32, ONE)
    if NORM:
        r_k, r_q = numbers.r_k.load(ONE), numbers.r_q.load(ONE)
        if not FULL:  # TMA also loads rows of the next sequence; their norms are multiplied by zeros, but may be NaN
            r_k, r_q = gl.where(o < rows, r_k, 1.0), gl.where(o < rows, r_q, 1.0)
    in_k, in_q, out = r_k, r_q, r_k
    total = 1.0
    if SCALAR:
        G = numbers.G.load(ONE)
        last = gl.sum(gl.where(o == BT - 1, G, 0.0), axis=0)
        before, after = gl.exp(G), gl.exp(last - G)
        in_k, in_q, out = before * r_k, before * r_q, after * r_k
        total = gl.exp(last)
    in_k = in_k * erases
    gl.store(factors.total + i_tile, total)
    if factors.rows_bwd is not None:
        _store_four(factors.rows_bwd + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)
    if FORWARD:
        out = beta * out
    _store_four(factors.rows + i_tile * (4 * BT) + o, in_k, in_q, out, beta, BT)


@gluon.jit
def _store_four(p, in_k, in_q, out, beta, BT: gl.constexpr):
    """Store four numbers per row, `Prepared.rows`."""
    gl.store(p, in_k)
    gl.store(p + BT, in_q)
    gl.store(p + 2 * BT, out)
    gl.store(p + 3 * BT, beta)
