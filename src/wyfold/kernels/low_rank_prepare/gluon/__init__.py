"""`low_rank_prepare` in Gluon for Hopper, with a channel gate and bfloat16.

The rule "keys", K = 128 and chunks of 64: by the kernel of `prepare`. Rules with two columns, 128 channels a program
and chunks of 32: by a kernel of this package.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.kernels.low_rank_prepare.gluon import columns, erase_gate
from wyfold.kernels.low_rank_prepare.gluon.kernel import wyfold_low_rank_prepare_gluon
from wyfold.kernels.prepare.gluon.channel import wyfold_prepare_channel_gluon
from wyfold.kernels.records import LowRankPrepared
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions

__all__ = ["kernels_of", "prepare", "wyfold_low_rank_prepare_gluon", "wyfold_prepare_channel_gluon"]


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    return ("wyfold_low_rank_prepare_gluon",) if key.launch == "two" else ("wyfold_prepare_channel_gluon",)


def prepare(
    rows: Any, gate: Any, strength: Any, grid: Any, options: DeltaOptions, key: LaunchKey, o: Tensor, **how: bool
) -> LowRankPrepared:
    """Compute the factors of every chunk; takes the arguments of the Triton launch."""
    module = columns if key.launch == "two" else erase_gate
    return module.prepare(rows, gate, strength, grid, options, key, o, **how)
