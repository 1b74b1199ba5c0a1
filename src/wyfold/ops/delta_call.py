"""A call of the delta family over whole sequences, from its arguments to its results."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wyfold.autograd.delta import Delta
from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta import delta_across_ranks
from wyfold.ops.delta_checks import DeltaFlags, cast_columns, check_copy
from wyfold.ops.delta_plan import known_short, make_plan
from wyfold.ops.delta_widths import Widths, fitted, restored
from wyfold.ops.rank_agreement import ranked_call
from wyfold.runtime.differentiation import apply
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.replay_cache import PublicOperator, find_call
from wyfold.runtime.torch_ops import in_autocast_dtype

Results = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def delta_arguments(
    flags: DeltaFlags,
    tensors: tuple[Any, ...],
    cu_seqlens: Tensor | SequenceLayout | None,
    cu_seqlens_cpu: Tensor | None = None,
    columns: tuple[Tensor | None, ...] = (None, None, None),
) -> tuple[DeltaTensors, DeltaFlags]:
    """The arguments of a call as the two records that `planned` takes.

    Args:
        flags: The other flags.
        tensors: q, k, v, g, beta, initial_state, A_log and dt_bias.
        cu_seqlens, cu_seqlens_cpu: As the caller passed them.
        columns: a, b and w of `DeltaTensors`.
    """
    cu, tokens = boundaries_of(cu_seqlens)
    if tokens is not None:
        flags = flags._replace(tokens=tokens)
    if (
        cu is not None
        and not flags.recurrent
        and flags.max_splits is None
        and known_short(flags.op, tensors[0], tensors[2], cu_seqlens, cu_seqlens_cpu)
    ):
        flags = flags._replace(max_splits=1)
    q, k, v, g, beta, initial_state, A_log, dt_bias = tensors
    return DeltaTensors(q, k, v, g, beta, initial_state, A_log, dt_bias, cu, cu_seqlens_cpu, *columns), flags


def _run(options: DeltaOptions, t: DeltaTensors, flags: DeltaFlags) -> Results:
    if t.cu_seqlens is not None and t.cu_seqlens_cpu is not None:
        check_copy(options.operator, t.q, t.cu_seqlens, t.cu_seqlens_cpu)
    t, widths = fitted(t, options.rule, v_first=options.state_v_first, head_width=options.head_width)
    q, k, v = in_autocast_dtype(*t[:3])
    columns = (t.a, t.b, t.w) if options.rule == "delta" else cast_columns((t.a, t.b, t.w), options.rule)
    return _results(options, widths, *apply(options.operator, Delta, q, k, v, *t[3:10], *columns, options))


DELTA = PublicOperator(make_plan, _run)


def run_across_ranks(t: DeltaTensors, flags: DeltaFlags, context: ContextParallel) -> Results:
    """Check, plan and run a call whose sequences span the ranks of a context."""

    with ranked_call(flags.op, context, t.q) as ranked:
        known = find_call(DELTA, t, (*flags, context.sizes))
        plan = lambda *_: make_plan(t, flags, context)
        options = plan() if known is None else known.plan_by(plan)
    if ranked.compares:
        ranked.assert_same(_alike_on_ranks(t, options))
    t, widths = fitted(t, flags.rule, v_first=options.state_v_first, head_width=options.head_width)
    q, k, v = in_autocast_dtype(*t[:3])
    tensors = DeltaTensors(q, k, v, *t[3:10], *cast_columns((t.a, t.b, t.w), flags.rule))
    return _results(options, widths, *delta_across_ranks(tensors, options, context))


def _results(
    options: DeltaOptions, widths: Widths | None, o: Tensor, final_state: Tensor | None, states: Tensor | None
) -> Results:
    """The results that were asked for, with the caller's widths."""
    final_state, states = final_state if options.final_state else None, states if options.checkpoint_every else None
    o, final_state, states = restored(o, final_state, states, widths, v_first=options.state_v_first)
    return (o, final_state) if states is None else (o, final_state, states)


def _alike_on_ranks(t: DeltaTensors, options: DeltaOptions) -> dict[str, object]:
    """Properties that must be equal on all ranks: sizes of the collectives' buffers, and the options of the model."""
    (B, _, H, K), (HV, V) = t.q.shape, t.v.shape[2:]
    sizes = {"B": B, "H": H, "HV": HV, "K": K, "V": V, "dtype of q": in_autocast_dtype(t.q)[0].dtype}
    optional = {"g": t.g, "beta": t.beta, "a": t.a, "b": t.b, "w": t.w}
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
        "segment_fewest",
    )
    asked = {name: value for name, value in options._asdict().items() if name not in local}
    # All ranks must take part in the backward's collective, or none.
    return {**sizes, **given, **asked, "requires_grad": asked.pop("save")}
