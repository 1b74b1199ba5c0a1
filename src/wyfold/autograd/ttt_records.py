"""What a call of TTT-Linear is made of, and memory for what it returns."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.tile.index.eager import wide


class TTTOptions(NamedTuple):
    """One call of TTT-Linear. Every field is a scalar of the registered operators' schema, in this order.

    Attributes:
        operator: Public name, for messages.
        recurrent: A mini-batch may be entered and left in its middle; the state that enters is a constant.
        residual: "o" or "q", what the norm of what was read is added to.
        scale: Multiplies q.
        eps: Of both norms.
        chunk_size: Tokens of a mini-batch.
        state_v_first: Matrix states are [V, K] outside.
        state_dtype: Storage of returned states.
        final_state: Whether the states after the last token are wanted.
        save: Whether a backward will follow.
        keep_states: Whether eager keeps the states for it instead of rebuilding them; kernels always do.
        backend: The plan's.
    """

    operator: str
    recurrent: bool
    residual: str
    scale: float
    eps: float
    chunk_size: int
    state_v_first: bool
    state_dtype: torch.dtype
    final_state: bool
    save: bool
    keep_states: bool
    backend: str


OPTIONS_SCHEMA = (
    "str operator, bool recurrent, str residual, float scale, float eps, int chunk_size, bool state_v_first, "
    "ScalarType state_dtype, bool final_state, bool save, bool keep_states, str backend"
)


class TTTTensors(NamedTuple):
    """Tensors of one call, as the public operators document them; eta and eta_col are [B, T, HV, 1].

    `grad`, `bias_grad` and `position` are a TTTState's, of recurrent calls alone.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    b: Tensor
    eta: Tensor
    eta_col: Tensor | None
    state: Tensor | None
    bias: Tensor | None
    grad: Tensor | None
    bias_grad: Tensor | None
    position: Tensor | None
    cu_seqlens: Tensor | None


class TTTResult(NamedTuple):
    """Results of one call; all but `o` are empty unless asked for, the last three unless the call is recurrent."""

    o: Tensor
    state: Tensor
    bias: Tensor
    grad: Tensor
    bias_grad: Tensor
    position: Tensor


TENSORS_SCHEMA = (
    "Tensor q, Tensor k, Tensor v, Tensor w, Tensor b, Tensor eta, Tensor? eta_col, Tensor? state, Tensor? bias, "
    "Tensor? grad, Tensor? bias_grad, Tensor? position, Tensor? cu_seqlens"
)
TENSORS, RESULTS, DIFFERENTIABLE = len(TTTTensors._fields), len(TTTResult._fields), 9


def empty_result(t: TTTTensors, options: TTTOptions) -> TTTResult:
    """Results of a call, unwritten; sizes come from metadata alone."""
    B, T, HV, D = t.v.shape
    states, dtype = B if t.cu_seqlens is None else t.cu_seqlens.shape[0] - 1, wide(t.q.dtype)
    final = states if options.final_state else 0
    summed = final if options.recurrent else 0
    return TTTResult(
        t.v.new_empty(B, T, HV, D),
        t.v.new_empty(final, HV, D, D, dtype=options.state_dtype),
        t.v.new_empty(final, HV, 1, D, dtype=options.state_dtype),
        t.v.new_empty(summed, HV, D, D, dtype=dtype),
        t.v.new_empty(summed, HV, 1, D, dtype=dtype),
        t.v.new_empty(summed, dtype=torch.int32 if t.position is None else t.position.dtype),
    )


def empty_gradients(t: TTTTensors) -> tuple[Tensor, ...]:
    """Of every tensor, unwritten; of no elements for one that was not given."""
    return tuple(t.v.new_empty(0) if x is None else x.new_empty(x.shape) for x in t[:DIFFERENTIABLE])


def transpose_if_v_first(S: Tensor, options: TTTOptions) -> Tensor:
    """Matrix states in the caller's layout, and back."""
    return S.transpose(-1, -2) if options.state_v_first else S
