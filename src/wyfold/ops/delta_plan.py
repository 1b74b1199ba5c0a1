"""Plan of a delta-family call, over whole sequences or on a pool of states: backend, chunk size, segments, options."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.delta_eager import chunks_per_part
from wyfold.autograd.delta_records import LEARNING, DeltaTensors, most_borders
from wyfold.autograd.low_rank_chunk import BACKWARD_CHUNK, backward_options
from wyfold.autograd.row_alignment import alignment_copies, tma_copies
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta import summarized_by_kernels
from wyfold.kernels import table
from wyfold.kernels.trial import Trial
from wyfold.ops.delta_checks import CheckedDelta, DeltaFlags, cast_columns, check_call
from wyfold.ops.delta_keys import Stages, launch_keys, low_rank_keys, token_keys
from wyfold.ops.delta_trials import call_trials
from wyfold.ops.delta_widths import fitted
from wyfold.ops.serving_checks import ServingFlags
from wyfold.runtime import check, kernel_configs, segment_rule, triton_support
from wyfold.runtime.chunk_layout import CHUNK_SIZES, Cut, expected_segments, max_borders
from wyfold.runtime.differentiation import traced
from wyfold.runtime.kernel_configs import LaunchKey
from wyfold.runtime.layout import SequenceLayout, boundaries
from wyfold.runtime.options import DeltaOptions, gradient_unit
from wyfold.runtime.plan import explaining
from wyfold.runtime.torch_modes import autocast_dtype
from wyfold.runtime.torch_ops import constant_to_compilers, in_autocast_dtype

HEAD = 128
"""Width of the heads of the fastest kernels, and of those that cut sequences."""

VALUE_TILE = 64
"""Value channels of a program, of which wider heads have several."""

SEGMENT_STAGES = ("segment_summary", "segment_fold")
"""Stages between those of a call, where long sequences are cut into segments."""


def make_plan(t: DeltaTensors, flags: DeltaFlags, context: ContextParallel | None = None) -> DeltaOptions:
    """Check a call over whole sequences and return its options. context: cp_context."""
    checked = check_call(t, flags, context)
    head_width = best_head_width(t, flags, context)
    t, widths = fitted(t, flags.rule, v_first=flags.state_v_first, head_width=head_width)
    if widths is not None:
        checked = checked._replace(sizes=checked.sizes | {"HV": t.v.shape[2], "K": widths.key, "V": widths.value})
    if autocast_dtype(t.q.device.type) is not None:
        q, k, v = in_autocast_dtype(*t[:3])
        t = t._replace(q=q, k=k, v=v, **dict(zip("abw", cast_columns((t.a, t.b, t.w), flags.rule), strict=True)))
    options = _options(t, flags, checked)._replace(head_width=head_width)
    sizes, on_kernels = checked.sizes, not runs_eagerly(t.q, flags.backend)
    crossing = context if on_kernels and context is not None and _crosses_ranks(context, flags, sizes) else None
    stages = _stages(options, on_kernels=on_kernels, crosses=crossing is not None)

    def parts() -> int:
        per_part = chunks_per_part(t.q, t.v, state_per_token=flags.recurrent and options.save)
        N = checked.sequences if checked.packed else None
        return workspace.part_count(sizes["B"], sizes["T"], N, options.chunk_size, per_part)

    forward, backward = (tuple([options.stage(name) for name in direction]) for direction in stages)
    return with_backend(
        options,
        (t.q, t.k, t.v, t.g),
        flags.backend,
        (forward, backward),
        dtypes=table.dtypes(*[t[index] for index in LEARNING]),
        columns=(t.a, t.b),
        keys=lambda: _keys(t, options, checked, stages, crossing),
        trials=lambda: call_trials(t, options, checked, across_ranks=context is not None),
        parts=parts,
        segments=options.cut.segments(-(-sizes["T"] // options.chunk_size)),
        # Over ranks the host finds the positions.
        grids=position_grids(options.cut, packed=t.cu_seqlens is not None) if context is None else (),
        collectives=() if context is None else _collectives(context, sizes),
        widths="" if widths is None else str(widths),
    )


def _options(t: DeltaTensors, flags: DeltaFlags, checked: CheckedDelta) -> DeltaOptions:
    """The options of a checked call, with kernels as its backend."""
    chunk_size = _chunk_size_of(t, flags, checked)
    cut = _cut_of(t, flags, checked, chunk_size)
    state_dtype = flags.state_dtype or check.state_dtypes(t.q)[0]
    return checked_options(flags, checked, chunk_size, cut, state_dtype)._replace(
        recurrent=flags.recurrent,
        final_state=flags.output_final_state,
        # A traced program decides itself what to save for its backward.
        save=check.any_requires_grad([t[index] for index in LEARNING]) and not traced(),
        keep_factors=flags.disable_recompute and not _prepared_in_gluon(t, flags, chunk_size),
        unit=gradient_unit(checked.scale, t.q.dtype),
        rule=flags.rule,
        erases=flags.erases,
    )


def checked_options(
    flags: DeltaFlags | ServingFlags, checked: CheckedDelta, chunk_size: int, cut: Cut, state_dtype: torch.dtype
) -> DeltaOptions:
    """The options of a checked call on kernels: chunk by chunk, without a backward, and with final states."""
    return DeltaOptions(
        operator=flags.op,
        recurrent=False,
        scale=checked.scale,
        qk_l2norm=flags.use_qk_l2norm_in_kernel,
        activation=checked.activation,
        lower_bound=checked.lower_bound,
        clamp=checked.clamp,
        beta_logit=flags.use_beta_sigmoid_in_kernel,
        beta_most=2.0 if flags.allow_neg_eigval else 1.0,
        state_v_first=flags.state_v_first,
        state_dtype=state_dtype,
        final_state=True,
        chunk_size=chunk_size,
        checkpoint_every=checked.every,
        save=False,
        keep_factors=False,
        backend="triton",
        segment_chunks=cut.chunks,
        segments=cut.most,
        segment_fewest=cut.fewest,
    )


def _stages(options: DeltaOptions, *, on_kernels: bool, crosses: bool) -> Stages:
    """Stages of the delta rule in each direction, before a low-rank rule replaces them.

    Args:
        options: The call's options.
        on_kernels: It does not run on eager.
        crosses: States cross the edges of ranks in kernels.
    """
    between: tuple[str, ...] = SEGMENT_STAGES if options.cut.chunks or crosses else ()
    if options.rule != "delta":
        between = between[1:]  # the scans compute the summaries
    if crosses:
        between = (*between, "rank_carry")
    backward = ("prepare", *between, "scan_bwd", "gradients")
    if not options.recurrent:
        return ("prepare", *between, "scan"), backward
    token_form = ("prepare", "recurrent")
    # A low-rank rule on kernels goes back chunk by chunk.
    return token_form, backward if options.rule != "delta" and on_kernels else token_form


def _keys(
    t: DeltaTensors, options: DeltaOptions, checked: CheckedDelta, stages: Stages, crossing: ContextParallel | None
) -> table.StageKeys:
    """(stage, launch key) of each kernel of a call. crossing: cp_context, if states cross ranks in kernels."""
    state, sizes = t.initial_state, checked.sizes
    stored = options.state_dtype if state is None else state.dtype
    if options.rule != "delta":
        backward = backward_options(t, options._replace(backend="triton"))
        shorter = not options.recurrent and backward.chunk_size != options.chunk_size
        in_parts = options.checkpoint_every > 0 or most_borders(t, options) > 0
        how: Any = {"w": t.w, "in_parts": in_parts, "shorter": shorter}
        return low_rank_keys(options, stages, t.q, t.v, t.g, stored, **how)
    if options.recurrent:
        return token_keys(t.q, t.v, t.g, stored, v_first=options.state_v_first)
    scanned = expected_segments(checked.sequences, sizes["B"] * sizes["T"], options.chunk_size, options.cut)
    if crossing is not None:
        scanned = crossing.segment_tables(sizes["B"], options.chunk_size, options.cut).segments
    how = {"kept": checked.every > 0, "norm": options.qk_l2norm, "erases": options.erases}
    return launch_keys(stages, t.q, t.v, t.g, options.chunk_size, scanned, **how)


def with_backend(
    options: DeltaOptions,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor | None],
    backend: str | None,
    stages: Stages,
    *,
    dtypes: tuple[torch.dtype, ...],
    keys: Callable[[], table.StageKeys],
    trials: Callable[[], tuple[Trial, ...]],
    columns: tuple[Tensor | None, Tensor | None] = (None, None),
    parts: Callable[[], int] = lambda: 1,
    segments: int = 1,
    grids: tuple[str, ...] = (),
    kept: tuple[str, ...] = (),
    collectives: tuple[str, ...] = (),
    widths: str = "",
) -> DeltaOptions:
    """Choose the backend of a call, over whole sequences or on a pool; return the options with it.

    Args:
        options: The call's options, with any backend.
        tokens: q, k, v and g, in the dtype of an active autocast.
        backend: Requested backend, or None.
        stages: Stages of the forward and of the backward.
        columns: a and b of a low-rank rule.
        dtypes, keys, trials, parts, segments, grids, kept, collectives, widths: As of `table.plan`.
    """
    (q, k, v, g), (a, b) = tokens, columns
    chunked, channel = not options.recurrent, g is not None and g.ndim == 4
    copied = explaining() and chunked
    plan = table.plan(
        options.operator,
        q.device,
        backend,
        forward=stages[0],
        backward=stages[1],
        dtypes=dtypes,
        chunk_size=options.chunk_size if chunked else None,
        parts=parts,
        segments=segments,
        grids=grids,
        saved=("prepare",) if options.keep_factors else (),
        kept=kept,
        collectives=collectives,
        widths=widths,
        sizes=_launch_sizes(q, options) if chunked else (),
        tma_copies=tma_copies(q, k, v) if copied else (),
        kernel_copies=alignment_copies(q=q, k=k, g=g if channel else None, a=a, b=b) if copied else (),
        keys=keys,
        trials=trials,
        # Of the low-rank rules, shorter chunks have never run.
        unrun=options.rule != "delta" and chunked and options.chunk_size < BACKWARD_CHUNK,
    )
    return options._replace(backend=plan.backend)


def position_grids(cut: Cut, *, packed: bool) -> tuple[str, ...]:
    """Launches that find the positions of chunks and segments."""
    return (*(["chunk_grid"] if packed else []), *(["segment_grid"] if cut.chunks else []))


def _crosses_ranks(context: ContextParallel, flags: DeltaFlags, sizes: dict[str, int]) -> bool:
    """Whether kernels carry states across ranks.

    Without collectives, ranks run the operator's kernels on their own sequences.
    """
    B, K, V = (sizes[letter] for letter in "BKV")
    return bool(context.partition.chains) and summarized_by_kernels(context, flags.rule, B, K, V)


def _collectives(context: ContextParallel, sizes: dict[str, int]) -> tuple[str, ...]:
    """Descriptions of the call's collectives, one for each direction."""
    B, HV, K, V = (sizes[letter] for letter in ("B", "HV", "K", "V"))
    counts = {"forward": context.partition.most_outgoing, "backward": context.partition.most_incoming}
    return tuple(
        f"all-gather {direction} of {count * B} x {HV} x {K} x {V + K} from each rank"
        for direction, count in counts.items()
        if count
    )


