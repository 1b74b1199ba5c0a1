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
from wyfold.tile.index.triton import Packing, TokenRows, load_upper, load_vector, sequence_span, store_tokens, strides
from wyfold.tile.index.triton.blocks import load_row_factors, load_tile_block, load_token_block
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    has_tma,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)
from wyfold.tile.index.triton.slots import segment_coords, slot_coords
from wyfold.tile.state.triton import StateAt, advance, load_end, read, residual, store_state


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
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        x_o=x_o,
        tokens=Tokens(
            s_q=None if channel else q.stride(),
            s_k=None if channel else k.stride(),
            s_v=v.stride(),
            W=p_W,
            F=p_F,
            o=o,
            s_o=o.stride(),
        ),
        states=States(
            S0=initial_state,
            s_S0=strides(initial_state),
            ST=final_state,
            s_ST=strides(final_state),
            kept=states,
            s_kept=strides(states),
            first_kept=first_state,
        ),
        segments=SegmentTables(
            borders=borders,
            s_borders=strides(borders),
            sequence=None if segments is None else segments.sequence,
            first=None if segments is None else segments.first,
            selected=selected,
        ),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=0 if segments is None else segments.sequences,
        shift=shift,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=options.scale,
        every=max(1, options.checkpoint_every // C),
        SIZES=Sizes(H=H, HV=HV, K=K, V=V, BT=C, BK=BK, BV=BV, STAGES=config.stages),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            CHANNEL=channel,
            FOLDED=folded,
            USE_TMA=descriptors is not None,
            OP=operand(q.dtype),
            PRECISION=precision(q.dtype),
        ),
        **slot_arguments(initial_state, slots),
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


class Tokens(NamedTuple):
    """Kernel argument: how the tokens lie in memory, and what is accessed through pointers alone.

    Attributes:
        s_q, s_k: Strides of q and k; None with a channel gate, whose rows are tiles.
        s_v: Strides of v.
        W, F: Triangular tiles, stored in quarters; W is None if folded.
        o, s_o: Output, and its strides.
    """

    s_q: Any
    s_k: Any
    s_v: Any
    W: Any
    F: Any
    o: Any
    s_o: Any
    end: None = None


class States(NamedTuple):
    """Kernel argument: states [.., HV, K, V], each with its strides; None where the call has none.

    Attributes:
        S0, s_S0: Initial states.
        ST, s_ST: Final states, written.
        kept, s_kept: States after every `every` chunks, written.
        first_kept: [N] first row in `kept` of each sequence.
    """

    S0: Any
    s_S0: Any
    ST: Any
    s_ST: Any
    kept: Any
    s_kept: Any
    first_kept: Any
    end: None = None


class SegmentTables(NamedTuple):
    """Kernel argument: segments of cut sequences; all None if no sequence is cut.

    Attributes:
        borders, s_borders: States at the borders of segments, and their strides.
        sequence: Sequence of each segment.
        first: First segment of each sequence.
        selected: Segments that the launch runs; None for all.
    """

    borders: Any
    s_borders: Any
    sequence: Any
    first: Any
    selected: Any = None
    end: None = None


class Pool(NamedTuple):
    """Kernel argument: tables of a pool's slots, each None without slots.

    Attributes:
        source: [N, columns] slot of each entering state, or None.
        target: [N] slot of each leaving state, or None.
        given: [N] False for a sequence that starts from zeros, or None.
    """

    source: Any = None
    target: Any = None
    given: Any = None


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles, and tiles in flight."""

    H: int
    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: variant of the kernel.

    Attributes:
        PACKED: Whether the batch is packed.
        CHANNEL: Whether the gate is per channel.
        FOLDED: Whether E is read instead of W.
        USE_TMA: Whether the arguments x_ are descriptors.
        OP, PRECISION: Dtype and precision of products.
    """

    PACKED: bool
    CHANNEL: bool
    FOLDED: bool
    USE_TMA: bool
    OP: Any
    PRECISION: str | None


def slot_arguments(pool: Tensor | None, slots: Slots | None) -> dict[str, Any]:
    """Kernel arguments of a call whose states enter from `pool`, by name; `slots` selects them.

    Strides and numbers are separate parameters: the compiler must not specialise on their values.
    """
    if slots is None or pool is None:
        return {"pool": Pool(), **dict.fromkeys(("s_source", "s_target", "slots", "pad"))}
    return {
        "pool": Pool(slots.source, slots.target, slots.given),
        "s_source": None if slots.source is None else slots.source.stride(0),
        "s_target": None if slots.target is None else slots.target.stride(0),
        "slots": pool.shape[0],
        "pad": slots.pad,
    }


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
    by sequence, or with slots by the sequence's slots.
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
    if slots is not None:
        i_from, begins, i_to, ends, live = slot_coords(
            i_n, pool.source, s_source, pool.target, s_target, pool.given, slots, pad
        )  # fmt: skip
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

    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, N)
        i_from, i_to = i_n, i_n
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
    if CHANNEL:
        total = load_vector(inputs.total, i_tile, K, BK, USE_TMA)[None, :]
        b_k = load_tile_block(inputs.k, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
        b_q = load_tile_block(inputs.q, i_tile, 0, 0, BT, K, BT, BK, USE_TMA)
    else:
        b_k = load_token_block(inputs.k, tokens.s_k, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
        b_q = load_token_block(inputs.q, tokens.s_q, at, i_h, 0, K, BT, BK, USE_TMA, FULL)
    b_v = load_token_block(inputs.v, tokens.s_v, at, i_hv, column, V, BT, BV, USE_TMA, FULL)
    b_FT = load_upper(tokens.F, i_tile, BT)

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
