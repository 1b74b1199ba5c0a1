"""`scan_bwd` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups.

A consumer holds a state, or its gradient. The products are those of `scan_bwd` in Triton, in the same order and with
the same roundings. A chunk stores S and e, or dS and X. Loads and barriers are as in `scan` in Gluon:

    forward half                                reverse half
    R^T = v^T - (S^T k^T) in                    X^T  = s do^T F + dS^T E^T                            folded
    e^T = R^T W^T                               X^T  = s do^T F + ((dS^T k^T) out beta) W / beta      else
    S^T <- total S^T + (R^T beta) E   folded    dS^T <- total dS^T + s (do^T in) q - (beta X^T in) k
    S^T <- total S^T + (e^T beta out) k   else

The stored state is its rounded copy, the left operand of the chunk's first product, written to shared memory under that
product. Its TMA store is issued together with that of e or X of the preceding chunk, which was written under that
chunk's last product. TMA has the rest of the chunk to read both. With OUT 2, two state buffers, it has one chunk more
for the state.

dS and X are in units of `DeltaOptions.unit`, relative to which s, otherwise the scale, is 1 and needs no
multiplication. A product with W starts from the rounding error of its operand, except that of e where it enters the
state. In the reverse half do^T q does not depend on the gradient's products and fills the matrix units between two that
do.

A state of 256 channels fills the registers. Its products then read the rounded copy that TMA stores, and do is read
from shared memory (`_wide_forward_step`, `_wide_reverse_step`). Such calls are unfolded.

A half that needs fewer tiles leaves its stages partly unused: x holds v or do, square W or F. A partial chunk is a
separate step, last in the forward half and first in the reverse half. Its rows past the last token are cleared in
shared memory first.

The ring and the producer are not those of `kernels/pipeline`. On that ring the assembler orders the instructions of
this kernel's loops otherwise, and it took up to 16 % longer on an H200 (docs/log/operators.md).
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes, chunk_descriptors
from wyfold.kernels.records import Prepared, TokenBorders
from wyfold.kernels.scan_bwd.gluon.kernel import wyfold_scan_bwd_gluon
from wyfold.kernels.scan_bwd.gluon.program import Heads
from wyfold.kernels.scan_bwd.triton import Half, programs, scan_bwd_key
from wyfold.kernels.scan_bwd.triton.arguments import States, segment_tables
from wyfold.runtime.chunk_layout import ChunkGrid, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import all_or_none, require_descriptors, tile_descriptor, tma_readable


def scan_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Prepared,
    initial_state: Tensor | None,
    do: Tensor,
    dST: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    dS0: Tensor | None,
    borders: TokenBorders,
    segments: Segments | None = None,
    entering: Tensor | None = None,
    leaving: Tensor | None = None,
    half: Half = "both",
) -> None:
    """States and their gradients at the borders of every chunk. The arguments are those of the Triton launch.

    Tokens are bfloat16, with the K of the configuration's row for `key`: 64, 128 or 256. Chunks have 64 tokens. Tokens
    that TMA cannot read are copied first. `prepared` includes W.
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    config = tuned("scan_bwd.gluon", scan_bwd_key(key, grid.sequences, v), q.device)
    halves, going_back = programs(half, grid.sequences)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    if prepared.q is None:
        q, k = tma_readable(q, C, K), tma_readable(k, C, K)
    v, do = tma_readable(v, C, BV // parts), tma_readable(do, C, BV // parts)
    BW, results = BV // parts, borders[:4]
    x_q, x_k, x_v, x_do, x_rows, x_total, x_E, x_F, x_W = chunk_descriptors(
        "scan_bwd", q, k, (v, do), prepared, (prepared.F, prepared.W), C, BW
    )
    sizes = (BW, K), (BW, K), (C, BW), (C, BW)
    blocks = [tile_descriptor(x, *size) for x, size in zip(results, sizes, strict=True)]
    x_S, x_dS, x_e, x_X = gluon_descriptors(require_descriptors("scan_bwd", all_or_none(results, blocks)))
    launch_kernel(
        wyfold_scan_bwd_gluon,
        halves * grid.sequences * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_do=x_do,
        x_rows=x_rows,
        x_total=x_total,
        x_E=x_E,
        x_F=x_F,
        x_W=x_W,
        x_S=x_S,
        x_dS=x_dS,
        x_e=x_e,
        x_X=x_X,
        heads=Heads(h_q=q.stride(2), h_k=k.stride(2), h_v=v.stride(2), h_do=do.stride(2)),
        states=with_strides(States, S0=initial_state, dST=dST, dS0=dS0),
        segments=segment_tables(segments, entering, leaving),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences if segments is None else segments.sequences,
        going_back=going_back,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        unit=options.unit,
        scale=None if options.scale == options.unit else options.scale / options.unit,
        SIZES=Sizes(
            H=H,
            HV=HV,
            K=K,
            V=V,
            BT=C,
            BV=BV,
            PARTS=parts,
            OUT=out,
            STAGES=config.stages,
            PACKED=grid.cu is not None,
            CHANNEL=prepared.q is not None,
            FOLDED=prepared.E is not None,
            ERASES=options.erases,
        ),
        **config.options(),
    )
