"""`gradients` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

from wyfold.kernels.gradients.eager.chunks import gradients
from wyfold.kernels.gradients.eager.tokens import unload

__all__ = ["gradients", "unload"]
