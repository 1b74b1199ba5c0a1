"""`recurrent` in Triton: one program per sequence, value head and tile of value rows; its state stays in registers.

A decoded token moves its state in and out once, and little else, so the tile is laid out among the threads as it lies
in memory: whole vectors come and go, every sum over K is taken inside a warp, and no part of the state passes through
shared memory. Norms, gate and write strength are made on the way. One token or a million run the same instructions: a
token's bits do not depend on how many come before it in the same call.

States lie in slots. A call of the differentiable operators has a slot per sequence, reads its initial states and
writes its final ones; a serving call reads and writes a pool by indices.
"""

from __future__ import annotations

from wyfold.kernels.recurrent.triton.backward import recurrent_bwd, wyfold_recurrent_bwd_triton
from wyfold.kernels.recurrent.triton.forward import recurrent, wyfold_recurrent_triton
from wyfold.kernels.recurrent.triton.gather import gather, wyfold_recurrent_gather_triton
from wyfold.kernels.recurrent.triton.tokens import WIDE, launch_key, launch_key_bwd, served_key

BLOCK, RUN = 64, 8
"""Tokens between the states the backward starts from, and between those it rebuilds from them first."""

# With the kernels: what of them was compiled is asked of this module.
__all__ = [
    "BLOCK",
    "RUN",
    "WIDE",
    "gather",
    "launch_key",
    "launch_key_bwd",
    "recurrent",
    "recurrent_bwd",
    "served_key",
    "wyfold_recurrent_bwd_triton",
    "wyfold_recurrent_gather_triton",
    "wyfold_recurrent_triton",
]
