"""`scan` in Gluon, for Hopper: a producer warp loads tiles for the consumer warpgroups that hold the state.

The products are those of `scan` in Triton, in the same order and with the same roundings:

    R^T = V^T - (S^T k^T) in          Y^T = R^T beta
    o^T = (S^T q^T) in + Y^T F^T            S^T <- total S^T + Y^T E                      folded
    o^T = (S^T q^T) in + R^T (F beta)^T     S^T <- total S^T + ((R^T W^T) beta out) k     else

Factors come from `prepare`, in `Prepared`. in and out are a token's decay since the chunk's start and until its end,
with 1/|k| or 1/|q| where `prepare` computes norms; a channel gate's are in the tiles of q and k. total is the state's
decay over the chunk. "beta out" and "F beta" are stored as products. Calls are folded where the gate is per channel
(`prepare.reads_folded`). In the code, y is the left operand of both later products: Y if folded, else R.

S^T [value rows, K] is a float32 accumulator in registers. Every left operand is a rounded accumulator, which is already
in the register layout that WGMMA reads. Every right operand is a tile in shared memory, read directly or transposed.
The critical path of a chunk's state is its products and three conversions. The output's products run in their shadow,
and its store overlaps the last product.

A state of 256 channels fills the registers. Its rounded copy then passes through shared memory, from where both of its
products read it. The queries' product is issued behind that of the residual (`_wide_step`), so one accumulator fewer is
alive. Such calls are unfolded.

A program's value rows are split between two parts that share the tiles (PARTS 2), or all its warpgroups work on them
together (PARTS 1). Mbarriers in shared memory synchronise the stages. `full` completes when TMA has written the
stage. `free` completes when every part has read it. A part arrives there after it has issued the next chunk's first
products, and then issues the TMA store of this chunk's output (`_release`). Until then the output is in one of OUT
buffers per part. With OUT 0 it is in the stage's v buffer, and `out_free` completes when TMA has read it from there.

A partial last chunk is a separate step after the loop. Its rows past the last token are masked, and its output is
stored through pointers.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.pipeline.gluon import Sizes, chunk_descriptors
from wyfold.kernels.records import Prepared, Slots
from wyfold.kernels.scan.gluon.kernel import Tokens, wyfold_scan_gluon
from wyfold.kernels.scan.triton import scan_key, sequences_to_run, slot_arguments
from wyfold.kernels.scan.triton.arguments import States, segment_tables
from wyfold.runtime.chunk_layout import ChunkGrid, EvenSegments, Segments
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import tma_readable


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
    segments: Segments | EvenSegments | None = None,
    borders: Tensor | None = None,
    from_borders: bool | None = None,
    slots: Slots | None = None,
) -> None:
    """Run every sequence from its entering state. The arguments are those of the Triton launch.

    Tokens are bfloat16, with the K of the configuration's row for `key`: 64, 128 or 256. Chunks have 64 tokens.
    Tokens that TMA cannot read are copied first. `states` and `first_state` are None: calls that want intermediate
    states use the Triton launch (`table.selected_backend`).
    """
    (H, K), (HV, V), C = q.shape[2:], v.shape[2:], grid.chunk_size
    concurrent = grid.sequences if segments is None else segments.expected
    selected, shift, count = sequences_to_run(grid, segments, from_borders)
    config = tuned("scan.gluon", scan_key(key, concurrent, v, kept=False), q.device)
    BV, parts, out = (config.blocks[name] for name in ("BV", "PARTS", "OUT"))
    if prepared.q is None:
        q, k = tma_readable(q, C, K), tma_readable(k, C, K)
    v, out_rows = tma_readable(v, C, BV // parts), tma_readable(o, C, BV // parts)
    folded, even = prepared.E is not None, isinstance(segments, EvenSegments)
    per_sequence = segments.length if isinstance(segments, EvenSegments) else grid.per_sequence
    squares = (None, prepared.F) if folded else (prepared.W, prepared.FB)
    x_q, x_k, x_v, x_o, x_rows, x_total, x_E, x_W, x_F = chunk_descriptors(
        "scan", q, k, (v, out_rows), prepared, squares, C, BV // parts
    )
    launch_kernel(
        wyfold_scan_gluon,
        count * HV * (V // BV),
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        x_rows=x_rows,
        x_total=x_total,
        x_write=x_E if folded else x_W,
        x_F=x_F,
        x_o=x_o,
        x_w=None,
        tokens=with_strides(Tokens, h_q=q.stride(2), h_k=k.stride(2), h_v=v.stride(2), o=out_rows),
        states=with_strides(States, S0=initial_state, ST=final_state),
        segments=segment_tables(segments, borders, selected),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=0 if segments is None else segments.sequences,
        shift=shift,
        T=grid.tokens,
        per_sequence=per_sequence,
        scale=options.scale,
        SIZES=Sizes(
            H=H,
            HV=HV,
            K=K,
            V=V,
            BT=C,
            BV=BV,
            PARTS=parts,
            STAGES=config.stages,
            PACKED=grid.cu is not None,
            CHANNEL=prepared.q is not None,
            FOLDED=folded,
            ERASES=options.erases,
            OUT=out,
            IN_PLACE=out == 0,
            EVEN=even,
        ),
        **slot_arguments(slots),
        **config.options(),
    )
    if out_rows is not o:
        o.copy_(out_rows)
