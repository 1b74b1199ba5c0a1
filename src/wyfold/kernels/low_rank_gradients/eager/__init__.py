"""`low_rank_gradients` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

from wyfold.kernels.low_rank_gradients.eager.chunks import gradients
from wyfold.kernels.low_rank_gradients.eager.tokens import unload

__all__ = ["gradients", "unload"]