def _launch_sizes(q: Tensor, options: DeltaOptions) -> tuple[tuple[str, str], ...]:
    """Stages whose sizes may be too large for a card (`beyond` in support.json), with their keys."""
    if q.dtype == torch.float64:
        return ()
    key = f"{kernel_configs.dtype_word(q.dtype)} K{q.shape[-1]} C{options.chunk_size}"
    stages = ("prepare", "scan", "gradients") if options.save else ("prepare", "scan")
    return tuple([(options.stage(name), key) for name in stages])


def known_short(op: str, q: object, v: object, cu_seqlens: object, on_cpu: object) -> bool:
    """Whether the host knows that no sequence of a long buffer is long enough for segments. v: None if not at hand."""
    if cu_seqlens is None or not isinstance(q, Tensor) or q.ndim < 2 or segment_rule.forcing() is not None:
        return False
    if torch.compiler.is_compiling() or q.shape[1] < segment_rule.SHORTEST // 2:
        return False
    longest = cu_seqlens.longest if isinstance(cu_seqlens, SequenceLayout) else None
    if longest is None and isinstance(on_cpu, Tensor) and check.readable(on_cpu):
        longest = max(boundaries(op, on_cpu, "cu_seqlens_cpu").diff().tolist(), default=0)
    return longest is not None and longest <= segment_rule.longest_uncut(v, _processors(q.device))


