"""Adjoint of the decayed grams of a whole chunk under a channel gate, in Triton: two products of matrices.

A pair of a row r and a column s adds R[r] D[r, s] C[s] to the gradient of each gate between them, where D is the
gradient of their gram, and R and C are the row and the column with their factors of the decay from s to r (`anchors`).
A gate's gradient is therefore what all pairs with a later row add, less what the pairs with a later column do, which
lie entirely after it. Both sums contain the same products of the same rounded numbers, so what is subtracted cancels to
the rounding of float32. Pairs of a token with itself, which no gate decays, are in neither sum and in no product:
`own_pairs` multiplies them element by element, unrounded.

Tiles of two kinds of rows alternate between them, NEAR rows at a time (`interleave_sub_chunks`). A warp's part of a
product then holds both kinds of the same tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.decay.channel.triton import REACH
from wyfold.tile.decay.channel.triton.adjoint import sum_over
from wyfold.tile.decay.channel.triton.near_pairs import sub_chunk_row
from wyfold.tile.decay.triton import NEAR
from wyfold.tile.dot.triton import mm, nearest_tf32, no_fma
from wyfold.tile.index.triton.sub_chunks import to_sub_chunks


class ChunkSums(NamedTuple):
    """Sums of a chunk's log gates to base 2, inside kernels, each a tuple of one or two addends.

    Attributes:
        rows: [NB, NEAR, BK] from the chunk's start to each row.
        total: [NB, BK] over the chunk, the same for every sub-chunk.
    """

    rows: Any
    total: Any


class ChunkRows(NamedTuple):
    """Rows of a chunk with their factors, inside kernels, [NB, NEAR, BK] each.

    Attributes:
        a, q: Erasing rows and queries, as operands.
        a_factor, q_factor: Their factors.
    """

    a: Any
    q: Any
    a_factor: Any
    q_factor: Any


class ChunkColumns(NamedTuple):
    """Columns of a chunk with their factor, inside kernels, [NB, NEAR, BK] each.

    Attributes:
        b, k: Columns, as operands; k is zero if there is one kind.
        factor: Their factor.
    """

    b: Any
    k: Any
    factor: Any


class GramGradients(NamedTuple):
    """Gradients D of the grams of a chunk, inside kernels.

    Attributes:
        far: [2 BT, 2 BT] interleaved, of a row with the columns of earlier tokens that it meets; zero elsewhere.
        ab, ak, qb, qk: [NB, NEAR, 1] of erasing rows and queries with the columns of their token, in the units of the
            rows' gradients.
    """

    far: Any
    ab: Any
    ak: Any
    qb: Any
    qk: Any


class ChunkGradients(NamedTuple):
    """Gradients of a chunk's rows and columns, inside kernels, [NB, NEAR, BK] each.

    Attributes:
        a, q, b, k: Of `ChunkRows`.
        terms: Of the gate's gradient: those from a row on belong to it.
        undecayed: Of the erasing rows before their factors.

    Without the pairs of a token with itself, until `own_pairs_of_rows`.
    """

    a: Any
    q: Any
    b: Any
    k: Any
    terms: Any
    undecayed: Any


class LoadedLayout(NamedTuple):
    """What `separate_sub_chunks` needs, inside kernels.

    Attributes:
        near: Any float32 pointer; it is never read.
        opaque_zero: As of `load_sub_chunks`.
    """

    near: Any
    opaque_zero: Any


@triton.jit
def interleaved_rows(BT: tl.constexpr):
    """Row of the chunk, and its kind, 0 or 1, for every row of an interleaved tile.   2 x [2 BT]"""
    o = tl.arange(0, 2 * BT)
    return o // (2 * NEAR) * NEAR + o % NEAR, o // NEAR % 2


@triton.jit
def interleave_sub_chunks(x, y):
    """Alternate sub-chunks of x and y.   2 x [NB, NEAR, BK] -> [2 BT, BK]"""
    return tl.join(x, y).permute(0, 3, 1, 2).reshape(2 * x.shape[0] * x.shape[1], x.shape[2])


@triton.jit
def separate_sub_chunks(x, memory):
    """The inverse of `interleave_sub_chunks`, in the layout of `load_sub_chunks`."""
    x, y = x.reshape(x.shape[0] // (2 * NEAR), 2, NEAR, x.shape[1]).permute(0, 2, 3, 1).split()
    BT: tl.constexpr = x.shape[0] * NEAR
    BK: tl.constexpr = x.shape[2]
    x = to_sub_chunks(x, memory.near, memory.opaque_zero, BT, BK, NEAR)
    return x, to_sub_chunks(y, memory.near, memory.opaque_zero, BT, BK, NEAR)


@triton.jit
def chunk_sums(b_g, OP: tl.constexpr):
    """`ChunkSums` of log gates [NB, NEAR, BK]; two addends where operands are float32, as in `load_chunk_sums`."""
    if OP == tl.bfloat16:
        b_sum, b_total = _running_sums(no_fma(b_g))
        return ChunkSums((b_sum,), (b_total,))
    else:
        b_multiple = (b_g + 3072.0) - 3072.0
        b_sum, b_total = _running_sums(b_multiple)
        b_rest, b_total_rest = _running_sums(b_g - b_multiple)
        return ChunkSums((b_sum, b_rest), (b_total, b_total_rest))


@triton.jit
def _running_sums(b_g):
    NB: tl.constexpr = b_g.shape[0]
    i_n = tl.arange(0, NB)
    b_sum = tl.cumsum(b_g, axis=1)
    b_last = sub_chunk_row(b_sum, NEAR - 1)
    b_sum += sum_over(b_last, i_n * 0, i_n, NB)[:, None]
    return b_sum, sum_over(b_last, i_n * 0, i_n * 0 + NB, NB)


@triton.jit
def total_of(sums):
    """Log decay over the chunk.   [NB, BK]"""
    b_total = sums.total[0]
    if len(sums.total) == 2:
        b_total += sums.total[1]
    return b_total


@triton.jit
def rest_of(sums):
    """Log decay from each row to the chunk's end.   [NB, NEAR, BK]"""
    b_rest = sums.total[0][:, None] - sums.rows[0]
    if len(sums.total) == 2:
        b_rest += sums.total[1][:, None] - sums.rows[1]
    return b_rest


