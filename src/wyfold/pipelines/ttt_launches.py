"""TTT-Linear as launches over whole calls: the walk of the backends whose kernels find their tokens themselves.

Nothing here waits for the device: the grid is sized by capacity, and what boundaries hold is read by kernels. The
backward starts from the call's own tensors: nothing is kept for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wyfold.pipelines.ttt_records import TTTOptions, TTTResult, TTTTensors, turned
from wyfold.runtime import check
from wyfold.runtime.chunks import ChunkGrid, chunk_grid
from wyfold.runtime.layout import legal_boundaries
from wyfold.stages import table
from wyfold.stages.ttt import States, TokenGradients, Tokens
from wyfold.tile.index.eager import wide


def forward(t: TTTTensors, options: TTTOptions, result: TTTResult) -> None:
    """Write the output and the states."""
    final = States(result.state, result.bias)
    if t.v.numel() == 0:
        if options.final_state:
            _pass_through(States(t.state, t.bias), final)
        return
    stage: Any = table.launches("ttt", options.backend)
    leaving = _outside(options, *final) if options.final_state else States(None, None)
    entering = _outside(options, t.state, t.bias)
    numbers = options.chunk_size, options.scale, options.eps
    stage.ttt(Tokens(*t[:6]), entering, leaving, _grid(t, options, stage), *numbers, result.o)


def backward(t: TTTTensors, options: TTTOptions, do: Tensor | None, dfinal: States, found: Sequence[Tensor]) -> None:
    """Write the gradients of everything that has one.

    Args:
        do, dfinal: Gradients of the results, each of which may be None.
        found: Of the call's tensors, in their order, of no elements for a state that was not given.
    """
    dq, dk, dv, dw, db, deta, dS, dc = found
    if t.v.numel() == 0:
        for dx in (dw, db):
            dx.zero_()
        _pass_through(dfinal, States(dS, dc))
        return
    stage: Any = table.launches("ttt", options.backend)
    if do is None:
        do = t.v.new_zeros(()).expand(t.v.shape)
    sums = [dx.new_empty(dx.shape, dtype=wide(t.q.dtype)) for dx in (dw, db)]
    stage.ttt_bwd(
        Tokens(*t[:6]),
        _outside(options, t.state, t.bias),
        do,
        _outside(options, *dfinal),
        _grid(t, options, stage),
        options.chunk_size,
        options.scale,
        options.eps,
        TokenGradients(dq, dk, dv, *sums, deta),
        _outside(options, None if t.state is None else dS, None if t.bias is None else dc),
    )
    for dx, total in zip((dw, db), sums, strict=True):
        dx.copy_(total)


def _grid(t: TTTTensors, options: TTTOptions, stage: Any) -> ChunkGrid:
    B, T = t.v.shape[:2]
    if t.cu_seqlens is not None and check.readable(t.cu_seqlens):
        legal_boundaries(options.operator, t.cu_seqlens, T)
    return chunk_grid(B, T, stage.SEGMENT, t.cu_seqlens)


def _outside(options: TTTOptions, S: Tensor | None, c: Tensor | None) -> States:
    """Views of the caller's states, the matrix K-first."""
    return States(None if S is None else turned(S, options), c)


def _pass_through(states: States, out: States) -> None:
    """Where there are no tokens at all, states leave as they entered, and so do their gradients."""
    for x, y in zip(states, out, strict=True):
        if y is not None and y.numel():
            y.zero_() if x is None else y.copy_(x)
