"""Launch of `segment_summary` in Gluon."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.kernels.segment_summary.gluon.forward.kernel import wyfold_segment_summary_gluon
from wyfold.kernels.segment_summary.gluon.forward.program import Heads, Sizes
from wyfold.kernels.segment_summary.triton.arguments import Maps, SegmentIndex
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    require_descriptors,
    tile_descriptor,
    tma_readable,
    token_descriptor,
    upper_descriptor,
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

    The arguments are those of the Triton launch. Tokens that TMA cannot read are copied first.

    Args:
        k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        v: [1, T, HV, V].
        prepared: From `prepare`.
        initial_state: [N, HV, K, V] view of any strides and float dtype, or None (zeros).
        segments: Layout of the segments, with chunks of 64.
        options: Uses `erases`.
        key: Key of the launch configuration.
        H: [borders, HV, K, V] float32 view, written.
        M: [borders, HV, K, K] float32 view, written; zeros for a segment that begins a sequence. Only a row of zeros
            holds negative zeros.
        horizon: As of the Triton launch.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", key._replace(launch="fwd"), k.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.k is None:
        k = tma_readable(k, grid.chunk_size, K)
    v = tma_readable(v, grid.chunk_size, BV // parts)
    x_k, x_v, x_rows, x_total, x_write = require_descriptors(
        "segment_summary", _descriptors(k, v, prepared, grid.chunk_size, BV // parts)
    )
    launch_kernel(
        wyfold_segment_summary_gluon,
        segments.borders * HV * (V // BV + K // BV),
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_write,
        p_rows=prepared.rows if horizon else None,
        heads=Heads(h_k=k.stride(2), h_v=v.stride(2)),
        maps=Maps(S0=initial_state, s_S0=strides(initial_state), H=H, s_H=strides(H), M=M, s_M=strides(M)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        SIZES=Sizes(
            H=HK,
            HV=HV,
            K=K,
            V=V,
            BT=grid.chunk_size,
            BV=BV,
            PARTS=parts,
            CHANNEL=prepared.k is not None,
            FOLDED=prepared.E is not None,
            ERASES=options.erases,
            STAGES=config.stages,
        ),
        **config.options(),
    )


def _descriptors(k: Tensor, v: Tensor, prepared: Prepared, C: int, BW: int) -> list[Any] | None:
    """The kernel's first arguments, as descriptors where TMA reads them; None if one cannot have a descriptor."""
    rows, total, _, k_tiles, E, _, W = prepared[:7]
    K, channel = k.shape[3], k_tiles is not None
    write = E if E is not None else W
    given = k, v, rows, total, write
    found = (
        tile_descriptor(k_tiles, C, K) if k_tiles is not None else token_descriptor(k, C, K),
        token_descriptor(v, C, BW),
        vector_descriptor(rows.flatten(1), 4 * C),
        vector_descriptor(total, K) if channel else total,
        None if write is None else tile_descriptor(write, C, K) if write is E else upper_descriptor(write),
    )
    descriptors = all_or_none(given, found)
    return None if descriptors is None else gluon_descriptors(descriptors)
