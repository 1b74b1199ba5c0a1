"""The kernel of `scan` in Triton."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import TokenRows, load_upper, load_vector, sequence_span, store_tokens
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block
from wyfold.tile.index.triton.slots import segment_coords, slot_coords
from wyfold.tile.state.triton import StateAt, advance, load_end, read, residual, store_state


@triton.jit(
    do_not_specialize=["N", "shift", "s_source", "s_target", "slots", "pad", "T", "per_sequence", "scale", "every"]
)
def wyfold_scan_triton(
    x_q,
    x_k,
    x_v,
    x_rows,
    x_total,
    x_E,
    x_o,
    tokens,
    states,
    segments,
    pool,
    packing,
    N,
    shift,
    s_source,
    s_target,
    slots,
    pad,
    T,
    per_sequence,
    scale,
    every,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program owns BV value rows of one state; the tiles of a head are neighbours, so that they share k and q in
    L2.

    i_n is the program's sequence of the chunk grid: its number n, or selected[n] + shift. With segments, the grid's
    sequences are segments, and segments.sequence[i_n] is the sequence that segment i_n belongs to. States are indexed
    by sequence, or with slots by the sequence's slots. With both, only the leaving states are in slots.
    """
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    PACKED: tl.constexpr = FLAGS.PACKED
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    if segments.selected is not None:
        i_n = tl.load(segments.selected + i_n) + shift
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    begins, ends, i_border, i_from, i_to = True, True, i_n, i_n, i_n
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)
        i_from, i_to = i_n, i_n
    if slots is not None:
        if segments.sequence is None:
            i_from, begins, i_to, ends, live = slot_coords(
                i_n, pool.source, s_source, pool.target, s_target, pool.given, slots, pad
            )  # fmt: skip
        else:
            # States enter from S0 by sequence: a slot may be written before the first segment has read it.
            _, _, i_to, stored, live = slot_coords(
                tl.minimum(i_n, N - 1), pool.source, s_source, pool.target, s_target, None, slots, pad
            )  # fmt: skip
            ends = ends & stored
        if not live:
            # Zero the output here; the code below then sees no token.
            for row in range(0, length, BT):
                rows = tl.minimum(length - row, BT).to(tl.int32)
                store_tokens(
                    tokens.o, tokens.s_o, TokenRows(b, t + row, rows), i_hv, column, tl.zeros((BT, BV), tl.float32), V
                )
            length = length * 0
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    inputs = Inputs(x_q, x_k, x_v, x_rows, x_total, x_E)
    b_S = load_end(
        StateAt(states.S0, states.s_S0, i_from, begins),
        StateAt(segments.borders, segments.s_borders, i_border - 1, i_n < N),
        i_hv, column, K, V, BK, BV,
    )  # fmt: skip
    total = 0.0
    if not CHANNEL:
        total = tl.load(x_total + i_tile, mask=length > 0, other=0.0)
    for i in tl.range(0, steps, num_stages=STAGES):
        next_total = total
        if not CHANNEL:
            next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=length > (i + 1) * BT, other=0.0)
        b_S = _step(
            b_S, total, inputs, x_o, tokens, i_tile + i * HV,
            TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, USE_TMA,
        )  # fmt: skip
        total = next_total
        if states.kept is not None:
            if ((i + 1) % every == 0) & (length >= (i + 1) * BT):
                i_state = (i + 1) // every - 1 + tl.load(states.first_kept + i_n)
                store_state(states.kept, states.s_kept, i_state, i_hv, column, b_S, K, V, BK, BV)
    if USE_TMA:
        if steps * BT < length:
            b_S = _step(
                b_S, total, inputs, x_o, tokens, i_tile + steps * HV,
                TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, False,
            )  # fmt: skip
    if states.ST is not None:
        if ends:
            store_state(states.ST, states.s_ST, i_to, i_hv, column, b_S, K, V, BK, BV)


class Inputs(NamedTuple):
    """Descriptors of what a chunk's step reads, or pointers without TMA: q, k and v, and the tiles of `prepare`."""

    q: Any
    k: Any
    v: Any
    rows: Any
    total: Any
    E: Any


@triton.jit
def _step(
    b_S,
    total,
    inputs,
    x_o,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    scale,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write a chunk's output; return the state leaving it. FULL: all its rows are tokens."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    CHANNEL: tl.constexpr = FLAGS.CHANNEL
    FOLDED: tl.constexpr = FLAGS.FOLDED
    USE_TMA: tl.constexpr = FLAGS.USE_TMA
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_k, b_Sk = None, None
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
        if inputs.k is not None:
            b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_v = load_token_block(inputs.v, tokens.s_v, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)

    if b_k is not None:
        b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    # Loaded after the product with the most live registers, which these numbers would double.
    b_in_k, b_in_q, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    b_R = residual(b_v, b_Sk, b_in_k)
    if FOLDED:
        b_R = b_R * b_beta[None, :]
    b_y = b_R.to(OP)
    b_o = read(b_S, b_q, b_y, b_FT, b_in_q, OP, PRECISION) * scale
    if USE_TMA and FULL:
        x_o.store(
            [(at.b * at.T + at.t).to(tl.int32), (i_hv * tokens.s_o[2]).to(tl.int32) + column],
            tl.trans(b_o.to(x_o.dtype)),
        )
    else:
        store_tokens(tokens.o, tokens.s_o, at, i_hv, column, tl.trans(b_o), V)
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, b_y, b_E, OP, PRECISION)
    else:
        b_WT = load_upper(tokens.W, i_tile, BT)
        b_e = mm(b_y, b_WT, None, OP, PRECISION)
        return advance(b_S, total, b_e * b_out[None, :], b_k, OP, PRECISION)
