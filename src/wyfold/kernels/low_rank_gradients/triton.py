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
from wyfold.tile.columns.eager import ONE_COLUMN
from wyfold.tile.columns.triton import (
    RowHeads,
    RuleRows,
    Values,
    early_rows,
    erased_columns,
    erasing_rows,
    keys_bwd,
    load_rows,
    load_values,
)
from wyfold.tile.decay.channel.triton import sub_chunk_gate
from wyfold.tile.decay.channel.triton.adjoint import (
    PairMemory,
    PairRows,
    column_bwd,
    reads_bwd,
    sums_inside,
    to_near_rows,
)
from wyfold.tile.decay.channel.triton.near_pairs import store_near_pairs, sub_chunk_row
from wyfold.tile.decay.triton import NEAR, Gate
from wyfold.tile.decay.triton.gradient import (
    GateGradient,
    channel_gradient,
    log_gate_bwd,
    store_gate_gradient,
    sum_channels,
)
from wyfold.tile.dot.triton import contracts, mm, operand, precision, right_operand, workspace
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_tile,
    stack,
    store_tile,
    store_token_scalars,
    store_tokens,
    strides,
    unstack,
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
    two, tiles = options.rule not in ONE_COLUMN, grid.chunks * HV
    whole = {"q": out.q, "k": out.k, "a": out.a}
    direct = not options.qk_l2norm and HV == q.shape[2]
    found = {
        name: x if x is None or direct else x.new_empty(B, T, HV, K, dtype=torch.float32) for name, x in whole.items()
    }
    db = out.b
    if db is not None and db.shape[2] != HV:
        db = found["b"] = db.new_empty(B, T, HV, K, dtype=torch.float32)
    dA_log = ddt_bias = None
    if out.A_log is not None:
        dA_log = q.new_empty(grid.chunks, HV, -(-K // BK), dtype=torch.float32)
    if out.dt_bias is not None:
        ddt_bias = q.new_empty(grid.chunks, HV, K, dtype=torch.float32)
    dg = channel_gradient(out.g, q)
    launch_kernel(
        wyfold_low_rank_gradients_triton,
        tiles,
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
            beta=out.beta,
            s_beta=strides(out.beta),
        ),
        dgate=GateGradient(g=dg, s_g=strides(dg), A_log=dA_log, dt_bias=ddt_bias),
        pairs=q.new_empty(tiles * (1 + two), 3, C, C, dtype=workspace(q.dtype)),
        near=q.new_empty(tiles * (1 + two), C, NEAR, 2, dtype=torch.float32),
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
    tokens, values, do, s_do, borders, gate, strength, outputs, dgate, pairs, near, packing, scale, unit, N, T,
    per_sequence, SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of the rows, columns and gates of a chunk of one value head."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    RULE: tl.constexpr = FLAGS.RULE
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    TWO: tl.constexpr = FLAGS.RULE == "given"
    ACTIVATION: tl.constexpr = FLAGS.ACTIVATION
    CLAMPED: tl.constexpr = FLAGS.CLAMPED
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    NB: tl.constexpr = BT // NEAR
    WRITES: tl.constexpr = 2 if FLAGS.RULE == "given" else 1
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_hv = i_tile // HV, i_tile % HV
    heads = RowHeads(i_hv // (HV // SIZES.H), i_hv // (HV // SIZES.HB))
    i_n, _, b, t, n_rows = chunk_span(i_c, packing, T, per_sequence, FLAGS.PACKED, BT)
    at = TokenRows(b, t, n_rows, T)
    opaque_zero = tl.minimum(T, 0)
    if FLAGS.PACKED:
        if i_n == N:
            for i_k in tl.static_range((K + BK - 1) // BK):
                _clear(outputs, dgate, i_tile, at, i_hv, i_k * BK, opaque_zero, SIZES)
            return
    early = early_rows(at, BEFORE)
    norms = row_factors(tokens, at, heads, strength, i_hv, SIZES, FLAGS.NORM, BEFORE)
    first: tl.constexpr = 1 if BEFORE else 0
    _pair_gradients(
        values, do, s_do, borders, PairMemory(pairs, near, i_tile, opaque_zero), at, i_hv,
        Factors(scale, unit), SIZES, FLAGS,
    )  # fmt: skip
    tl.debug_barrier()  # other threads may load what a thread stored

    b_dbeta = tl.zeros((NB, NEAR), tl.float32)
    for i_k in range((K + BK - 1) // BK):
        # Erasing rows and queries, and the written values of both columns, are one operand of 2 BT rows.
        b_reads, b_writes = tl.zeros((2 * BT, BK), tl.float32), tl.zeros((WRITES * BT, BK), tl.float32)
        b_carried = tl.zeros((BK,), tl.float32)
        for i_v in range((V + BV - 1) // BV):
            b_S = load_tile(borders.S, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
            b_dS = load_tile(borders.dS, i_tile, i_v * BV, i_k * BK, V, K, BV, BK)
            b_XO = _load_reads(borders.X, do, s_do, i_tile, at, i_hv, i_v * BV, first, V, BT, BV)
            b_reads = mm(b_XO, b_S, b_reads, OP, PRECISION)
            if TWO:
                b_writes = mm(
                    _load_writes(borders.e, values, i_tile, at, i_hv, i_v * BV, V, BT, BV),
                    b_dS,
                    b_writes,
                    OP,
                    PRECISION,
                )
            else:
                b_writes = mm(load_tile(borders.e, i_tile, 0, i_v * BV, BT, V, BT, BV), b_dS, b_writes, OP, PRECISION)
            b_carried += tl.sum(b_S.to(tl.float32) * b_dS.to(tl.float32), axis=0)
        b_q = load_rows(tokens.q, tokens.s_q, at, heads.k, i_k * BK, opaque_zero, K, BT, BK, NEAR)
        if FLAGS.NORM:
            b_q *= norms.q.reshape(NB, NEAR, 1)
        b_a = erasing_rows(tokens, early, heads, norms.early, i_k * BK, opaque_zero, RULE, SIZES, BK, NEAR)
        b_x = load_rows(gate.g, gate.s_g, at, i_hv, i_k * BK, opaque_zero, K, BT, BK, NEAR)
        b_gate = sub_chunk_gate(b_x, gate, i_hv, i_k * BK, n_rows, ACTIVATION, K)
        memory = PairMemory(pairs, near, i_tile, opaque_zero)
        b_da, b_dq = unstack(b_reads)
        b_da, b_dq = to_near_rows(b_da * unit, memory), to_near_rows(b_dq * scale, memory)
        if BEFORE and outputs.a is not None:
            # The last early row is the chunk's first token, which reads undecayed, and reads no row of the chunk.
            o_n, o_k = tl.arange(0, NB)[:, None], (i_k * BK + tl.arange(0, BK))[None, :]
            p_first = outputs.a + b * outputs.s_a[0] + t * outputs.s_a[1] + i_hv * outputs.s_a[2]
            b_first = sub_chunk_row(b_da, NEAR - 1)
            if not TWO:
                b_first = -b_first  # a is minus the erasing row
            p_first += o_n * 0 + o_k.to(tl.int64) * outputs.s_a[3]
            tl.store(p_first, b_first.to(p_first.dtype.element_ty), mask=(o_n == NB - 1) & (o_k < K) & (n_rows > 0))
        b_dq, b_da, b_over = reads_bwd(PairRows(b_q, b_a), b_gate, b_dq, b_da, b_carried * unit)
        if TWO:
            b_db, b_dk = unstack(b_writes)
            b_dg = sums_inside(tl.fma(b_q, b_dq, b_a * b_da), tl.zeros_like(b_q), b_over)
            # The bound hides the count, so that the compiler does not copy the body.
            for which in range(2 + opaque_zero):
                if which == 0:
                    b_c = load_rows(tokens.b, tokens.s_b, at, heads.b, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                else:
                    b_c = load_rows(tokens.k, tokens.s_k, at, heads.k, i_k * BK, opaque_zero, K, BT, BK, NEAR)
                memory = PairMemory(pairs, near, i_tile * 2 + which, opaque_zero)
                none = tl.zeros_like(b_q)
                b_dq_more, b_da_more, b_dc, b_dg_more = column_bwd(
                    PairRows(b_q, b_a, b_c), b_gate, memory, none, none, tl.zeros_like(b_over),
                    tl.where(which == 0, b_db, b_dk) * unit, OP, PRECISION,
                )  # fmt: skip
                b_dq, b_da, b_dg = b_dq + b_dq_more, b_da + b_da_more, b_dg + b_dg_more
                if which == 0:
                    if outputs.b is not None:
                        store_token_sub_chunks(outputs.b, outputs.s_b, at, i_hv, i_k * BK, b_dc, opaque_zero, K)
                elif outputs.k is not None:
                    store_token_sub_chunks(outputs.k, outputs.s_k, at, i_hv, i_k * BK, b_dc, opaque_zero, K)
        else:
            b_c = erased_columns(tokens, at, heads, norms, i_k * BK, opaque_zero, RULE, SIZES, BK, NEAR)
            b_dq, b_da, b_dc, b_dg = column_bwd(
                PairRows(b_q, b_a, b_c), b_gate, memory, b_dq, b_da, b_over, b_writes * unit, OP, PRECISION
            )
            b_dk, b_da, b_db_tokens, b_terms = keys_bwd(
                tokens, at, heads, norms, i_k * BK, opaque_zero, b_da, b_dc, SIZES, NEAR
            )
            b_dbeta += tl.sum(b_terms, axis=2)
            if outputs.b is not None:
                store_token_sub_chunks(outputs.b, outputs.s_b, at, i_hv, i_k * BK, b_db_tokens, opaque_zero, K)
            if outputs.k is not None:
                store_token_sub_chunks(outputs.k, outputs.s_k, at, i_hv, i_k * BK, b_dk, opaque_zero, K)
        if outputs.q is not None:
            store_token_sub_chunks(outputs.q, outputs.s_q, at, i_hv, i_k * BK, b_dq, opaque_zero, K)
        if outputs.a is not None:
            store_token_sub_chunks(outputs.a, outputs.s_a, early, i_hv, i_k * BK, b_da, opaque_zero, K)
        b_dx, b_dA = log_gate_bwd(b_x, b_dg, gate, i_hv, i_k * BK, CLAMPED, "channel", ACTIVATION, K, BK)
        store_gate_gradient(dgate, i_tile, at, i_hv, i_k * BK, b_dx, b_dA, opaque_zero, "channel", K)
    if outputs.beta is not None:
        store_token_scalars(outputs.beta, outputs.s_beta, at, i_hv, b_dbeta.reshape(BT), BT)


@triton.jit
def _load_reads(
    p_X, p_do, s_do, i_tile, at, h, column, first: tl.constexpr, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr
):
    """Rows of X from row `first` on, then the rows before it, then the rows of do.   [2 BT, BV]"""
    o_x, o_v = (tl.arange(0, 2 * BT) + first) % BT, column + tl.arange(0, BV)
    top = tl.arange(0, 2 * BT) < BT
    p = p_X + i_tile.to(tl.int64) * (BT * V) + (o_x * V)[:, None] + o_v[None, :]
    b_X = tl.load(p, mask=top[:, None] & (o_v < V)[None, :], other=0.0)
    return _load_below(p_do, s_do, at, h, column, b_X, V, BT, BV)


@triton.jit
def _load_writes(p_W, values, i_tile, at, h, column, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """The rows of W, then those of the written values.   [2 BT, BV]"""
    if values.w is None:
        o_r, o_v = tl.arange(0, 2 * BT), column + tl.arange(0, BV)
        p = p_W + i_tile.to(tl.int64) * (BT * V) + (o_r % BT * V)[:, None] + o_v[None, :]
        b_W = tl.load(p, mask=(o_r < BT)[:, None] & (o_v < V)[None, :], other=0.0)
        return _load_below(values.v, values.s_v, at, h, column, b_W, V, BT, BV)
    else:
        b_W = load_tile(p_W, i_tile, 0, column, BT, V, BT, BV).to(tl.float32)
        return stack(b_W, load_values(values, at, h, column, V, BT, BV))


@triton.jit
def _load_below(p, s, at, h, column, b_x, V: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr):
    """Load token rows into the lower half of b_x, which is zero there.   [2 BT, BV]"""
    o_r, o_v = tl.arange(0, 2 * BT) % BT, column + tl.arange(0, BV)
    p_first = p + at.b * s[0] + at.t * s[1] + h * s[2]
    p_x = p_first + o_r.to(tl.int64)[:, None] * s[1] + o_v.to(tl.int64)[None, :] * s[3]
    mask = ((tl.arange(0, 2 * BT) >= BT) & (o_r < at.rows))[:, None] & (o_v < V)[None, :]
    if b_x.dtype == p.dtype.element_ty:
        return tl.load(p_x, mask=mask, other=b_x)
    else:
        return b_x.to(tl.float32) + tl.load(p_x, mask=mask, other=0.0).to(tl.float32)


class Factors(NamedTuple):
    """Numbers inside the kernel: scale of the output, and unit of X."""

    scale: Any
    unit: Any


@triton.jit
def _pair_gradients(values, do, s_do, borders, memory, at, i_hv, factors, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Store the gradients of a chunk's grams, as `column_bwd` loads them: with b, and with k if it is another."""
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BV: tl.constexpr = SIZES.BV
    TWO: tl.constexpr = FLAGS.RULE == "given"
    BEFORE: tl.constexpr = FLAGS.RULE != "keys"
    first: tl.constexpr = 1 if BEFORE else 0
    COLUMNS: tl.constexpr = 2 if TWO else 1
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    i_tile = memory.i_tile
    b_with_b, b_with_k = tl.zeros((2 * BT, BT), tl.float32), tl.zeros((2 * BT, BT), tl.float32)
    for i_v in range((V + BV - 1) // BV):
        b_XO = _load_reads(borders.X, do, s_do, i_tile, at, i_hv, i_v * BV, first, V, BT, BV)
        b_W = load_tile(borders.e, i_tile, 0, i_v * BV, BT, V, BT, BV)
        b_with_b = mm(b_XO, tl.trans(b_W), b_with_b, OP, PRECISION)
        if TWO:
            b_v = load_values(values, at, i_hv, i_v * BV, V, BT, BV)
            b_with_k = mm(b_XO, tl.trans(b_v), b_with_k, OP, PRECISION)
    _store_pairs(memory, i_tile * COLUMNS, b_with_b, factors, BT, BEFORE)
    if TWO:
        _store_pairs(memory, i_tile * COLUMNS + 1, b_with_k, factors, BT, BEFORE)


@triton.jit
def _store_pairs(memory, i_pair, b_dgrams, factors, BT: tl.constexpr, BEFORE: tl.constexpr):
    """Store the gradients of the grams of the erasing rows and of the queries, [2 BT, BT], with one kind of columns."""
    o_r, o_s = tl.arange(0, BT)[:, None], tl.arange(0, BT)[None, :]
    b_dJ, b_dP = unstack(b_dgrams)
    b_dJ, b_dP = b_dJ * factors.unit, b_dP * factors.scale
    if BEFORE:
        b_dJ = tl.where(o_r == BT - 1, 0.0, b_dJ)  # the chunk's first row, which reads no row of the chunk
    b_dJT, b_dPT = tl.trans(b_dJ), tl.where(o_r <= o_s, tl.trans(b_dP), 0.0)
    if not BEFORE:
        b_dJT = tl.where(o_r < o_s, b_dJT, 0.0)  # rows read before their own write
    store_near_pairs(memory.near, i_pair, 0, b_dPT, BT)
    store_near_pairs(memory.near, i_pair, 1, b_dJT, BT)
    store_tile(memory.pairs, i_pair * 3, 0, 0, tl.where(o_r < o_s, b_dJT, b_dJ), BT, BT, BT, BT)
    store_tile(memory.pairs, i_pair * 3 + 1, 0, 0, b_dP, BT, BT, BT, BT)
    store_tile(memory.pairs, i_pair * 3 + 2, 0, 0, b_dPT, BT, BT, BT, BT)


@triton.jit
def _clear(outputs, dgate, i_tile, at, h, column, opaque_zero, SIZES: tl.constexpr):
    """Zero the gradients of tokens past the last boundary, for some channels."""
    K: tl.constexpr = SIZES.K
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    zeros = tl.zeros((BT, BK), tl.float32)
    if outputs.q is not None:
        store_tokens(outputs.q, outputs.s_q, at, h, column, zeros, K)
    if outputs.k is not None:
        store_tokens(outputs.k, outputs.s_k, at, h, column, zeros, K)
    if outputs.a is not None:
        store_tokens(outputs.a, outputs.s_a, at, h, column, zeros, K)
    if outputs.b is not None:
        store_tokens(outputs.b, outputs.s_b, at, h, column, zeros, K)
    if outputs.beta is not None:
        store_token_scalars(outputs.beta, outputs.s_beta, at, h, tl.sum(zeros, axis=1), BT)
    b_none = zeros.reshape(BT // NEAR, NEAR, BK)
    store_gate_gradient(dgate, i_tile, at, h, column, b_none, b_none, opaque_zero, "channel", K)
