"""Norms in PyTorch, in blocks of rows that fit the cache."""

from __future__ import annotations

from wyfold.kernels.norm.eager.l2norm import l2norm, l2norm_bwd
from wyfold.kernels.norm.eager.rms_norm import rms_norm_gated, rms_norm_gated_bwd

__all__ = ["l2norm", "l2norm_bwd", "rms_norm_gated", "rms_norm_gated_bwd"]
