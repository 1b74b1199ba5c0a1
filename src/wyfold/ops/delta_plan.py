"""Plan of a delta-family call, and the options its implementation runs with."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.delta_eager import chunks_per_part
from wyfold.autograd.row_alignment import alignment_copies, tma_copies
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.delta import summarized_by_kernels
from wyfold.context_parallel.rank_exchange import exchange_trials
from wyfold.kernels import table
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample, with_sequences
from wyfold.ops.chunking import chunk_size_of, cut_of, runs_eagerly
from wyfold.ops.delta_arguments import DeltaCall
from wyfold.ops.delta_checks import CheckedDelta, check_call
from wyfold.ops.plan_cache import any_requires_grad
from wyfold.runtime import check, kernel_configs
from wyfold.runtime.chunk_layout import CUT_FROM, Cut, expected_segments
from wyfold.runtime.layout import boundaries_of
from wyfold.runtime.options import DeltaOptions, gradient_unit
from wyfold.runtime.plan import Plan, explaining


def make_plan(call: DeltaCall) -> DeltaOptions:
    """Check the call and return its options."""
    chunk, flags = call.chunk, call.flags
    checked = check_call(call)
    chunk_size = chunk_size_of(call, checked)
    cut = cut_of(call, checked, chunk_size)
    parameters = call.gate.A_log, call.gate.dt_bias
    given = *checked[:3], call.g, call.beta, call.initial_state, *parameters, *call.column_tensors
    save = any_requires_grad(given)
    options = DeltaOptions(
        operator=call.op,
        recurrent=chunk is None,
        scale=checked.scale,
        qk_l2norm=flags.use_qk_l2norm_in_kernel,
        activation=checked.activation,
        lower_bound=checked.lower_bound,
        clamp=checked.clamp,
        beta_logit=flags.use_beta_sigmoid_in_kernel,
        beta_most=2.0 if flags.allow_neg_eigval else 1.0,
        state_v_first=flags.state_v_first,
        state_dtype=flags.state_dtype or check.state_dtypes(checked.q)[0],
        final_state=flags.output_final_state,
        chunk_size=chunk_size,
        checkpoint_every=checked.every,
        save=save,
        keep_factors=chunk is not None and chunk.disable_recompute,
        backend="triton",
        segment_chunks=cut.chunks,
        segments=cut.most,
        unit=gradient_unit(checked.scale, checked.q.dtype),
        rule=call.rule,
        erases=flags.erases,
    )
    return options._replace(backend=_plan(call, checked, options, cut, given).backend)


def _plan(
    call: DeltaCall, checked: CheckedDelta, options: DeltaOptions, cut: Cut, given: tuple[Tensor | None, ...]
) -> Plan:
    """Launches of both directions and their backend. given: all floating tensors of the call."""
    chunk_size, save = options.chunk_size, options.save
    q, k, v, g, sizes, N = checked.q, checked.k, checked.v, call.g, checked.sizes, checked.sequences
    recurrent, context = call.chunk is None, None if call.chunk is None else call.chunk.cp_context
    communicates = context is not None and not runs_eagerly(call) and _has_collectives(context, sizes)
    between = (
        ("segment_summary", "segment_fold", *(["rank_carry"] if communicates else []))
        if cut.chunks or communicates
        else ()
    )
    stages = (
        (("prepare", "recurrent"),) * 2
        if recurrent
        else (("prepare", *between, "scan"), ("prepare", *between, "scan_bwd", "gradients"))
    )
    forward, backward = (tuple([options.stage(name) for name in direction]) for direction in stages)

    def keys() -> list[tuple[str, str]]:
        if recurrent:
            flags, state = call.flags, call.initial_state
            stored = (flags.state_dtype or torch.float32) if state is None else state.dtype
            return token_keys(q, v, g, stored, v_first=flags.state_v_first)
        likely = expected_segments(N, sizes["B"] * sizes["T"], chunk_size, cut)
        if communicates and context is not None:
            likely = context.segment_tables(sizes["B"], chunk_size, cut).segments
        norm = call.flags.use_qk_l2norm_in_kernel
        return launch_keys(stages, q, v, g, chunk_size, likely, kept=checked.every > 0, norm=norm)

    per_part = chunks_per_part(q, v, state_per_token=recurrent and save)
    return table.plan(
        call.op,
        q.device,
        call.flags.backend,
        forward=forward,
        backward=backward,
        dtypes=table.dtypes(*given),
        chunk_size=None if recurrent else chunk_size,
        parts=workspace.part_count(sizes["B"], sizes["T"], N if checked.packed else None, chunk_size, per_part),
        segments=cut.segments(-(-sizes["T"] // chunk_size)),
        collectives=() if context is None else _collectives(context, sizes),
        sizes=() if recurrent else launch_sizes(q, chunk_size),
        tma_copies=tma_copies(q, k, v) if explaining() and not recurrent else (),
        kernel_copies=alignment_copies(q=q, k=k, g=g if call.gate.channel else None)
        if explaining() and not recurrent
        else (),
        keys=keys,
        trials=lambda: _trials(call, checked, options),
    )


def _trials(call: DeltaCall, checked: CheckedDelta, options: DeltaOptions) -> tuple[Trial, ...]:
    """Small calls with the kernels of this one. Sequences are cut into segments if those of the call may be.

    Over ranks, the kernels are those of one rank's segments, and those that apply the states of other ranks.
    """
    across_ranks = call.chunk is not None and call.chunk.cp_context is not None
    (q, k, v), gate, sizes = checked[:3], call.gate, checked.sizes
    scale = q.shape[-1] ** -0.5  # a number to the kernels: another scale is no other kernel
    options = options._replace(scale=scale, unit=gradient_unit(scale, q.dtype))
    sequences, tokens = checked.sequences, TOKENS
    if options.segment_chunks or across_ranks:
        most = CUT_FROM + 1
        tokens = most * options.chunk_size - 7
        sequences = -(-expected_segments(sequences, sizes["B"] * sizes["T"], options.chunk_size, options.cut) // most)
        options = options._replace(segment_chunks=1, segments=most)
    if options.recurrent:
        tokens = options.chunk_size + 9
    if options.checkpoint_every:
        tokens = max(tokens, 2 * options.checkpoint_every + 9)
    trial = Trial(
        call.op,
        "delta_fwd",
        (
            *token_samples(q, k, v, call.g, call.beta, options),
            sample(call.initial_state, "normal", "N"),
            sample(gate.A_log, "A_log", ""),
            sample(gate.dt_bias, "dt_bias", ""),
            boundary_sample(boundaries_of(call.cu_seqlens)[0]),
            *[None] * 4,  # boundaries on the CPU, and the tokens of rules without kernels
        ),
        tuple(options),
        ("o", "state", "states"),
        tokens=tokens,
        packed=call.cu_seqlens is not None,
        gradients=options.save,
        rounding="once" if options.recurrent else "chunks",
    )
    exchange = exchange_trials(options, q, v) if across_ranks else ()
    return *with_sequences(trial, sequences, v), *exchange


def token_samples(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, options: DeltaOptions
) -> list[Sample | None]:
    """Samples of the tokens of a delta-family call."""
    return [
        sample(q, "normal" if options.qk_l2norm else "unit", "BT"),
        sample(k, "normal" if options.qk_l2norm else "unit", "BT"),
        sample(v, "normal", "BT"),
        sample(g, "decay" if options.activation == "given" else "normal", "BT"),
        sample(beta, "normal" if options.beta_logit else "strength", "BT"),
    ]


def launch_keys(
    stages: tuple[tuple[str, ...], ...],
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    chunk_size: int,
    scanned: int,
    *,
    kept: bool,
    norm: bool,
) -> list[tuple[str, str]]:
    """(stage, launch key) of each kernel of a chunked call.

    Args:
        stages: Stages of the forward and of the backward.
        scanned: Number of sequences, or the likely number of segments.
        kept: Intermediate states are returned.
        norm: Kernels normalise the rows of q and k.
    """
    prepare: Any = table.kernel_module("prepare", "triton")
    gate, folded = prepare.gate_kind(g), prepare.reads_folded(g)
    key = prepare.launch_key(q.dtype, q.shape[-1], v.shape[-1], chunk_size, gate, folded)
    keys = dict.fromkeys(stages[0] + stages[1], key)
    keys["prepare"] = f"{key} norm" if norm else key
    keys["scan"] = table.kernel_module("scan", "triton").scan_key(key, scanned, v, kept=kept)
    if "scan_bwd" in keys:
        keys["scan_bwd"] = table.kernel_module("scan_bwd", "triton").scan_bwd_key(key, scanned, v)
    if "gradients" in keys:
        keys["gradients"] = table.kernel_module("gradients", "triton").gradients_key(keys["prepare"], q, v)
    back = []
    if "segment_summary" in keys:
        keys["segment_summary"], back = f"{key} fwd", [("segment_summary", f"{key} bwd")]
    return [*keys.items(), *back]


def token_keys(q: Tensor, v: Tensor, g: Tensor | None, stored: torch.dtype, *, v_first: bool) -> list[tuple[str, str]]:
    """(stage, launch key) of a recurrent call's kernels: forward, backward, and the sum of partial gradients."""
    module: Any = table.kernel_module("recurrent", "triton")
    K, V = q.shape[-1], v.shape[-1]
    backward = [("recurrent", module.launch_key_bwd(K, V)), ("recurrent", "gather")]
    return [("recurrent", module.launch_key(stored, K, V, g, v_first=v_first)), *backward]


def _has_collectives(context: ContextParallel, sizes: dict[str, int]) -> bool:
    """Whether sequences cross ranks and kernels can summarise this rank's segments."""
    return bool(context.partition.chains) and summarized_by_kernels(context, sizes["B"], sizes["K"], sizes["V"])


def _collectives(context: ContextParallel, sizes: dict[str, int]) -> tuple[str, ...]:
    """Descriptions of the call's collectives, one for each direction."""
    B, HV, K, V = (sizes[letter] for letter in ("B", "HV", "K", "V"))
    counts = {"forward": context.partition.most_outgoing, "backward": context.partition.most_incoming}
    return tuple(
        f"all-gather {direction} of {count * B} x {HV} x {K} x {V + K} from each rank"
        for direction, count in counts.items()
        if count
    )


def launch_sizes(q: Tensor, chunk_size: int) -> tuple[tuple[str, str], ...]:
    """Stages whose sizes may be too large for a card (`beyond` in support.json), with their keys."""
    if q.dtype == torch.float64:
        return ()
    key = f"{kernel_configs.dtype_word(q.dtype)} K{q.shape[-1]} C{chunk_size}"
    return ("prepare", key), ("scan", key)
