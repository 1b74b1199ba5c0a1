"""Arguments of TTT-Linear as records, and its step sizes, which are tensors or numbers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout


class TTTCall(NamedTuple):
    """One call of a differentiable operator.

    Attributes:
        states: initial_state and initial_state_bias; of a recurrent call a TTTState, or nothing.
        recurrent: Whether a mini-batch may be entered and left in its middle.
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
    """Arguments that are no tensors, and that a decision depends on."""

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
    """Those that are numbers, and those that are not, with None in the others' places."""
    numbers = tuple([x if isinstance(x, float | int) else None for x in given])
    return numbers, tuple([x if number is None else None for x, number in zip(given, numbers, strict=True)])


def column(v: Tensor, eta: Tensor | float) -> Tensor:
    """Step sizes, or factors of them, as [B, T, HV, 1]."""
    if isinstance(eta, Tensor):
        return eta if eta.ndim == 4 else eta.unsqueeze(-1)
    return torch.full((1, 1, 1, 1), eta, dtype=check.state_dtypes(v)[0], device=v.device).expand(*v.shape[:3], 1)
