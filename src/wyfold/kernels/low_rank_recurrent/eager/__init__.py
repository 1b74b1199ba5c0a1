"""`low_rank_recurrent` and its adjoint in PyTorch: a loop over tokens, batched over sequences and value heads."""

from __future__ import annotations

from wyfold.kernels.low_rank_recurrent.eager.backward import recurrent_bwd
from wyfold.kernels.low_rank_recurrent.eager.forward import recurrent

__all__ = ["recurrent", "recurrent_bwd"]
