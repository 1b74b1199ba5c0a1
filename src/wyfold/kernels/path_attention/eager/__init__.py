"""Softmax of PaTH attention in PyTorch, chunk of queries by chunk of queries, and its adjoint.

A chunk of queries holds products with one chunk or block of keys at a time, so memory is linear in the tokens.
"""

from __future__ import annotations

from wyfold.kernels.path_attention.eager.backward import path_attention_bwd
from wyfold.kernels.path_attention.eager.forward import path_attention

__all__ = ["path_attention", "path_attention_bwd"]
