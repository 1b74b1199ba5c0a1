"""`segment_summary` in Triton: one program per border, value head and tile of value rows of H, M or c.

Forward, H and M belong to the segment that ends at the border; backward, c belongs to the one that begins there. The
last segment of a sequence (forward) and the first (backward) need no summary.

With `horizon`, a program begins at the first chunk whose effect can reach the border (`tile/decay/horizon`): H from
zeros, and M is zeros if that is not the segment's first chunk. c begins at the last such chunk.

As in the scans the state is held transposed. M is the identity run through the scan with values of zero, so its tiles
are K further value rows. Results that the scans store per chunk, and inputs that only those need, are omitted. Only the
last segment of a sequence can have a partial chunk, and only c covers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.kernels.scan.triton import Sizes
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.horizon.triton import chunks_in_reach
from wyfold.tile.dot.triton import contracts, mm, operand, precision
from wyfold.tile.index.triton import Packing, TokenRows, load_upper, load_vector, sequence_span, strides
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    has_tma,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)
from wyfold.tile.index.triton.slots import segment_coords
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
    *,
    horizon: bool,
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
        horizon: Begin at the horizon. The gate is scalar, and `prepare` normalised the keys.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.triton", key, k.device)
    C, BK, BV = grid.chunk_size, tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel, folded = prepared.k is not None, prepared.E is not None
    inputs = prepared.k if channel else k, v, *prepared[:2], prepared.E, None if folded else prepared.W
    descriptors = _descriptors(inputs, C, BK, BV) if has_tma(k.device) else None
    x_k, x_v, x_rows, x_total, x_E, W = descriptors or inputs
    launch_kernel(
        wyfold_segment_summary_triton,
        segments.borders * HV * (-(-V // BV) + -(-K // BV)),
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        p_rows=prepared.rows if horizon else None,
        tokens=Tokens(s_k=None if channel else k.stride(), s_v=v.stride(), W=W),
        maps=Maps(S0=initial_state, s_S0=strides(initial_state), H=H, s_H=strides(H), M=M, s_M=strides(M)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        SIZES=Sizes(H=HK, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV, STAGES=config.stages),
        CHANNEL=channel,
        FOLDED=folded,
        USE_TMA=descriptors is not None,
        OP=operand(k.dtype),
        PRECISION=precision(k.dtype),
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
    *,
    horizon: bool,
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
        horizon: As of `segment_summary`.
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
    x_q, x_k, x_do, x_rows, x_total, x_E, F, W = descriptors or inputs
    launch_kernel(
        wyfold_segment_summary_bwd_triton,
        segments.borders * HV * -(-V // BV),
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        p_rows=prepared.rows if horizon else None,
        tokens=ReverseTokens(
            s_q=None if channel else q.stride(), s_k=None if channel else k.stride(), s_do=do.stride(), F=F, W=W
        ),
        gradients=Gradients(dST=dST, s_dST=strides(dST), c=c, s_c=strides(c)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        scale=options.scale,
        SIZES=Sizes(H=HK, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV, STAGES=config.stages),
        CHANNEL=channel,
        FOLDED=folded,
        USE_TMA=descriptors is not None,
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
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


class Tokens(NamedTuple):
    """Kernel argument: strides of k and v, and W, which is accessed through pointers alone; see `scan`."""

    s_k: Any
    s_v: Any
    W: Any
    end: None = None


class ReverseTokens(NamedTuple):
    """Kernel argument: strides of q, k and do, and F and W, which are accessed through pointers alone; see `scan`."""

    s_q: Any
    s_k: Any
    s_do: Any
    F: Any
    W: Any
    end: None = None


class Maps(NamedTuple):
    """Kernel argument: the map of each segment, and what it starts from, each with its strides.

    Attributes:
        S0, s_S0: [N, HV, K, V] initial states, or None.
        H, s_H: [borders, HV, K, V] states that segments leave, written.
        M, s_M: [borders, HV, K, K] maps from the entering to the leaving state, written.
    """

    S0: Any
    s_S0: Any
    H: Any
    s_H: Any
    M: Any
    s_M: Any
    end: None = None


class Gradients(NamedTuple):
    """Kernel argument: gradients of states, each with its strides.

    Attributes:
        dST, s_dST: [N, HV, K, V] of the final states, or None.
        c, s_c: [borders, HV, K, V] of the states at borders, written.
    """

    dST: Any
    s_dST: Any
    c: Any
    s_c: Any
    end: None = None


class SegmentIndex(NamedTuple):
    """Kernel argument: which segments there are.

    Attributes:
        sequence: Sequence of each segment.
        first: First segment of each sequence.
        leading: Segment before each border.
    """

    sequence: Any
    first: Any
    leading: Any


class Inputs(NamedTuple):
    """Descriptors of what a chunk's step reads, or pointers without TMA: tokens, and the tiles of `prepare`."""

    k: Any
    v: Any
    rows: Any
    total: Any
    E: Any


