"""Adjoint of the pairs of rows inside sub-chunks of `NEAR` rows under a channel gate, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.tile.decay.triton import NEAR


@triton.jit
def sub_chunk_row(x, i: tl.constexpr):
    """Row i of every sub-chunk, bit for bit.   [NB, BR, BK] -> [NB, BK]

    Summed as integers: where a thread holds all rows of a column, the sum with zeros is an exact selection.
    """
    o_i = tl.arange(0, x.shape[1])[None, :, None]
    return tl.sum(tl.where(o_i == i, x.to(tl.int32, bitcast=True), 0), axis=1).to(tl.float32, bitcast=True)


@triton.jit
def store_near_pairs(p_near, i_tile, which: tl.constexpr, b_pairs, BT: tl.constexpr):
    """Store the pairs [s, r] inside sub-chunks, gradients of P (`which` 0) or J (1), for `add_near_pairs`."""
    o_s, o_r = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    o_near = (o_s // NEAR * NEAR + o_s % NEAR) * NEAR + o_r % NEAR
    mask = (o_s // NEAR == o_r // NEAR) & (o_s <= o_r)
    tl.store(p_near + i_tile * (BT * NEAR * 2) + o_near * 2 + which, b_pairs, mask=mask)


@triton.jit
def load_near_pairs(p_near, i_tile, s: tl.constexpr, NB: tl.constexpr):
    """Load the gradients of P[r, s] and J[r, s] of every sub-chunk for rows r >= s.   2 x (NEAR - s) x [NB, 1]

    Two rows are loaded together, 16 bytes. Entries above the diagonal were never written and are dropped.
    """
    o_n, o_r, o_two = tl.arange(0, NB)[:, None, None], tl.arange(0, 2)[None, :, None], tl.arange(0, 2)[None, None, :]
    dP_rows, dJ_rows = (), ()
    for r in tl.static_range(s // 2 * 2, NEAR, 2):
        p = p_near + i_tile * (NB * NEAR * NEAR * 2) + ((o_n * NEAR + s) * NEAR + r + o_r) * 2 + o_two
        b_dP, b_dJ = tl.split(tl.load(p))
        b_dP, b_next_dP = tl.split(b_dP)
        b_dJ, b_next_dJ = tl.split(b_dJ)
        if r >= s:
            dP_rows, dJ_rows = append_row(dP_rows, b_dP[:, None]), append_row(dJ_rows, b_dJ[:, None])
        dP_rows, dJ_rows = append_row(dP_rows, b_next_dP[:, None]), append_row(dJ_rows, b_next_dJ[:, None])
    return dP_rows, dJ_rows


@triton.jit
def add_near_pairs(memory, rows, b_a, b_dq, b_dk, b_dg, NB: tl.constexpr):
    """Add the pairs inside sub-chunks to the gradients: no anchors, each decay is a product over the tokens between.

        z[s, r] = k[s] a[s + 1] ... a[r]                 key s decayed to row r
        u[s, r] = dP[r, s] q[r] + dJ[r, s] k[r]          gradient that row r returns to s
        b[s, i] = u[s, i] + a[i + 1] b[s, i + 1]         the same, summed over r >= i and decayed to i

        dq[r] += sum_{s<=r} dP[r, s] z[s, r]     dk[r] += sum_{s<r} dJ[r, s] z[s, r]
        dk[s] += dP[s, s] q[s] + a[s + 1] b[s, s + 1]     dg[i] += sum_{s<i} z[s, i] b[s, i]

    A thread holds all rows of its columns, so threads exchange no data here.
    """
    q_rows, k_rows, a_rows = sub_chunk_rows(rows.q), sub_chunk_rows(rows.k), sub_chunk_rows(b_a)
    for s in tl.static_range(NEAR):
        b_z = sub_chunk_row(rows.k, s)
        dP_rows, dJ_rows = load_near_pairs(memory.near, memory.i_tile, s, NB)
        b_dq = add_row(b_dq, s, dP_rows[0] * b_z)
        b_dk = add_row(b_dk, s, dP_rows[0] * q_rows[s])
        z_rows, u_rows = (), ()
        for r in tl.static_range(s + 1, NEAR):
            b_dP, b_dJ = dP_rows[r - s], dJ_rows[r - s]
            b_z *= a_rows[r]
            b_dq = add_row(b_dq, r, b_dP * b_z)
            b_dk = add_row(b_dk, r, b_dJ * b_z)
            z_rows, u_rows = append_row(z_rows, b_z), append_row(u_rows, tl.fma(b_dP, q_rows[r], b_dJ * k_rows[r]))
        b_b = tl.zeros_like(b_z)
        for i in tl.static_range(NEAR - 1 - s):
            b_b += u_rows[NEAR - 2 - s - i]
            b_dg = add_row(b_dg, NEAR - 1 - i, z_rows[NEAR - 2 - s - i] * b_b)
            b_b *= a_rows[NEAR - 1 - i]
        b_dk = add_row(b_dk, s, b_b)
    return b_dq, b_dk, b_dg


@triton.jit
def sub_chunk_rows(x):
    """All rows of every sub-chunk of x [NB, NEAR, BK] as a tuple.   NEAR x [NB, BK]"""
    rows = ()
    for i in tl.static_range(NEAR):
        rows = append_row(rows, sub_chunk_row(x, i))
    return rows


@triton.jit
def append_row(rows, b_row):
    """Append a row to a tuple of rows."""
    return rows + (b_row,)


@triton.jit
def add_row(x, i: tl.constexpr, b_row):
    """Add b_row to row i of every sub-chunk of x.   [NB, BR, BK], [NB, BK] -> [NB, BR, BK]"""
    return tl.where(tl.arange(0, x.shape[1])[None, :, None] == i, x + b_row[:, None], x)
