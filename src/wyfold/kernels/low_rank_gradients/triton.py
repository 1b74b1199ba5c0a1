"""`low_rank_gradients` in Triton: one program per chunk and value head.

With a norm or grouped heads, `_unload` applies their adjoints to float32 gradients of every value head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.low_rank_prepare.triton import row_factors
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import (
    RowHeads,
    RuleRows,
    Values,
    early_rows,
    erased_columns,
    erasing_rows,
    keys_bwd,
    load_rows,
    scale_rows,
)
from wyfold.tile.decay.channel.triton import sub_chunk_gate
from wyfold.tile.decay.channel.triton.adjoint import sum_over, sums_inside
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
from wyfold.tile.decay.channel.triton.near_pairs import sub_chunk_row
from wyfold.tile.decay.triton import NEAR, Gate
from wyfold.tile.decay.triton.gradient import (
    GateGradient,
    channel_gradient,
    log_gate_bwd,
    store_gate_gradient,
    sum_channels,
)
from wyfold.tile.dot.triton import contracts, mm, no_fma, operand, precision, right_operand
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_tile,
    store_token_scalars,
    store_tokens,
    strides,
)
from wyfold.tile.index.triton.strength import Strength
from wyfold.tile.index.triton.sub_chunks import store_token_sub_chunks
from wyfold.tile.norm.eager import l2norm, l2norm_bwd


def gradients(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    tokens: Any,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter, but those of values, which `low_rank_scan_bwd` writes.

    Args:
        rows, gate, strength: As given to `low_rank_prepare`.
        tokens: The tensors of the call, `DeltaTensors`.
        do: [B, T, HV, V] gradient of the output, any strides.
        borders: From `low_rank_scan_bwd`.
        grid: The call's chunk grid.
        options: As given to `low_rank_prepare`.
        key: Launch configuration key.
        out: Receives the gradients; tokens past a packed batch's last boundary get zeros. None where a gradient is not
            requested.
    """
    q, (B, T, HV, V), K, C = rows.q, do.shape, rows.q.shape[3], grid.chunk_size
    config = tuned("low_rank_gradients.triton", key, q.device)
    BK, BV = (right_operand(tile_width(W), config.blocks[name], q.dtype) for name, W in (("BK", K), ("BV", V)))
    tiles = grid.chunks * HV
    whole = {"q": out.q, "k": out.k, "a": out.a}
    direct = not options.qk_l2norm and HV == q.shape[2]
    found = {
        name: x if x is None or direct else x.new_empty(B, T, HV, K, dtype=torch.float32) for name, x in whole.items()
    }
    db = out.b
    if db is not None and db.shape[2] != HV:
        db = found["b"] = db.new_empty(B, T, HV, K, dtype=torch.float32)
    slices, dbeta = -(-K // BK), None
    dA_log = ddt_bias = None
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, slices, dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K, dtype=torch.float32)
    if out.beta is not None:
        dbeta = q.new_empty(slices, B, T, HV, dtype=torch.float32)
    dg = channel_gradient(out.g, q)
    launch_kernel(
        wyfold_low_rank_gradients_triton,
        tiles * slices,
        tokens=rows,
        values=Values(v=tokens.v, s_v=tokens.v.stride(), w=tokens.w, s_w=strides(tokens.w)),
        do=do,
        s_do=do.stride(),
        borders=borders,
        gate=gate,
        strength=strength,
        outputs=Outputs(
            q=found["q"],
            s_q=strides(found["q"]),
            k=found["k"],
            s_k=strides(found["k"]),
            a=found["a"],
            s_a=strides(found["a"]),
            b=db,
            s_b=strides(db),
            beta=dbeta,
            s_beta=None if dbeta is None else dbeta.stride()[1:],
            s_slice=None if dbeta is None else dbeta.stride(0),
        ),
        dgate=GateGradient(g=dg, s_g=strides(dg), A_log=dA_log, dt_bias=ddt_bias),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        scale=options.scale,
        unit=options.unit,
        N=grid.sequences,
        T=T,
        per_sequence=grid.per_sequence,
        SIZES=Sizes(H=q.shape[2], HV=HV, HB=HV if rows.b is None else rows.b.shape[2], K=K, V=V, BT=C, BK=BK, BV=BV),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            RULE=options.rule,
            ACTIVATION=options.activation,
            CLAMPED=options.clamp != 0,
            NORM=options.qk_l2norm,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
        ),
        # One warp per sub-chunk.
        **{**config.options(contract=contracts(q.dtype)), "num_warps": C // NEAR.value},
    )
    sum_channels(dg, out.g)
    if out.beta is not None and dbeta is not None:
        out.beta.copy_(dbeta.sum(0))
    if out.A_log is not None and dA_log is not None:
        out.A_log.copy_(dA_log.sum((0, 2)).view_as(out.A_log))
    if out.dt_bias is not None and ddt_bias is not None:
        out.dt_bias.copy_(ddt_bias.sum(0).view_as(out.dt_bias))
    for name, dx in found.items():
        given, gradient = getattr(tokens, name), getattr(out, name)
        if dx is not None and dx is not gradient:
            _unload(dx, given if options.qk_l2norm else None, grid, gradient)


