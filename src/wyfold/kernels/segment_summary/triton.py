"""`segment_summary` in Triton: one program per border, value head and tile of value rows of H, M or c.

Forward, H and M belong to the segment that ends at the border; backward, c belongs to the one that begins there. The
last segment of a sequence (forward) and the first (backward) need no summary.

As in the scans the state is held transposed. M is the identity run through the scan with values of zero, so its tiles
are K further value rows. Results that the scans store per chunk, and inputs that only those need, are omitted. Only the
last segment of a sequence can have a partial chunk, and only c covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.dot.triton import contracts, mm, operand, precision
from wyfold.tile.index.triton import (
    all_or_none,
    has_tma,
    load_row_factors,
    load_tile_block,
    load_token_block,
    load_upper,
    load_vector,
    segment_coords,
    sequence_span,
    strides,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.triton import advance, load_state, residual, retreat, store_state


def segment_summary(
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    segments: Segments,
    key: LaunchKey,
    H: Tensor,
    M: Tensor,
) -> None:
    """Maps of the segments that end at borders.

    Args:
        k: [1, T, H, K] tokens of all rows, any strides.
        v: [1, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        segments: Layout of the segments.
        key: Key of the launch configuration.
        H: [borders, HV, K, V] float32 view, written.
        M: [borders, HV, K, K] float32 view, written; zeros for a segment that begins a sequence. Only a row of zeros
            holds negative zeros.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.triton", key, k.device)
    C, BK, BV = grid.chunk_size, tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel, folded = prepared.k is not None, prepared.E is not None
    inputs = prepared.k if channel else k, v, *prepared[:2], prepared.E, None if folded else prepared.W
    descriptors = _descriptors(inputs, C, BK, BV) if has_tma(k.device) else None
    x_k, x_v, *x_tiles = descriptors or inputs
    launch_kernel(
        wyfold_segment_summary_triton,
        segments.borders * HV * (-(-V // BV) + -(-K // BV)),
        x_k,
        None if channel else k.stride(),
        x_v,
        v.stride(),
        *x_tiles,
        initial_state,
        strides(initial_state),
        H,
        strides(H),
        M,
        strides(M),
        segments.sequence,
        segments.first,
        segments.leading,
        segments.sequences,
        grid.cu,
        grid.first,
        grid.tokens,
        H=HK,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=BK,
        BV=BV,
        CHANNEL=channel,
        FOLDED=folded,
        USE_TMA=descriptors is not None,
        OP=operand(k.dtype),
        PRECISION=precision(k.dtype),
        STAGES=config.stages,
        **config.options(contract=contracts(k.dtype)),
    )


def _descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    k, v, rows, total, E, W = given
    channel = k.ndim == 3
    found = (
        tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
        token_descriptor(v, C, BV),
        tile_descriptor(rows, 4, C),
        vector_descriptor(total, BK) if channel else total,
        None if E is None else tile_descriptor(E, C, BK),
        W,
    )
    return all_or_none(given, found)


def segment_summary_bwd(
    q: Tensor,
    k: Tensor,
    prepared: Prepared,
    do: Tensor,
    dST: Tensor | None,
    segments: Segments,
    options: DeltaOptions,
    key: LaunchKey,
    c: Tensor,
) -> None:
    """Gradients of the states entering the segments that begin at borders.

    Args:
        q, k: [1, T, H, K] tokens of all rows, any strides.
        prepared: From `prepare`, including W.
        do: [1, T, HV, V].
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        segments: Layout of the segments.
        options: Uses `scale`.
        key: Key of the launch configuration.
        c: [borders, HV, K, V] float32 view, written.
    """
    (HK, K), (HV, V), grid = q.shape[2:], do.shape[2:], segments.grid
    config = tuned("segment_summary.triton", key._replace(launch="bwd"), q.device)
    C, BK, BV = grid.chunk_size, tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel, folded = prepared.q is not None, prepared.E is not None
    inputs = (
        *((prepared.q, prepared.k) if channel else (q, k)),
        do,
        *prepared[:2],
        prepared.E,
        prepared.F,
        None if folded else prepared.W,
    )
    descriptors = _reverse_descriptors(inputs, C, BK, BV) if has_tma(q.device) else None
    x_q, x_k, x_do, *x_tiles = descriptors or inputs
    launch_kernel(
        wyfold_segment_summary_bwd_triton,
        segments.borders * HV * -(-V // BV),
        x_q,
        None if channel else q.stride(),
        x_k,
        None if channel else k.stride(),
        x_do,
        do.stride(),
        *x_tiles,
        dST,
        strides(dST),
        c,
        strides(c),
        segments.sequence,
        segments.first,
        segments.leading,
        segments.sequences,
        grid.cu,
        grid.first,
        grid.tokens,
        options.scale,
        H=HK,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=BK,
        BV=BV,
        CHANNEL=channel,
        FOLDED=folded,
        USE_TMA=descriptors is not None,
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
        STAGES=config.stages,
        **config.options(contract=contracts(q.dtype)),
    )


def _reverse_descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    q, k, do, rows, total, E, F, W = given
    channel = q.ndim == 3
    found = (
        tile_descriptor(q, C, BK) if channel else token_descriptor(q, C, BK),
        tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
        token_descriptor(do, C, BV),
        tile_descriptor(rows, 4, C),
        vector_descriptor(total, BK) if channel else total,
        None if E is None else tile_descriptor(E, C, BK),
        F,
        W,
    )
    return all_or_none(given, found)


@triton.jit(do_not_specialize=["N", "T"])
def wyfold_segment_summary_triton(
    x_k,
    s_k,
    x_v,
    s_v,
    x_rows,
    x_total,
    x_E,
    p_W,
    p_S0,
    s_S0,
    p_H,
    s_H,
    p_M,
    s_M,
    p_sequence,
    p_first_segment,
    p_leading,
    N,
    p_cu,
    p_first,
    T,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2."""
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % TILES, (pid // TILES) % HV, tl.load(p_leading + pid // (TILES * HV))
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_coords(i_s, p_sequence, p_first_segment, N)
    i_c, b, t, length = sequence_span(i_s, p_cu, p_first, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if (i_n < N) & (ends == 0):
        total = 0.0
        if i_v < NV:
            column = (i_v * BV).to(tl.int32)
            b_S = tl.zeros((BV, BK), tl.float32)
            if p_S0 is not None:
                if begins:
                    b_S = load_state(p_S0, s_S0, i_n, i_hv, column, K, V, BK, BV)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, x_k, s_k, x_v, s_v, x_rows, x_total, x_E, p_W,
                    i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T,
                    K, V, BT, BK, BV, True, CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            store_state(p_H, s_H, i_border, i_hv, column, b_S, K, V, BK, BV)
        else:
            column = ((i_v - NV) * BV).to(tl.int32)
            # The first segment needs no M: its entering state is known.
            steps = tl.where(begins, 0, steps)
            b_S = (column + tl.arange(0, BV)[:, None] == tl.arange(0, BK)[None, :]).to(tl.float32)
            b_S = tl.where(begins, 0.0, b_S)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, x_k, s_k, x_v, s_v, x_rows, x_total, x_E, p_W,
                    i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T,
                    K, V, BT, BK, BV, False, CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            # Mark for `segment_fold`: rows of zeros get the other sign, which no other zero has.
            zeros = tl.max((b_S != 0.0).to(tl.int32)) == 0
            b_S = tl.where(b_S == 0.0, 0.0, b_S) * tl.where(zeros, -1.0, 1.0)
            store_state(p_M, s_M, i_border, i_hv, column, b_S, K, K, BK, BV)


@triton.jit
def _step(
    b_S,
    total,
    x_k,
    s_k,
    x_v,
    s_v,
    x_rows,
    x_total,
    x_E,
    p_W,
    i_tile,
    b,
    t,
    i_h,
    i_hv,
    column,
    T,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State leaving a chunk of tokens only. VALUES: include the values of its tokens; else they count as zeros."""
    if CHANNEL:
        total = load_vector(x_total, i_tile, K, BK, USE_TMA)[None, :]
        b_k = load_tile_block(x_k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(x_k, s_k, b, t, i_h, 0, BT, T, K, BT, BK, USE_TMA, USE_TMA)
    b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, _, b_out, b_beta = load_row_factors(x_rows, i_tile, BT, USE_TMA)
    if VALUES:
        b_v = load_token_block(x_v, s_v, b, t, i_hv, column, BT, T, V, BT, BV, USE_TMA, USE_TMA)
        b_R = residual(b_v, b_Sk, b_in_k)
    else:
        b_R = -b_Sk * b_in_k[None, :]
    if FOLDED:
        b_E = load_tile_block(x_E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, (b_R * b_beta[None, :]).to(OP), b_E, OP, PRECISION)
    else:
        b_WT = load_upper(p_W, i_tile, BT)
        b_e = mm(b_R, b_WT, None, OP, PRECISION)
        return advance(b_S, total, b_e * b_out[None, :], b_k, OP, PRECISION)


@triton.jit(do_not_specialize=["N", "T", "scale"])
def wyfold_segment_summary_bwd_triton(
    x_q,
    s_q,
    x_k,
    s_k,
    x_do,
    s_do,
    x_rows,
    x_total,
    x_E,
    p_F,
    p_W,
    p_dST,
    s_dST,
    p_c,
    s_c,
    p_sequence,
    p_first_segment,
    p_leading,
    N,
    p_cu,
    p_first,
    T,
    scale,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns BV value rows of c."""
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, tl.load(p_leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_n, i_border, begins, ends = segment_coords(i_s, p_sequence, p_first_segment, N)
    i_c, b, t, length = sequence_span(i_s, p_cu, p_first, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    if (i_n < N) & (begins == 0):
        total = 0.0
        b_dS = tl.zeros((BV, BK), tl.float32)
        if p_dST is not None:
            if ends:
                b_dS = load_state(p_dST, s_dST, i_n, i_hv, column, K, V, BK, BV)
        if USE_TMA:
            if steps * BT < length:
                if not CHANNEL:
                    total = tl.load(x_total + i_tile + steps * HV)
                b_dS = _reverse_step(
                    b_dS, total, x_q, s_q, x_k, s_k, x_do, s_do, x_rows, x_total, x_E, p_F, p_W,
                    i_tile + steps * HV, b, t + steps * BT, i_h, i_hv, column, length - steps * BT, T, scale,
                    K, V, BT, BK, BV, CHANNEL, FOLDED, USE_TMA, False, OP, PRECISION,
                )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile + (steps - 1) * HV, mask=steps > 0, other=0.0)
        for j in tl.range(0, steps, num_stages=STAGES):
            i = steps - 1 - j
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i - 1) * HV, mask=i > 0, other=0.0)
            b_dS = _reverse_step(
                b_dS, total, x_q, s_q, x_k, s_k, x_do, s_do, x_rows, x_total, x_E, p_F, p_W,
                i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, length - i * BT, T, scale,
                K, V, BT, BK, BV, CHANNEL, FOLDED, USE_TMA, USE_TMA, OP, PRECISION,
            )  # fmt: skip
            total = next_total
        store_state(p_c, s_c, i_border - 1, i_hv, column, b_dS, K, V, BK, BV)


@triton.jit
def _reverse_step(
    b_dS,
    total,
    x_q,
    s_q,
    x_k,
    s_k,
    x_do,
    s_do,
    x_rows,
    x_total,
    x_E,
    p_F,
    p_W,
    i_tile,
    b,
    t,
    i_h,
    i_hv,
    column,
    rows,
    T,
    scale,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    FULL: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state entering a chunk, as in `scan_bwd`. FULL: all its rows are tokens."""
    if CHANNEL:
        b_k = load_tile_block(x_k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(x_q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(x_k, s_k, b, t, i_h, 0, rows, T, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(x_q, s_q, b, t, i_h, 0, rows, T, K, BT, BK, USE_TMA, FULL)
    b_do = load_token_block(x_do, s_do, b, t, i_hv, column, rows, T, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(p_F, i_tile, BT)
    if FOLDED:
        b_E = load_tile_block(x_E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_dY = mm(b_dS, tl.trans(b_E), None, OP, PRECISION)
    else:
        b_dY = mm(b_dS, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, b_in_q, b_out, b_beta = load_row_factors(x_rows, i_tile, BT, USE_TMA)
    # Never taken. It puts do^T into the accumulator's layout, which the next products read as their left operand.
    b_doT = tl.where(rows < 0, b_dY.to(b_do.dtype), tl.trans(b_do))
    b_X = mm(b_doT, tl.trans(b_FT), None, OP, PRECISION) * scale
    if FOLDED:
        b_X += b_dY
    else:
        b_WT = load_upper(p_W, i_tile, BT)
        b_divisor = nonzero_beta(b_beta)
        b_X += mm(b_dY * (b_out * b_divisor)[None, :], tl.trans(b_WT), None, OP, PRECISION) * (1.0 / b_divisor)[None, :]
    b_doT = b_doT.to(tl.float32) * (b_in_q * scale)[None, :]
    if CHANNEL:
        total = load_vector(x_total, i_tile, K, BK, USE_TMA)[None, :]
    return retreat(b_dS, total, b_doT, b_q, b_X * (b_beta * b_in_k)[None, :], b_k, OP, PRECISION)
