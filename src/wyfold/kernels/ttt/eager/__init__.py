"""`ttt` and `ttt_bwd` in PyTorch: a serial loop over mini-batches for the state, everything else batched over a part.

A column of the chunk table holds the mini-batches with the same number in their sequences.
"""

from __future__ import annotations

from wyfold.kernels.ttt.eager.backward import ttt_bwd
from wyfold.kernels.ttt.eager.forward import ttt
from wyfold.kernels.ttt.eager.tokens import load, unload

__all__ = ["load", "ttt", "ttt_bwd", "unload"]
