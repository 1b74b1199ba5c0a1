"""`gradients` in Gluon for Hopper: bfloat16, chunks of 64, K = V = 128.

`scalar` serves no gate and a scalar gate, `channel` a channel gate.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.gradients.gluon import channel, scalar
from wyfold.kernels.gradients.gluon.channel import wyfold_gradients_channel_gluon, wyfold_gradients_norm_gluon
from wyfold.kernels.gradients.gluon.scalar import wyfold_gradients_gluon, wyfold_gradients_heads_gluon
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_flags


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    if key.per_channel:
        kernels = (wyfold_gradients_channel_gluon, *([wyfold_gradients_norm_gluon] if key.norm else []))
    else:
        kernels = (wyfold_gradients_gluon, *([] if key.group == 1 else [wyfold_gradients_heads_gluon]))
    return tuple([kernel.fn.__name__ for kernel in kernels])


def gradients(
    q: Tensor,
    k: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    do: Tensor,
    borders: TokenBorders,
    grid: ChunkGrid,
    options: DeltaOptions,
    key: LaunchKey,
    out: GradientOutputs,
) -> None:
    """Gradients of every token and parameter: `channel.gradients` for a channel gate, else `scalar.gradients`."""
    flags = gate_flags(g)
    if flags["CHANNEL"] and g is not None:
        channel.gradients(q, k, g, beta, A_log, dt_bias, do, borders, grid, options, key, out)
    else:
        scalar.gradients(q, k, g, beta, A_log, dt_bias, do, borders, grid, options, key, out)
