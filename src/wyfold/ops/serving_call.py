"""A serving call of the delta family, on states in a pool: checks, plan, run."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.serving_delta import serve_op
from wyfold.kernels import table
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample, with_sequences
from wyfold.ops.delta_checks import CheckedDelta, GateFlags, check_boundaries, check_gate, check_strength, check_tensors
from wyfold.ops.delta_plan import (
    SEGMENT_STAGES,
    best_chunk_size,
    call_cut,
    launch_keys,
    position_grids,
    runs_eagerly,
    with_backend,
)
from wyfold.ops.delta_trials import token_samples, trial_segments
from wyfold.runtime import check, segment_rule
from wyfold.runtime.chunk_layout import expected_segments
from wyfold.runtime.differentiation import refuse_transforms
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.replay_cache import PublicOperator
from wyfold.runtime.torch_ops import call, in_autocast_dtype

INDICES = (torch.int32, torch.int64)

FLOATS = ("q", "k", "v", "g", "beta", "pool", "A_log", "dt_bias", "out")
"""Fields of `ServingTensors` that hold floats, without the pool of checkpoints."""


class ServingTensors(NamedTuple):
    """Tensors of a call, named as in `decode`, `verify` and `prefill`.

    Attributes:
        cu_seqlens: Boundaries of packed sequences, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    A_log: Tensor | None
    dt_bias: Tensor | None
    cu_seqlens: Tensor | None
    pool: Tensor
    state_indices: Tensor | None
    output_state_indices: Tensor | None
    has_initial_state: Tensor | None
    num_accepted_tokens: Tensor | None
    checkpoint_pool: Tensor | None
    checkpoint_indices: Tensor | None
    out: Tensor | None


class ServingFlags(NamedTuple):
    """Arguments of a call that are no tensors, named as in `decode`, `verify` and `prefill`.

    Attributes:
        op: Operator's name, for messages.
        channel: One decay per key channel (KDA) instead of one per head.
        swapped: Tokens are [1, N, ..] instead of [N, 1, ..].
        chunked: Use the chunk form instead of the recurrence.
        each: Keep the state after every token (`verify`).
        tokens: Length of the buffer of a `SequenceLayout`, else None.
    """

    op: str
    channel: bool
    state_v_first: bool
    pad_slot_id: int
    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    use_gate_in_kernel: bool
    safe_gate: bool
    lower_bound: float | None
    backend: str | None
    swapped: bool = False
    chunked: bool = False
    each: bool = False
    checkpoint_every: int | None = None
    tokens: int | None = None
    max_splits: int | None = None


def run(options: DeltaOptions, t: ServingTensors, flags: ServingFlags) -> Tensor:
    """Run a checked call."""
    q, k, v, g, beta, A_log, dt_bias, cu, pool, source, target, given, accepted, checkpoints, rows, out = t
    refuse_transforms(flags.op, *t[:5], pool, out)
    written = out
    if flags.swapped:
        q, k, v, g, beta, written = map(swap_batch_time, (q, k, v, g, beta, out))
    q, k, v = in_autocast_dtype(q, k, v)
    o: Tensor = v.new_empty(v.shape) if written is None else written
    if source is not None and not flags.each:
        source = source[:, None]
    if rows is not None:
        rows = rows.flatten()
    call(
        serve_op, q, k, v, g, beta, A_log, dt_bias, cu, pool, source, target, given, accepted, checkpoints, rows,
        o, flags.each, flags.pad_slot_id, *options,
    )  # fmt: skip
    if out is not None:
        returned: Tensor = out
        return returned
    return o.transpose(0, 1) if flags.swapped else o


