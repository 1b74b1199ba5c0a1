"""`low_rank_prepare` in Triton: one program per chunk and value head.

A gate per token, or none, is read as a gate per channel: its strides along the channels, and without a gate along all
dimensions, are zero. Results are those that `low_rank_scan` reads. It computes the output as

    o = scale ((q from the start) S + F (rows S) + P v)

so Q of the eager stage is not needed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import LowRankPrepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.eager import ONE_COLUMN
from wyfold.tile.columns.triton import (
    RowFactors,
    RowHeads,
    RuleRows,
    early_rows,
    erased_columns,
    erasing_row,
    erasing_rows,
    load_rows,
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
from wyfold.tile.decay.triton import FLOOR, Gate, as_channels
from wyfold.tile.dot.triton import contracts, exact, mm, mm_exact, operand, precision, right_operand, workspace
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    stack,
    store_tile,
    store_tokens,
    store_upper,
    strides,
    unstack,
)
from wyfold.tile.index.triton.strength import Strength, load_strength
from wyfold.tile.inverse.triton import inverse_transposed


def prepare(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    backward: bool,
    clear: bool,
) -> LowRankPrepared:
    """Compute the factors of every chunk from the caller's tensors.

    Args:
        rows, gate, strength: Kernel arguments of the call, from `call_arguments`.
        grid: The call's chunk grid.
        options: Uses `qk_l2norm`, `activation`, `chunk_size`, `rule`.
        o: [B, T, HV, V] output of the call; only tokens past a packed batch's last boundary are written, with zeros.
        backward: Whether `low_rank_scan_bwd` will read these.
        clear: Whether o is written at all; if not, any tensor of its shape may be passed.
    """
    (H, K), (HV, V), C = rows.q.shape[2:], o.shape[2:], grid.chunk_size
    tiles, whole = grid.chunks * HV, tile_width(K)
    found = empty(rows.q, options.rule, tiles, C, backward=backward)
    if clear and backward and grid.cu is not None:
        # A registered operator must not return uninitialised memory, and not every tile of a packed batch is written.
        for x in found:
            if x is not None:
                x.zero_()
    config = tuned("low_rank_prepare.triton", launch_key(rows.q.dtype, K, V, C), rows.q.device)
    BK, BE = min(whole, config.blocks["BK"]), right_operand(whole, config.blocks["BE"], rows.q.dtype)
    launch_kernel(
        wyfold_low_rank_prepare_triton,
        tiles,
        tokens=rows,
        gate=gate,
        strength=strength,
        # A runtime argument selects what is stored, so that both directions share one compiled kernel.
        factors=found if backward else found._replace(A=found.F, R=found.P),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        o=o,
        s_o=o.stride(),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        backward=int(backward),
        SIZES=Sizes(
            H=H, HV=HV, HB=HV if rows.b is None else rows.b.shape[2], K=K, V=V, BT=C, BK=BK, BE=BE, BV=tile_width(V),
            WARPS=config.warps, STAGES=config.stages,
        ),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            RULE=options.rule,
            ACTIVATION=options.activation,
            NORM=options.qk_l2norm,
            OP=operand(rows.q.dtype),
            PRECISION=precision(rows.q.dtype),
            EXACT=exact(rows.q.dtype),
        ),
        **config.options(contract=contracts(rows.q.dtype)),
    )  # fmt: skip
    return found


def call_arguments(
    tokens: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    heads: int,
    options: DeltaOptions,
) -> tuple[RuleRows, Gate, Strength]:
    """Kernel arguments that several stages take.

    Args:
        tokens: q, k, a and b.
        g: [B, T, HV] or [B, T, HV, K] gate of the call; None without a gate.
        beta: [B, T, HV] write strength of the call; None for 1.
        A_log, dt_bias: Gate parameters or None.
        heads: HV.
        options: Uses `lower_bound`, `clamp`.
    """
    q, k, a, b = tokens
    g = as_channels(g, q, heads)
    rows = RuleRows(q, q.stride(), k, k.stride(), a, strides(a), b, strides(b))
    gate = Gate(g, g.stride(), A_log, dt_bias, options.lower_bound, options.clamp or FLOOR)
    return rows, gate, Strength(beta=beta, s_beta=strides(beta), most=1.0)


def empty(q: Tensor, rule: str, tiles: int, chunk_size: int, *, backward: bool) -> LowRankPrepared:
    """Allocate the factors of `tiles` tiles without writing them; sizes depend on metadata alone."""
    C, K, stored, two = chunk_size, q.shape[-1], workspace(q.dtype), rule not in ONE_COLUMN
    rows, upper = (tiles, C, K), (tiles, 3, C // 2, C // 2)
    return LowRankPrepared(
        rows=q.new_empty(rows, dtype=stored),
        q=q.new_empty(rows, dtype=stored),
        E=q.new_empty(rows, dtype=stored),
        K=q.new_empty(rows, dtype=stored) if two else None,
        total=q.new_empty(tiles, K, dtype=torch.float32),
        F=q.new_empty(upper, dtype=stored),
        P=q.new_empty(upper, dtype=stored) if two else None,
        A=q.new_empty(upper, dtype=stored) if backward else None,
        R=q.new_empty(upper, dtype=stored) if backward and two else None,
    )


def launch_key(dtype: torch.dtype, K: int, V: int, chunk_size: int) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(dtype_word(dtype), K, V, C=chunk_size)


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles.

    Attributes:
        H, HV, HB, K, V, BT: Sizes of the call and of a chunk; HB heads of b.
        BK, BE: Columns of a slice of K, for the grams and for E and K.
        BV: Width of a row of the output.
        WARPS, STAGES: Warps of a program, and slices in flight.
    """

    H: int
    HV: int
    HB: int
    K: int
    V: int
    BT: int
    BK: int
    BE: int
    BV: int
    WARPS: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        RULE: How rows and columns are made; see `tile.columns`.
        ACTIVATION: The gate's activation.
        NORM: Whether q, k and a are normalised.
        OP, PRECISION, EXACT: Dtype and precision of products.
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    NORM: bool
    OP: Any
    PRECISION: Any
    EXACT: str


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
    for column in tl.range(0, K, BK, num_stages=STAGES):
        sums = load_chunk_sums(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BK, OP)
        b_p = to_loaded_layout(since_anchor(sums, 0), factors.total, opaque_zero)
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
        b_rows = stack(b_a, b_q)
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
            b_rows = stack(b_a, b_q)
            b_c = erased_columns(tokens, at, heads, norms, again, 0, RULE, SIZES, BK, 0) * b_column
            b_APb = _add_grams(b_APb, b_rows, b_c, OP, PRECISION)
            if TWO:
                b_c = load_rows(tokens.k, tokens.s_k, at, heads.k, again, 0, K, BT, BK, 0) * b_column
                b_APk = _add_grams(b_APk, b_rows, b_c, OP, PRECISION)

    o_r, o_s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_L, b_P = unstack(b_APb)
    b_L = -_erasing_gram(b_L, BEFORE)
    b_PbT = tl.trans(tl.where(o_s <= o_r, b_P, 0.0))
    # Only substitution reads the first, no tile product.
    b_AT = inverse_transposed(b_L, tl.trans(b_L), BT, EXACT, SIZES.WARPS)
    store_upper(factors.F, i_tile, mm_exact(b_AT, b_PbT, None, EXACT), BT)
    if backward:
        store_upper(factors.A, i_tile, b_AT, BT)
    b_rows = b_AT
    if TWO:
        b_J, b_P = unstack(b_APk)
        b_RT = mm_exact(tl.trans(_erasing_gram(b_J, BEFORE)), b_AT, None, EXACT)
        b_PkT = tl.trans(tl.where(o_s <= o_r, b_P, 0.0))
        store_upper(factors.P, i_tile, mm_exact(b_RT, b_PbT, b_PkT, EXACT), BT)
        if backward:
            store_upper(factors.R, i_tile, b_RT, BT)
        b_rows = stack(b_AT, b_RT)

    for column in tl.range(0, K, BE, num_stages=STAGES):
        sums = load_chunk_sums(gate, at, i_hv, column, opaque_zero, ACTIVATION, K, BT, BE, OP)
        b_out = tl.exp2(to_loaded_layout(chunk_rest(sums), factors.total, opaque_zero))
        b_c = erased_columns(tokens, at, heads, norms, column, 0, RULE, SIZES, BE, 0) * b_out
        b_E = mm_exact(b_rows, b_c, None, EXACT)
        if TWO:
            b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, 0, K, BT, BE, 0) * b_out
            b_E, b_K = unstack(b_E)
            store_tile(factors.K, i_tile, 0, column, b_K + b_k, BT, K, BT, BE)
        store_tile(factors.E, i_tile, 0, column, b_E, BT, K, BT, BE)


