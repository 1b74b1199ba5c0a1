"""`scan` in Triton: one program per sequence, value head and tile of value rows, with the state in registers.

The state is held transposed, [V, K], so every product has the running value as its left operand, without a transpose in
registers:

    R^T = V^T - (S^T k^T) in          Y^T = R^T beta
    o^T = (S^T q^T) in + Y^T F^T            S^T <- total S^T + Y^T E                      folded
    o^T = (S^T q^T) in + R^T (F beta)^T     S^T <- total S^T + ((R^T W^T) beta out) k     else

in and out are a token's decay since the chunk's start and until its end; a channel gate's are in the tiles of q and k.
total is the state's decay over the chunk. All three come from `prepare`, as do the products F beta and beta out.

The unfolded form has one product more, e = W R, and reads 128 bytes a token less. `scan_bwd` computes the same state
from the same e, bit for bit.

If the memory layout allows descriptors, TMA loads and stores the tiles. A partial last chunk is then a separate step
after the loop, the only one that masks rows of the next sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import Prepared, Slots
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned, with_occupancy_hint
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
    slot_coords,
    store_tokens,
    strides,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)
from wyfold.tile.state.triton import advance, load_end, read, residual, store_state

SLOT_NUMBERS = ["s_source", "s_target", "slots", "pad"]
"""Kernel arguments whose values the compiler must not specialise on."""


def scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    final_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
    segments: Segments | None = None,
    borders: Tensor | None = None,
    from_borders: bool | None = None,
    slots: Slots | None = None,
) -> None:
    """Run every sequence, or every segment of one, from its entering state.

    Args:
        q, k: [B, T, H, K] tokens, any strides.
        v: [B, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        grid: Chunk grid of the call, or of its segments.
        options: Uses `scale`, `checkpoint_every`.
        key: Key of the launch configuration.
        o: [B, T, HV, V] written.
        final_state: [N, HV, K, V] view, written, or None.
        states: [rows, HV, K, V] view, written with the states after every `checkpoint_every` tokens, or None.
        first_state: [N] int64 first row in `states` of each sequence.
        segments: Layout of the segments, whose sequences are those of the states; None if no sequence is cut.
        borders: [borders, HV, K, V] view, states entering the segments that do not begin a sequence.
        from_borders: Whether to run only those segments, or only the others; None if no sequence is cut.
        slots: Uses `source`, `target`, `given`, `pad`. If given, `initial_state` and `final_state` are views of the
            pool and no sequence is cut. Each sequence writes one slot, which no other reads. o is zero for sequences
            without a live slot. None: states are indexed by sequence.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    concurrent = grid.sequences if segments is None else segments.expected
    selected, shift, count = sequences_to_run(grid, segments, from_borders)
    config = tuned("scan.triton", scan_key(key, concurrent, v, kept=states is not None), q.device)
    BK, BV = tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel = prepared.q is not None
    folded = prepared.E is not None
    factors = prepared.E, None if folded else prepared.W, prepared.F if folded else prepared.FB
    inputs = prepared.q if channel else q, prepared.k if channel else k, v, *prepared[:2], *factors, o
    # The block of a wider output would need shared memory that the tiles occupy.
    descriptors = _descriptors(inputs, C, BK, BV) if has_tma(q.device) and o.dtype == v.dtype else None
    x_q, x_k, x_v, x_rows, x_total, x_E, p_W, p_F, x_o = descriptors or inputs
    launch_kernel(
        wyfold_scan_triton,
        count * HV * -(-V // BV),
        x_q,
        None if channel else q.stride(),
        x_k,
        None if channel else k.stride(),
        x_v,
        v.stride(),
        x_rows,
        x_total,
        x_E,
        p_W,
        p_F,
        initial_state,
        strides(initial_state),
        x_o,
        o,
        o.stride(),
        final_state,
        strides(final_state),
        states,
        strides(states),
        first_state,
        borders,
        strides(borders),
        None if segments is None else segments.sequence,
        None if segments is None else segments.first,
        0 if segments is None else segments.sequences,
        selected,
        shift,
        *slot_arguments(initial_state, slots),
        grid.cu,
        grid.first,
        grid.tokens,
        grid.per_sequence,
        options.scale,
        max(1, options.checkpoint_every // C),
        H=H,
        HV=HV,
        K=K,
        V=V,
        BT=C,
        BK=BK,
        BV=BV,
        PACKED=grid.cu is not None,
        CHANNEL=channel,
        FOLDED=folded,
        USE_TMA=descriptors is not None,
        OP=operand(q.dtype),
        PRECISION=precision(q.dtype),
        STAGES=config.stages,
        **config.options(contract=contracts(q.dtype)),
    )


def _descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    q, k, v, rows, total, E, W, F, o = given
    channel = q.ndim == 3
    found = (
        tile_descriptor(q, C, BK) if channel else token_descriptor(q, C, BK),
        tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
        token_descriptor(v, C, BV),
        tile_descriptor(rows, 4, C),
        vector_descriptor(total, BK) if channel else total,
        None if E is None else tile_descriptor(E, C, BK),
        # Triangular tiles are stored in quarters and loaded through pointers.
        W,
        F,
        token_descriptor(o, C, BV),
    )
    return all_or_none(given, found)


class SlotArguments(NamedTuple):
    """Kernel arguments that describe the slots of a pool, in the kernels' order; all None without slots.

    Attributes:
        source: [N, columns] slot of each entering state, or None.
        source_step: Stride of `source`.
        target: [N] slot of each leaving state, or None.
        target_step: Stride of `target`.
        given: [N] False for a sequence that starts from zeros, or None.
        slots: Number of slots.
        pad: Live slots are greater than this.
    """

    source: Tensor | None = None
    source_step: int | None = None
    target: Tensor | None = None
    target_step: int | None = None
    given: Tensor | None = None
    slots: int | None = None
    pad: int | None = None


def slot_arguments(pool: Tensor | None, slots: Slots | None) -> SlotArguments:
    """Slot arguments of a call whose states enter from `pool`; `slots` selects them."""
    if slots is None or pool is None:
        return SlotArguments()
    source, target = slots.source, slots.target
    steps = (None if x is None else x.stride(0) for x in (source, target))
    return SlotArguments(source, next(steps), target, next(steps), slots.given, pool.shape[0], slots.pad)


def sequences_to_run(
    grid: ChunkGrid, segments: Segments | None, from_borders: bool | None
) -> tuple[Tensor | None, int, int]:
    """Which of the grid's sequences a launch runs, as a tensor and an offset for the kernels, and their count.

    Unused borders select segments without a token.
    """
    if segments is None:
        return None, 0, grid.sequences
    return (segments.leading, 1, segments.borders) if from_borders else (segments.first, 0, segments.sequences)


def scan_key(key: LaunchKey, sequences: int, v: Tensor, *, kept: bool) -> LaunchKey:
    """Key of the launch configuration: the call's key, and hints on occupancy and stored states.

    A hint marks launches whose programs of 128 value rows leave the GPU half empty. `kept`: states are stored on the
    way, which needs memory next to the tiles in flight.
    """
    HV, V = v.shape[2:]
    return with_occupancy_hint(key._replace(kept=kept), sequences * HV * -(-V // 128), v.device)


@triton.jit(do_not_specialize=[*SLOT_NUMBERS, "N", "shift", "T", "per_sequence", "scale", "every"])
def wyfold_scan_triton(
    x_q,
    s_q,
    x_k,
    s_k,
    x_v,
    s_v,
    x_rows,
    x_total,
    x_E,
    p_W,
    p_F,
    p_S0,
    s_S0,
    x_o,
    p_o,
    s_o,
    p_ST,
    s_ST,
    p_states,
    s_states,
    p_first_state,
    p_borders,
    s_borders,
    p_sequence,
    p_first_segment,
    N,
    p_selected,
    shift,
    p_source,
    s_source,
    p_target,
    s_target,
    p_given,
    slots,
    pad,
    p_cu,
    p_first,
    T,
    per_sequence,
    scale,
    every,
    H: tl.constexpr,
    HV: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PACKED: tl.constexpr,
    CHANNEL: tl.constexpr,
    FOLDED: tl.constexpr,
    USE_TMA: tl.constexpr,
    OP: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One program owns BV value rows of one state; the tiles of a head are neighbours, so that they share k and q in
    L2.

    i_n is the program's sequence of the chunk grid: its number n, or with p_selected, p_selected[n] + shift. With
    p_sequence, the grid's sequences are segments, and p_sequence[i_n] is the sequence that segment i_n belongs to.
    States are indexed by sequence, or with slots by the sequence's slots.
    """
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    if p_selected is not None:
        i_n = tl.load(p_selected + i_n) + shift
    i_h = i_hv // (HV // H)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, p_cu, p_first, T, per_sequence, PACKED)
    i_tile = i_c * HV + i_hv
    begins, ends, i_border, i_from, i_to = True, True, i_n, i_n, i_n
    if slots is not None:
        i_from, begins, i_to, ends, live = slot_coords(
            i_n, p_source, s_source, p_target, s_target, p_given, slots, pad
        )  # fmt: skip
        if not live:
            # Zero the output here; the code below then sees no token.
            for row in range(0, length, BT):
                rows = tl.minimum(length - row, BT).to(tl.int32)
                store_tokens(p_o, s_o, b, t + row, i_hv, column, rows, tl.zeros((BT, BV), tl.float32), V, BT, BV)
            length = length * 0
    steps = (length // BT).to(tl.int32)
    if not USE_TMA:
        steps = tl.cdiv(length, BT).to(tl.int32)

    if p_sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, p_sequence, p_first_segment, N)
        i_from, i_to = i_n, i_n
    b_S = load_end(
        p_S0, s_S0, i_from, begins, p_borders, s_borders, i_border - 1, i_n < N, i_hv, column, K, V, BK, BV
    )  # fmt: skip
    total = 0.0
    if not CHANNEL:
        total = tl.load(x_total + i_tile, mask=length > 0, other=0.0)
    for i in tl.range(0, steps, num_stages=STAGES):
        next_total = total
        if not CHANNEL:
            next_total = tl.load(x_total + i_tile + (i + 1) * HV, mask=length > (i + 1) * BT, other=0.0)
        b_S = _step(
            b_S, total, x_q, s_q, x_k, s_k, x_v, s_v, x_rows, x_total, x_E, p_W, p_F, x_o, p_o, s_o,
            i_tile + i * HV, b, t + i * BT, i_h, i_hv, column, length - i * BT, T, scale,
            K, V, BT, BK, BV, CHANNEL, FOLDED, USE_TMA, USE_TMA, OP, PRECISION,
        )  # fmt: skip
        total = next_total
        if p_states is not None:
            if ((i + 1) % every == 0) & (length >= (i + 1) * BT):
                i_state = (i + 1) // every - 1 + tl.load(p_first_state + i_n)
                store_state(p_states, s_states, i_state, i_hv, column, b_S, K, V, BK, BV)
    if USE_TMA:
        if steps * BT < length:
            b_S = _step(
                b_S, total, x_q, s_q, x_k, s_k, x_v, s_v, x_rows, x_total, x_E, p_W, p_F, x_o, p_o, s_o,
                i_tile + steps * HV, b, t + steps * BT, i_h, i_hv, column, length - steps * BT, T, scale,
                K, V, BT, BK, BV, CHANNEL, FOLDED, USE_TMA, False, OP, PRECISION,
            )  # fmt: skip
    if p_ST is not None:
        if ends:
            store_state(p_ST, s_ST, i_to, i_hv, column, b_S, K, V, BK, BV)


@triton.jit
def _step(
    b_S,
    total,
    x_q,
    s_q,
    x_k,
    s_k,
    x_v,
    s_v,
    x_rows,
    x_total,
    x_E,
    p_W,
    p_F,
    x_o,
    p_o,
    s_o,
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
    """Write a chunk's output; return the state leaving it. FULL: all its rows are tokens."""
    if CHANNEL:
        total = load_vector(x_total, i_tile, K, BK, USE_TMA)[None, :]
        b_k = load_tile_block(x_k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(x_q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(x_k, s_k, b, t, i_h, 0, rows, T, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(x_q, s_q, b, t, i_h, 0, rows, T, K, BT, BK, USE_TMA, FULL)
    b_v = load_token_block(x_v, s_v, b, t, i_hv, column, rows, T, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(p_F, i_tile, BT)

    b_Sk = mm(b_S, tl.trans(b_k), None, OP, PRECISION)
    # Loaded after the product with the most live registers, which these numbers would double.
    b_in_k, b_in_q, b_out, b_beta = load_row_factors(x_rows, i_tile, BT, USE_TMA)
    b_R = residual(b_v, b_Sk, b_in_k)
    if FOLDED:
        b_R = b_R * b_beta[None, :]
    b_y = b_R.to(OP)
    b_o = read(b_S, b_q, b_y, b_FT, b_in_q, OP, PRECISION) * scale
    if USE_TMA and FULL:
        x_o.store([(b * T + t).to(tl.int32), (i_hv * s_o[2]).to(tl.int32) + column], tl.trans(b_o.to(x_o.dtype)))
    else:
        store_tokens(p_o, s_o, b, t, i_hv, column, rows, tl.trans(b_o), V, BT, BV)
    if FOLDED:
        b_E = load_tile_block(x_E, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        return advance(b_S, total, b_y, b_E, OP, PRECISION)
    else:
        b_WT = load_upper(p_W, i_tile, BT)
        b_e = mm(b_y, b_WT, None, OP, PRECISION)
        return advance(b_S, total, b_e * b_out[None, :], b_k, OP, PRECISION)