def _chunk_size_of(t: DeltaTensors, flags: DeltaFlags, checked: CheckedDelta) -> int:
    """Chunk size. For the recurrent form, whose bits do not depend on it, the spacing of saved states."""
    op, every = flags.op, checked.every
    if flags.recurrent:
        return math.gcd(every, 64)
    check.flag(op, disable_recompute=flags.disable_recompute)
    if flags.chunk_size is not None:
        check.choice(op, "chunk_size", flags.chunk_size, CHUNK_SIZES)
    channel = flags.channel if flags.rule == "delta" else t.g is not None and t.g.ndim == 4
    size = flags.chunk_size or best_chunk_size(t.q, t.v, channel_gate=channel, rule=flags.rule)
    if every % size:
        got = f"{every // flags.updates} times {flags.updates} updates" if flags.updates > 1 else f"{every}"
        raise ValueError(f"{op}: checkpoint_every must be a multiple of chunk_size = {size}, got {got}")
    return size


def best_chunk_size(q: Tensor, v: Tensor, *, channel_gate: bool, rule: str = "delta") -> int:
    """Fastest chunk size for the device, gate kind and widths.

    See docs/facts/cpu.md, CPU-3, and docs/facts/hopper.md, H200-5. For DPLR with K = V = 128, chunks of 64 took 1.4
    times as long as of 32 on an H200, forward and backward.
    """
    if q.device.type == "cpu":
        return 32 if q.shape[-1] * v.shape[-1] >= 128 * 128 else 16
    # Formatting the widths specialises them: to compilers they may be symbolic.
    if rule != "delta":
        widths = f"K{q.shape[-1]} V{v.shape[-1]} C64 channel"
        gated = rule == "keys" and channel_gate
        return 64 if gated and _runs_in_gluon(q.device, q.dtype, "low_rank_prepare", widths) else 32
    if not channel_gate:
        return 64
    widths = f"K{q.shape[-1]} V{v.shape[-1]} C64 channel GR{v.shape[2] // q.shape[2]}"
    return 64 if _runs_in_gluon(q.device, q.dtype, "gradients", widths) else 32


