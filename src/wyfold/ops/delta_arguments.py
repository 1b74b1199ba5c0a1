"""Records of the delta family's arguments, as the caller passed them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime.layout import SequenceLayout


class DeltaCall(NamedTuple):
    """Arguments of one call of a differentiable operator, named as in `chunk_gated_delta_rule`.

    Attributes:
        op: Operator's name, for messages.
        gate: Gate arguments.
        chunk: Arguments of the chunk form. None: token by token.
        flags: Arguments of both forms.
    """

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
    """Gate arguments.

    Attributes:
        channel: One decay per key channel (KDA) instead of one per head.
        in_kernel: use_gate_in_kernel.
        A_log, dt_bias, lower_bound: As in `chunk_kda`.
        safe: safe_gate.
    """

    channel: bool = False
    in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    safe: bool = False
    lower_bound: float | None = None


class ChunkFlags(NamedTuple):
    """Arguments that only the chunk forms have, named as in `chunk_gated_delta_rule`."""

    chunk_size: int | None
    disable_recompute: bool
    cu_seqlens_cpu: Tensor | None
    cp_context: ContextParallel | None
    max_splits: int | None


class Flags(NamedTuple):
    """Non-tensor arguments of both forms, named as in `chunk_gated_delta_rule`."""

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
