"""Kernel of `low_rank_gradients`: products with the states at the borders, then the adjoints of the grams."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.low_rank_gradients.triton.loads import load_columns, load_reading, load_reads, load_writes
from wyfold.kernels.low_rank_gradients.triton.stores import Place, clear, store
from wyfold.tile.columns.triton import RowHeads, early_rows, load_rows, row_factors
from wyfold.tile.decay.channel.triton import sub_chunk_gate
from wyfold.tile.decay.channel.triton.adjoint import sum_over
from wyfold.tile.decay.channel.triton.anchors import anchored, since_anchor
from wyfold.tile.decay.channel.triton.chunk_adjoint import (
    ChunkGradients,
    GramGradients,
    LoadedLayout,
    chunk_sums,
    grams_bwd,
    interleaved_rows,
    number_of_anchors,
    operand_of,
    rest_of,
    scaled_columns,
    scaled_rows,
    separate_sub_chunks,
    total_of,
)
from wyfold.tile.decay.channel.triton.own_pairs import own_pairs, own_pairs_of_columns
from wyfold.tile.decay.triton import NEAR
from wyfold.tile.dot.triton import mm, no_fma
from wyfold.tile.index.triton import TokenRows, chunk_span, load_tile


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_low_rank_gradients_triton(
    tokens, values, do, s_do, borders, gate, strength, outputs, dgate, packing, scale, unit, N, T,
    per_sequence, SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program computes some channels of the gradients of the rows, columns and gates of a chunk of a value head."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    TWO: tl.constexpr = FLAGS.RULE == "given"
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    NB: tl.constexpr = BT // NEAR
    NK: tl.constexpr = (K + BK - 1) // BK
    i_tile, i_k = (tl.program_id(0) // NK).to(tl.int64), tl.program_id(0) % NK
    i_c, i_hv = i_tile // HV, i_tile % HV
    heads = RowHeads(i_hv // (HV // SIZES.H), i_hv // (HV // SIZES.HB))
    i_n, _, b, t, n_rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    at = TokenRows(b, t, n_rows, T)
    opaque_zero = tl.minimum(T, 0)
    if FLAGS.PACKED:
        if i_n == N:
            clear(outputs, dgate, i_tile, at, i_hv, i_k, opaque_zero, SIZES)
            return
    early = early_rows(at, BEFORE)
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, BEFORE)
    first: tl.constexpr = 1 if BEFORE else 0
    memory = LoadedLayout(borders.S.to(tl.pointer_type(tl.float32), bitcast=True), opaque_zero)
    # Erasing rows and queries, and the written values of both columns, are one operand of 2 BT rows.
    b_reads, b_writes = tl.zeros((2 * BT, BK), tl.float32), tl.zeros((2 * BT, BK), tl.float32)
    b_D = tl.zeros((2 * BT, 2 * BT), tl.float32)
    b_carried = tl.zeros((NB, BK), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        b_S = load_tile(borders.S, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
        b_dS = load_tile(borders.dS, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
        b_XO = load_reads(borders.X, do, s_do, i_tile, at, i_hv, i_v * BV, first, V, BT, BV)
        b_WV = load_writes(borders.e, values, i_tile, at, i_hv, i_v * BV, TWO, V, BT, BV)
        b_reads = mm(b_XO, b_S, b_reads, OP, PRECISION)
        b_writes = mm(b_WV, b_dS, b_writes, OP, PRECISION)
        b_D = mm(b_XO, tl.trans(b_WV), b_D, OP, PRECISION)
        b_carried += _row_sums(b_S.to(tl.float32) * b_dS.to(tl.float32), NB)
    grams = _met(b_D, unit, scale, BEFORE, OP, PRECISION)
    i_n = tl.arange(0, NB)
    column = i_k * BK
    place = Place(i_tile, at, early, i_hv, heads, i_k, column)
    b_x = load_rows(gate.g, gate.s_g, at, i_hv, column, opaque_zero, K, BT, BK, NEAR)
    sums = chunk_sums(sub_chunk_gate(b_x, gate, i_hv, column, n_rows, ACTIVATION, K), OP)
    columns = load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES, FLAGS)
    b_out = tl.exp2(rest_of(sums)) * unit
    b_db, b_dk = separate_sub_chunks(b_writes, memory)
    b_db, b_dk = b_db * b_out, b_dk * b_out
    b_written = columns[0] * b_db
    if TWO:
        b_written = tl.fma(columns[1], b_dk, b_written)
    b_over = _sum_of_sums(b_carried, memory)[None, :] * tl.exp2(total_of(sums)) * unit
    b_over += sum_over(tl.sum(b_written, axis=1), i_n * 0, i_n, NB)
    anchors = number_of_anchors(sums)
    if anchors == 1:
        b_row, b_column = anchored(since_anchor(sums.rows, 0), 0, "nearest")
        scaled = scaled_columns(columns, b_column, OP, PRECISION)
        reading = load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES, FLAGS)
        b_db, b_dk = own_pairs_of_columns(b_db, b_dk, grams, reading, BEFORE, TWO)
        rows = scaled_rows(reading, b_row, unit, scale, OP, PRECISION)
        found = grams_bwd(rows, scaled, grams, b_reads, memory, OP, PRECISION)
        found = ChunkGradients(
            found.a, found.q, b_db + no_fma(found.b), b_dk + no_fma(found.k), found.terms, found.undecayed
        )
        store(
            found,
            grams,
            b_written,
            b_over,
            b_x,
            tokens,
            norms,
            gate,
            outputs,
            dgate,
            place,
            unit,
            opaque_zero,
            SIZES,
            FLAGS,
        )
    else:
        # Apart, so that the common case keeps nothing in registers for it.
        none = tl.zeros_like(b_db)
        reading = load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES, FLAGS)
        b_db, b_dk = own_pairs_of_columns(b_db, b_dk, grams, reading, BEFORE, TWO)
        found = ChunkGradients(none, none, b_db, b_dk, none, none)
        for anchor in range(anchors):
            b_row, b_column = anchored(since_anchor(sums.rows, anchor), anchor, "nearest")
            again = load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES, FLAGS)
            scaled = scaled_columns(again, b_column, OP, PRECISION)
            rows = load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES, FLAGS)
            rows = scaled_rows(rows, b_row, unit, scale, OP, PRECISION)
            more = grams_bwd(rows, scaled, grams, b_reads, memory, OP, PRECISION)
            b_undecayed = tl.where(anchor == 0, more.undecayed, found.undecayed)
            found = ChunkGradients(
                found.a + no_fma(more.a), found.q + no_fma(more.q), found.b + no_fma(more.b),
                found.k + no_fma(more.k), found.terms + more.terms, b_undecayed,
            )  # fmt: skip
            b_reads = tl.zeros_like(b_reads)
        store(
            found,
            grams,
            b_written,
            b_over,
            b_x,
            tokens,
            norms,
            gate,
            outputs,
            dgate,
            place,
            unit,
            opaque_zero,
            SIZES,
            FLAGS,
        )


@triton.jit
def _met(b_D, unit, scale, BEFORE: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`GramGradients` of all pairs [2 BT, 2 BT] that meet."""
    BT: tl.constexpr = b_D.shape[0] // 2
    o_r, kind = interleaved_rows(BT)
    far, meets = o_r[None, :] < o_r[:, None], kind == 1
    if BEFORE:  # the last erasing row is the chunk's first token, which reads no row of the chunk
        meets = meets | (o_r != BT - 1)
        far = far & meets[:, None]
    b_far = operand_of(tl.where(far, b_D, 0.0), OP, PRECISION)
    b_ab, b_ak, b_qb, b_qk = own_pairs(b_D, meets, tl.where(kind == 1, scale, unit))
    return GramGradients(b_far, b_ab, b_ak, b_qb, b_qk)


@triton.jit
def _row_sums(x, WARPS: tl.constexpr):
    """Sums of the rows of x in as many groups as there are warps.   [BV, BK] -> [WARPS, BK]

    Lanes of a warp have 4 rows side by side, so a group is a warp's.
    """
    return tl.sum(tl.sum(x.reshape(x.shape[0] // (4 * WARPS), WARPS, 4, x.shape[1]), axis=0), axis=1)


@triton.jit
def _sum_of_sums(x, memory):
    """Sum of the rows of x [WARPS, BK], with neighbouring columns in neighbouring lanes, as in sub-chunks.   [BK]

    Warps exchange sums through shared memory: with eight columns in a thread, all lanes would write to one bank.
    """
    W: tl.constexpr = x.shape[0]
    BK: tl.constexpr = x.shape[1]
    p = memory.near + tl.arange(0, W)[:, None] * BK + tl.arange(0, BK)[None, :] + 2 * memory.opaque_zero
    return tl.sum(tl.load(p, mask=tl.full((W, BK), 0, tl.int32) + memory.opaque_zero > 0, other=x), axis=0)
