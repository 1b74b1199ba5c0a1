"""Small calls with the kernels of a delta-family call, for their self-check."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.delta_rank import map_widths
from wyfold.context_parallel.rank_exchange import exchange_trials
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample, with_sequences
from wyfold.ops.delta_checks import CheckedDelta
from wyfold.runtime.chunk_layout import expected_segments
from wyfold.runtime.options import DeltaOptions, gradient_unit
from wyfold.runtime.segment_rule import CUT_FROM


def call_trials(
    t: DeltaTensors, options: DeltaOptions, checked: CheckedDelta, *, across_ranks: bool
) -> tuple[Trial, ...]:
    """Small calls with the kernels of this one. Sequences are cut into segments if those of the call may be.

    Over ranks, the kernels are those of one rank's segments, and those that apply the states of other ranks. Those of a
    low-rank rule are the ordinary ones, also with more value columns.
    """
    if across_ranks and options.rule != "delta":
        return _low_rank_trials(t, options, checked)
    q, k, v, sizes = *t[:3], checked.sizes
    scale = q.shape[-1] ** -0.5  # a number to the kernels: another scale is no other kernel
    options = options._replace(scale=scale, unit=gradient_unit(scale, q.dtype))
    sequences, tokens = checked.sequences, TOKENS
    if options.segment_chunks or across_ranks:
        options, sequences, tokens = trial_segments(options, sequences, sizes["B"] * sizes["T"])
    if options.recurrent:
        tokens = options.chunk_size + 9
    if options.checkpoint_every:
        tokens = max(tokens, 2 * options.checkpoint_every + 9)
    trial = Trial(
        options.operator,
        "delta_fwd",
        (
            *token_samples(q, k, v, t.g, t.beta, options),
            sample(t.initial_state, "normal", "N"),
            sample(t.A_log, "A_log", ""),
            sample(t.dt_bias, "dt_bias", ""),
            boundary_sample(t.cu_seqlens),
            None,  # boundaries on the CPU
            *column_samples(t.a, t.b, t.w, options),
        ),
        tuple(options),
        ("o", "state", "states"),
        tokens=tokens,
        packed=t.cu_seqlens is not None,
        gradients=options.save,
        rounding="inputs" if options.rule != "delta" else "once" if options.recurrent else "chunks",
    )
    exchange = exchange_trials(options, q, v) if across_ranks else ()
    return *with_sequences(trial, sequences, v), *exchange


def _low_rank_trials(t: DeltaTensors, options: DeltaOptions, checked: CheckedDelta) -> tuple[Trial, ...]:
    """Small calls of a low-rank rule over ranks: all pieces packed, and one alone, also for its map."""
    options, K = options._replace(state_v_first=False, final_state=True), t.q.shape[-1]
    boundaries = t.q.new_empty(2, dtype=torch.int64)

    def of_width(V: int, cu: Tensor | None) -> tuple[Trial, ...]:
        wide = lambda x: x[..., :1].expand(*x.shape[:-1], V)
        v, w = wide(t.v), None if t.w is None else wide(t.w)
        state = t.q.new_empty((1, t.v.shape[2], K, V), dtype=torch.float32)
        local = t._replace(v=v, w=w, initial_state=state, cu_seqlens=cu)
        return call_trials(local, options, checked, across_ranks=False)

    V = t.v.shape[-1]
    alone = [trial for width in dict.fromkeys((V, *map_widths(K, V))) for trial in of_width(width, None)]
    return *of_width(V, boundaries), *alone


def trial_segments(options: DeltaOptions, sequences: int, tokens: int) -> tuple[DeltaOptions, int, int]:
    """Options of a trial in segments, and the number and length of its sequences, for a call of so many of each."""
    most = CUT_FROM + 1
    likely = -(-expected_segments(sequences, tokens, options.chunk_size, options.cut) // most)
    options = options._replace(segment_chunks=1, segments=most, segment_fewest=CUT_FROM)
    return options, likely, most * options.chunk_size - 7


def column_samples(a: Tensor | None, b: Tensor | None, w: Tensor | None, options: DeltaOptions) -> list[Sample | None]:
    """Samples of a low-rank rule's further tokens."""
    return [
        # Where kernels divide by the norms of rows, these differ.
        sample(a, "normal" if options.qk_l2norm else "unit", "BT"),
        # Rates and erase gates are in (0, 1). A column of DPLR is short, since any row may read it.
        sample(b, "step" if options.rule == "given" else "strength", "BT"),
        sample(w, "strength", "BT"),
    ]


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
