"""`prepare` in Gluon for Hopper: bfloat16, chunks of 64.

`scalar` serves no gate and a scalar gate, with K of 64, 128 and 256, `channel` a channel gate with K = 128.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.prepare.gluon import channel, scalar
from wyfold.kernels.prepare.gluon.channel import wyfold_prepare_channel_gluon
from wyfold.kernels.prepare.gluon.scalar import wyfold_prepare_gluon
from wyfold.kernels.records import Prepared
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_flags

__all__ = ["kernels_of", "prepare", "wyfold_prepare_channel_gluon", "wyfold_prepare_gluon"]


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    return ("wyfold_prepare_channel_gluon",) if key.per_channel else ("wyfold_prepare_gluon",)


def prepare(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    grid: ChunkGrid,
    options: DeltaOptions,
    o: Tensor,
    *,
    folded: bool,
    backward: bool,
    forward: bool = True,
    clear: bool = True,
) -> Prepared:
    """Compute the factors of every chunk; takes the arguments of the Triton launch.

    Unfolded without a gate or with a scalar gate; E and F with a channel gate.
    """
    channels = gate_flags(g)["CHANNEL"]
    launch = channel.prepare if channels else scalar.prepare
    given = q, k, g, beta, A_log, dt_bias, grid, options, o
    return launch(*given, folded=folded, backward=backward, forward=forward, clear=clear)
