"""`low_rank_gradients` in Triton: one program per chunk, value head and slice of channels."""

from __future__ import annotations

from wyfold.kernels.low_rank_gradients.triton.kernel import wyfold_low_rank_gradients_triton
from wyfold.kernels.low_rank_gradients.triton.launch import gradients
from wyfold.kernels.low_rank_gradients.triton.token_gate import wyfold_low_rank_gradients_token_gate_triton

# The kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = ["gradients", "wyfold_low_rank_gradients_token_gate_triton", "wyfold_low_rank_gradients_triton"]
