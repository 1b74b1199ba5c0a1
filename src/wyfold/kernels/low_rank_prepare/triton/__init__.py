"""`low_rank_prepare` in Triton: one program per chunk and value head.

A gate per token, or none, is read as a gate per channel: its strides along the channels, and without a gate along all
dimensions, are zero. Results are those that `low_rank_scan` reads. It computes the output as

    o = scale ((q from the start) S + F (rows S) + P v)

so Q of the eager stage is not needed.
"""

from __future__ import annotations

from wyfold.kernels.low_rank_prepare.triton.arguments import call_arguments, prepare_key, token_gate_kind
from wyfold.kernels.low_rank_prepare.triton.kernel import wyfold_low_rank_prepare_triton
from wyfold.kernels.low_rank_prepare.triton.launch import allocate, empty, launch_key, prepare
from wyfold.kernels.low_rank_prepare.triton.token_gate import wyfold_low_rank_prepare_token_gate_triton
from wyfold.runtime.kernel_configs import LaunchKey

# The kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "allocate",
    "call_arguments",
    "empty",
    "kernels_of",
    "launch_key",
    "prepare",
    "prepare_key",
    "token_gate_kind",
    "wyfold_low_rank_prepare_token_gate_triton",
    "wyfold_low_rank_prepare_triton",
]


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    of_tokens = key.gate in ("none", "scalar")
    kernel = wyfold_low_rank_prepare_token_gate_triton if of_tokens else wyfold_low_rank_prepare_triton
    return (kernel.fn.__name__,)
