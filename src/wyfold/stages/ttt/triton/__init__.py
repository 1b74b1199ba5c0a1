"""`ttt` in Triton: walks over the mini-batches of a sequence, and what is parallel beside them.

    walk         forward, serial: one program per sequence and value head, its state transposed, [V, K], in registers
    replay       backward, parallel over segments of 64 tokens: X and r of the inner norm, dO, and dN's share of reading
    walk back    serial: the gradient of the state in registers, from tokens alone; leaves dZ and dY
    gradients    parallel over segments: dq, dk, dv, deta

A walk goes through its products alone: Z^T = S^T k^T + c in front of the inner norm, N^T behind it, and every product
takes the running value as its left operand. What the walk leaves for a backward, N of every token and the state at the
borders of segments, makes the rest parallel, since inside a segment

    S entering r's mini-batch = S of the border - sum over s before that mini-batch of e_s' k_s^T N_s

with e' the step that closed s's mini-batch; so a row that meets S is a masked product more. No launch keeps a state per
mini-batch. The backward walks forward again unless the forward left those.

A mini-batch is a chain of short steps, and where the sums over value rows lie decides its length: in the layout of a
product they cross the program's warps. So there products are twice as wide and their columns taken by turns, which
takes them out of that layout, to where a token's value rows are one warp's own: 13 barriers a step in place of 26.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.runtime.chunks import ChunkGrid
from wyfold.stages.ttt import Borders, States, TokenGradients, Tokens
from wyfold.stages.ttt.triton.back import walk_back, wyfold_ttt_bwd_triton
from wyfold.stages.ttt.triton.gradients import token_gradients, wyfold_ttt_gradients_triton
from wyfold.stages.ttt.triton.launch import LAUNCHES, SEGMENT, launch_keys
from wyfold.stages.ttt.triton.outputs import outputs, wyfold_ttt_outputs_triton
from wyfold.stages.ttt.triton.replay import replayed, wyfold_ttt_replay_triton
from wyfold.stages.ttt.triton.walk import walk, wyfold_ttt_triton
from wyfold.tile.dot.triton import workspace

# With the kernels: what of them was compiled is asked of this module.
__all__ = [
    "LAUNCHES",
    "SEGMENT",
    "empty",
    "launch_keys",
    "ttt",
    "ttt_bwd",
    "wyfold_ttt_bwd_triton",
    "wyfold_ttt_gradients_triton",
    "wyfold_ttt_outputs_triton",
    "wyfold_ttt_replay_triton",
    "wyfold_ttt_triton",
]


def empty(q: Tensor, v: Tensor, segments: int, backward: bool) -> Borders:
    """Borders, unwritten; with all that a backward takes of them, or what the outputs do."""
    B, T, HV, D = v.shape
    dtype = workspace(q.dtype)
    return Borders(
        v.new_empty(v.shape, dtype=dtype),
        v.new_empty(segments * HV, D, D, dtype=dtype),
        v.new_empty(segments * HV, D, dtype=torch.float32),
        v.new_empty(v.shape, dtype=dtype) if backward else None,
        v.new_empty(B, T, HV, 4, dtype=torch.float32) if backward else None,
    )


def ttt(
    x: Tokens,
    entering: States,
    leaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    o: Tensor | None,
    borders: Borders,
) -> None:
    """Run every sequence from its entering state.

    Args:
        x: The call's tokens.
        entering: Any strides and float dtypes.
        leaving: Written.
        grid: The call's grid of segments.
        chunk_size: Tokens of a mini-batch.
        scale: Multiplies q.
        eps: Of both norms.
        o: [B, T, HV, D] written, zero past the last boundary; or None.
        borders: From `empty`, written, for the outputs and for `ttt_bwd`.
    """
    walk(x, entering, leaving, grid, chunk_size, eps, borders)
    if o is not None:
        outputs(x, borders, grid, chunk_size, scale, eps, o)


def ttt_bwd(
    x: Tokens,
    borders: Borders,
    do: Tensor,
    dleaving: States,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    found: TokenGradients,
    dentering: States,
) -> None:
    """Gradients of tokens, parameters and entering states.

    Args:
        x, grid, chunk_size, scale, eps: As given to `ttt`.
        borders: As `ttt` left them.
        do: [B, T, HV, D].
        dleaving: Gradients of what `ttt` left.
        found: Written, zero past the last boundary.
        dentering: Written.
    """
    left = replayed(x, borders, do, grid, chunk_size, scale, eps)
    walk_back(x, borders, left, dleaving, grid, chunk_size, scale, found.col, dentering)
    for index, dx in enumerate((found.w, found.u)):
        torch.sum(left.read[index], 0, out=dx)
        dx.add_(left.stepped[index].sum(0))
    token_gradients(x, borders, left, do if x.residual == "q" else None, grid, chunk_size, scale, found)
