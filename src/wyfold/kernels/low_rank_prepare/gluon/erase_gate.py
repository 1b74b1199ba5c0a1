"""Launch for the rule "keys" with a channel gate, bfloat16, K = 128, chunks of 64.

The kernel is that of `prepare` for a channel gate, whose erasing rows are -(b k) here instead of k.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.low_rank_prepare.triton import empty
from wyfold.kernels.prepare.gluon.channel import wyfold_prepare_channel_gluon
from wyfold.kernels.prepare.gluon.channel.launch import channel_launch
from wyfold.kernels.records import LowRankPrepared, Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.triton import RuleRows
from wyfold.tile.decay.triton import Gate
from wyfold.tile.index.triton.strength import Strength

__all__ = ["prepare", "wyfold_prepare_channel_gluon"]


def prepare(
    rows: RuleRows,
    gate: Gate,
    strength: Strength,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    o: Tensor,
    *,
    backward: bool,
    clear: bool,
) -> LowRankPrepared:
    """Compute the factors of every chunk; takes the arguments of the Triton launch, of a rule without rows a."""
    q, C = rows.q, grid.chunk_size
    tiles = grid.chunks * o.shape[2]
    found = empty(q, options.rule, tiles, C, backward=backward)
    written = Prepared(
        rows=q.new_empty(tiles, 4, C, dtype=found.total.dtype),
        total=found.total,
        q=found.q,
        k=found.rows,
        E=found.E,
        F=found.F,
        W=found.A,
        FB=None,
        rows_bwd=None,
        norms=q.new_empty(tiles, 2, C, dtype=found.total.dtype) if options.qk_l2norm else None,
    )
    config = tuned("low_rank_prepare.gluon", key, q.device)
    programs, arguments = channel_launch(
        q, rows.k, rows.b, gate, strength._replace(erases=-1.0), written, config, grid, options, o, rows=True,
        clear=clear, zero=clear and backward,
    )  # fmt: skip
    launch_kernel(wyfold_prepare_channel_gluon, programs, **arguments)
    return found
