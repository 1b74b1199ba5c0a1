"""Kernel of `low_rank_gradients` where the gate is one number for each token, or none.

Decays are outside of the products, as in `low_rank_prepare`: they multiply the gradients of pairs of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from wyfold.kernels.low_rank_gradients.triton.loads import load_reads, load_writes
from wyfold.kernels.low_rank_gradients.triton.stores import clear_tokens, store_token_tiles
from wyfold.kernels.low_rank_prepare.triton.token_gate import row_after, token_decays
from wyfold.tile.columns.triton import RowHeads, erasing_rows, load_rows, raw_columns, row_factors
from wyfold.tile.decay.channel.triton.chunk_adjoint import interleaved_rows
from wyfold.tile.decay.triton import load_gate
from wyfold.tile.decay.triton.gradient import interval_sum, log_gate_bwd, state_gate_gradient
from wyfold.tile.decay.triton.pairs import interval_decay
from wyfold.tile.dot.triton import mm, no_fma
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    interleave,
    load_tile,
    separate,
    separate_columns,
    store_token_scalars,
)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_low_rank_gradients_token_gate_triton(
    tokens, values, do, s_do, borders, gate, strength, outputs, dg, s_dg, packing, scale, unit, N, T,
    per_sequence, SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program computes some channels of the gradients of the rows and columns of a chunk of a value head.

    The gradients of the gate and of the write strength are sums over channels; each program stores its part.
    """
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    RULE: tl.constexpr = FLAGS.RULE
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    TWO: tl.constexpr = FLAGS.RULE == "given"
    OP: tl.constexpr = FLAGS.OP
    GATE: tl.constexpr = FLAGS.GATE
    PRECISION: tl.constexpr = FLAGS.PRECISION
    EXACT: tl.constexpr = FLAGS.EXACT
    NK: tl.constexpr = (K + BK - 1) // BK
    BW: tl.constexpr = 2 * BT if TWO else BT
    i_tile, i_k = (tl.program_id(0) // NK).to(tl.int64), tl.program_id(0) % NK
    i_c, i_hv, column = i_tile // HV, i_tile % HV, i_k * BK
    heads = RowHeads(i_hv // (HV // SIZES.H), i_hv // (HV // SIZES.HB))
    i_n, _, b, t, n_rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    at = TokenRows(b, t, n_rows, T)
    if FLAGS.PACKED:
        if i_n == N:
            clear_tokens(outputs, at, i_hv, i_k, SIZES)
            if dg is not None:
                store_token_scalars(dg + i_k * s_dg[0], s_dg[1:], at, i_hv, tl.zeros((BT,), tl.float32), BT)
            return
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, False)
    b_x, b_g = load_gate(gate, at, i_hv, 0, GATE, "given", K, BT, BK)
    # Erasing rows and queries are one operand of 2 BT rows; so are the written values of two columns.
    b_reads, b_writes = tl.zeros((2 * BT, BK), tl.float32), tl.zeros((BW, BK), tl.float32)
    b_D, b_SdS = tl.zeros((2 * BT, BW), tl.float32), tl.zeros((BV, BK), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        b_S = load_tile(borders.S, i_tile, i_v * BV, column, V, K, BV, BK)
        b_dS = load_tile(borders.dS, i_tile, i_v * BV, column, V, K, BV, BK)
        b_XO = load_reads(borders.X, do, s_do, i_tile, at, i_hv, i_v * BV, 0, V, BT, BV)
        if TWO:
            b_W = load_writes(borders.e, values, i_tile, at, i_hv, i_v * BV, TWO, V, BT, BV)
        else:
            b_W = load_tile(borders.e, i_tile, 0, i_v * BV, BT, V, BT, BV)
        b_reads = mm(b_XO, b_S, b_reads, OP, PRECISION)
        b_writes = mm(b_W, b_dS, b_writes, OP, PRECISION)
        b_D = mm(b_XO, tl.trans(b_W), b_D, OP, PRECISION)
        b_SdS = tl.fma(b_S.to(tl.float32), b_dS.to(tl.float32), b_SdS)
    carried = tl.sum(tl.sum(b_SdS, axis=1)[None, :], axis=1) * unit

    o_r, kind = interleaved_rows(BT)
    erasing, o_s = (kind == 0)[:, None], tl.arange(0, BT)[None, :]
    met = (o_s < o_r[:, None]) | ((o_s == o_r[:, None]) & ~erasing)
    b_in, b_read, b_out, total = token_decays(b_g, GATE, BEFORE, BT)
    b_norm = tl.where(kind == 0, tl.gather(norms.a, o_r, 0), tl.gather(norms.q, o_r, 0))
    o_from = o_r
    if BEFORE:
        o_from = tl.where(kind == 0, tl.maximum(o_r - 1, 0), o_r)
    b_decay = tl.gather(interval_decay(b_g, BT), tl.broadcast_to(o_from[:, None], (2 * BT, BT)), 0)
    b_decay *= tl.where(erasing, unit, scale)
    b_reads *= tl.where(kind == 0, unit * tl.gather(b_read, o_r, 0), scale * tl.gather(b_in, o_r, 0))[:, None]
    b_a = erasing_rows(tokens, at, heads, None, column, 0, RULE, SIZES, BK, 0)
    b_q = load_rows(tokens.q, tokens.s_q, at, heads.k, column, 0, K, BT, BK, 0)
    b_rows = interleave(b_a.to(OP), b_q.to(OP))
    b_c = raw_columns(tokens, at, heads, column, RULE, SIZES, BK)
    b_read_terms = tl.sum(b_rows.to(tl.float32) * b_reads, axis=1) * b_norm
    if TWO:
        b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BK, 0)
        b_db, b_dk = separate(b_writes)
        b_Db, b_Dk = separate_columns(b_D)
        b_db, b_dk = b_db * (unit * b_out)[:, None], b_dk * (unit * b_out)[:, None]
        b_write = tl.sum(tl.fma(b_c, b_db, b_k * b_dk), axis=1)
        b_Dk = tl.where(met, no_fma(b_Dk * b_decay), 0.0)
        b_pairs = b_Dk * mm(b_rows, tl.trans(b_k), None, OP, PRECISION)
        b_reads = mm(b_Dk, b_k, b_reads, OP, PRECISION)
        b_dk = mm(tl.trans(b_Dk * b_norm[:, None]), b_rows, b_dk, OP, PRECISION)
        b_column = tl.full((BT,), 1.0, tl.float32)
    else:
        b_Db, b_db, b_dk = b_D, b_writes * (unit * b_out)[:, None], b_writes
        b_column = norms.k * norms.beta
        b_write = tl.sum(b_c * b_db, axis=1) * b_column
        b_pairs = tl.zeros((2 * BT, BT), tl.float32)
    b_Db = tl.where(met, no_fma(b_Db * b_decay), 0.0)
    b_pairs = (b_pairs + b_Db * mm(b_rows, tl.trans(b_c), None, OP, PRECISION) * b_column[None, :]) * b_norm[:, None]
    b_da, b_dq = separate(mm(b_Db * b_column[None, :], b_c, b_reads, OP, PRECISION))
    b_db = mm(tl.trans(b_Db * b_norm[:, None]), b_rows, b_db, OP, PRECISION)
    store_token_tiles(b_da, b_dq, b_db, b_dk, tokens, norms, outputs, at, i_hv, heads, i_k, SIZES, FLAGS)
    if dg is not None:
        b_erased, b_queried = separate(tl.where(met, b_pairs, 0.0))
        b_early, b_late = separate(b_read_terms[:, None])
        b_early, b_late = tl.sum(b_early, axis=1), tl.sum(b_late, axis=1)
        if BEFORE:
            b_early = row_after(b_early)
            o_next = tl.arange(0, BT)[:, None] + 1
            b_next = tl.gather(b_erased, tl.broadcast_to(tl.minimum(o_next, BT - 1), (BT, BT)), 0)
            b_erased = tl.where(o_next < BT, b_next, 0.0)
        b_dg = interval_sum(b_erased + b_queried, BT, EXACT)
        b_dg += state_gate_gradient(b_early + b_late, b_write, carried * total, BT)
        b_dx, _ = log_gate_bwd(b_x, b_dg, gate, i_hv, 0, FLAGS.CLAMPED, GATE, "given", K, BK)
        store_token_scalars(dg + i_k * s_dg[0], s_dg[1:], at, i_hv, b_dx, BT)
