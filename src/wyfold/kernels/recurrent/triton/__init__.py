"""`recurrent` in Triton: one program per sequence, value head and tile of value rows; its state stays in registers.

Decoding a token loads and stores its state once, and little else. So the tile's layout follows memory: loads and stores
are whole vectors, every sum over K stays inside a warp, and the state never passes through shared memory. Norms, gate
and write strength are computed in the same kernel. One token or a million run the same instructions: a token's bits do
not depend on the number of tokens before it in the call.

States are stored in slots. A call of the differentiable operators has one slot per sequence: it reads initial states
and writes final ones. A serving call reads and writes a pool by indices.
"""

from __future__ import annotations

from wyfold.kernels.recurrent.triton.backward import recurrent_bwd, wyfold_recurrent_bwd_triton
from wyfold.kernels.recurrent.triton.forward import recurrent, wyfold_recurrent_triton
from wyfold.kernels.recurrent.triton.reduce_partials import reduce_partials, wyfold_recurrent_gather_triton
from wyfold.kernels.recurrent.triton.tokens import WIDE, launch_key, launch_key_bwd, served_key

BLOCK, RUN = 64, 8
"""Tokens between the stored states that the backward starts from, and between the states it recomputes first."""

# Kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "BLOCK",
    "RUN",
    "WIDE",
    "launch_key",
    "launch_key_bwd",
    "recurrent",
    "recurrent_bwd",
    "reduce_partials",
    "served_key",
    "wyfold_recurrent_bwd_triton",
    "wyfold_recurrent_gather_triton",
    "wyfold_recurrent_triton",
]
