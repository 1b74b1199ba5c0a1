"""Launch for rules with two columns, without norms: chunks of 32, and heads of 128 channels or pairs of heads of 64."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from wyfold.kernels.low_rank_prepare.gluon.kernel import wyfold_low_rank_prepare_gluon
from wyfold.kernels.low_rank_prepare.triton import allocate
from wyfold.kernels.prepare.gluon.channel.arguments import Sizes
from wyfold.kernels.records import LowRankPrepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows
from wyfold.tile.decay.triton import Gate
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton import Packing
from wyfold.tile.index.triton.descriptors import all_or_none, require_descriptors, tile_descriptor


class Flags(NamedTuple):
    """Constexprs: whether the batch is packed, whether every chunk is full, and the gate's activation."""

    PACKED: bool
    FULL: bool
    ACTIVATION: str


def prepare(
    rows: RuleRows,
    gate: Gate,
    strength: Any,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    *,
    backward: bool,
    clear: bool,
) -> LowRankPrepared:
    """Compute the factors of every chunk; takes the arguments of the Triton launch."""
    (H, K), (HV, V), C = rows.q.shape[2:], o.shape[2:], grid.chunk_size
    found = allocate(rows.q, options, grid, grid.chunks * HV, backward=backward, clear=clear)
    outputs = found.E, found.K
    described = require_descriptors(
        "low_rank_prepare", all_or_none(outputs, [None if x is None else tile_descriptor(x, C, 64) for x in outputs])
    )
    x_E, x_K = gluon_descriptors(described)
    config = tuned("low_rank_prepare.gluon", key, rows.q.device)
    launch_kernel(
        wyfold_low_rank_prepare_gluon,
        grid.chunks * (HV * K // 128),
        x_E=x_E,
        x_K=x_K,
        tokens=rows,
        gate=gate,
        # A runtime argument selects what is stored, so that both directions share one compiled kernel.
        factors=found if backward else found._replace(A=found.F, R=found.P),
        packing=Packing(cu=grid.cu, first=grid.first, sequence=grid.sequence),
        o=o,
        s_o=o.stride(),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        clear=int(clear),
        backward=int(backward),
        SIZES=Sizes(H=H, HV=HV, HB=rows.b.shape[2], K=K, V=V, BT=C, BV=tile_width(V)),
        FLAGS=Flags(
            PACKED=grid.cu is not None,
            FULL=grid.cu is None and grid.tokens % C == 0,
            ACTIVATION=options.activation,
        ),
        **config.options(),
    )
    return found
