"""Records of one TTT-Linear call, and allocation of its results and gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.tile.index.eager import wide


class TTTOptions(NamedTuple):
    """One call of TTT-Linear. Every field is a scalar of the registered operators' schema, in this order.

    Attributes:
        operator: Public name, for messages.
        recurrent: Whether a call may begin and end inside a mini-batch; the initial state then gets no gradient.
        residual: "o" or "q", the tensor to which the normalized readout is added.
        scale: Multiplies q.
        eps: Epsilon of both norms.
        chunk_size: Tokens of a mini-batch.
        state_v_first: Whether the caller's matrix states are [V, K].
        state_dtype: Storage dtype of returned states.
        final_state: Whether to return the states after the last token.
        save: Whether to save tensors for a backward.
        keep_states: Whether the eager backend saves states for the backward instead of recomputing them; kernels always
            do.
        backend: Backend of the plan.
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

    `grad`, `bias_grad` and `position` are those of a TTTState; only recurrent calls have them.
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
    """Results of one call, as the public operators document them.

    All but `o` have no elements without `final_state`; the last three also if the call is not recurrent.
    """

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
    """Allocate the results of a call, uninitialized, from metadata alone."""
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
    """Allocate the gradient of every differentiable tensor, uninitialized; without elements for None."""
    return tuple(t.v.new_empty(0) if x is None else x.new_empty(x.shape) for x in t[:DIFFERENTIABLE])


def transpose_if_v_first(S: Tensor, options: TTTOptions) -> Tensor:
    """View matrix states in the caller's layout (V-first if `state_v_first`), and the caller's K-first."""
    return S.transpose(-1, -2) if options.state_v_first else S
