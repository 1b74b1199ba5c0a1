"""`recurrent` and `recurrent_bwd` in PyTorch: a loop over tokens, batched over sequences and value heads."""

from __future__ import annotations

from wyfold.kernels.recurrent.eager.backward import recurrent_bwd
from wyfold.kernels.recurrent.eager.forward import recurrent

__all__ = ["recurrent", "recurrent_bwd"]
