"""A serving call of the delta family, on states in a pool: checks, plan, run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd.kernel_call import pays_two_streams
from wyfold.autograd.serving_delta import serve_op
from wyfold.kernels import table
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample, with_sequences
from wyfold.ops.delta_checks import CheckedDelta, cast_columns
from wyfold.ops.delta_keys import launch_keys, low_rank_keys
from wyfold.ops.delta_plan import (
    SEGMENT_STAGES,
    best_chunk_size,
    call_cut,
    checked_options,
    position_grids,
    runs_eagerly,
    with_backend,
)
from wyfold.ops.delta_trials import column_samples, token_samples, trial_segments
from wyfold.ops.serving_checks import (
    FLOATS,
    RULES,
    ServingFlags,
    ServingTensors,
    check_call,
    check_checkpoints,
    check_distinct_checkpoints,
    check_rule,
)
from wyfold.runtime import check, segment_rule
from wyfold.runtime.chunk_layout import WITHOUT_TABLES, expected_segments
from wyfold.runtime.differentiation import refuse_transforms
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.plan import explaining
from wyfold.runtime.replay_cache import PublicOperator
from wyfold.runtime.torch_ops import call, in_autocast_dtype


def run(options: DeltaOptions, t: ServingTensors, flags: ServingFlags) -> Tensor:
    """Run a checked call."""
    refuse_transforms(flags.op, *t[:5], t.pool, t.out, t.a, t.b, t.w)
    out = t.out
    t = _batch_first(t) if flags.swapped else t
    q, k, v, g, beta, A_log, dt_bias, cu, pool, source, target, given, accepted, checkpoints, rows, written = t[:16]
    q, k, v = in_autocast_dtype(q, k, v)
    a, b, w = cast_columns((t.a, t.b, t.w), options.rule)
    o: Tensor = v.new_empty(v.shape) if written is None else written
    if source is not None and not flags.each:
        source = source[:, None]
    if rows is not None:
        rows = rows.flatten()
    call(
        serve_op, q, k, v, g, beta, A_log, dt_bias, cu, a, b, w, pool, source, target, given, accepted, checkpoints,
        rows, o, flags.each, flags.pad_slot_id, *options,
    )  # fmt: skip
    if out is not None:
        returned: Tensor = out
        return returned
    return o.transpose(0, 1) if flags.swapped else o


def make_plan(t: ServingTensors, flags: ServingFlags) -> DeltaOptions:
    """Check the call and return its options."""
    refuse_transforms(flags.op, *t[:5], t.pool, t.out, t.a, t.b, t.w)
    check_rule(t, flags)
    t = _batch_first(t) if flags.swapped else t
    checked = check_call(t, flags)
    q, k, v = in_autocast_dtype(*t[:3])
    t = t._replace(q=q, k=k, v=v)
    options = _options(t, flags, checked)
    # The scan reads and writes the slots itself, but states that enter segments, and checkpoints, pass through copies.
    # So do all states of a low-rank rule.
    low_rank = options.rule != "delta"
    between = SEGMENT_STAGES if options.cut.chunks else ()
    passes = low_rank or (flags.chunked and (options.checkpoint_every or between))
    if between and explaining() and q.dtype in table.FLOATS:  # others have no keys, and are refused below
        passes = not _copied_in_summaries(t, options, dict(_keys(t, flags, checked, options, between)))
    copied = ("state_pool",) if passes else ()
    steps = ("prepare", *between, "scan") if flags.chunked else ("prepare", "recurrent")
    pools = ("state_pool",) if flags.chunked or low_rank else ()
    return with_backend(
        options,
        (q, k, v, t.g),
        flags.backend,
        ((*pools, *map(options.stage, steps)), ()),
        columns=(t.a, t.b),
        dtypes=table.dtypes(*[getattr(t, name) for name in FLOATS], t.checkpoint_pool),
        keys=lambda: [*[(stage, LaunchKey()) for stage in copied], *_keys(t, flags, checked, options, between)],
        trials=lambda: _trials(t, flags, checked.sequences, options),
        segments=options.cut.segments(-(-checked.sizes["T"] // options.chunk_size)),
        grids=position_grids(options.cut, packed=checked.packed),
        kept=copied,
    )


def _options(t: ServingTensors, flags: ServingFlags, checked: CheckedDelta) -> DeltaOptions:
    """The options of a checked call, with kernels as its backend."""
    chunk_size, every, cut = 1 if flags.each else 64, checked.every, segment_rule.WHOLE
    rule = RULES[flags.rule]
    if flags.chunked:
        channel = flags.channel and (rule.rule == "delta" or t.g is not None)
        chunk_size = best_chunk_size(t.q, t.v, channel_gate=channel, rule=rule.rule)
        every = check_checkpoints(t, flags, chunk_size, checked.sizes)
        if check.checking_contents():
            check_distinct_checkpoints(t, flags, every, checked.sizes)
        if flags.max_splits is not None:
            check.integer(flags.op, "max_splits", flags.max_splits, least=1)
        if not every and rule.rule == "delta":  # checkpoints are the states of one scan
            eager = runs_eagerly(t.q, flags.backend)
            cut = call_cut(t.q, t.v, chunk_size, flags.max_splits, packed=checked.packed, eager=eager)
    dtype = torch.float64 if t.q.dtype == torch.float64 else torch.float32
    options = checked_options(flags, checked._replace(every=every), chunk_size, cut, dtype)
    return options._replace(recurrent=not flags.chunked, rule=rule.rule, erases=rule.erases)


def _keys(
    t: ServingTensors, flags: ServingFlags, checked: CheckedDelta, options: DeltaOptions, between: tuple[str, ...]
) -> list[tuple[str, LaunchKey]]:
    """(stage, launch key) of each kernel of a call. between: Its stages of segments."""
    sizes, wide = checked.sizes, t.out is not None and t.out.dtype != t.v.dtype
    if options.rule != "delta":
        how: Any = {"w": t.w, "in_parts": options.checkpoint_every > 0, "wide": wide}
        forward = ("prepare", "scan" if flags.chunked else "recurrent")
        return low_rank_keys(options, (forward, ()), t.q, t.v, t.g, **how)
    if not flags.chunked:
        recurrent: Any = table.kernel_module("recurrent", "triton")
        alone = not checked.packed and not flags.each and sizes["T"] == 1 and options.erases
        order = {"v_first": flags.state_v_first, "alone": alone}
        return [("recurrent", recurrent.served_key(t.pool, sizes["K"], sizes["V"], t.g, **order))]
    likely = expected_segments(checked.sequences, sizes["B"] * sizes["T"], options.chunk_size, options.cut)
    stages = ("prepare", *between, "scan"), ()
    flagged = {"kept": options.checkpoint_every > 0, "norm": options.qk_l2norm, "erases": options.erases}
    found = launch_keys(stages, t.q, t.v, t.g, options.chunk_size, likely, **flagged)
    if wide:
        found = [(stage, key._replace(wide=stage == "scan")) for stage, key in found]
    return found


def _copied_in_summaries(t: ServingTensors, options: DeltaOptions, keys: dict[str, LaunchKey]) -> bool:
    """Whether the summaries of a call in segments copy the states that enter, as `entering_states` decides. keys: Of
    each stage."""
    kernels = {table.selected_backend(stage, options.backend, keys[stage], t.q.device) for stage in WITHOUT_TABLES}
    even = t.cu_seqlens is None and kernels == {"gluon"}
    chunks = options.cut.length(-(-t.q.shape[1] // options.chunk_size))
    return even and not pays_two_streams(keys["segment_summary"].gate, chunks)


SERVING = PublicOperator(make_plan, run)


def _trials(t: ServingTensors, flags: ServingFlags, sequences: int, options: DeltaOptions) -> tuple[Trial, ...]:
    """Small calls with the kernels of this one, whose tokens have the dtype of an active autocast. sequences: N."""
    q, k, v, cu, every = *t[:3], t.cu_seqlens, options.checkpoint_every
    length = max(TOKENS, 2 * every + 9)
    if options.segment_chunks:
        options, sequences, length = trial_segments(options, sequences, q.shape[0] * q.shape[1])
    if options.recurrent:
        length = 1 if q.shape[1] == 1 and cu is None else 5
    small = Trial(
        options.operator,
        "serve",
        (
            *token_samples(q, k, v, t.g, t.beta, options),
            sample(t.A_log, "A_log", ""),
            sample(t.dt_bias, "dt_bias", ""),
            boundary_sample(cu),
            *column_samples(t.a, t.b, t.w, options),
            sample(t.pool, "normal", "S"),
            *slot_samples(t.state_indices, t.output_state_indices, each=flags.each),
            sample(t.has_initial_state, "flags", "N"),
            sample(t.num_accepted_tokens, "accepted", "N"),
            sample(t.checkpoint_pool, "normal", "R"),
            None if t.checkpoint_indices is None else Sample("rows", t.checkpoint_indices.dtype, "R", ()),
            sample(v if t.out is None else t.out, "normal", "BT"),
        ),
        (flags.each, -1, *options._replace(scale=q.shape[-1] ** -0.5)),
        (),
        tokens=length,
        packed=cu is not None,
        gradients=False,
        rounding="inputs" if options.rule != "delta" else "once" if options.recurrent else "chunks",
        written=length if flags.each else 1,
    )
    if options.recurrent:
        return (small._replace(sequences=9),)
    found = with_sequences(small, sequences, v)
    if t.checkpoint_pool is None:
        return found
    rows = [trial.sizes()["T"] // every * (1 if trial.packed else trial.sequences) for trial in found]
    return tuple([trial._replace(rows=count) for trial, count in zip(found, rows, strict=True)])


def slot_samples(
    source: Tensor | None, target: Tensor | None, *, each: bool = False
) -> tuple[Sample | None, Sample | None]:
    """Samples of the slots that rows of a serving call read and write, as the registered operators take them."""
    read = None if source is None else Sample("slots", source.dtype, "NC", ())
    written = None if target is None else Sample("other slots", target.dtype, "NC" if each else "N", ())
    return read, written


def _batch_first(t: ServingTensors) -> ServingTensors:
    """Tokens [N, 1, ..] of tokens [1, N, ..]."""
    names = ("q", "k", "v", "g", "beta", "out", "a", "b", "w")
    return t._replace(**{name: swap_batch_time(getattr(t, name)) for name in names})


def swap_batch_time(x: Any) -> Any:
    """Swap the first two dimensions of a tensor; return anything else as it is, for a later check to refuse."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.ndim > 1 else x
