"""Shared implementation of the two public TTT-Linear operators, from checks to results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.ttt import ttt
from wyfold.autograd.ttt_eager import chunks_per_part
from wyfold.autograd.ttt_records import TTTOptions, TTTResult, TTTTensors
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.ttt import ttt_across_ranks
from wyfold.kernels import table
from wyfold.kernels.trial import STATES, Trial, boundary_sample, sample
from wyfold.ops.plan_cache import cached_plan, plan_key
from wyfold.ops.rank_agreement import ranked_call
from wyfold.ops.ttt_arguments import TTTCall, column, split_numbers
from wyfold.ops.ttt_checks import CheckedTTT, check_call
from wyfold.runtime import check
from wyfold.runtime.kernel_configs import dtype_word
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.plan import Plan
from wyfold.runtime.torch_ops import in_autocast_dtype


def call_ttt(call: TTTCall) -> TTTResult:
    """Check, plan and run a call; `chunk_ttt_linear` documents the arguments."""
    if call.context is None:
        options = cached_plan(_plan_key(call), lambda: _make_plan(call))
        return ttt(_tensors(call), options)
    with ranked_call(call.op, call.context, call.q) as ranked:
        options = _make_plan(call)
    if ranked.compares:
        ranked.assert_same(_alike_on_ranks(_tensors(call), options))
    return ttt_across_ranks(_tensors(call), options, call.context)


def _plan_key(call: TTTCall) -> tuple[Any, ...] | None:
    """Cache key of everything `_make_plan` reads in a call without a context; None if the plan must not be reused."""
    tokens, cu = 0, call.cu_seqlens
    if isinstance(cu, SequenceLayout):
        tokens, cu = cu.tokens, cu.cu_seqlens
    numbers, tensors = split_numbers(*call[1:8], *call.states)  # step sizes
    values = call.op, tokens, numbers, *map(type, numbers), *call.form, call.backend
    return plan_key((*tensors, cu), values, call.backend)


def _make_plan(call: TTTCall) -> TTTOptions:
    """Check the call and return its options."""
    form, checked = call.form, check_call(call)
    learning = call[1:8] if call.recurrent else (*call[1:8], *call.states)
    options = TTTOptions(
        operator=call.op,
        recurrent=call.recurrent,
        residual=form.residual,
        scale=checked.scale,
        eps=float(form.eps),
        chunk_size=form.chunk_size,
        state_v_first=form.state_v_first,
        state_dtype=form.state_dtype or check.state_dtypes(checked.q)[0],
        final_state=form.final_state,
        save=torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in learning),
        keep_states=form.keep_states,
        backend="triton",
    )
    return options._replace(backend=_plan(call, checked, options).backend)


def _plan(call: TTTCall, checked: CheckedTTT, options: TTTOptions) -> Plan:
    """Launches of both directions and their backend."""
    q, k, v, packed, _ = checked
    B, T, _, D = v.shape
    stages, C = ("ttt_open",) if call.recurrent else ("ttt",), call.form.chunk_size
    return table.plan(
        call.op,
        v.device,
        call.backend,
        forward=stages,
        backward=stages,
        dtypes=table.dtypes(q, k, v),
        chunk_size=C,
        parts=workspace.part_count(B, T, packed, C, chunks_per_part(v, C)),
        collectives=() if call.context is None else _collectives(call.context, v),
        keys=lambda: _launch_keys(v.device, q.dtype, D, C),
        sizes=() if q.dtype == torch.float64 else (("ttt", f"{dtype_word(q.dtype)} K{int(D)} C{C}"),),
        trials=lambda: (_trial(call, checked, options),),
    )


def _trial(call: TTTCall, checked: CheckedTTT, options: TTTOptions) -> Trial:
    """A small call with the kernels of this one, which never starts inside a mini-batch."""
    q, k, v = checked[:3]
    state, bias = call.states[:2] if call.states else (None, None)
    steps = column(v, call.eta), None if call.eta_col is None else column(v, call.eta_col)
    return Trial(
        call.op,
        "ttt_fwd",
        (
            sample(q, "unit", "BT"),
            sample(k, "unit", "BT"),
            sample(v, "normal", "BT"),
            sample(call.w, "weight", ""),
            sample(call.b, "step", ""),
            sample(steps[0], "step", "BT"),
            sample(steps[1], "weight", "BT"),
            sample(state, "normal", "N"),
            sample(bias, "normal", "N"),
            None,
            None,
            None,
            boundary_sample(boundaries_of(call.cu_seqlens)[0]),
        ),
        tuple(options._replace(scale=v.shape[3] ** -0.5)),
        ("o", "state", "state_bias"),
        sequences=-(-STATES // v.shape[2]),
        packed=call.cu_seqlens is not None,
        gradients=options.save,
        rounding="inputs",
    )


def _collectives(context: ContextParallel, v: Tensor) -> tuple[str, ...]:
    """Descriptions of the call's collectives, one for each direction."""
    depth, (B, _, HV, D) = context.partition.depth, v.shape
    size = f"{B} x {HV} x {D + 1} x {D} for each sequence handed on"
    return tuple(f"{depth} all-gathers {way} of {size}" for way in ("forward", "backward")) if depth else ()


def _launch_keys(device: torch.device, dtype: torch.dtype, D: int, C: int) -> list[tuple[str, str]]:
    """Launch keys for `table.plan`. The Gluon forward also computes the readout, so that launch is left out."""
    forward, readout, *backward = [
        ("ttt", key) for key in table.kernel_module("ttt", "triton").launch_keys(dtype, D, C)
    ]
    fused = table.selected_backend("ttt", "triton", forward[1], device) == "gluon"
    return [forward, *backward] if fused else [forward, readout, *backward]


def _alike_on_ranks(t: TTTTensors, options: TTTOptions) -> dict[str, object]:
    """Properties that must be equal on all ranks of a call."""
    (B, _, H, _), (HV, D) = t.q.shape, t.v.shape[2:]
    sizes = {"B": B, "H": H, "HV": HV, "D": D, "dtype of q": t.q.dtype, "eta_col given": t.eta_col is not None}
    asked = {name: getattr(options, name) for name in ("residual", "scale", "eps", "chunk_size")}
    return {**sizes, **asked, "requires_grad": options.save}


def _tensors(call: TTTCall) -> TTTTensors:
    """Tensors of a checked call; a recurrent call's state is detached."""
    cu, eta_col = call.cu_seqlens, call.eta_col
    if isinstance(cu, SequenceLayout):
        cu = cu.cu_seqlens
    steps = column(call.v, call.eta), None if eta_col is None else column(call.v, eta_col)
    q, k, v = in_autocast_dtype(call.q, call.k, call.v)
    states: list[Any] = [x.detach() for x in call.states] if call.recurrent else [*call.states]
    S, c, G, a, position = states + [None] * (5 - len(states))
    return TTTTensors(q, k, v, call.w, call.b, *steps, S, c, G, a, position, cu)