@triton.jit
def number_of_anchors(sums):
    """As `chunk_anchors`."""
    most = -tl.min(total_of(sums))
    return tl.where(most > 0.0, most / REACH + 0.01, 0.0).to(tl.int32) + 1


@triton.jit
def scaled_rows(rows, b_row, a_scale, q_scale, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`ChunkRows` from erasing rows and queries, their factor from `anchored`, and the scales of their gradients."""
    b_a, b_q = rows
    a_factor, q_factor = b_row * a_scale, b_row * q_scale
    return ChunkRows(
        operand_of(b_a * a_factor, OP, PRECISION), operand_of(b_q * q_factor, OP, PRECISION), a_factor, q_factor
    )


@triton.jit
def scaled_columns(columns, b_column, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`ChunkColumns` from columns and their factor from `anchored`."""
    b_b, b_k = columns
    return ChunkColumns(operand_of(b_b * b_column, OP, PRECISION), operand_of(b_k * b_column, OP, PRECISION), b_column)


@triton.jit
def grams_bwd(rows, columns, grams, b_reads, memory, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Adjoint of the decayed grams of rows with columns, for the pairs that an anchor serves, and of the rows' reads.

    Args:
        rows, columns: `ChunkRows` and `ChunkColumns` with the factors of the anchor.
        grams: `GramGradients`.
        b_reads: [2 BT, BK] gradients of the rows as they read the entering state, before its decay, interleaved.
        memory: `LoadedLayout`.

    Returns:
        `ChunkGradients`.
    """
    b_aq = interleave_sub_chunks(rows.a, rows.q)
    b_xb, b_xk = separate_sub_chunks(mm(tl.trans(grams.far), b_aq, None, OP, PRECISION), memory)
    b_inside = tl.fma(columns.k.to(tl.float32), b_xk, columns.b.to(tl.float32) * b_xb)
    b_xb, b_xk = b_xb * columns.factor, b_xk * columns.factor
    b_bk = interleave_sub_chunks(columns.b, columns.k)
    b_undecayed, b_xq = separate_sub_chunks(mm(grams.far, b_bk, b_reads, OP, PRECISION), memory)
    b_later = tl.fma(rows.q.to(tl.float32), b_xq, rows.a.to(tl.float32) * b_undecayed)
    b_terms = no_fma(b_later) - no_fma(b_inside)
    return ChunkGradients(b_undecayed * rows.a_factor, b_xq * rows.q_factor, b_xb, b_xk, b_terms, b_undecayed)


@triton.jit
def operand_of(x, OP: tl.constexpr, PRECISION: tl.constexpr):
    """x as `mm` rounds it."""
    if OP == tl.bfloat16:
        return no_fma(x).to(tl.bfloat16)
    elif PRECISION == "tf32 to nearest":
        return nearest_tf32(no_fma(x))
    else:
        return x
