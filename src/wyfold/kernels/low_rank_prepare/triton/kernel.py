"""Kernel of `low_rank_prepare`: the grams of a chunk, their inverse, then what is folded with it."""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.low_rank_prepare.triton.fold import fold
from wyfold.tile.columns.triton import (
    RowHeads,
    early_rows,
    erased_columns,
    erasing_row,
    erasing_rows,
    load_rows,
    row_factors,
    scale_rows,
)
from wyfold.tile.decay.channel.triton import gram_operand
from wyfold.tile.decay.channel.triton.anchors import (
    anchored,
    chunk_anchors,
    chunk_rest,
    chunk_total,
    load_chunk_sums,
    since_anchor,
    to_loaded_layout,
)
from wyfold.tile.dot.triton import mm, mm_exact
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    interleave,
    separate,
    store_tile,
    store_tokens,
)


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "clear", "backward"])
def wyfold_low_rank_prepare_triton(
    tokens,
    gate,
    strength,
    factors,
    packing,
    o,
    s_o,
    N,
    T,
    per_sequence,
    clear,
    backward,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program computes the factors of a chunk of one value head."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BE: tl.constexpr = SIZES.BE
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = FLAGS.PACKED
    RULE: tl.constexpr = FLAGS.RULE
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    TWO: tl.constexpr = FLAGS.RULE == "given"
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    heads = RowHeads(i_hv // (HV // SIZES.H), i_hv // (HV // SIZES.HB))
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    at = TokenRows(b, t, rows, T)
    if PACKED:
        if i_n == N:
            if clear:
                store_tokens(o, s_o, at, i_hv, 0, tl.zeros((BT, BV), tl.float32), SIZES.V)
            return
    # A 0 that the compiler cannot fold: it hides the alignment of tiles whose rows a thread is to hold.
    opaque_zero = tl.minimum(T, 0)
    early = early_rows(at, BEFORE)
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, BEFORE)
    # Rows of the grams are the erasing rows, then the queries: with 64, Hopper's matrix unit reads shared memory.
    b_APb, b_APk = tl.zeros((2 * BT, BT), tl.float32), tl.zeros((2 * BT, BT), tl.float32)
    # Narrow sums of one addend are kept for what is behind the inverse; wide ones would spill.
    KEEP: tl.constexpr = BK >= K and BE == BK and K <= 64 and OP == tl.bfloat16
    b_rest = tl.zeros((BT, BE), tl.float32)
    for column in tl.range(0, K, BK, num_stages=STAGES):
        sums = load_chunk_sums(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BK, OP)
        b_p = to_loaded_layout(since_anchor(sums, 0), factors.total, opaque_zero)
        if KEEP:
            b_rest = chunk_total(sums).reshape(1, BK) - b_p
        b_row, b_column = anchored(b_p, 0, PRECISION)
        b_q = scale_rows(load_rows(tokens.q, tokens.s_q, at, heads.k, column, 0, K, BT, BK, 0), norms.q) * b_row
        b_a = erasing_rows(tokens, early, heads, norms.early, column, 0, RULE, SIZES, BK, 0) * b_row
        store_tile(factors.q, i_tile, 0, column, b_q, BT, K, BT, BK)
        if BEFORE:
            # A row later, where the row belongs; the chunk's first is undecayed.
            place = TokenRows(i_tile * 0, i_tile * BT + 1, BT - 1)
            store_tokens(factors.rows, (0, K, 0, 1), place, 0, column, b_a, K)
            b_first = erasing_row(tokens, at, heads, norms.a, column, RULE, K, BK)
            o_k = column + tl.arange(0, BK)
            tl.store(factors.rows + i_tile * (BT * K) + o_k, b_first.to(factors.rows.dtype.element_ty), mask=o_k < K)
        else:
            store_tile(factors.rows, i_tile, 0, column, b_a, BT, K, BT, BK)
        o_k = column + tl.arange(0, BK)[None, :]
        tl.store(factors.total + i_tile * K + o_k, tl.exp2(chunk_total(sums)), mask=o_k < K)
        b_rows = interleave(b_a, b_q)
        b_c = erased_columns(tokens, at, heads, norms, column, 0, RULE, SIZES, BK, 0) * b_column
        b_APb = _add_grams(b_APb, b_rows, b_c, OP, PRECISION)
        if TWO:
            b_c = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BK, 0) * b_column
            b_APk = _add_grams(b_APk, b_rows, b_c, OP, PRECISION)
        # Everything is loaded again, so that the common case keeps nothing in registers for it. The added zero keeps
        # the loads inside the loop.
        for anchor in range(1, chunk_anchors(sums)):
            again = column + anchor * opaque_zero
            far = load_chunk_sums(gate, at, i_hv, again, opaque_zero, ACTIVATION, K, BT, BK, OP)
            b_p = to_loaded_layout(since_anchor(far, anchor), factors.total, opaque_zero)
            b_row, b_column = anchored(b_p, anchor, PRECISION)
            b_q = scale_rows(load_rows(tokens.q, tokens.s_q, at, heads.k, again, 0, K, BT, BK, 0), norms.q) * b_row
            b_a = erasing_rows(tokens, early, heads, norms.early, again, 0, RULE, SIZES, BK, 0) * b_row
            b_rows = interleave(b_a, b_q)
            b_c = erased_columns(tokens, at, heads, norms, again, 0, RULE, SIZES, BK, 0) * b_column
            b_APb = _add_grams(b_APb, b_rows, b_c, OP, PRECISION)
            if TWO:
                b_c = load_rows(tokens.k, tokens.s_k, at, heads.k, again, 0, K, BT, BK, 0) * b_column
                b_APk = _add_grams(b_APk, b_rows, b_c, OP, PRECISION)

    WHOLE: tl.constexpr = TWO and BT == 32 and OP == tl.bfloat16
    b_rows = fold(factors, i_tile, b_APb, b_APk, None, None, backward, TWO, BEFORE, WHOLE, EXACT, SIZES.WARPS)
    for column in tl.range(0, K, BE, num_stages=STAGES):
        if not KEEP:
            sums = load_chunk_sums(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BE, OP)
            b_rest = to_loaded_layout(chunk_rest(sums), factors.total, opaque_zero)
        b_out = tl.exp2(b_rest)
        b_c = erased_columns(tokens, at, heads, norms, column, 0, RULE, SIZES, BE, 0) * b_out
        b_E = mm_exact(b_rows, b_c, None, EXACT)
        if TWO:
            b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BE, 0) * b_out
            b_E, b_K = separate(b_E)
            store_tile(factors.K, i_tile, 0, column, b_K + b_k, BT, K, BT, BE)
        store_tile(factors.E, i_tile, 0, column, b_E, BT, K, BT, BE)


@triton.jit
def _add_grams(b_gram, b_rows, b_c, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Add some channels to the grams of rows with columns, given with their factors.   [2 BT, BT], [r, s]"""
    b_rows, b_c = gram_operand(b_rows, OP, PRECISION), gram_operand(b_c, OP, PRECISION)
    return mm(b_rows, tl.trans(b_c), b_gram, tl.float32, PRECISION)
