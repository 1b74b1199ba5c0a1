"""`ttt` forward in Gluon for Hopper: one launch, a pipeline of four warp groups over segments of 64 tokens.

    producer   one warp: loads k, v and q of a segment by TMA as soon as a stage is free
    prepare    computes the scan's inputs that do not depend on the state: w (u - v + k) and its sums, steps, factors
    scan       runs the mini-batches in order, its state transposed, [V, K], in registers; writes N and segment states
    read       computes the outputs of a segment, and stores the results that a backward needs

A stage of shared memory holds all data of one segment. It passes from group to group through mbarriers: `loaded`,
`prepared`, `scanned` and `free`. The scan always finds its stage prepared, and the outputs are computed behind it, so
the scan alone determines the time.

A mini-batch of the scan has two exchanges. The product k S + c leaves a slab of 16 value rows in each warp. Through
shared memory it is converted to rows, with a token's values in eight lanes, where all row sums are reduced together. N
is converted back the same way. No mean is subtracted beforehand: values are taken relative to the first value of their
token, which costs one shuffle, and the sums are corrected. That value is as far from the mean as values differ from
each other, so no square cancels.

All products are synchronous single-warp instructions (`mma_v2`): operands in shared memory need no fence before they
are read, and no product still reads an operand while the next one is written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt import triton
from wyfold.kernels.ttt.gluon.kernel import wyfold_ttt_gluon
from wyfold.kernels.ttt.gluon.program import Heads, Results
from wyfold.kernels.ttt.triton import (
    SEGMENT,
    empty,
    forward_scan_key,
    ttt_bwd,
    wyfold_ttt_bwd_triton,
    wyfold_ttt_gradients_triton,
    wyfold_ttt_parameters_triton,
    wyfold_ttt_replay_triton,
)
from wyfold.kernels.ttt.triton.arguments import Inputs, States
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing, with_strides
from wyfold.tile.index.triton.descriptors import TmaDescriptor, token_descriptor

# The backward is that of the Triton module. Its kernels are exported because `kernel_configs.compiled` looks them up
# here.
__all__ = [
    "SEGMENT",
    "empty",
    "ttt",
    "ttt_bwd",
    "wyfold_ttt_bwd_triton",
    "wyfold_ttt_gluon",
    "wyfold_ttt_gradients_triton",
    "wyfold_ttt_parameters_triton",
    "wyfold_ttt_replay_triton",
]


def ttt(
    x: TTTInputs,
    entering: StateViews,
    leaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    o: Tensor,
    borders: SegmentBorders | None,
) -> None:
    """Run every sequence from its entering state; takes the arguments of the Triton launch.

    Calls without a sequence, or with more tokens than TMA can address, go to the Triton launch. q, k and v are copied
    where TMA cannot read them, so results do not depend on strides.

    Args:
        x: bfloat16 tokens of 64 channels, in mini-batches of 16.
        o: Contiguous, as are the borders.
        borders: Written for `ttt_bwd`; None where no backward follows, and then the scan's results are not stored.
    """
    descriptors = [_descriptors(y) for y in (x.q, x.k, x.v)]
    if grid.sequences == 0 or None in descriptors:
        triton.ttt(x, entering, leaving, grid, chunk_size, scale, eps, o, borders)
        return
    HV, D = x.v.shape[2:]
    config = tuned("ttt.gluon", forward_scan_key(x.q.dtype, D, chunk_size), x.q.device)
    N, S, c, X, rows = borders or (None,) * 5
    x_q, x_k, x_v = gluon_descriptors(descriptors)
    launch_kernel(
        wyfold_ttt_gluon,
        grid.sequences * HV,
        x_q=x_q,
        x_k=x_k,
        x_v=x_v,
        tokens=with_strides(Inputs, w=x.w, u=x.u, eta=x.eta, col=x.col),
        heads=Heads(h_q=x_q.base.stride(2), h_k=x_k.base.stride(2), h_v=x_v.base.stride(2)),
        states=with_strides(States, S0=entering.S, c0=entering.c, ST=leaving.S, cT=leaving.c),
        results=Results(o=o, N=N, X=X, S=S, c=c, rows=rows),
        packing=Packing(cu=grid.cu, first=grid.first),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        scale=scale,
        eps=eps,
        H=x.q.shape[2],
        HV=HV,
        D=D,
        BT=chunk_size,
        SEGMENT=SEGMENT,
        PACKED=grid.cu is not None,
        ON_Q=x.residual == "q",
        STAGES=config.stages,
        READ=config.blocks["READ"],
        PREPARE=config.blocks["PREPARE"],
        **config.options(),
    )


def _descriptors(x: Tensor) -> TmaDescriptor | None:
    """TMA descriptor of a segment's tokens of one head; of a copy where x's strides do not allow one."""
    D = x.shape[3]
    return token_descriptor(x, SEGMENT, D) or token_descriptor(
        x.clone(memory_format=torch.contiguous_format), SEGMENT, D
    )
