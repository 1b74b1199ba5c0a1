"""`low_rank_gradients` in Triton: one program per chunk, value head and slice of channels."""

from __future__ import annotations

from wyfold.kernels.low_rank_gradients.triton.kernel import wyfold_low_rank_gradients_triton
from wyfold.kernels.low_rank_gradients.triton.launch import gradients
from wyfold.kernels.low_rank_gradients.triton.token_gate import wyfold_low_rank_gradients_token_gate_triton
from wyfold.runtime.kernel_configs import LaunchKey

# The kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = ["gradients", "kernels_of", "wyfold_low_rank_gradients_token_gate_triton", "wyfold_low_rank_gradients_triton"]


def kernels_of(key: LaunchKey) -> tuple[str, ...]:
    """Names of the kernels that calls of a key launch, for `explain`."""
    kernel = wyfold_low_rank_gradients_triton if key.gate is None else wyfold_low_rank_gradients_token_gate_triton
    return (kernel.fn.__name__,)
