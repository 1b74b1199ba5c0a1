"""`low_rank_gradients` in Triton: one program per chunk, value head and slice of channels."""

from __future__ import annotations

from wyfold.kernels.low_rank_gradients.triton.kernel import wyfold_low_rank_gradients_triton
from wyfold.kernels.low_rank_gradients.triton.launch import gradients

# The kernel is exported because `kernel_configs.compiled` looks it up in this module.
__all__ = ["gradients", "wyfold_low_rank_gradients_triton"]
