"""`ttt` in Triton: walks over the mini-batches of a sequence, and what is parallel beside them.

    walk         serial: one program per sequence and value head, its state transposed, [V, K], in registers
    outputs      forward, parallel over segments of 64 tokens: what is read, normalised
    replay       backward, parallel over segments: dO, and dN's share of reading
    walk back    serial: the gradient of the state in registers, from tokens alone; leaves dZ and dY
    parameters   backward, parallel over channels: dw and du, of the shares that replay and the walk back leave
    gradients    parallel over segments: dq, dk, dv, deta

A walk carries its chain alone: what the next mini-batch does not wait for is another launch's. What the walk leaves, N
of every token and the state at the borders of segments, makes the rest parallel, since inside a segment

    S entering r's mini-batch = S of the border - sum over s before that mini-batch of e_s' k_s^T N_s

with e' the step that closed s's mini-batch; so a row that meets S is a masked product more. No launch keeps a state per
mini-batch. The forward of a call that has a backward leaves those to it, with X of every token beside them.

A mini-batch is a chain of short steps, and few programs run: the latency of each step is what counts, not the work.

- The state is a slab of 16 or more value rows a warp: a batched product, one matrix of the batch each warp's. A slab is
  multiplied and added to where it lies, by the matrix unit's instructions of one warp; those of four warps together
  wait for fences, in front of them and behind.
- What it predicts is turned to rows, a token's values eight lanes' own, by one exchange (`tiles.in_rows`); there all
  sums are added at once, and the way back to an operand is a second exchange.
- A bias is the first column of equal ones, an accumulator of the products: sums over tokens are products with ones.
- Of the next mini-batch everything is asked for before this one's work begins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt import SegmentBorders, StateViews, TTTGradients, TTTInputs
from wyfold.kernels.ttt.triton.back import walk_back, wyfold_ttt_bwd_triton
from wyfold.kernels.ttt.triton.gradients import token_gradients, wyfold_ttt_gradients_triton
from wyfold.kernels.ttt.triton.launch import LAUNCHES, SEGMENT, launch_keys, walk_key
from wyfold.kernels.ttt.triton.outputs import outputs, wyfold_ttt_outputs_triton
from wyfold.kernels.ttt.triton.parameters import parameter_gradients, wyfold_ttt_parameters_triton
from wyfold.kernels.ttt.triton.replay import replayed, wyfold_ttt_replay_triton
from wyfold.kernels.ttt.triton.walk import walk, wyfold_ttt_triton
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.tile.dot.triton import workspace

# With the kernels: what of them was compiled is asked of this module.
__all__ = [
    "LAUNCHES",
    "SEGMENT",
    "empty",
    "launch_keys",
    "ttt",
    "ttt_bwd",
    "walk_key",
    "wyfold_ttt_bwd_triton",
    "wyfold_ttt_gradients_triton",
    "wyfold_ttt_outputs_triton",
    "wyfold_ttt_parameters_triton",
    "wyfold_ttt_replay_triton",
    "wyfold_ttt_triton",
]


def empty(q: Tensor, v: Tensor, segments: int, backward: bool) -> SegmentBorders:
    """Borders, unwritten; with all that a backward takes of them, or what the outputs do."""
    B, T, HV, D = v.shape
    dtype = workspace(q.dtype)
    return SegmentBorders(
        v.new_empty(v.shape, dtype=dtype),
        v.new_empty(segments * HV, D, D, dtype=dtype),
        v.new_empty(segments * HV, D, dtype=torch.float32),
        v.new_empty(v.shape, dtype=dtype) if backward else None,
        v.new_empty(B, T, HV, 4, dtype=torch.float32) if backward else None,
    )


def ttt(
    x: TTTInputs,
    entering: StateViews,
    leaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    o: Tensor,
    borders: SegmentBorders | None,
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
        o: [B, T, HV, D] written, zero past the last boundary.
        borders: From `empty`, written, for the outputs and for `ttt_bwd`; None where no backward follows.
    """
    if borders is None:
        borders = empty(x.q, x.v, grid.chunks, False)
    walk(x, entering, leaving, grid, chunk_size, eps, borders)
    outputs(x, borders, grid, chunk_size, scale, eps, o)


def ttt_bwd(
    x: TTTInputs,
    borders: SegmentBorders,
    do: Tensor,
    dleaving: StateViews,
    grid: ChunkGrid,
    chunk_size: int,
    scale: float,
    eps: float,
    found: TTTGradients,
    dentering: StateViews,
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
    left = replayed(x, borders, do, grid, chunk_size, scale, eps, found.v)
    walk_back(x, borders, left, dleaving, grid, chunk_size, scale, found.col, dentering)
    parameter_gradients(left, found.w, found.u)
    token_gradients(x, borders, left, do if x.residual == "q" else None, grid, chunk_size, scale, found)
