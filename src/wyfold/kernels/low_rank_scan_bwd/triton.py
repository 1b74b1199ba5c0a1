"""`low_rank_scan_bwd` in Triton: two halves of one grid; each program holds a state, or its gradient, in registers.

forward half:  store S, then as `low_rank_scan` without output; store W = A U + R v, what the erasing rows read
reverse half:  store dS (of the state leaving the chunk), then
               X^T  = s do^T F + dS^T E^T           gradient of U
               dv^T = s do^T P + dS^T K^T
               dS^T <- total dS^T + s do^T q + X^T rows

If a rule erases along what it writes, W is A (U + v), the written values, and dv is X. dS and X are in units of
`DeltaOptions.unit`, relative to which s, otherwise the scale, is 1. A has a unit diagonal, so a product with it starts
from the rounding error of its operand, which the diagonal passes through unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.low_rank_scan.triton import Borders, Flags, Sizes
from wyfold.kernels.records import LowRankPrepared, TokenBorders
from wyfold.kernels.scan_bwd.triton.arguments import States
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import Values, load_values
from wyfold.tile.dot.triton import contracts, mm, mm_unit_diagonal, operand, precision, workspace
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    load_tile,
    load_tokens,
    load_upper,
    load_vector,
    sequence_span,
    store_tile,
    store_tokens,
    strides,
)
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.state.triton import StateAt, advance, load_end, store_state


def scan_bwd(
    v: Tensor,
    w: Tensor | None,
    prepared: LowRankPrepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    dS0: Tensor | None,
    out: tuple[Tensor | None, Tensor | None],
    segments: Segments | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    part: str = "outputs",
) -> TokenBorders:
    """States and their gradients at the borders of every chunk, and the gradients of values.

    Args:
        v, w: [B, T, HV, V] values and their factors, or None for 1.
        prepared: From `low_rank_prepare`, with the factors of the backward.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        do: [B, T, HV, V] gradient of the output, any strides.
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        grid: Chunk grid of the call.
        options: Uses `scale`, `unit`.
        key: Key of the launch configuration.
        dS0: [N, HV, K, V] view, written, or None.
        out: Gradients of v and w, written where tokens belong to a sequence; None where one is not requested.
        segments: Layout of the segments if sequences are cut; tokens are then one buffer, [1, B T, ..].
        entering, leaving: [borders, HV, K, V] views, states at the borders between segments, and their gradients.
        part: "outputs". "states": write `leaving` alone, with the gradients of the states at the beginnings of segments
            if those of the states at the ends of segments that end no sequence are zero.

    Returns:
        The borders; `e` is W.
    """
    (HV, V), K, C = v.shape[2:], prepared.rows.shape[2], grid.chunk_size
    tiles, stored = grid.chunks * HV, workspace(v.dtype)
    found = TokenBorders.of(v.new_empty(2, tiles, V, K, dtype=stored), v.new_empty(2, tiles, C, V, dtype=stored))
    config = tuned("low_rank_scan_bwd.triton", key, v.device)
    BV = min(config.blocks["BV"], tile_width(V))
    if grid.cu is not None:
        for dx in out:
            if dx is not None:
                dx.zero_()  # tokens past the last boundary belong to no sequence
    programs = grid.sequences * HV * -(-V // BV)
    launch_kernel(
        wyfold_low_rank_scan_bwd_triton,
        2 * programs if part == "outputs" else programs,  # the reverse half is the first
        values=Values(v=v, s_v=v.stride(), w=w, s_w=strides(w)),
        factors=prepared,
        borders=found,
        gradients=Gradients(
            do=do, s_do=do.stride(), dv=out[0], s_dv=strides(out[0]), dw=out[1], s_dw=strides(out[1])
        ),
        states=States(
            S0=initial_state, s_S0=strides(initial_state), dST=dST, s_dST=strides(dST), dS0=dS0, s_dS0=strides(dS0)
        ),
        packing=Packing(cu=grid.cu, first=grid.first),
        entering=Borders.of(segments, entering),
        leaving=Borders.of(segments, leaving),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        unit=options.unit,
        scale=options.scale / options.unit,
        SIZES=Sizes(HV=HV, K=K, V=V, BT=C, BK=tile_width(K), BV=BV, STAGES=config.stages),
        FLAGS=Flags(PACKED=grid.cu is not None, PART=part, OP=operand(v.dtype), PRECISION=precision(v.dtype)),
        **config.options(contract=contracts(v.dtype)),
    )  # fmt: skip
    return found


class Gradients(NamedTuple):
    """Kernel argument: gradients of tokens [B, T, HV, V], each with its strides; None where one is not requested.

    Attributes:
        do, s_do: Of the output.
        dv, s_dv, dw, s_dw: Of the values and their factors, written.
    """

    do: Any
    s_do: Any
    dv: Any
    s_dv: Any
    dw: Any
    s_dw: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence", "unit", "scale"])
def wyfold_low_rank_scan_bwd_triton(
    values, factors, borders, gradients, states, packing, entering, leaving, N, T, per_sequence, unit, scale,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program owns BV value rows of one state, or of its gradient."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    PART: tl.constexpr = FLAGS.PART
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    half = N * HV * NV
    reverse = pid < half
    pid -= tl.where(reverse, 0, half)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, FLAGS.PACKED)
    steps = tl.cdiv(length, BT).to(tl.int32)
    begins, ends, i_border, nowhere = True, True, i_n, StateAt(None, None, 0, False)
    before, after = nowhere, nowhere
    if entering.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, entering.sequence, entering.first, entering.N)
        before = StateAt(entering.p, entering.s, i_border - 1, i_n < entering.N)
        if PART == "outputs":
            after = StateAt(leaving.p, leaving.s, i_border, i_n < entering.N)
    if reverse:
        b_dS = load_end(StateAt(states.dST, states.s_dST, i_n, ends), after, i_hv, column, K, V, BK, BV)
        unit = tl.where(length > 0, unit, 1.0)  # without a token the gradient passes through unchanged
        b_dS *= 1.0 / unit
        for j in tl.range(0, steps, num_stages=SIZES.STAGES):
            i = steps - 1 - j
            at = TokenRows(b, t + i * BT, length - i * BT, T)
            b_dS = _reverse_step(
                b_dS, values, factors, borders, gradients, (i_c + i) * HV + i_hv, at, i_hv, column, unit, scale,
                SIZES, FLAGS,
            )  # fmt: skip
        b_dS *= unit
        if PART != "outputs":
            if (i_n < entering.N) & (begins == 0):
                store_state(leaving.p, leaving.s, i_border - 1, i_hv, column, b_dS, K, V, BK, BV)
        elif states.dS0 is not None:
            if begins:
                store_state(states.dS0, states.s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
    else:
        b_S = load_end(StateAt(states.S0, states.s_S0, i_n, begins), before, i_hv, column, K, V, BK, BV)
        for i in tl.range(0, steps, num_stages=SIZES.STAGES):
            at = TokenRows(b, t + i * BT, length - i * BT, T)
            b_S = _forward_step(b_S, values, factors, borders, (i_c + i) * HV + i_hv, at, i_hv, column, SIZES, FLAGS)


@triton.jit
def _reverse_step(
    b_dS, values, factors, borders, gradients, i_tile, at, i_hv, column, unit, scale,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """Write dS, X and the values' gradients of a chunk; return the gradient of the state entering it.

    scale: Factor of do, in units.
    """
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_do = load_tokens(gradients.do, gradients.s_do, at, i_hv, column, V, BT, BV)
    b_FT = load_upper(factors.F, i_tile, BT)
    b_E = load_tile(factors.E, i_tile, 0, 0, BT, K, BT, BK)
    b_q = load_tile(factors.q, i_tile, 0, 0, BT, K, BT, BK)
    b_rows = load_tile(factors.rows, i_tile, 0, 0, BT, K, BT, BK)
    total = load_vector(factors.total, i_tile, K, BK, False)[None, :]
    store_tile(borders.dS, i_tile, column, 0, b_dS, V, K, BV, BK)
    b_Z = mm(b_dS, tl.trans(b_E), None, OP, PRECISION)
    # Never taken. It puts do^T into the accumulator's layout, which the next products read as their left operand.
    b_doT = tl.where(at.rows < 0, b_Z.to(b_do.dtype), tl.trans(b_do))
    b_X = mm(b_doT, tl.trans(b_FT), None, OP, PRECISION) * scale + b_Z
    store_tile(borders.X, i_tile, 0, column, tl.trans(b_X), BT, V, BT, BV)
    if gradients.dv is not None or gradients.dw is not None:
        b_dv = b_X
        if factors.K is not None:
            b_PT = load_upper(factors.P, i_tile, BT)
            b_K = load_tile(factors.K, i_tile, 0, 0, BT, K, BT, BK)
            b_dv = mm(b_doT, tl.trans(b_PT), None, OP, PRECISION) * scale
            b_dv = mm(b_dS, tl.trans(b_K), b_dv, OP, PRECISION)
        _store_value_gradients(values, gradients, at, i_hv, column, tl.trans(b_dv * unit), V)
    b_dS = mm(b_doT.to(tl.float32) * scale, b_q, b_dS * total, OP, PRECISION)
    return mm(b_X, b_rows, b_dS, OP, PRECISION)


@triton.jit
def _store_value_gradients(values, gradients, at, h, column, b_dv, V: tl.constexpr):
    """Store the gradients of v and w, given that of their product.   [BT, BV]"""
    BT: tl.constexpr = b_dv.shape[0]
    BV: tl.constexpr = b_dv.shape[1]
    if gradients.dw is not None:
        b_v = load_tokens(values.v, values.s_v, at, h, column, V, BT, BV).to(tl.float32)
        store_tokens(gradients.dw, gradients.s_dw, at, h, column, b_dv * b_v, V)
    if gradients.dv is not None:
        if values.w is not None:
            b_dv *= load_tokens(values.w, values.s_w, at, h, column, V, BT, BV).to(tl.float32)
        store_tokens(gradients.dv, gradients.s_dv, at, h, column, b_dv, V)


@triton.jit
def _forward_step(b_S, values, factors, borders, i_tile, at, i_hv, column, SIZES: tl.constexpr, FLAGS: tl.constexpr):
    """Write S and W of a chunk; return the state leaving it."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    b_rows = load_tile(factors.rows, i_tile, 0, 0, BT, K, BT, BK)
    b_v = load_values(values, at, i_hv, column, V, BT, BV)
    b_AT = load_upper(factors.A, i_tile, BT)
    b_E = load_tile(factors.E, i_tile, 0, 0, BT, K, BT, BK)
    total = load_vector(factors.total, i_tile, K, BK, False)[None, :]
    store_tile(borders.S, i_tile, column, 0, b_S, V, K, BV, BK)
    b_y = mm(b_S, tl.trans(b_rows), None, OP, PRECISION)
    if factors.K is None:
        b_y += tl.trans(b_v).to(tl.float32)
    b_W = mm_unit_diagonal(b_y, None, b_AT, OP, PRECISION)
    b_S = advance(b_S, total, b_y, b_E, OP, PRECISION)
    if factors.K is not None:
        b_W = mm(tl.trans(b_v), load_upper(factors.R, i_tile, BT), b_W, OP, PRECISION)
        b_S = mm(tl.trans(b_v), load_tile(factors.K, i_tile, 0, 0, BT, K, BT, BK), b_S, OP, PRECISION)
    store_tile(borders.e, i_tile, 0, column, tl.trans(b_W), BT, V, BT, BV)
    return b_S
