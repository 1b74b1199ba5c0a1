"""Adjoint of the l2 norm."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import Coords, load_rows, store_rows
from wyfold.tile.index.triton import Packing, chunk_span


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_norm_gluon(
    p_q,
    p_k,
    s_q,
    s_k,
    p_dq,
    p_dk,
    s_dq,
    s_dk,
    p_norm_dots,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    H: gl.constexpr,
    K: gl.constexpr,
    BT: gl.constexpr,
    PACKED: gl.constexpr,
):
    """Adjoint of the l2 norm, one program per chunk and key head: du = z - u <u, z>/|u|^2, in place of z.

    Args:
        p_norm_dots: [chunks and key heads, half of the channels, q or k, BT] partial sums of <u, z>.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, Packing(p_cu, p_first, p_sequence), T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    coords = Coords(b, t, 0, i_h, rows)
    o = p_norm_dots + pid * (4 * BT) + gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    _norm_bwd(p_q, s_q, p_dq, s_dq, coords, gl.load(o) + gl.load(o + 2 * BT), L, BT, K)
    _norm_bwd(p_k, s_k, p_dk, s_dk, coords, gl.load(o + BT) + gl.load(o + 3 * BT), L, BT, K)


@gluon.jit
def _norm_bwd(p_x, s_x, p_dx, s_dx, coords, dot, L: gl.constexpr, BT: gl.constexpr, K: gl.constexpr):
    """Apply the norm's adjoint to q or k. x is the raw row u, and p_dx holds z, then du."""
    x = load_rows(p_x, s_x, coords, 0, L, BT, K)
    r = gl.rsqrt(gl.sum(gl.fma(x, x, 0.0), axis=1) + 1e-6)
    z = load_rows(p_dx, s_dx, coords, 0, L, BT, K)
    store_rows(p_dx, s_dx, coords, 0, gl.fma(x, -(dot * r * r)[:, None], z), L, BT, K)
