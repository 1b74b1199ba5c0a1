"""`gradients` in Gluon for Hopper: bfloat16, chunks of 64.

`scalar` serves no gate and a scalar gate with K = V = 128, `wide` the same with other multiples of 64, `channel` a
channel gate with K = V = 128. `heads` adds the gradients of value heads in groups.
"""

from __future__ import annotations

from torch import Tensor

from wyfold.kernels.gradients.gluon import channel, scalar
from wyfold.kernels.gradients.gluon.channel import wyfold_gradients_channel_gluon, wyfold_gradients_norm_gluon
from wyfold.kernels.gradients.gluon.heads import wyfold_gradients_heads_gluon
from wyfold.kernels.gradients.gluon.scalar import wyfold_gradients_gluon
from wyfold.kernels.gradients.gluon.scalar.launch import HEAD
from wyfold.kernels.gradients.gluon.wide import wyfold_gradients_wide_gluon
from wyfold.kernels.records import GradientOutputs, TokenBorders
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.decay.triton import gate_flags


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    wide = (key.K, key.V) != (HEAD, HEAD)
    scalar_kernel = wyfold_gradients_wide_gluon if wide else wyfold_gradients_gluon
    kernels = [wyfold_gradients_channel_gluon if key.per_channel else scalar_kernel]
    if key.group != 1:
        kernels.append(wyfold_gradients_heads_gluon)
    elif key.per_channel and key.norm:
        kernels.append(wyfold_gradients_norm_gluon)
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
