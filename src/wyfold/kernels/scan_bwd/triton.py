"""`scan_bwd` in Triton: two halves of one grid; each program holds a state, or its gradient, in registers.

forward half:  store S, then as `scan` without output; store e = W R, whose sum starts from the rounding error of R if
               e does not enter the state
reverse half:  store dS (of the state leaving the chunk), then
               X^T  = s do^T F + dS^T E^T                    folded
               X^T  = s do^T F + ((dS^T k^T) out beta) W / beta    else: A = diag(beta) W / diag(beta)
               dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k

dS and X are in units of `DeltaOptions.unit`, relative to which s, otherwise the scale, is 1. W has a unit diagonal, so
a product with it starts from the rounding error of its operand, which the diagonal passes through unchanged.

Descriptors and the partial last chunk are as in `scan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Prepared, TokenBorders
from wyfold.kernels.scan.triton import Flags, Sizes
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned, with_occupancy_hint
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.dot.triton import contracts, mm, mm_unit_diagonal, operand, precision, workspace
from wyfold.tile.index.triton import Packing, TokenRows, load_upper, load_vector, sequence_span, strides
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block, store_tile_block
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    has_tma,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.inverse.triton import nonzero_beta
from wyfold.tile.state.triton import StateAt, advance, load_end, residual, retreat, store_state

Half = Literal["forward", "reverse", "both"]


def scan_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    dS0: Tensor | None,
    borders: TokenBorders,
    segments: Segments | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    half: Half = "both",
) -> None:
    """States and their gradients at the borders of every chunk.

    Args:
        q, k: [B, T, H, K] tokens, any strides.
        v, do: [B, T, HV, V].
        prepared: From `prepare`, including W.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        grid: Chunk grid of the call, or of its segments.
        options: Uses `scale`.
        key: Key of the launch configuration.
        dS0: [N, HV, K, V] view, written, or None.
        borders: From `token_borders`, written.
        segments: Layout of the segments, whose sequences are those of the states; None if no sequence is cut.
        entering, leaving: [borders, HV, K, V] views, states at the segments' borders and their gradients.
        half: Half to run: "forward" reads no gradient of a state, "reverse" no state.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    halves, going_back = programs(half, grid.sequences)
    config = tuned("scan_bwd.triton", scan_bwd_key(key, grid.sequences, v), q.device)
    BK, BV = tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel = prepared.q is not None
    inputs = prepared.q if channel else q, prepared.k if channel else k, v, do, *prepared[:2], *prepared[4:7], *borders
    descriptors = _descriptors(inputs, C, BK, BV) if has_tma(q.device) else None
    x_q, x_k, x_v, x_do, x_rows, x_total, x_E, p_F, p_W, x_S, x_dS, x_e, x_X = descriptors or inputs
    launch_kernel(
        wyfold_scan_bwd_triton,
        halves * grid.sequences * HV * -(-V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        tokens=Tokens(
            s_q=None if channel else q.stride(),
            s_k=None if channel else k.stride(),
            s_v=v.stride(),
            s_do=do.stride(),
            F=p_F,
            W=p_W,
        ),
        states=States(
            S0=initial_state, s_S0=strides(initial_state), dST=dST, s_dST=strides(dST), dS0=dS0, s_dS0=strides(dS0)
        ),
        segments=SegmentTables(
            entering=entering,
            s_entering=strides(entering),
            leaving=leaving,
            s_leaving=strides(leaving),
            sequence=None if segments is None else segments.sequence,
            first=None if segments is None else segments.first,
        ),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences if segments is None else segments.sequences,
        going_back=going_back,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        unit=options.unit,
        scale=options.scale / options.unit,
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV, STAGES=config.stages),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            CHANNEL=channel,
            FOLDED=prepared.E is not None,
            USE_TMA=descriptors is not None,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
        ),
        **config.options(contract=contracts(q.dtype)),
    )


def token_borders(q: Tensor, v: Tensor, grid: ChunkGrid) -> TokenBorders:
    """Uninitialised border tensors, which `scan_bwd` writes."""
    return TokenBorders.of(*border_pairs(q, v, grid))


def border_pairs(q: Tensor, v: Tensor, grid: ChunkGrid) -> tuple[Tensor, Tensor]:
    """The memory of the border tensors, for `TokenBorders.of`."""
    K, V, tiles = q.shape[3], v.shape[3], grid.chunks * v.shape[2]
    states = v.new_empty(2, tiles, V, K, dtype=workspace(q.dtype))
    tokens = v.new_empty(2, tiles, grid.chunk_size, V, dtype=workspace(q.dtype))
    return states, tokens


