"""Eager implementation of TTT-Linear: a call runs part by part (`workspace`).

The forward passes the state from one part to the next, and the backward goes through the parts in reverse. It starts
from states that the forward saved at the parts' borders or at every mini-batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.ttt_records import TTTOptions, TTTResult, TTTTensors, transpose_if_v_first
from wyfold.autograd.ttt_resume import Resumption, resume
from wyfold.autograd.workspace import WorkspacePart
from wyfold.kernels import table
from wyfold.kernels.ttt_records import State
from wyfold.runtime.layout import legal_boundaries
from wyfold.tile.index.eager import to_chunks, wide


class TTTGradients(NamedTuple):
    """Gradients of a call's results. None stands for zeros.

    Attributes:
        do: [B, T, HV, D] of the output.
        state, bias, grad, bias_grad: Of the other results, shaped as in `TTTResult`.
    """

    do: Tensor | None
    state: Tensor | None
    bias: Tensor | None
    grad: Tensor | None
    bias_grad: Tensor | None


def forward(t: TTTTensors, options: TTTOptions, result: TTTResult, kept: State) -> None:
    """Run the forward.

    Args:
        t, options: The call.
        result: Written.
        kept: Tensors of `saved`, written.
    """
    call = EagerTTTCall(t, options)
    o, leaving, sums = result.o, State(result.state, result.bias), State(result.grad, result.bias_grad)
    whole = slice(0, call.N)
    if options.final_state:
        _write(leaving, whole, call.to_caller(call.states(t.state, t.bias, whole)))
        if call.resumption is not None:
            _write(sums, whole, call.states(t.grad, t.bias_grad, whole))
            result.position.copy_(call.resumption.position)
    rows, carried = call.buffer(o), State(kept.S[:0], kept.c[:0])
    for part in call.parts:
        entering = call.states(t.state, t.bias, part.sequences)
        _write(entering, slice(0, part.entered), carried)
        if options.save and not options.keep_states:
            _write(kept, slice(part.index, part.index + part.entered), carried)
        x, at = call.load(part), call.mini_batch_states(kept, part)
        left, opened = call.stage.ttt(x, entering, call.sums(part), part.table, options.eps, part.block(rows), at)
        if options.final_state:
            _write(leaving, part.sequences, call.to_caller(left))
            if opened is not None:
                _write(sums, part.sequences, opened)
        carried = State(*(s[s.shape[0] - part.left :] for s in left))
    call.copy_tokens(rows, o)
    o[:, call.end :] = 0


def backward(
    t: TTTTensors, options: TTTOptions, kept: State, incoming: TTTGradients, found: tuple[Tensor, ...]
) -> None:
    """Compute the gradients.

    Args:
        t, options: The call.
        kept: Tensors of `saved`, as the forward wrote them.
        incoming: Gradients of the results.
        found: From `empty_gradients`, written.
    """
    do, dS, dc, dG, da = incoming
    call = EagerTTTCall(t, options)
    given = found[:3] + found[5 : 6 if t.eta_col is None else 7]
    buffers, do = [call.buffer(x) for x in given], None if do is None else call.rows(do)
    dw, db = (x.new_zeros(x.shape, dtype=call.dtype) for x in (t.w, t.b))
    dentering = call.states(dS, dc, slice(0, call.N))
    carried = State(dentering.S[:0], dentering.c[:0])
    for part in reversed(call.parts):
        dleaving, dsums = call.states(dS, dc, part.sequences), None
        _write(dleaving, slice(part.table.sequences - part.left, part.table.sequences), carried)
        if dG is not None or da is not None:
            dsums = call.states(dG, da, part.sequences)
        entering = None
        if not options.keep_states:
            entering = call.states(t.state, t.bias, part.sequences)
            _write(entering, slice(0, part.entered), State(*(s[part.index : part.index + part.entered] for s in kept)))
        x, d_out, sums, at = call.load(part), call.tiles(do, part), call.sums(part), call.mini_batch_states(kept, part)
        gradients, left = call.stage.ttt_bwd(x, entering, sums, d_out, dleaving, dsums, part.table, options.eps, at)
        blocks = [part.block(rows) for rows in buffers] + [None] * (t.eta_col is None)
        call.stage.unload(gradients, part.table, options.scale, *blocks, dw, db)
        begun = slice(part.sequences.start + part.entered, part.sequences.stop)
        _write(dentering, begun, State(*(s[part.entered :] for s in left)))
        carried = State(*(s[: part.entered] for s in left))
    for rows, x in zip(buffers, given, strict=True):
        call.copy_tokens(rows, x)
        x[:, call.end :] = 0
    for x, wide_x in zip(
        (*found[3:5], *found[7:]), (dw, db, transpose_if_v_first(dentering.S, options), dentering.c), strict=True
    ):
        if x.numel():
            x.copy_(wide_x)


def saved(t: TTTTensors, options: TTTOptions) -> list[Tensor]:
    """Allocate the saved tensors, from metadata alone."""
    B, T, HV, D = t.v.shape
    N, dtype = None if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1, wide(t.q.dtype)
    rows = _kept_rows(B, T, N, options, chunks_per_part(t.v, options.chunk_size)) if options.save else 0
    return [t.v.new_zeros(rows, HV, height, D, dtype=dtype) for height in (D, 1)]


def _kept_rows(B: int, T: int, N: int | None, options: TTTOptions, per_part: int) -> int:
    C = options.chunk_size
    if options.recurrent:
        N = B if N is None else N
        B, T = 1, B * T + N * (C - 1)  # plus padding rows: at most C - 1 for each sequence
    return workspace.chunk_rows(B, T, N, C) if options.keep_states else workspace.border_rows(B, T, N, C, per_part)


def chunks_per_part(v: Tensor, chunk_size: int) -> int:
    """Maximum number of mini-batches in a part, from sizes and dtype; a tile may be larger than a state."""
    HV, D = v.shape[2:]
    return workspace.chunks_per_part(HV * D * max(D, chunk_size) * wide(v.dtype).itemsize)


class EagerTTTCall:
    """Inputs that both directions derive from an eager call before the first launch.

    A recurrent call is packed: a dense batch is B sequences of one buffer.

    Attributes:
        tensors, options: The call.
        HV, D: Heads and head dimension.
        dtype: The wide dtype, in which states and tiles are computed.
        end: Number of tokens that belong to sequences; outputs and gradients after them are zero.
        resumption: Padding that aligns sequences to the grid of mini-batches; None unless the call is recurrent.
        N: Number of sequences.
        q, k, v, eta, col: Tokens on the grid of mini-batches; `col` may be None.
        parts: Parts of the call, in forward order.
        stage: The eager kernels.
    """

    def __init__(self, tensors: TTTTensors, options: TTTOptions):
        self.tensors, self.options = tensors, options
        B, T, self.HV, self.D = tensors.v.shape
        self.dtype = wide(tensors.q.dtype)
        cu = None if tensors.cu_seqlens is None else legal_boundaries(options.operator, tensors.cu_seqlens, T)
        self.end = T if cu is None else int(cu[-1])
        self.resumption: Resumption | None = None
        if options.recurrent:
            cu = torch.arange(B + 1) * T if cu is None else cu
            self.resumption = resume(options.operator, cu, tensors.position, options.chunk_size)
            cu = self.resumption.cu_seqlens
        self.N = B if cu is None else cu.shape[0] - 1
        self.q, self.k, self.v, self.eta = (self.rows(x) for x in (tensors.q, tensors.k, tensors.v, tensors.eta))
        self.col = None if tensors.eta_col is None else self.rows(tensors.eta_col)
        per_part = chunks_per_part(tensors.v, options.chunk_size)
        self.parts = workspace.parts(self.v.shape[0], self.v.shape[1], cu, options.chunk_size, per_part)
        self.stage: Any = table.kernel_module("ttt", options.backend)

    def rows(self, x: Tensor) -> Tensor:
        """Place tokens [B, T, ...] on the grid of mini-batches."""
        return x if self.resumption is None else self.resumption.widen(x.reshape(1, -1, *x.shape[2:]))

    def buffer(self, x: Tensor) -> Tensor:
        """Buffer on the grid of mini-batches for a contiguous x [B, T, ...]: x itself without padding rows."""
        return x if self.resumption is None else self.resumption.buffer(x.view(1, -1, *x.shape[2:]))

    def copy_tokens(self, rows: Tensor, x: Tensor) -> None:
        """Copy the tokens of `rows`, the `buffer` of x, to x; no copy if they are the same."""
        if self.resumption is not None:
            self.resumption.narrow(rows, x.view(1, -1, *x.shape[2:]))

    def load(self, part: WorkspacePart) -> Any:
        blocks = (part.block(x) for x in (self.q, self.k, self.v))
        taken = None if self.resumption is None else self.resumption.taken[part.sequences].clone()
        if taken is not None:
            taken[: part.entered] = 0
        w, b = self.tensors.w, self.tensors.b
        eta, col = (None if x is None else part.block(x) for x in (self.eta, self.col))
        numbers = self.options.scale, taken, self.options.residual
        return self.stage.load(*blocks, w, b, eta, col, part.table, *numbers)

    def states(self, S: Tensor | None, c: Tensor | None, sequences: slice) -> State:
        """[n, HV, ..] wide, K-first copies of some sequences' states; zeros for None."""
        n = sequences.stop - sequences.start
        matrix, bias = (
            self.v.new_zeros(n, self.HV, rows, self.D, dtype=self.dtype) if x is None else x[sequences]
            for x, rows in ((S, self.D), (c, 1))
        )
        if S is not None:
            matrix = transpose_if_v_first(matrix, self.options).to(
                self.dtype, copy=True, memory_format=torch.contiguous_format
            )
        if c is not None:
            bias = bias.to(self.dtype, copy=True, memory_format=torch.contiguous_format)
        return State(matrix, bias)

    def sums(self, part: WorkspacePart) -> State | None:
        """Gradient sums of the open mini-batches that the part's sequences resume; None unless the call is recurrent.

        They are zero for sequences that began in an earlier part.
        """
        if not self.options.recurrent:
            return None
        sums = self.states(self.tensors.grad, self.tensors.bias_grad, part.sequences)
        for s in sums:
            s[: part.entered] = 0
        return sums

    def tiles(self, do: Tensor | None, part: WorkspacePart) -> Tensor:
        """Tiles of the output's gradient; zeros if do is None."""
        if do is None:
            return self.v.new_zeros(part.table.chunks * self.HV, self.options.chunk_size, self.D, dtype=self.dtype)
        return to_chunks(part.block(do), part.table, self.HV, self.dtype)

    def mini_batch_states(self, kept: State, part: WorkspacePart) -> State:
        """[chunks, HV, ..] buffers for the states of the part's mini-batches: views of `kept` if they are saved."""
        chunks = slice(part.first_chunk, part.first_chunk + part.table.chunks)
        if self.options.save and self.options.keep_states:
            return State(*(s[chunks] for s in kept))
        return State(*(s.new_empty(part.table.chunks, *s.shape[1:]) for s in kept))

    def to_caller(self, states: State) -> State:
        """Return states in the layout and storage dtype of the options."""
        return State(
            *(s.to(self.options.state_dtype) for s in (transpose_if_v_first(states.S, self.options), states.c))
        )


def _write(states: State, sequences: slice, source: State) -> None:
    for s, x in zip(states, source, strict=True):
        s[sequences] = x
