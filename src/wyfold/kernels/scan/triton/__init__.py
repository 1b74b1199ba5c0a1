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
from typing import Any

from torch import Tensor

from wyfold.kernels.records import Prepared, Slots
from wyfold.kernels.scan.triton.arguments import Flags, Pool, Sizes, States, Tokens, segment_tables
from wyfold.kernels.scan.triton.kernel import wyfold_scan_triton
from wyfold.runtime.chunk_layout import ChunkGrid, EvenSegments, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned, with_occupancy_hint
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.dot.triton import contracts, operand, precision
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    has_tma,
    tile_descriptor,
    token_descriptor,
    vector_descriptor,
)


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
        from_borders: Whether to run only those segments, or only the others; None for all.
        slots: Uses `source`, `target`, `given`, `pad`. If given, `final_state` is a view of the pool, and so is
            `initial_state` if no sequence is cut. Each sequence writes one slot, which no other reads. o is zero for
            sequences without a live slot. None: states are indexed by sequence.
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
        tokens=with_strides(
            Tokens,
            s_q=None if channel else q.stride(),
            s_k=None if channel else k.stride(),
            s_v=v.stride(),
            W=p_W,
            F=p_F,
            o=o,
        ),
        states=with_strides(States, S0=initial_state, ST=final_state, kept=states, first_kept=first_state),
        segments=segment_tables(segments, borders, selected),
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
        **slot_arguments(slots),
        **config.options(contract=contracts(q.dtype)),
    )


def _descriptors(given: tuple[Any, ...], C: int, BK: int, BV: int) -> Sequence[Any] | None:
    """The arguments as descriptors, or None if one of them cannot have one."""
    q, k, v, rows, total, E, W, F, o = given
    channel = q.ndim == 3
    found = (
        tile_descriptor(q, C, BK) if channel else token_descriptor(q, C, BK),
        None if k is None else tile_descriptor(k, C, BK) if channel else token_descriptor(k, C, BK),
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


def slot_arguments(slots: Slots | None) -> dict[str, Any]:
    """Kernel arguments of a call whose states are in slots, by name.

    Strides and numbers are separate parameters: the compiler must not specialise on their values.
    """
    if slots is None or slots.leaving is None:
        return {"pool": Pool(), **dict.fromkeys(("s_source", "s_target", "slots", "pad"))}
    return {
        "pool": Pool(slots.source, slots.target, slots.given),
        "s_source": None if slots.source is None else slots.source.stride(0),
        "s_target": None if slots.target is None else slots.target.stride(0),
        "slots": slots.leaving.shape[0],
        "pad": slots.pad,
    }


def sequences_to_run(
    grid: ChunkGrid, segments: Segments | EvenSegments | None, from_borders: bool | None
) -> tuple[Tensor | None, int, int]:
    """Which of the grid's sequences a launch runs, as a tensor and an offset for the kernels, and their count.

    Unused borders select segments without a token.
    """
    if from_borders is None or segments is None:
        return None, 0, grid.sequences
    if isinstance(segments, EvenSegments):
        return None, int(from_borders), segments.borders if from_borders else segments.sequences
    return (segments.leading, 1, segments.borders) if from_borders else (segments.first, 0, segments.sequences)


def scan_key(key: LaunchKey, sequences: int, v: Tensor, *, kept: bool) -> LaunchKey:
    """Key of the launch configuration: the call's key, and hints on occupancy and stored states.

    A hint marks launches whose programs of 128 value rows leave the GPU half empty. `kept`: states are stored on the
    way, which needs memory next to the tiles in flight.
    """
    HV, V = v.shape[2:]
    return with_occupancy_hint(key._replace(kept=kept), sequences * HV * -(-V // 128), v.device)