def _prepared_in_gluon(t: DeltaTensors, flags: DeltaFlags, chunk_size: int) -> bool:
    """Whether a call launches the Gluon `low_rank_prepare`, whose factors the backward does not read."""
    if flags.rule != "keys" or flags.recurrent or t.g is None or t.g.ndim != 4 or runs_eagerly(t.q, flags.backend):
        return False
    widths = f"K{t.q.shape[-1]} V{t.v.shape[-1]} C{chunk_size} channel"
    return _runs_in_gluon(t.q.device, t.q.dtype, "low_rank_prepare", widths)


@constant_to_compilers
def _runs_in_gluon(device: torch.device, dtype: torch.dtype, stage: str, widths: str) -> bool:
    """Whether the Gluon kernel of a stage with a channel gate is available."""
    if device.type != "cuda" or triton_support.support_of(device).refusal or dtype not in table.FLOATS:
        return False
    key = LaunchKey.parse(f"{kernel_configs.dtype_word(dtype)} {widths}")
    return kernel_configs.dispatched(triton_support.architecture(device), stage, key)


def best_head_width(t: DeltaTensors, flags: DeltaFlags, context: ContextParallel | None) -> int:
    """Width of the value heads as which a call's are computed, as in `DeltaOptions`; 0 for the nearest to the call's.

    Triton's tiles are powers of two, so keys of 65 to 128 channels and wider values cost what padded heads of 128 do.
    Measured in docs/log/operators.md. Keys of a channel gate are not padded: the gate would be padded too, in float32,
    which costs the forward more than it gains.

    Gluon kernels that take wide values whole are faster than heads of 128, but have no segments. So calls are left to
    them whose heads of 128 would never be cut. The number of heads decides that, not the batch or its lengths.
    """
    K, (HV, V) = t.q.shape[-1], t.v.shape[2:]
    widest_keys = K == HEAD if flags.channel else HEAD // 2 < K <= HEAD
    if not widest_keys or V <= HEAD or flags.rule != "delta" or not flags.erases or flags.recurrent:
        return 0
    if flags.chunk_size not in (None, 64) or runs_eagerly(t.q, flags.backend):
        return 0
    dtype = autocast_dtype(t.q.device.type) or t.q.dtype
    gate = "none" if t.g is None else "channel" if flags.channel else "scalar"
    if not _gradients_in_gluon(t.q.device, dtype, f"K{HEAD} V{HEAD} C64 {gate}"):
        return 0
    cut = segment_rule.cut(HV * -(-V // HEAD), HEAD, HEAD, 64, _processors(t.q.device))
    width = -(-V // VALUE_TILE) * VALUE_TILE
    whole = cut == segment_rule.WHOLE and context is None
    if not whole or not _gradients_in_gluon(t.q.device, dtype, f"K{HEAD} V{width} C64 {gate}"):
        return HEAD
    return 0 if (K, V) == (HEAD, width) else width


@constant_to_compilers
def _gradients_in_gluon(device: torch.device, dtype: torch.dtype, widths: str) -> bool:
    """Whether the gradients of such heads are computed by a Gluon kernel."""
    if dtype not in table.FLOATS:
        return False
    key = LaunchKey.parse(f"{kernel_configs.dtype_word(dtype)} {widths}")
    return table.selected_backend("gradients", "triton", key, device) == "gluon"


def _cut_of(t: DeltaTensors, flags: DeltaFlags, checked: CheckedDelta, chunk_size: int) -> Cut:
    """`call_cut`; `WHOLE` also for the token form, if the call forbids segments, and for low-rank rules on eager."""
    if flags.recurrent:
        return segment_rule.WHOLE
    if flags.max_splits is not None:
        check.integer(flags.op, "max_splits", flags.max_splits, least=1)
    if flags.batch_invariant or checked.every:
        return segment_rule.WHOLE
    eager = runs_eagerly(t.q, flags.backend)
    if eager and flags.rule != "delta":
        return segment_rule.WHOLE
    return call_cut(t.q, t.v, chunk_size, flags.max_splits, packed=checked.packed, eager=eager)


def call_cut(q: Tensor, v: Tensor, chunk_size: int, max_splits: int | None, *, packed: bool, eager: bool) -> Cut:
    """Segmentation of a call's long sequences; `WHOLE` if no sequence can be long enough.

    `WHOLE` also on eager, which gains nothing. A call that returns intermediate states does not ask: those are the
    states of one scan.
    """
    if eager and segment_rule.forcing() is None:
        return segment_rule.WHOLE
    B, T, HV, V = v.shape
    # Round T up to whole chunks: the rule counts chunks and must not depend on tokens within the last one.
    if -(-T // chunk_size) * chunk_size < segment_rule.SHORTEST // 2 and segment_rule.forcing() is None:
        return segment_rule.WHOLE
    cut = segment_rule.cut(HV, q.shape[-1], V, chunk_size, _processors(q.device), max_splits, batch=B)
    return cut if cut.chunks and max_borders(B, T, chunk_size, packed, cut) else segment_rule.WHOLE


def runs_eagerly(q: Tensor, backend: str | None) -> bool:
    """Whether a call demands the eager backend, or gets it because of its device."""
    return backend == "eager" or (backend is None and q.device.type != "cuda")


@constant_to_compilers
def _processors(device: torch.device) -> int:
    return kernel_configs.processors(device)