class ReverseInputs(NamedTuple):
    """`Inputs` of the backward."""

    q: Any
    k: Any
    do: Any
    rows: Any
    total: Any
    E: Any


@triton.jit(do_not_specialize=["N", "T"])
def wyfold_segment_summary_triton(
    x_k,
    x_v,
    x_rows,
    x_total,
    x_E,
    p_rows,
    tokens,
    maps,
    segments,
    packing,
    N,
    T,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BV value rows of H or M; the tiles of a head are neighbours, so that they share k in L2."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    NV: tl.constexpr = (V + BV - 1) // BV
    TILES: tl.constexpr = NV + (K + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % TILES, (pid // TILES) % HV, tl.load(segments.leading + pid // (TILES * HV))
    i_h = i_hv // (HV // H)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    inputs = Inputs(x_k, x_v, x_rows, x_total, x_E)
    if (i_n < N) & (ends == 0):
        holds_S0, without_M = begins, begins
        if p_rows is not None:
            reach = chunks_in_reach(x_total, p_rows, i_tile + (steps - 1) * HV, -HV, steps, BT)
            holds_S0, without_M = begins & (reach == steps), begins | (reach < steps)
            i_tile += (steps - reach) * HV
            t += (steps - reach) * BT
            steps = reach
        total = 0.0
        if i_v < NV:
            column = (i_v * BV).to(tl.int32)
            b_S = tl.zeros((BV, BK), tl.float32)
            if maps.S0 is not None:
                if holds_S0:
                    b_S = load_state(maps.S0, maps.s_S0, i_n, i_hv, column, K, V, BK, BV)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, inputs, tokens, i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T, SIZES, True,
                    CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            store_state(maps.H, maps.s_H, i_border, i_hv, column, b_S, K, V, BK, BV)
        else:
            column = ((i_v - NV) * BV).to(tl.int32)
            # The first segment needs no M: its entering state is known.
            steps = tl.where(without_M, 0, steps)
            b_S = (column + tl.arange(0, BV)[:, None] == tl.arange(0, BK)[None, :]).to(tl.float32)
            b_S = tl.where(without_M, 0.0, b_S)
            if not CHANNEL:
                total = tl.load(x_total + i_tile)
            for i in tl.range(0, steps, num_stages=STAGES):
                next_total = total
                if not CHANNEL:
                    next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=i + 1 < steps, other=0.0)
                b_S = _step(
                    b_S, total, inputs, tokens, i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, T, SIZES, False,
                    CHANNEL, FOLDED, USE_TMA, OP, PRECISION,
                )  # fmt: skip
                total = next_total
            # Mark for `segment_fold`: rows of zeros get the other sign, which no other zero has.
            zeros = tl.max((b_S != 0.0).to(tl.int32)) == 0
            b_S = tl.where(b_S == 0.0, 0.0, b_S) * tl.where(zeros, -1.0, 1.0)
            store_state(maps.M, maps.s_M, i_border, i_hv, column, b_S, K, K, BK, BV)


@triton.jit
def _step(
    b_S,
    total,
    inputs,
    tokens,
    i_tile,
    b,
    t,
    i_h,
    i_hv,
    column,
    T,
    SIZES: tl.constexpr,
    VALUES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """State leaving a chunk of tokens only. VALUES: include the values of its tokens; else they count as zeros."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, TokenRows(b, t, BT, T), i_h, 0, K, BT, BK, USE_TMA, USE_TMA)
    b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, _, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    if VALUES:
        b_v = load_token_block(inputs.v, tokens.s_v, TokenRows(b, t, BT, T), i_hv, column, V, BT, BV, USE_TMA, USE_TMA)
        b_R = residual(b_v, b_Sk, b_in_k)
    else:
        b_R = -b_Sk * b_in_k[None, :]
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, (b_R * b_beta[None, :]).to(OP), b_E, OP, PRECISION)
    else:
        b_WT = load_upper(tokens.W, i_tile, BT)
        b_e = mm(b_R, b_WT, None, OP, PRECISION)
        return advance(b_S, total, b_e * b_out[None, :], b_k, OP, PRECISION)


@triton.jit(do_not_specialize=["N", "T", "scale"])
def wyfold_segment_summary_bwd_triton(
    x_q,
    x_k,
    x_do,
    x_rows,
    x_total,
    x_E,
    p_rows,
    tokens,
    gradients,
    segments,
    packing,
    N,
    T,
    scale,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program owns BV value rows of c."""
    H: tl.constexpr = SIZES.H
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    STAGES: tl.constexpr = SIZES.STAGES
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_s = pid % NV, (pid // NV) % HV, tl.load(segments.leading + pid // (NV * HV)) + 1
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_n, i_border, begins, ends = segment_coords(i_s, segments.sequence, segments.first, N)
    i_c, b, t, length = sequence_span(i_s, packing, T, 0, True)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    inputs = ReverseInputs(x_q, x_k, x_do, x_rows, x_total, x_E)
    if (i_n < N) & (begins == 0):
        if p_rows is not None:
            count = tl.cdiv(length, BT).to(tl.int32)
            reach = chunks_in_reach(x_total, p_rows, i_tile, HV, count, BT)
            ends = ends & (reach == count)
            length = tl.where(reach < count, reach * BT, length)
            steps = tl.minimum(reach, steps)
        total = 0.0
        b_dS = tl.zeros((BV, BK), tl.float32)
        if gradients.dST is not None:
            if ends:
                b_dS = load_state(gradients.dST, gradients.s_dST, i_n, i_hv, column, K, V, BK, BV)
        if USE_TMA:
            if steps * BT < length:
                if not CHANNEL:
                    total = tl.load(x_total + i_tile + steps * HV)
                b_dS = _reverse_step(
                    b_dS, total, inputs, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, scale, SIZES, CHANNEL,
                    FOLDED, USE_TMA, False, OP, PRECISION,
                )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile + (steps - 1) * HV, mask=steps > 0, other=0.0)
        for j in tl.range(0, steps, num_stages=STAGES):
            i = steps - 1 - j
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i - 1) * HV, mask=i > 0, other=0.0)
            b_dS = _reverse_step(
                b_dS, total, inputs, tokens, i_tile + i * HV, TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv,
                column, scale, SIZES, CHANNEL, FOLDED, USE_TMA, USE_TMA, OP, PRECISION,
            )  # fmt: skip
            total = next_total
        store_state(gradients.c, gradients.s_c, i_border - 1, i_hv, column, b_dS, K, V, BK, BV)


@triton.jit
def _reverse_step(
    b_dS,
    total,
    inputs,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    scale,
    SIZES: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    FULL: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Gradient of the state entering a chunk, as in `scan_bwd`. FULL: all its rows are tokens."""
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    if CHANNEL:
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_do = load_token_block(inputs.do, tokens.s_do, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_dY = mm(b_dS, tl.trans(b_E), None, OP, PRECISION)
    else:
        b_dY = mm(b_dS, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, b_in_q, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    # Never taken. It puts do^T into the accumulator's layout, which the next products read as their left operand.
    b_doT = tl.where(at.rows < 0, b_dY.to(b_do.dtype), tl.trans(b_do))
    b_X = mm(b_doT, tl.trans(b_FT), None, OP, PRECISION) * scale
    if FOLDED:
        b_X += b_dY
    else:
        b_WT = load_upper(tokens.W, i_tile, BT)
        b_divisor = nonzero_beta(b_beta)
        b_X += mm(b_dY * (b_out * b_divisor)[None, :], tl.trans(b_WT), None, OP, PRECISION) * (1.0 / b_divisor)[None, :]
    b_doT = b_doT.to(tl.float32) * (b_in_q * scale)[None, :]
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    return retreat(b_dS, total, b_doT, b_q, b_X * (b_beta * b_in_k)[None, :], b_k, OP, PRECISION)
