"""`low_rank_scan` in Gluon for Hopper, where a rule erases along what it writes: K = V = 128, chunks of 64, bfloat16.

The kernel is that of `scan`, which adds what the erasing rows read instead of subtracting it. The products are those of
`low_rank_scan` in Triton, in the same order and with the same roundings.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes
from wyfold.kernels.records import LowRankPrepared
from wyfold.kernels.scan.gluon.kernel import Tokens, wyfold_scan_gluon
from wyfold.kernels.scan.triton import slot_arguments
from wyfold.kernels.scan.triton.arguments import States, segment_tables
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    require_descriptors,
    tile_descriptor,
    tma_readable,
    token_descriptor,
    upper_descriptor,
    vector_descriptor,
)

__all__ = ["scan", "wyfold_scan_gluon"]


def scan(
    v: Tensor,
    w: Tensor | None,
    prepared: LowRankPrepared,
    initial_state: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    final_state: Tensor | None,
) -> None:
    """Run every sequence from its initial state; takes the first arguments of the Triton launch.

    Args:
        w: Factors of the values, bfloat16, or None for 1.
        o: [B, T, HV, V] written.
    """
    (HV, V), C, K = v.shape[2:], grid.chunk_size, prepared.rows.shape[2]
    config = tuned("low_rank_scan.gluon", key, v.device)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    BW = BV // parts
    v, out_rows = tma_readable(v, C, BW), tma_readable(o, C, BW)
    if w is not None:
        w = tma_readable(w, C, BW)
        if w.stride(2) != v.stride(2):
            v, w = v.contiguous(), w.contiguous()  # one column of both
    x_q, x_rows, x_v, x_o, x_total, x_E, x_F, x_w = _descriptors(prepared, v, w, out_rows, C, BW)
    launch_kernel(
        wyfold_scan_gluon,
        grid.sequences * HV * (V // BV),
        x_q=x_q,
        x_k=x_rows,
        x_v=x_v,
        x_rows=None,
        x_total=x_total,
        x_write=x_E,
        x_F=x_F,
        x_o=x_o,
        x_w=x_w,
        tokens=with_strides(Tokens, h_q=0, h_k=0, h_v=v.stride(2), o=out_rows),
        states=with_strides(States, S0=initial_state, ST=final_state),
        segments=segment_tables(None, None, None),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=0,
        shift=0,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=options.scale,
        SIZES=Sizes(
            H=HV,
            HV=HV,
            K=K,
            V=V,
            BT=C,
            BV=BV,
            PARTS=parts,
            STAGES=config.stages,
            PACKED=grid.cu is not None,
            CHANNEL=True,
            FOLDED=True,
            OUT=out,
            IN_PLACE=out == 0,
            ADDS=True,
        ),
        **slot_arguments(None),
        **config.options(),
    )
    if out_rows is not o:
        o.copy_(out_rows)


def _descriptors(prepared: LowRankPrepared, v: Tensor, w: Tensor | None, o: Tensor, C: int, BW: int) -> list[Any]:
    """TMA descriptors of a chunk: q, erasing rows, v, o, decay, E, F and w, which may be None."""
    K = prepared.rows.shape[2]
    given = prepared.q, prepared.rows, v, o, prepared.total, prepared.E, prepared.F, w
    found = (
        tile_descriptor(prepared.q, C, K),
        tile_descriptor(prepared.rows, C, K),
        token_descriptor(v, C, BW),
        token_descriptor(o, C, BW),
        vector_descriptor(prepared.total, K),
        tile_descriptor(prepared.E, C, K),
        upper_descriptor(prepared.F),
        None if w is None else token_descriptor(w, C, BW),
    )
    return gluon_descriptors(require_descriptors("low_rank_scan", all_or_none(given, found)))