def make_plan(t: ServingTensors, flags: ServingFlags) -> DeltaOptions:
    """Check the call and return its options."""
    refuse_transforms(flags.op, *t[:5], t.pool, t.out)
    if flags.swapped:
        names = ("q", "k", "v", "g", "beta", "out")
        t = t._replace(**{name: swap_batch_time(getattr(t, name)) for name in names})
    checked = _check_call(t, flags)
    q, k, v = in_autocast_dtype(*t[:3])
    t = t._replace(q=q, k=k, v=v)
    options = _options(t, flags, checked)
    # The scan reads and writes the slots itself, unless segments or checkpoints make the states pass through copies.
    copied = ("state_pool",) if flags.chunked and (options.checkpoint_every or options.cut.chunks) else ()
    between = SEGMENT_STAGES if options.cut.chunks else ()
    return with_backend(
        options,
        (q, k, v, t.g),
        flags.backend,
        (("state_pool", "prepare", *between, "scan") if flags.chunked else ("prepare", "recurrent"), ()),
        dtypes=table.dtypes(*[getattr(t, name) for name in FLOATS], t.checkpoint_pool),
        keys=lambda: [*[(stage, LaunchKey()) for stage in copied], *_keys(t, flags, checked, options, between)],
        trials=lambda: _trials(t, flags, checked.sequences, options),
        segments=options.cut.segments(-(-checked.sizes["T"] // options.chunk_size)),
        grids=position_grids(options.cut, packed=checked.packed),
        kept=copied,
    )


def _check_call(t: ServingTensors, flags: ServingFlags) -> CheckedDelta:
    """Run all checks except those of checkpoints and segments. `every` is that of a call without checkpoints."""
    op = flags.op
    sizes = check_tensors(
        op, dict(zip(ServingTensors._fields[:7], t[:7], strict=True)), channel=flags.channel, pooled=True
    )
    q, k, v = in_autocast_dtype(*t[:3])
    check.same_attribute(op, "dtype", q=q, k=k, v=v)
    cu, out = t.cu_seqlens, t.out
    sizes["N"] = check_boundaries(op, q, cu, flags.tokens)
    _check_slots(t, flags, sizes)
    if flags.each and cu is None and t.state_indices is not None and sizes["T"] > t.state_indices.shape[1]:
        columns = t.state_indices.shape[1]
        raise ValueError(f"{op}: state_indices must have a column for each of T = {sizes['T']} tokens, got {columns}")
    if check.checking_contents():
        _check_distinct(t, flags, sizes)
    if out is not None:
        check.shapes(op, known=sizes, out=(out, "B T HV V"))
        check.output_dtype(op, out, v=v)
        check.same_attribute(op, "device", v=v, out=out)
        check.no_overlap(op, out=out)
    check.flag(
        op,
        use_qk_l2norm_in_kernel=flags.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=flags.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=flags.allow_neg_eigval,
    )
    check_strength(op, t.beta, logit=flags.use_beta_sigmoid_in_kernel, doubled=flags.allow_neg_eigval)
    gate = GateFlags(flags.channel, flags.use_gate_in_kernel, flags.safe_gate, flags.lower_bound)
    activation, lower_bound, clamp = check_gate(op, t.g, t.A_log, t.dt_bias, gate, sizes, cu)
    check.no_gradients(op, {name: getattr(t, name) for name in FLOATS})
    scale = int(sizes["K"]) ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    return CheckedDelta(sizes, sizes["N"], cu is not None, activation, lower_bound, clamp, scale, int(flags.each))


def _options(t: ServingTensors, flags: ServingFlags, checked: CheckedDelta) -> DeltaOptions:
    """The options of a checked call, with kernels as its backend."""
    chunk_size, every, cut = 1 if flags.each else 64, checked.every, segment_rule.WHOLE
    if flags.chunked:
        chunk_size = best_chunk_size(t.q, t.v, channel_gate=flags.channel)
        every = _check_checkpoints(t, flags, chunk_size, checked.sizes)
        if check.checking_contents():
            _check_distinct_checkpoints(t, flags, every, checked.sizes)
        if flags.max_splits is not None:
            check.integer(flags.op, "max_splits", flags.max_splits, least=1)
        if not every:  # checkpoints are the states of one scan
            eager = runs_eagerly(t.q, flags.backend)
            cut = call_cut(t.q, t.v, chunk_size, flags.max_splits, packed=checked.packed, eager=eager)
    return DeltaOptions(
        operator=flags.op,
        recurrent=not flags.chunked,
        scale=checked.scale,
        qk_l2norm=flags.use_qk_l2norm_in_kernel,
        activation=checked.activation,
        lower_bound=checked.lower_bound,
        clamp=checked.clamp,
        beta_logit=flags.use_beta_sigmoid_in_kernel,
        beta_most=2.0 if flags.allow_neg_eigval else 1.0,
        state_v_first=flags.state_v_first,
        state_dtype=torch.float64 if t.q.dtype == torch.float64 else torch.float32,
        final_state=True,
        chunk_size=chunk_size,
        checkpoint_every=every,
        save=False,
        keep_factors=False,
        backend="triton",
        segment_chunks=cut.chunks,
        segments=cut.most,
    )


def _keys(
    t: ServingTensors, flags: ServingFlags, checked: CheckedDelta, options: DeltaOptions, between: tuple[str, ...]
) -> list[tuple[str, LaunchKey]]:
    """(stage, launch key) of each kernel of a call. between: Its stages of segments."""
    sizes = checked.sizes
    if not flags.chunked:
        recurrent: Any = table.kernel_module("recurrent", "triton")
        order = {"v_first": flags.state_v_first, "alone": not checked.packed and not flags.each and sizes["T"] == 1}
        return [("recurrent", recurrent.served_key(t.pool, sizes["K"], sizes["V"], t.g, **order))]
    likely = expected_segments(checked.sequences, sizes["B"] * sizes["T"], options.chunk_size, options.cut)
    stages, kept = (("prepare", *between, "scan"), ()), options.checkpoint_every > 0
    found = launch_keys(stages, t.q, t.v, t.g, options.chunk_size, likely, kept=kept, norm=options.qk_l2norm)
    if t.out is not None and t.out.dtype != t.v.dtype:
        found = [(stage, key._replace(wide=stage == "scan")) for stage, key in found]
    return found


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
        rounding="once" if options.recurrent else "chunks",
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


def _check_checkpoints(t: ServingTensors, flags: ServingFlags, chunk_size: int, sizes: dict[str, int]) -> int:
    """Check the checkpoint arguments; return the tokens between stored states, or 0 if none are stored."""
    op = flags.op
    given = flags.checkpoint_every, t.checkpoint_pool, t.checkpoint_indices
    if all(x is None for x in given):
        return 0
    if any(x is None for x in given):
        names = "checkpoint_every", "checkpoint_pool", "checkpoint_indices"
        missing = ", ".join(name for name, x in zip(names, given, strict=True) if x is None)
        raise ValueError(
            f"{op}: checkpoint_every, checkpoint_pool and checkpoint_indices must come together, got no {missing}"
        )
    every = check.integer(op, "checkpoint_every", flags.checkpoint_every, least=1)
    if every % chunk_size:
        raise ValueError(f"{op}: checkpoint_every must be a multiple of the chunk, {chunk_size}, got {every}")
    _check_pool(op, "checkpoint_pool", t.q, t.checkpoint_pool, flags.state_v_first, sizes)
    rows = [sizes["T"] // every] if t.cu_seqlens is not None else [sizes["B"], sizes["T"] // every]
    _check_rows(op, t.q, "checkpoint_indices", t.checkpoint_indices, rows, INDICES)
    return every


def _check_slots(t: ServingTensors, flags: ServingFlags, sizes: dict[str, int]) -> None:
    """Check the pool and the index tensors."""
    op, q, N = flags.op, t.q, sizes["N"]
    check.flag(op, state_v_first=flags.state_v_first)
    check.integer(op, "pad_slot_id", flags.pad_slot_id, least=-1)
    _check_pool(op, "pool", q, t.pool, flags.state_v_first, sizes)
    rows = [N, t.state_indices.shape[1]] if flags.each and t.state_indices is not None else [N]
    _check_rows(op, q, "has_initial_state", t.has_initial_state, [N], (torch.bool,))
    _check_rows(op, q, "num_accepted_tokens", t.num_accepted_tokens, [N], INDICES)
    _check_rows(op, q, "state_indices", t.state_indices, rows, INDICES)
    _check_rows(op, q, "output_state_indices", t.output_state_indices, rows, INDICES)


def _check_distinct(t: ServingTensors, flags: ServingFlags, sizes: dict[str, int]) -> None:
    """Check that no slot is written twice, or written by one row and read by another.

    Indices of skipped rows and columns after a row's last token are ignored.
    """
    op, given, accepted, cu, N = flags.op, t.has_initial_state, t.num_accepted_tokens, t.cu_seqlens, sizes["N"]
    indices = t.state_indices, t.output_state_indices
    rows = torch.arange(N, device=t.q.device)
    if not all(x is None or check.readable(x) for x in (*indices, given, accepted, cu, rows)):
        return
    source, target = (None if x is None else x.to(torch.int64).view(N, x.shape[1:].numel()) for x in indices)
    source = rows[:, None] if source is None else source
    _check_distinct_slots(op, "state_indices", source, _live_slots(source, t.pool, flags))
    if target is None:
        return
    column = rows * 0 if accepted is None else (accepted.to(torch.int64) - 1).clamp(0, source.shape[1] - 1)
    entry = source.gather(1, column[:, None])
    live = _live_slots(entry, t.pool, flags)
    tokens = (rows * 0 + sizes["T"] if cu is None else cu.diff())[:, None]
    written = live & _live_slots(target, t.pool, flags)
    if flags.each:
        written &= torch.arange(target.shape[1], device=t.q.device) < tokens
    _check_distinct_slots(op, "output_state_indices", target, written)
    read = live if given is None else live & given[:, None]
    if torch.isin(target[written & (target != entry)], entry[read]).any():
        got = f"got {target.squeeze(1).tolist()} beside {source.squeeze(1).tolist()}"
        raise ValueError(f"{op}: output_state_indices must name no slot that another row starts from, {got}")


def _check_distinct_checkpoints(t: ServingTensors, flags: ServingFlags, every: int, sizes: dict[str, int]) -> None:
    """Check that no two checkpoints go to one slot.

    Indices of skipped sequences, and those past the last checkpoint of a packed batch, are ignored.
    """
    source, indices, pool, cu = t.state_indices, t.checkpoint_indices, t.checkpoint_pool, t.cu_seqlens
    rows = torch.arange(sizes["N"], device=t.q.device)
    if indices is None or pool is None or not all(x is None or check.readable(x) for x in (source, indices, cu, rows)):
        return
    live = _live_slots(rows if source is None else source, t.pool, flags)
    states = rows * 0 + sizes["T"] // every if cu is None else cu.diff() // every
    of_live = live.repeat_interleave(states)
    indices = indices.flatten()[:, None]
    written = _live_slots(indices, pool, flags)
    written[: of_live.numel()] &= of_live[:, None]
    written[of_live.numel() :] = False
    _check_distinct_slots(flags.op, "checkpoint_indices", indices, written)


def _live_slots(x: Tensor, pool: Tensor, flags: ServingFlags) -> Tensor:
    """Mask of the indices that are live slots of a pool."""
    return (x > flags.pad_slot_id) & (x < pool.shape[0])


def _check_distinct_slots(op: str, name: str, x: Tensor, selected: Tensor) -> None:
    """Check that the selected slots are distinct."""
    if x[selected].unique().numel() != int(selected.sum()):
        raise ValueError(f"{op}: {name} must hold distinct slots, got {x.squeeze(1).tolist()}")


def _check_pool(op: str, name: str, q: Tensor, pool: Tensor | None, v_first: bool, sizes: dict[str, int]) -> None:
    check.shapes(op, optional=(), known=sizes, **{name: (pool, "slots HV V K" if v_first else "slots HV K V")})
    pool = check.tensor(op, name, pool)
    check.floating(op, check.state_dtypes(q), **{name: pool})
    if pool.stride()[2:] != (pool.shape[3], 1):
        raise ValueError(f"{op}: {name} must hold each head's state in one piece, got strides {pool.stride()}")
    check.no_overlap(op, **{name: pool})
    check.same_attribute(op, "device", q=q, **{name: pool})


def _check_rows(
    op: str, q: Tensor, name: str, x: Tensor | None, shape: list[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    """Check an optional tensor of integers or flags, one per sequence, draft or checkpoint."""
    if x is None:
        return
    if list(check.tensor(op, name, x).shape) != shape or x.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"{op}: {name} must be {shape} {wanted}, got {got}")
    check.same_attribute(op, "device", q=q, **{name: x})


def swap_batch_time(x: Any) -> Any:
    """Swap the first two dimensions of a tensor; return anything else as it is, for a later check to refuse."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.ndim > 1 else x