def _unload(found: Tensor, given: Tensor | None, grid: ChunkGrid, out: Tensor) -> None:
    """Apply the adjoints of norm and grouped heads, and write a token's gradient.

    Args:
        found: [B, T, HV, K] gradient for every value head.
        given: [B, T, H, K] rows as the caller gave them, which were normalised; None if they were not.
        grid: The call's chunk grid.
        out: [B, T, H, K] written.
    """
    found = found.unflatten(2, (out.shape[2], -1)).sum(3)
    if given is not None:
        y, r = l2norm(given.to(found.dtype))
        found = l2norm_bwd(y, r, found)
        if grid.cu is not None:  # tokens past the last boundary may hold anything
            used = torch.arange(found.shape[1], device=found.device) < grid.cu[grid.sequences]
            found = torch.where(used[:, None, None], found, 0.0)
    out.copy_(found)


class Outputs(NamedTuple):
    """Kernel argument: receives gradients of tokens, each with its strides; None where one is not requested."""

    q: Any
    s_q: Any
    k: Any
    s_k: Any
    a: Any
    s_a: Any
    b: Any
    s_b: Any
    beta: Any
    s_beta: Any
    s_slice: Any
    end: None = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles; HB heads of b."""

    H: int
    HV: int
    HB: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        RULE: How rows and columns are made; see `tile.columns`.
        ACTIVATION, CLAMPED: The gate's activation, and whether a clamp is requested.
        NORM: Whether q, k and a are normalised.
        OP, PRECISION: Dtype and precision of products.
    """

    PACKED: bool
    RULE: str
    ACTIVATION: str
    CLAMPED: bool
    NORM: bool
    OP: Any
    PRECISION: Any


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
            _clear(outputs, dgate, i_tile, at, i_hv, i_k, opaque_zero, SIZES)
            return
    early = early_rows(at, BEFORE)
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, BEFORE)
    first: tl.constexpr = 1 if BEFORE else 0
    memory = LoadedLayout(borders.S.to(tl.pointer_type(tl.float32), bitcast=True), opaque_zero)
    # Erasing rows and queries, and the written values of both columns, are one operand of 2 BT rows.
    b_reads, b_writes = tl.zeros((2 * BT, BK), tl.float32), tl.zeros((2 * BT, BK), tl.float32)
    b_D = tl.zeros((2 * BT, 2 * BT), tl.float32)
    b_carried = tl.zeros((BK,), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        b_S = load_tile(borders.S, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
        b_dS = load_tile(borders.dS, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
        b_XO = _load_reads(borders.X, do, s_do, i_tile, at, i_hv, i_v * BV, first, V, BT, BV)
        b_WV = _load_writes(borders.e, values, i_tile, at, i_hv, i_v * BV, TWO, V, BT, BV)
        b_reads = mm(b_XO, b_S, b_reads, OP, PRECISION)
        b_writes = mm(b_WV, b_dS, b_writes, OP, PRECISION)
        b_D = mm(b_XO, tl.trans(b_WV), b_D, OP, PRECISION)
        b_carried += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)
    grams = _met(b_D, BEFORE, OP, PRECISION)
    i_n = tl.arange(0, NB)
    column = i_k * BK
    place = Place(i_tile, at, early, i_hv, heads, i_k, column)
    b_x = load_rows(gate.g, gate.s_g, at, i_hv, column, opaque_zero, K, BT, BK, NEAR)
    sums = chunk_sums(sub_chunk_gate(b_x, gate, i_hv, column, n_rows, ACTIVATION, K), OP)
    columns = _load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES, FLAGS)
    b_out = tl.exp2(rest_of(sums)) * unit
    b_db, b_dk = separate_sub_chunks(b_writes, memory)
    b_db, b_dk = b_db * b_out, b_dk * b_out
    b_written = columns[0] * b_db
    if TWO:
        b_written = tl.fma(columns[1], b_dk, b_written)
    b_over = b_carried[None, :] * tl.exp2(total_of(sums)) * unit
    b_over += sum_over(tl.sum(b_written, axis=1), i_n * 0, i_n, NB)
    anchors = number_of_anchors(sums)
    if anchors == 1:
        b_row, b_column = anchored(since_anchor(sums.rows, 0), 0, "nearest")
        scaled = scaled_columns(columns, b_column, OP, PRECISION)
        rows = _load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES, FLAGS)
        rows = scaled_rows(rows, b_row, unit, scale, OP, PRECISION)
        found = grams_bwd(rows, scaled, grams, b_reads, memory, OP, PRECISION)
        found = ChunkGradients(
            found.a, found.q, b_db + no_fma(found.b), b_dk + no_fma(found.k), found.terms, found.undecayed
        )
        _store(
            found, b_written, b_over, b_x, tokens, norms, gate, outputs, dgate, place, unit, opaque_zero, SIZES, FLAGS
        )
    else:
        # Apart, so that the common case keeps nothing in registers for it.
        none = tl.zeros_like(b_db)
        found = ChunkGradients(none, none, b_db, b_dk, none, none)
        for anchor in range(anchors):
            b_row, b_column = anchored(since_anchor(sums.rows, anchor), anchor, "nearest")
            again = _load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES, FLAGS)
            scaled = scaled_columns(again, b_column, OP, PRECISION)
            rows = _load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES, FLAGS)
            rows = scaled_rows(rows, b_row, unit, scale, OP, PRECISION)
            more = grams_bwd(rows, scaled, grams, b_reads, memory, OP, PRECISION)
            b_undecayed = tl.where(anchor == 0, more.undecayed, found.undecayed)
            found = ChunkGradients(
                found.a + no_fma(more.a), found.q + no_fma(more.q), found.b + no_fma(more.b),
                found.k + no_fma(more.k), found.terms + more.terms, b_undecayed,
            )  # fmt: skip
            b_reads = tl.zeros_like(b_reads)
        _store(
            found, b_written, b_over, b_x, tokens, norms, gate, outputs, dgate, place, unit, opaque_zero, SIZES, FLAGS
        )


