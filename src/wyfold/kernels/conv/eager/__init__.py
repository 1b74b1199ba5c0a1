"""`conv` in PyTorch: the same taps over every window."""

from __future__ import annotations

from wyfold.kernels.conv.eager.backward import conv_bwd
from wyfold.kernels.conv.eager.forward import conv

__all__ = ["conv", "conv_bwd"]
