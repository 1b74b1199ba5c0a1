"""Shared implementation of the public operators of the delta family, from checks to results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.autograd.delta import delta
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.delta import delta_across_ranks
from wyfold.ops.chunking import known_short
from wyfold.ops.delta_arguments import ChunkFlags, ColumnArguments, DeltaCall, Flags, GateFlags
from wyfold.ops.delta_checks import paired_columns
from wyfold.ops.delta_plan import make_plan
from wyfold.ops.plan_cache import cached_plan, plan_key
from wyfold.ops.rank_agreement import ranked_call
from wyfold.runtime import segment_rule
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.replay_cache import replayed
from wyfold.runtime.torch_ops import in_autocast_dtype

Results = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def call_delta(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: GateFlags,
    chunk: ChunkFlags | None,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | SequenceLayout | None,
    flags: Flags,
    columns: ColumnArguments | None = None,
) -> Results:
    """Check, plan and run a call; `chunk_gated_delta_rule` documents the arguments."""

    def run() -> Results:
        return _call_delta(DeltaCall(op, q, k, v, g, beta, initial_state, cu_seqlens, gate, chunk, flags, columns))

    if chunk is not None and chunk.max_splits is None and known_short(op, q, cu_seqlens, chunk.cu_seqlens_cpu):
        chunk = chunk._replace(max_splits=1)
    size, keep, on_cpu, context, splits = chunk or _NO_CHUNK_FLAGS
    if context is not None:
        return run()
    cu, tokens = boundaries_of(cu_seqlens)
    tensors = q, k, v, g, beta, initial_state, gate.A_log, gate.dt_bias, cu, on_cpu, *(columns or _NO_COLUMNS)[1:4]
    values = op, gate.in_kernel, gate.safe, gate.lower_bound, chunk is None, size, keep, splits, tokens, *flags
    return replayed(tensors, (*values, segment_rule.forcing()), run)


_NO_CHUNK_FLAGS = (None,) * 5  # of `ChunkFlags`, token by token
_NO_COLUMNS = ("delta", None, None, None)  # of `ColumnArguments`, of a delta rule


def _call_delta(call: DeltaCall) -> Results:
    op, q, k, v, g, beta, initial_state, cu_seqlens, gate, chunk, flags = call[:11]
    on_cpu, context = (None, None) if chunk is None else (chunk.cu_seqlens_cpu, chunk.cp_context)

    if context is None:
        options = _plan(call)
    else:
        with ranked_call(op, context, q) as ranked:
            options = _plan(call)
        if ranked.compares:
            ranked.assert_same(_alike_on_ranks(call, options))
    q, k, v = in_autocast_dtype(q, k, v)
    columns = dict(zip("abw", call.column_tensors, strict=True)) | paired_columns(call)
    cu = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, SequenceLayout) else cu_seqlens
    parameters = gate.A_log, gate.dt_bias
    tensors = DeltaTensors(q, k, v, g, beta, initial_state, *parameters, cu, on_cpu, **columns)
    o, final_state, states = (
        delta(tensors, options) if context is None else delta_across_ranks(tensors, options, context)
    )
    final = final_state if flags.output_final_state else None
    return (o, final, states) if flags.return_intermediate_states else (o, final)


def _plan(call: DeltaCall) -> DeltaOptions:
    return cached_plan(_plan_key(call), lambda: make_plan(call))


def _plan_key(call: DeltaCall) -> tuple[Any, ...] | None:
    """Cache key of everything `make_plan` reads; None if the plan must not be reused."""
    op, q, k, v, g, beta, initial_state, cu_seqlens, gate, chunk, flags = call[:11]
    tokens = 0
    if isinstance(cu_seqlens, SequenceLayout):
        tokens, cu_seqlens = cu_seqlens.tokens, cu_seqlens.cu_seqlens
    size, keep, on_cpu, context, splits = chunk or _NO_CHUNK_FLAGS
    shared = None if context is None else context.sizes
    # On the CPU, the contents of cu_seqlens and cu_seqlens_cpu are compared.
    if on_cpu is not None and isinstance(q, Tensor) and q.device.type == "cpu":
        return None
    asked = gate.channel, gate.in_kernel, gate.safe, gate.lower_bound, chunk is None, size, keep, splits
    tensors = q, k, v, g, beta, initial_state, gate.A_log, gate.dt_bias, cu_seqlens, on_cpu, *call.column_tensors
    return plan_key(tensors, (op, tokens, shared, *asked, segment_rule.forcing(), *flags), flags.backend)


def _alike_on_ranks(call: DeltaCall, options: DeltaOptions) -> dict[str, object]:
    """Properties that must be equal on all ranks: sizes of the collectives' buffers, and the options of the model."""
    (B, _, H, K), (HV, V) = call.q.shape, call.v.shape[2:]
    sizes = {"B": B, "H": H, "HV": HV, "K": K, "V": V, "dtype of q": in_autocast_dtype(call.q)[0].dtype}
    optional = {"g": call.g, "beta": call.beta} | dict(zip("abw", call.column_tensors, strict=True))
    given = {f"{name} given": x is not None for name, x in optional.items()}
    local = (
        "operator",
        "state_v_first",
        "state_dtype",
        "final_state",
        "chunk_size",
        "keep_factors",
        "backend",
        "segment_chunks",
        "segments",
    )
    asked = {name: value for name, value in options._asdict().items() if name not in local}
    # All ranks must take part in the backward's collective, or none.
    return {**sizes, **given, **asked, "requires_grad": asked.pop("save")}
