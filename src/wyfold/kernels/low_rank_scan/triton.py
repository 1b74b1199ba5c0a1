"""`low_rank_scan` in Triton: one program per sequence, value head and tile of value rows, with the state in registers.

    U^T = S^T rows^T        o^T = scale (S^T q^T + U^T F^T + v^T P^T)        S^T <- total S^T + U^T E + v^T K

The state is held transposed, [V, K]. If a rule erases along what it writes, P is F and K is E, and both products are
one, of U + v.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.records import LowRankPrepared
from wyfold.kernels.scan.triton.arguments import States
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import Values, load_values
from wyfold.tile.dot.triton import contracts, mm, operand, precision
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    load_tile,
    load_upper,
    load_vector,
    sequence_span,
    store_tokens,
    strides,
)
from wyfold.tile.index.triton.slots import segment_coords
from wyfold.tile.state.triton import StateAt, advance, load_end, store_state


def scan(
    v: Tensor,
    w: Tensor | None,
    prepared: LowRankPrepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor | None,
    final_state: Tensor | None,
    states: Tensor | None,
    first_state: Tensor | None,
    segments: Segments | None = None,
    borders: Tensor | None = None,
    part: str = "outputs",
) -> None:
    """Run every sequence, or segment, from its entering state.

    Args:
        v, w: [B, T, HV, V] values and their factors, or None for 1.
        prepared: From `low_rank_prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        grid: Chunk grid of the call, or of the segments.
        options: Uses `scale`, `checkpoint_every`.
        key: Key of the launch configuration.
        o: [B, T, HV, V] written, or None: states alone are computed.
        final_state: [N, HV, K, V] view, written, or None.
        states: [rows, HV, K, V] view, written with the states after every `checkpoint_every` tokens, or None.
        first_state: [N] int64 first row in `states` of each sequence.
        segments: Layout of the segments if sequences are cut; tokens are then one buffer, [1, B T, ..].
        borders: [borders, HV, K, V] view, states at the borders between segments.
        part: "outputs", from the states at `borders`. "states" or "maps": write `borders` alone, with the states at the
            ends of segments if zeros enter those that begin no sequence, or with the segments' maps (V = K).
    """
    HV, K, C = v.shape[2], prepared.rows.shape[2], grid.chunk_size
    V = K if part == "maps" else v.shape[3]
    config = tuned("low_rank_scan.triton", key, v.device)
    BV = min(config.blocks["BV"], tile_width(V))
    launch_kernel(
        wyfold_low_rank_scan_triton,
        grid.sequences * HV * -(-V // BV),
        values=Values(v=v, s_v=v.stride(), w=w, s_w=strides(w)),
        factors=prepared,
        output=Output(o=o, s_o=strides(o)),
        states=States(
            S0=initial_state,
            s_S0=strides(initial_state),
            ST=final_state,
            s_ST=strides(final_state),
            kept=states,
            s_kept=strides(states),
            first_kept=first_state,
        ),
        packing=Packing(cu=grid.cu, first=grid.first),
        segments=Borders.of(segments, borders),
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=options.scale,
        every=max(1, options.checkpoint_every // C),
        SIZES=Sizes(HV=HV, K=K, V=V, BT=C, BK=tile_width(K), BV=BV, STAGES=config.stages),
        FLAGS=Flags(PACKED=grid.cu is not None, PART=part, OP=operand(v.dtype), PRECISION=precision(v.dtype)),
        **config.options(contract=contracts(v.dtype)),
    )


def scan_key(prepared: LaunchKey, v: Tensor, w: Tensor | None, *, kept: bool, wide: bool) -> LaunchKey:
    """Launch key of the outputs' scan.

    Args:
        prepared: Key of `low_rank_prepare`, whose factors the scan reads.
        kept: Intermediate states are returned, or sequences are cut.
        wide: The output has another dtype than v.
    """
    return prepared._replace(kept=kept, wide=wide or (w is not None and w.dtype != v.dtype))


class Output(NamedTuple):
    """Kernel argument: the output and its strides, or None."""

    o: Any
    s_o: Any
    end: None = None


class Borders(NamedTuple):
    """Kernel argument: segments of N sequences.

    Attributes:
        p, s: States at the borders between segments, and their strides.
        sequence: Sequence of each segment.
        first: First segment of each sequence.
    """

    p: Any
    s: Any
    sequence: Any
    first: Any
    N: Any
    end: None = None

    @classmethod
    def of(cls, segments: Segments | None, states: Tensor | None) -> Borders:
        """The segments of a call, with these states at their borders; all None if no sequence is cut."""
        if segments is None:
            return cls(None, None, None, None, None)
        return cls(states, strides(states), segments.sequence, segments.first, segments.sequences)


class Sizes(NamedTuple):
    """Constexprs: sizes of the call and of tiles, and tiles in flight."""

    HV: int
    K: int
    V: int
    BT: int
    BK: int
    BV: int
    STAGES: int


class Flags(NamedTuple):
    """Constexprs: whether the batch is packed; which part of a scan is run; dtype and precision of products."""

    PACKED: bool
    PART: str
    OP: Any
    PRECISION: str | None


@triton.jit(do_not_specialize=["T", "per_sequence", "scale", "every"])
def wyfold_low_rank_scan_triton(
    values, factors, output, states, packing, segments, T, per_sequence, scale, every,
    SIZES: tl.constexpr, FLAGS: tl.constexpr,
):  # fmt: skip
    """One program owns BV value rows of one state; the tiles of a head are neighbours, so that they share factors in
    L2."""
    HV: tl.constexpr = SIZES.HV
    K: tl.constexpr = SIZES.K
    V: tl.constexpr = SIZES.V
    BT: tl.constexpr = SIZES.BT
    BK: tl.constexpr = SIZES.BK
    BV: tl.constexpr = SIZES.BV
    OP: tl.constexpr = FLAGS.OP
    PRECISION: tl.constexpr = FLAGS.PRECISION
    PART: tl.constexpr = FLAGS.PART
    NV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0).to(tl.int64)
    i_v, i_hv, i_n = pid % NV, (pid // NV) % HV, pid // (NV * HV)
    column = (i_v * BV).to(tl.int32)
    i_c, b, t, length = sequence_span(i_n, packing, T, per_sequence, FLAGS.PACKED)
    begins, ends, i_border, border = True, True, i_n, StateAt(None, None, 0, False)
    if segments.sequence is not None:
        i_n, i_border, begins, ends = segment_coords(i_n, segments.sequence, segments.first, segments.N)
        if PART == "outputs":
            border = StateAt(segments.p, segments.s, i_border - 1, i_n < segments.N)
    b_S = load_end(StateAt(states.S0, states.s_S0, i_n, begins), border, i_hv, column, K, V, BK, BV)
    if PART == "maps":
        b_S = tl.where((column + tl.arange(0, BV))[:, None] == tl.arange(0, BK)[None, :], 1.0, 0.0)
    for i in tl.range(0, tl.cdiv(length, BT).to(tl.int32), num_stages=SIZES.STAGES):
        i_tile = (i_c + i) * HV + i_hv
        at = TokenRows(b, t + i * BT, length - i * BT, T)
        b_rows = load_tile(factors.rows, i_tile, 0, 0, BT, K, BT, BK)
        b_q = load_tile(factors.q, i_tile, 0, 0, BT, K, BT, BK)
        if PART == "maps":
            b_v = tl.zeros((BT, BV), OP)
        else:
            b_v = load_values(values, at, i_hv, column, V, BT, BV)
        b_FT = load_upper(factors.F, i_tile, BT)
        b_E = load_tile(factors.E, i_tile, 0, 0, BT, K, BT, BK)
        total = load_vector(factors.total, i_tile, K, BK, False)[None, :]
        b_y = mm(b_S, tl.trans(b_rows), None, OP, PRECISION)
        b_o = mm(b_S, tl.trans(b_q), None, OP, PRECISION)
        if factors.K is None:
            b_y = (b_y + tl.trans(b_v).to(tl.float32)).to(OP)
            b_o = mm(b_y, b_FT, b_o, OP, PRECISION)
            b_S = advance(b_S, total, b_y, b_E, OP, PRECISION)
        else:
            b_y = b_y.to(OP)
            b_o = mm(b_y, b_FT, b_o, OP, PRECISION)
            b_o = mm(tl.trans(b_v), load_upper(factors.P, i_tile, BT), b_o, OP, PRECISION)
            b_S = advance(b_S, total, b_y, b_E, OP, PRECISION)
            b_S = mm(tl.trans(b_v), load_tile(factors.K, i_tile, 0, 0, BT, K, BT, BK), b_S, OP, PRECISION)
        if output.o is not None:
            store_tokens(output.o, output.s_o, at, i_hv, column, tl.trans(b_o * scale), V)
        if states.kept is not None:
            if ((i + 1) % every == 0) & (length >= (i + 1) * BT):
                i_state = (i + 1) // every - 1 + tl.load(states.first_kept + i_n)
                store_state(states.kept, states.s_kept, i_state, i_hv, column, b_S, K, V, BK, BV)
    if PART != "outputs":
        if (i_n < segments.N) & (ends == 0):
            # Negative zeros would mark a map of zeros to `segment_fold`.
            store_state(segments.p, segments.s, i_border, i_hv, column, b_S + 0.0, K, V, BK, BV)
    if states.ST is not None:
        if ends:
            store_state(states.ST, states.s_ST, i_n, i_hv, column, b_S, K, V, BK, BV)