@triton.jit
def _add_grams(b_gram, b_rows, b_c, OP: tl.constexpr, PRECISION: tl.constexpr):
    """Add some channels to the grams of rows with columns, given with their factors.   [2 BT, BT], [r, s]"""
    b_rows, b_c = gram_operand(b_rows, OP, PRECISION), gram_operand(b_c, OP, PRECISION)
    return mm(b_rows, tl.trans(b_c), b_gram, tl.float32, PRECISION)


@triton.jit
def _erasing_gram(b_A, BEFORE: tl.constexpr):
    """Gram of the erasing rows, strictly lower.   [BT, BT]

    Rows that were loaded one token early are moved to their place.
    """
    BT: tl.constexpr = b_A.shape[0]
    o_r, o_s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    if BEFORE:
        b_A = tl.gather(b_A, tl.broadcast_to(tl.maximum(o_r - 1, 0), (BT, BT)), 0)
    return tl.where(o_s < o_r, b_A, 0.0)


@triton.jit
def row_factors(tokens, at, heads, strength, i_hv, SIZES: tl.constexpr, NORM: tl.constexpr, BEFORE: tl.constexpr):
    """Reciprocal norms and write strengths of a chunk's rows."""
    BT: tl.constexpr = SIZES.BT
    b_beta = load_strength(strength, at, i_hv, False, BT)
    if NORM:
        b_rk = _reciprocal_norms(tokens.k, tokens.s_k, at, heads.k, SIZES)
        b_ra = b_rk
        if tokens.a is not None:
            b_ra = _reciprocal_norms(tokens.a, tokens.s_a, at, heads.k, SIZES)
        b_early = b_ra
        if BEFORE:
            b_early = tl.gather(b_ra, tl.minimum(tl.arange(0, BT) + 1, BT - 1), 0)
        return RowFactors(_reciprocal_norms(tokens.q, tokens.s_q, at, heads.k, SIZES), b_rk, b_ra, b_early, b_beta)
    else:
        ones = tl.full((BT,), 1.0, tl.float32)
        return RowFactors(ones, ones, ones, ones, b_beta)


@triton.jit
def _reciprocal_norms(p, s, at, h, SIZES: tl.constexpr):
    """(sum x^2 + 1e-6)^(-1/2) of rows.   [BT]"""
    BT: tl.constexpr = SIZES.BT
    b_xx = tl.zeros((BT,), tl.float32)
    for column in range(0, SIZES.K, 64):
        b_x = load_rows(p, s, at, h, column, 0, SIZES.K, BT, 64, 0)
        b_xx += tl.sum(b_x * b_x, axis=1)
    return tl.rsqrt(b_xx + 1e-6)