def programs(half: Half, sequences: int) -> tuple[int, int]:
    """Size of a launch.

    Returns:
        Number of programs per sequence, head and tile of value rows, and how many sequences the reverse half runs.
    """
    return (2 if half == "both" else 1), (0 if half == "forward" else sequences)


def scan_bwd_key(key: LaunchKey, sequences: int, v: Tensor) -> LaunchKey:
    """Key of the launch configuration: the call's key, and whether programs of 128 value rows leave the GPU half
    empty."""
    HV, V = v.shape[2:]
    return with_occupancy_hint(key, 2 * sequences * HV * -(-V // 128), v.device)


def _descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    q, k, v, do, rows, total, E, F, W, S, dS, e, X = given
    channel = q.ndim == 3
    found = (
        tile_descriptor(q, C, BK) if channel else token_descriptor(q, C, BK),
        tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
        token_descriptor(v, C, BV),
        token_descriptor(do, C, BV),
        tile_descriptor(rows, 4, C),
        vector_descriptor(total, BK) if channel else total,
        None if E is None else tile_descriptor(E, C, BK),
        # Triangular tiles are stored in quarters and loaded through pointers.
        F,
        W,
        tile_descriptor(S, BV, BK),
        tile_descriptor(dS, BV, BK),
        tile_descriptor(e, C, BV),
        tile_descriptor(X, C, BV),
    )
    return all_or_none(given, found)


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and tiles that are accessed through pointers alone.

    Attributes:
        s_q, s_k: Strides of q and k; None with a channel gate, whose rows are tiles.
        s_v, s_do: Strides of v and do.
        F, W: Triangular tiles, stored in quarters.
    """

    s_q: Any
    s_k: Any
    s_v: Any
    s_do: Any
    F: Any
    W: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [N, HV, K, V] of the call, each with its strides; None where it has none.

    Attributes:
        S0, s_S0: Initial states.
        dST, s_dST: Gradients of the final states.
        dS0, s_dS0: Gradients of the initial states, written.
    """

    S0: Any
    s_S0: Any
    dST: Any
    s_dST: Any
    dS0: Any
    s_dS0: Any
    end: None = None


class SegmentTables(NamedTuple):
    """Kernel argument: segments of cut sequences; all None if no sequence is cut.

    Attributes:
        entering, s_entering: States at the borders of segments, and their strides.
        leaving, s_leaving: Gradients of those states.
        sequence: Sequence of each segment.
        first: First segment of each sequence.
    """

    entering: Any
    s_entering: Any
    leaving: Any
    s_leaving: Any
    sequence: Any
    first: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "going_back", "T", "per_sequence", "unit", "scale"])
