"""Arguments of the delta family as records: a call as its caller made it, the field's flags by what they are about."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime.layout import SequenceLayout


class DeltaCall(NamedTuple):
    """One call of a differentiable operator; `chunk` is None where it goes token by token."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | SequenceLayout | None
    gate: GateFlags
    chunk: ChunkFlags | None
    flags: Flags


class GateFlags(NamedTuple):
    """The field's gate flags; `channel` says which operator asks."""

    channel: bool = False
    in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    safe: bool = False
    lower_bound: float | None = None


class ChunkFlags(NamedTuple):
    """What only the chunk forms take; None in its place means token by token."""

    chunk_size: int | None
    disable_recompute: bool
    cu_seqlens_cpu: Tensor | None
    cp_context: ContextParallel | None
    max_splits: int | None


class Flags(NamedTuple):
    """Arguments that every form takes and that are no tensors."""

    scale: float | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    state_dtype: torch.dtype | None
    return_intermediate_states: bool
    checkpoint_every: int | None
    batch_invariant: bool
    backend: str | None
