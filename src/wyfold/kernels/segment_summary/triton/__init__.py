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
from typing import Any

from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.kernels.scan.triton.arguments import Sizes
from wyfold.kernels.segment_summary.triton.arguments import Bounds, Gradients, Maps, ReverseTokens, SegmentIndex, Tokens
from wyfold.kernels.segment_summary.triton.backward import wyfold_segment_summary_bwd_triton
from wyfold.kernels.segment_summary.triton.forward import wyfold_segment_summary_triton
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
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


def segment_summary(
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    segments: Segments,
    options: DeltaOptions,
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
        options: Uses `erases` and `qk_l2norm` with a horizon. The Gluon launch always uses `erases`; here
            `prepared.rows` say whether keys read the state.
        key: Key of the launch configuration.
        H: [borders, HV, K, V] float32 view, written.
        M: [borders, HV, K, K] float32 view, written; zeros for a segment that begins a sequence. Only a row of zeros
            holds negative zeros.
        horizon: Begin at the horizon. There is a gate.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.triton", key, k.device)
    C, BK, BV = grid.chunk_size, tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel, folded = prepared.q is not None, prepared.E is not None
    inputs = prepared.erasing if channel else k, v, *prepared[:2], prepared.E, None if folded else prepared.W
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
        bounds=Bounds.of(prepared, k, options, horizon=horizon),
        tokens=Tokens(s_k=None if channel else k.stride(), s_v=v.stride(), W=W),
        maps=with_strides(Maps, S0=initial_state, H=H, M=M),
        segments=SegmentIndex.of(segments),
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
        options: Uses `scale`, `unit`.
        key: Key of the launch configuration.
        c: [borders, HV, K, V] float32 view, written.
        horizon: As of `segment_summary`.
    """
    (HK, K), (HV, V), grid = q.shape[2:], do.shape[2:], segments.grid
    config = tuned("segment_summary.triton", key._replace(launch="bwd"), q.device)
    C, BK, BV = grid.chunk_size, tile_width(K), min(config.blocks["BV"], tile_width(V))
    channel, folded = prepared.q is not None, prepared.E is not None
    inputs = (
        *((prepared.q, prepared.erasing) if channel else (q, k)),
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
        bounds=Bounds.of(prepared, k, options, horizon=horizon),
        tokens=ReverseTokens(
            s_q=None if channel else q.stride(), s_k=None if channel else k.stride(), s_do=do.stride(), F=F, W=W
        ),
        gradients=with_strides(Gradients, dST=dST, c=c),
        segments=SegmentIndex.of(segments),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        unit=options.unit,
        scale=options.scale / options.unit,
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