def wyfold_scan_bwd_triton(
    x_q,
    x_k,
    x_v,
    x_do,
    x_rows,
    x_total,
    x_E,
    x_S,
    x_dS,
    x_e,
    x_X,
    tokens,
    states,
    segments,
    packing,
    N,
    going_back,
    T,
    per_sequence,
    unit,
    scale,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """One program owns BV value rows of one state, or of its gradient; `going_back` sequences or segments have the
    latter."""
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
    half = going_back * HV * NV
    reverse = pid < half
    pid -= tl.where(reverse, 0, half)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)
    inputs = Inputs(x_q, x_k, x_v, x_do, x_rows, x_total, x_E)
    results = TokenBorders(x_S, x_dS, x_e, x_X)
    total = 0.0
    begins, ends, i_border = True, True, i_n
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)

    if reverse:
        b_dS = load_end(
            StateAt(states.dST, states.s_dST, i_n, ends),
            StateAt(segments.leaving, segments.s_leaving, i_border, i_n < N),
            i_hv, column, K, V, BK, BV,
        )  # fmt: skip
        unit = tl.where(length > 0, unit, 1.0)  # without a token the gradient passes through unchanged
        b_dS *= 1.0 / unit
        if USE_TMA:
            if steps * BT < length:
                if not CHANNEL:
                    total = tl.load(x_total + i_tile + steps * HV)
                b_dS = _reverse_step(
                    b_dS, total, inputs, results, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, False,
                )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile + (steps - 1) * HV, mask=steps > 0, other=0.0)
        for j in tl.range(0, steps, num_stages=STAGES):
            i = steps - 1 - j
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i - 1) * HV, mask=i > 0, other=0.0)
            b_dS = _reverse_step(
                b_dS, total, inputs, results, tokens, i_tile + i * HV,
                TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv, column, scale, SIZES, FLAGS, USE_TMA,
            )  # fmt: skip
            total = next_total
        b_dS *= unit
        if states.dS0 is not None:
            if segments.sequence is None:
                store_state(states.dS0, states.s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
            elif begins:
                store_state(states.dS0, states.s_dS0, i_n, i_hv, column, b_dS, K, V, BK, BV)
    else:
        b_S = load_end(
            StateAt(states.S0, states.s_S0, i_n, begins),
            StateAt(segments.entering, segments.s_entering, i_border - 1, i_n < N),
            i_hv, column, K, V, BK, BV,
        )  # fmt: skip
        if not CHANNEL:
            total = tl.load(x_total + i_tile, mask=length > 0, other=0.0)
        for i in tl.range(0, steps, num_stages=STAGES):
            next_total = total
            if not CHANNEL:
                next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=length > (i + 1) * BT, other=0.0)
            b_S = _forward_step(
                b_S, total, inputs, results, tokens, i_tile + i * HV,
                TokenRows(b, t + i * BT, length - i * BT, T), i_h, i_hv, column, SIZES, FLAGS, USE_TMA,
            )  # fmt: skip
            total = next_total
        if USE_TMA:
            if steps * BT < length:
                _forward_step(
                    b_S, total, inputs, results, tokens, i_tile + steps * HV,
                    TokenRows(b, t + steps * BT, length - steps * BT, T), i_h, i_hv, column, SIZES, FLAGS, False,
                )  # fmt: skip


class Inputs(NamedTuple):
    """Descriptors of what a chunk's step reads, or pointers without TMA: tokens, and the tiles of `prepare`."""

    q: Any
    k: Any
    v: Any
    do: Any
    rows: Any
    total: Any
    E: Any


@triton.jit
def _reverse_step(
    b_dS,
    total,
    inputs,
    results,
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
    """Write dS and X of a chunk; return the gradient of the state entering it. FULL: all its rows are tokens.

    scale: Factor of do, in units.
    """
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
    if CHANNEL:
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_do = load_token_block(inputs.do, tokens.s_do, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)

    store_tile_block(results.dS, i_tile, column, 0, b_dS, V, K, BV, BK, USE_TMA)
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
        b_dR = mm_unit_diagonal(b_dY, (b_out * b_divisor)[None, :], tl.trans(b_WT), OP, PRECISION)
        b_X += b_dR * (1.0 / b_divisor)[None, :]
    store_tile_block(results.X, i_tile, 0, column, tl.trans(b_X), BT, V, BT, BV, USE_TMA)
    b_doT = b_doT.to(tl.float32) * (b_in_q * scale)[None, :]
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    return retreat(b_dS, total, b_doT, b_q, b_X * (b_beta * b_in_k)[None, :], b_k, OP, PRECISION)


@triton.jit
def _forward_step(
    b_S,
    total,
    inputs,
    results,
    tokens,
    i_tile,
    at,
    i_h,
    i_hv,
    column,
    SIZES: tl.constexpr,
    FLAGS: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write S and e of a chunk; return the state leaving it. FULL: all its rows are tokens."""
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
    if CHANNEL:
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_v = load_token_block(inputs.v, tokens.s_v, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_WT = load_upper(tokens.W, i_tile, BT)

    store_tile_block(results.S, i_tile, column, 0, b_S, V, K, BV, BK, USE_TMA)
    b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    b_in_k, _, b_out, b_beta = load_row_factors(inputs.rows, i_tile, BT, USE_TMA)
    b_R = residual(b_v, b_Sk, b_in_k)
    if FOLDED:
        b_e = mm_unit_diagonal(b_R, None, b_WT, OP, PRECISION)
    else:
        b_e = mm(b_R, b_WT, None, OP, PRECISION)
    store_tile_block(results.e, i_tile, 0, column, tl.trans(b_e), BT, V, BT, BV, USE_TMA)
    if FOLDED:
        b_E = load_tile_block(inputs.E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, b_R * b_beta[None, :], b_E, OP, PRECISION)
    else:
        return advance(b_S, total, b_e * (b_beta * b_out)[None, :], b_k, OP, PRECISION)
