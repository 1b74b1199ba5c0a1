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
        columns: Arguments of a diagonal-plus-low-rank rule. None: a delta rule.
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
    columns: ColumnArguments | None = None

    @property
    def rule(self) -> str:
        """`DeltaOptions.rule`."""
        return "delta" if self.columns is None else self.columns.rule

    @property
    def column_tensors(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """a, b and w of `DeltaTensors`."""
        return (None, None, None) if self.columns is None else (self.columns.a, self.columns.b, self.columns.w)


class ColumnArguments(NamedTuple):
    """Arguments that diagonal-plus-low-rank rules have besides those of the delta rules.

    Attributes:
        rule: How the rule makes its rows and columns, as `DeltaOptions.rule`.
        a, b, w: As of `DeltaTensors`.
        names: Argument of `DeltaCall`, or a, b or w -> its name in the operator's signature, where that differs.
    """

    rule: str
    a: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None
    names: tuple[tuple[str, str], ...] = ()


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
    """Non-tensor arguments of both forms, named as in `chunk_gated_delta_rule`.

    Attributes:
        erases: As in `DeltaOptions`; no argument, but a property of the operator.
    """

    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    state_dtype: torch.dtype | None = None
    return_intermediate_states: bool = False
    checkpoint_every: int | None = None
    batch_invariant: bool = False
    backend: str | None = None
    erases: bool = True