class Place(NamedTuple):
    """Where a program's gradients belong, inside kernels: tile, tokens, those of the erasing rows, heads, channels."""

    i_tile: Any
    at: Any
    early: Any
    i_hv: Any
    heads: Any
    i_k: Any
    column: Any


@triton.jit
def _store(
    found, b_written, b_over, b_x, tokens, norms, gate, outputs, dgate, place, unit, opaque_zero,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Store a chunk's gradients: `ChunkGradients`, and that of the gate from its terms.

    Args:
        b_written: [NB, NEAR, BK] terms of the gate's gradient that belong to all later rows.
        b_over: [NB, BK] terms that belong to all rows of a sub-chunk, but for those of found.
        b_x: [NB, NEAR, BK] the gate as it was given.
    """
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    NB: tl.constexpr = BT // NEAR
    TWO: tl.constexpr = FLAGS.RULE == "given"
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    CLAMPED: tl.constexpr = FLAGS.CLAMPED
    i_n = tl.arange(0, NB)
    at, i_hv, column = place.at, place.i_hv, place.column
    b_over += sum_over(tl.sum(found.terms, axis=1), i_n + 1, i_n * 0 + NB, NB)
    b_dg = sums_inside(found.terms, b_written, b_over)
    b_da, b_db, b_dk = found.a, found.b, found.k
    if FLAGS.RULE != "keys" and outputs.a is not None:
        # The last early row is the chunk's first token, which reads undecayed, and reads no row of the chunk.
        o_n, o_k = tl.arange(0, NB)[:, None], (place.i_k * BK + tl.arange(0, BK))[None, :]
        p_first = outputs.a + at.b * outputs.s_a[0] + at.t * outputs.s_a[1] + i_hv * outputs.s_a[2]
        b_first = sub_chunk_row(found.undecayed, NEAR - 1) * unit
        if not TWO:
            b_first = -b_first  # a is minus the erasing row
        p_first += o_n * 0 + o_k.to(tl.int64) * outputs.s_a[3]
        tl.store(p_first, b_first.to(p_first.dtype.element_ty), mask=(o_n == NB - 1) & (o_k < K) & (at.rows > 0))
    if not TWO:
        b_dk, b_da, b_db, b_beta = keys_bwd(
            tokens, at, place.heads, norms, column, opaque_zero, b_da, b_db, SIZES, NEAR
        )
        if outputs.beta is not None:
            p_beta = outputs.beta + place.i_k * outputs.s_slice
            store_token_scalars(p_beta, outputs.s_beta, at, i_hv, tl.sum(b_beta, axis=2).reshape(BT), BT)
    if outputs.b is not None:
        store_token_sub_chunks(outputs.b, outputs.s_b, at, i_hv, column, b_db, opaque_zero, K)
    if outputs.k is not None:
        store_token_sub_chunks(outputs.k, outputs.s_k, at, i_hv, column, b_dk, opaque_zero, K)
    if outputs.q is not None:
        store_token_sub_chunks(outputs.q, outputs.s_q, at, i_hv, column, found.q, opaque_zero, K)
    if outputs.a is not None:
        store_token_sub_chunks(outputs.a, outputs.s_a, place.early, i_hv, column, b_da, opaque_zero, K)
    b_dx, b_dA = log_gate_bwd(b_x, b_dg, gate, i_hv, column, CLAMPED, "channel", ACTIVATION, K, BK)
    store_gate_gradient(dgate, place.i_tile, at, i_hv, column, b_dx, b_dA, opaque_zero, "channel", K)


@triton.jit
def _load_columns(tokens, at, heads, norms, column, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Load the columns of a chunk, for some channels; the second are zero if there is one kind."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    RULE: tl.constexpr = FLAGS.RULE
    b_b = erased_columns(tokens, at, heads, norms, column, opaque_zero, RULE, SIZES, BK, NEAR)
    b_k = tl.zeros_like(b_b)
    if RULE == "given":
        b_k = load_rows(tokens.k, tokens.s_k, at, heads.k, column, opaque_zero, K, BT, BK, NEAR)
    return b_b, b_k


@triton.jit
def _load_reading(tokens, at, early, heads, norms, column, opaque_zero, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Load the erasing rows and queries of a chunk, for some channels."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    RULE: tl.constexpr = FLAGS.RULE
    b_q = load_rows(tokens.q, tokens.s_q, at, heads.k, column, opaque_zero, K, BT, BK, NEAR)
    if FLAGS.NORM:
        b_q = scale_rows(b_q, norms.q)
    b_a = erasing_rows(tokens, early, heads, norms.early, column, opaque_zero, RULE, SIZES, BK, NEAR)
    return b_a, b_q


@triton.jit
def _load_reads(
    p_X, p_do, s_do, i_tile, at, h, column, first: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    """Rows of X from row `first` on, then the rows before it, interleaved with the rows of do.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p = p_X + i_tile.to(tl.int64) * (BT * V) + ((o_r + first) % BT * V)[:, None] + o_v[None, :]
    b_X = tl.load(p, mask=(kind == 0)[:, None] & (o_v < V)[None, :], other=0.0)
    return _load_second(p_do, s_do, at, h, column, b_X, V, BT, BV)


@triton.jit
def _load_writes(
    p_W, values, i_tile, at, h, column, TWO: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    """The rows of W, interleaved with those of the written values if they go along another column.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p = p_W + i_tile.to(tl.int64) * (BT * V) + (o_r * V)[:, None] + o_v[None, :]
    b_W = tl.load(p, mask=(kind == 0)[:, None] & (o_v < V)[None, :], other=0.0)
    if not TWO:
        return b_W
    elif values.w is None:
        return _load_second(values.v, values.s_v, at, h, column, b_W, V, BT, BV)
    else:
        none = tl.zeros((2 * BT, BV), tl.float32)
        b_v = _load_second(values.v, values.s_v, at, h, column, none, V, BT, BV)
        return b_W.to(tl.float32) + b_v * _load_second(values.w, values.s_w, at, h, column, none, V, BT, BV)


@triton.jit
def _load_second(p, s, at, h, column, b_x, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Load token rows into the second kind of rows of an interleaved b_x, which are zero there.   [2 BT, BV]"""
    o_r, kind = interleaved_rows(BT)
    o_v = column + tl.arange(0, BV)
    p_first = p + at.b * s[0] + at.t * s[1] + h * s[2]
    p_x = p_first + o_r.to(tl.int64)[:, None] * s[1] + o_v.to(tl.int64)[None, :] * s[3]
    mask = ((kind == 1) & (o_r < at.rows))[:, None] & (o_v < V)[None, :]
    if b_x.dtype == p.dtype.element_ty:
        return tl.load(p_x, mask=mask, other=b_x)
    else:
        return b_x.to(tl.float32) + tl.load(p_x, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _met(b_D, BEFORE: tl.constexpr, OP: tl.constexpr, PRECISION: tl.constexpr):
    """`GramGradients` of all pairs [2 BT, 2 BT] that meet."""
    BT: tl.constexpr = b_D.shape[0] // 2
    o_r, kind = interleaved_rows(BT)
    o_r, o_s, query = o_r[:, None], o_r[None, :], (kind == 1)[:, None]
    if BEFORE:  # the last erasing row is the chunk's first token, which reads no row of the chunk
        far, own = (o_s < o_r) & (query | (o_r != BT - 1)), (o_s == o_r) & (query | (o_r != BT - 1))
    else:  # rows read before their own write
        far, own = o_s < o_r, (o_s == o_r) & query
    b_far = operand_of(tl.where(far, b_D, 0.0), OP, PRECISION)
    return GramGradients(b_far, operand_of(tl.where(own, b_D, 0.0), OP, PRECISION))


@triton.jit
def _clear(outputs, dgate, i_tile, at, h, i_k, opaque_zero, SIZES: tl.constexpr):
    """Zero the gradients of tokens past the last boundary, for some channels."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    zeros, column = tl.zeros((BT, BK), tl.float32), i_k * BK
    if outputs.q is not None:
        store_tokens(outputs.q, outputs.s_q, at, h, column, zeros, K)
    if outputs.k is not None:
        store_tokens(outputs.k, outputs.s_k, at, h, column, zeros, K)
    if outputs.a is not None:
        store_tokens(outputs.a, outputs.s_a, at, h, column, zeros, K)
    if outputs.b is not None:
        store_tokens(outputs.b, outputs.s_b, at, h, column, zeros, K)
    if outputs.beta is not None:
        store_token_scalars(outputs.beta + i_k * outputs.s_slice, outputs.s_beta, at, h, tl.sum(zeros, axis=1), BT)
    b_none = zeros.reshape(BT // NEAR, NEAR, BK)
    store_gate_gradient(dgate, i_tile, at, h, column, b_none, b_none, opaque_zero, "channel", K)
