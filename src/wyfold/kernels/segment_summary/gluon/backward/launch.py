"""Launch of `segment_summary_bwd` in Gluon."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes, chunk_descriptors
from wyfold.kernels.records import Prepared
from wyfold.kernels.segment_summary.gluon.backward.kernel import Heads, wyfold_segment_summary_bwd_gluon
from wyfold.kernels.segment_summary.triton.arguments import Bounds, Gradients, SegmentIndex
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import tma_readable


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

    The arguments are those of the Triton launch. Tokens are bfloat16, with the K of the configuration's row for
    `key`, 64 or 128. Chunks have 64 tokens. Tokens that TMA cannot read are copied first. `prepared` includes W.
    """
    (HK, K), (HV, V), grid = q.shape[2:], do.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", key._replace(launch="bwd"), q.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.q is None:
        q, k = tma_readable(q, grid.chunk_size, K), tma_readable(k, grid.chunk_size, K)
    do = tma_readable(do, grid.chunk_size, BV // parts)
    folded = prepared.E is not None
    squares = prepared.F, None if folded else prepared.W
    x_q, x_k, x_do, x_rows, x_total, x_E, x_F, x_W = chunk_descriptors(
        "segment_summary", q, k, (do,), prepared, squares, grid.chunk_size, BV // parts
    )
    if prepared.W is None:  # no query reads what its chunk has written
        x_E = x_F = None
    launch_kernel(
        wyfold_segment_summary_bwd_gluon,
        segments.borders * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_F=x_F,
        x_write=x_E if folded else x_W,
        bounds=Bounds.of(prepared, k, options, horizon=horizon),
        heads=Heads(h_q=q.stride(2), h_k=k.stride(2), h_do=do.stride(2)),
        gradients=with_strides(Gradients, dST=dST, c=c),
        segments=SegmentIndex.of(segments),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        unit=options.unit,
        scale=options.scale / options.unit,
        SIZES=Sizes(
            H=HK,
            HV=HV,
            K=K,
            V=V,
            BT=grid.chunk_size,
            BV=BV,
            PARTS=parts,
            STAGES=config.stages,
            PACKED=True,
            CHANNEL=prepared.q is not None,
            FOLDED=folded,
            ERASES=options.erases,
        ),
        **config.options(),
    )
