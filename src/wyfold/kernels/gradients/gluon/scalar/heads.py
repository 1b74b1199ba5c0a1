"""Sums of dq and dk over the value heads of a key head."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from wyfold.kernels.gradients.gluon.tokens import Coords, store_rows
from wyfold.tile.index.triton import chunk_span

UNROLLED = gl.constexpr(8)
"""Value heads of a group whose loads are unrolled. 128 of them compiled for minutes and spilled registers."""


@gluon.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_gradients_heads_gluon(
    p_q,
    p_k,
    p_dq,
    p_dk,
    s_dq,
    s_dk,
    packing,
    N,
    T,
    per_sequence,
    SIZES: gl.constexpr,
    PACKED: gl.constexpr,
):
    """One program sums the gradients of a chunk of one key head, in the order of its value heads.

    Args:
        p_q, p_k: [chunks and value heads, BT, K] gradients through each value head.
        p_dq, p_dk: Sums, at the tokens; None if they are not wanted.
    """
    H: gl.constexpr = SIZES.H
    pid = gl.program_id(0).to(gl.int64)
    i_c, i_h = pid // H, pid % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, SIZES.BT)
    exists = True
    if PACKED:
        exists = i_n < N
    coords = Coords(b, t, 0, i_h, rows)
    if p_dq is not None:
        _store_sum(p_q, p_dq, s_dq, coords, pid, exists, SIZES)
    if p_dk is not None:
        _store_sum(p_k, p_dk, s_dk, coords, pid, exists, SIZES)


@gluon.jit
def _store_sum(p_tiles, p, s, coords, pid, exists, SIZES: gl.constexpr):
    """Store the sum of the value heads' tiles; zeros where no sequence has the chunk."""
    K: gl.constexpr = SIZES.K
    BT: gl.constexpr = SIZES.BT
    GR: gl.constexpr = SIZES.HV // SIZES.H
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // K, K // 8], [gl.num_warps(), 1], [1, 0])
    o_t, o_w = gl.arange(0, BT, layout=gl.SliceLayout(1, L)), gl.arange(0, K, layout=gl.SliceLayout(0, L))
    offsets = o_t[:, None] * K + o_w[None, :]
    mask = (o_t < coords.rows)[:, None] & (o_w >= 0)[None, :] & exists
    total = gl.zeros([BT, K], gl.float32, L)
    p_first = p_tiles + pid * GR * (BT * K) + offsets
    if GR <= UNROLLED:
        for r in gl.static_range(GR):
            total += gl.load(p_first + r * (BT * K), mask, 0.0).to(gl.float32)
    else:
        for r in range(GR):
            total += gl.load(p_first + r * (BT * K), mask, 0.0).to(gl.float32)
    store_rows(p, s, coords, 0, total, L, BT, K)
