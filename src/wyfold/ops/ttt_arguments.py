"""Records of TTT-Linear's arguments, and conversion of step sizes, which are tensors or numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class TTTCall(NamedTuple):
    """Arguments of one call of a differentiable operator.

    Attributes:
        op: Operator's name, for messages.
        q, k, v, w, b, eta, eta_col, cu_seqlens, backend: As in `chunk_ttt_linear`.
        states: (initial_state, initial_state_bias). For a recurrent call, the fields of a TTTState, or ().
        context: cp_context.
        form: Options of the call.
        recurrent: The call may start and end inside a mini-batch.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    b: Tensor
    eta: Tensor | float
    eta_col: Tensor | float | None
    states: tuple[Any, ...]
    cu_seqlens: Tensor | SequenceLayout | None
    context: ContextParallel | None
    form: TTTForm
    backend: str | None
    recurrent: bool = False


class TTTForm(NamedTuple):
    """Non-tensor arguments of a call, named as in `chunk_ttt_linear`.

    Attributes:
        final_state: output_final_state.
        keep_states: disable_recompute.
    """

    residual: str
    scale: float | None
    eps: float
    chunk_size: int
    state_v_first: bool
    state_dtype: torch.dtype | None
    final_state: bool
    keep_states: bool
    batch_invariant: bool


def split_numbers(*given: Any) -> tuple[tuple[float | None, ...], tuple[Any, ...]]:
    """Split arguments into numbers and non-numbers, each with None in the place of the others."""
    numbers = tuple([x if isinstance(x, float | int) else None for x in given])
    return numbers, tuple([x if number is None else None for x, number in zip(given, numbers, strict=True)])


def column(v: Tensor, eta: Tensor | float) -> Tensor:
    """Step sizes, or their factors, as a tensor [B, T, HV, 1]."""
    if isinstance(eta, Tensor):
        return eta if eta.ndim == 4 else eta.unsqueeze(-1)
    return torch.full((1, 1, 1, 1), eta, dtype=check.state_dtypes(v)[0], device=v.device).expand(*v.shape[:3], 1)
