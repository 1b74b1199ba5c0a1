"""Launch of `segment_summary_bwd` in Gluon."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes, chunk_descriptors
from wyfold.kernels.records import Prepared
from wyfold.kernels.segment_summary.gluon.backward.kernel import Heads, wyfold_segment_summary_bwd_gluon
from wyfold.kernels.segment_summary.triton.arguments import Gradients, SegmentIndex
from wyfold.runtime.chunk_layout import Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.triton import Packing, strides
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

    The arguments are those of the Triton launch. Tokens that TMA cannot read are copied first.

    Args:
        q, k: [1, T, H, K] tokens of all rows, bfloat16, K 64 or 128, as the table's row for `key` says.
        prepared: From `prepare`, including W.
        do: [1, T, HV, V].
        dST: [N, HV, K, V] view, gradient of the final state, or None (zeros).
        segments: Layout of the segments, with chunks of 64.
        options: Uses `scale`.
        key: Key of the launch configuration.
        c: [borders, HV, K, V] float32 view, written.
        horizon: As of the Triton launch.
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
        p_rows=prepared.rows if horizon else None,
        heads=Heads(h_q=q.stride(2), h_k=k.stride(2), h_do=do.stride(2)),
        gradients=Gradients(dST=dST, s_dST=strides(dST), c=c, s_c=strides(c)),
        segments=SegmentIndex(sequence=segments.sequence, first=segments.first, leading=segments.leading),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=segments.sequences,
        T=grid.tokens,
        scale=options.scale,
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
            CHANNEL=prepared.k is not None,
            FOLDED=folded,
        ),
        **config.options(),
    )
