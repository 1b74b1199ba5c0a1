"""Launch of `segment_summary` in Gluon."""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes, chunk_descriptors
from wyfold.kernels.records import Prepared, Slots
from wyfold.kernels.scan.triton.arguments import Pool
from wyfold.kernels.segment_summary.gluon.forward.kernel import Heads, wyfold_segment_summary_gluon
from wyfold.kernels.segment_summary.triton.arguments import Bounds, Maps, SegmentIndex
from wyfold.runtime.chunk_layout import EvenSegments, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import tma_readable


def segment_summary(
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    segments: Segments | EvenSegments,
    options: DeltaOptions,
    key: LaunchKey,
    H: Tensor,
    M: Tensor,
    *,
    horizon: bool,
    slots: Slots | None = None,
    entering: Tensor | None = None,
) -> None:
    """Maps of the segments that end at borders. The arguments are those of the Triton launch, and two more.

    With slots, `initial_state` is a view of their pool, `segments` has no tables, and the initial states are copied to
    `entering` [N, HV, K, V], zeros for sequences without one.

    Tokens are bfloat16, with the K of the configuration's row for `key`, 64 or 128. Chunks have 64 tokens. Tokens that
    TMA cannot read are copied first.
    """
    (HK, K), (HV, V), grid = k.shape[2:], v.shape[2:], segments.grid
    config = tuned("segment_summary.gluon", key._replace(launch="fwd"), k.device)
    BV, parts = config.blocks["BV"], config.blocks["PARTS"]
    if prepared.q is None:
        k = tma_readable(k, grid.chunk_size, K)
    v = tma_readable(v, grid.chunk_size, BV // parts)
    folded = prepared.E is not None
    length = segments.length if isinstance(segments, EvenSegments) else 0
    _, x_k, x_v, x_rows, x_total, x_E, x_W = chunk_descriptors(
        "segment_summary", None, k, (v,), prepared, (None if folded else prepared.W,), grid.chunk_size, BV // parts
    )
    launch_kernel(
        wyfold_segment_summary_gluon,
        segments.borders * HV * (V // BV + K // BV),
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_E if folded else x_W,
        bounds=Bounds.of(prepared, k, options, horizon=horizon),
        heads=Heads(h_k=k.stride(2), h_v=v.stride(2)),
        maps=with_strides(Maps, S0=initial_state, H=H, M=M, copy=entering),
        segments=SegmentIndex.of(segments),
        packing=Packing(cu=grid.cu, first=grid.first),
        pool=Pool() if slots is None else Pool(source=slots.source, given=slots.given),
        s_source=None if slots is None or slots.source is None else slots.source.stride(0),
        slots=None if slots is None or initial_state is None else initial_state.shape[0],
        pad=None if slots is None else slots.pad,
        N=segments.sequences,
        T=grid.tokens,
        length=length,
        SIZES=Sizes(
            H=HK,
            HV=HV,
            K=K,
            V=V,
            BT=grid.chunk_size,
            BV=BV,
            PARTS=parts,
            STAGES=config.stages,
            PACKED=not length,
            CHANNEL=prepared.q is not None,
            FOLDED=folded,
            ERASES=options.erases,
            EVEN=length > 0,
        ),
        **config.options(),
    )
