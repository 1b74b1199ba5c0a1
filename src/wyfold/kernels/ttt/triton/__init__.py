"""`ttt` in Triton: two serial scans over a sequence's mini-batches, and four parallel launches.

    forward scan    serial: one program per sequence and value head, its state transposed, [V, K], in registers
    outputs         forward, parallel over segments of 64 tokens: reads from the states, normalised
    recompute       backward, parallel over segments: O once more, dO, and the part of dN that comes through O
    backward scan   serial: the gradient of the state in registers, computed from tokens alone; stores dZ and dY
    parameters      backward, parallel over channels: dw and du, summed from partials of recompute and backward scan
    gradients       backward, parallel over segments: dq, dk, dv, deta

A scan computes only what the next mini-batch depends on. Everything else is another launch. The forward scan stores N
of every token and the state entering every segment. These make the other launches parallel, since inside a segment

    S entering r's mini-batch = S entering the segment - sum over s before that mini-batch of e_s' k_s^T N_s

with e' the step size that closed s's mini-batch. A row that reads S therefore needs one more masked product. No launch
stores a state per mini-batch. Where a backward follows, the forward keeps N and these states for it, and X of every
token.

A mini-batch is a chain of short dependent steps and few programs run, so each step's latency matters, not its work.

- Each warp holds a slab of at least 16 value rows of the state: products are batched, with one matrix per warp. A slab
  is updated in place by single-warp matrix instructions. Four-warp instructions would wait for fences before and after.
- Predictions change layout once so that eight lanes hold a token's values (`tiles.to_row_layout`). All row sums are
  reduced together there. A second layout change makes N an operand again.
- The bias is stored as equal columns and is the accumulator of the products: sums over tokens are products with ones.
- All loads of the next mini-batch are issued before the current one is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt.triton.backward_scan import backward_scan, wyfold_ttt_bwd_triton
from wyfold.kernels.ttt.triton.forward_scan import forward_scan, wyfold_ttt_triton
from wyfold.kernels.ttt.triton.gradients import token_gradients, wyfold_ttt_gradients_triton
from wyfold.kernels.ttt.triton.launch import LAUNCHES, SEGMENT, forward_scan_key, launch_keys
from wyfold.kernels.ttt.triton.outputs import outputs, wyfold_ttt_outputs_triton
from wyfold.kernels.ttt.triton.parameters import parameter_gradients, wyfold_ttt_parameters_triton
from wyfold.kernels.ttt.triton.recompute import recompute, wyfold_ttt_replay_triton
from wyfold.kernels.ttt_records import SegmentBorders, StateViews, TTTGradients, TTTInputs
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.tile.dot.triton import workspace

# Kernels are exported because `kernel_configs.compiled` looks them up in this module.
__all__ = [
    "LAUNCHES",
    "SEGMENT",
    "empty",
    "forward_scan_key",
    "launch_keys",
    "ttt",
    "ttt_bwd",
    "wyfold_ttt_bwd_triton",
    "wyfold_ttt_gradients_triton",
    "wyfold_ttt_outputs_triton",
    "wyfold_ttt_parameters_triton",
    "wyfold_ttt_replay_triton",
    "wyfold_ttt_triton",
]


def empty(q: Tensor, v: Tensor, segments: int, backward: bool) -> SegmentBorders:
    """Allocate `SegmentBorders` without writing them; X and rows only where a backward follows."""
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
        x: Inputs of the call.
        entering: Initial states, any strides and float dtypes.
        leaving: Receives the final states.
        grid: The call's chunk grid, one chunk per segment.
        chunk_size: Tokens of a mini-batch.
        scale: Multiplies q.
        eps: Epsilon of both norms.
        o: [B, T, HV, D] output, written; zero past a packed batch's last boundary.
        borders: From `empty`, written for the outputs and `ttt_bwd`; None where no backward follows.
    """
    if borders is None:
        borders = empty(x.q, x.v, grid.chunks, False)
    forward_scan(x, entering, leaving, grid, chunk_size, eps, borders)
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
        borders: Written by `ttt`.
        do: [B, T, HV, D] gradient of the output.
        dleaving: Gradients of the final states.
        found: Receives the gradients; zero past a packed batch's last boundary.
        dentering: Receives the gradients of the initial states.
    """
    scratch = recompute(x, borders, do, grid, chunk_size, scale, eps, found.v)
    backward_scan(x, borders, scratch, dleaving, grid, chunk_size, scale, found.col, dentering)
    parameter_gradients(scratch, found.w, found.u)
    token_gradients(x, borders, scratch, do if x.residual == "q" else None, grid, chunk_size, scale, found)
