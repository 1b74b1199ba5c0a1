"""A call of TTT-Linear, from its arguments to its results: checks, plan, run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd import workspace
from wyfold.autograd.row_alignment import alignment_copies, tma_copies
from wyfold.autograd.ttt import TTT
from wyfold.autograd.ttt_eager import chunks_per_part
from wyfold.autograd.ttt_records import TTTOptions, TTTResult, TTTTensors
from wyfold.context_parallel.context import ContextParallel
from wyfold.context_parallel.ttt import ttt_across_ranks
from wyfold.kernels import table
from wyfold.kernels.trial import STATES, Sample, Trial, boundary_sample, sample
from wyfold.ops.rank_agreement import check_shard, ranked_call
from wyfold.runtime import check
from wyfold.runtime.chunk_layout import CHUNK_SIZES
from wyfold.runtime.differentiation import apply, traced
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word
from wyfold.runtime.layout import SequenceLayout, boundaries_of, packed_boundaries
from wyfold.runtime.plan import Plan, explaining
from wyfold.runtime.replay_cache import PublicOperator
from wyfold.runtime.torch_ops import in_autocast_dtype

WIDEST = 128
LEAST_IN_TRIAL = 8
"""Least channels of a self-check: rounding in the norm of a narrower row looks like a fault."""
RESIDUALS = ("o", "q")


class TTTFlags(NamedTuple):
    """Arguments of a call that are no tensors, named as in `chunk_ttt_linear`.

    Attributes:
        op: Operator's name, for messages.
        recurrent: Whether the call may start and end inside a mini-batch.
        final_state: output_final_state.
        keep_states: disable_recompute.
        eta, eta_col: Step sizes given as numbers; None if they are tensors.
        tokens: Length of the buffer of a `SequenceLayout`, else None.
    """

    op: str
    recurrent: bool
    residual: str
    scale: float | None
    eps: float
    chunk_size: int
    state_v_first: bool
    state_dtype: torch.dtype | None
    final_state: bool
    keep_states: bool
    batch_invariant: bool
    backend: str | None
    eta: float | None = None
    eta_col: float | None = None
    tokens: int | None = None


def ttt_arguments(
    flags: TTTFlags,
    tokens: tuple[Any, ...],
    eta: Tensor | float,
    eta_col: Tensor | float | None,
    states: tuple[Any, ...],
    cu_seqlens: Tensor | SequenceLayout | None,
) -> tuple[TTTTensors, TTTFlags]:
    """The arguments of a call as the two records that `planned` takes.

    Args:
        flags: The other flags.
        tokens: q, k, v, w and b.
        eta, eta_col, cu_seqlens: As the caller passed them.
        states: The five fields of a TTTState, None where absent.
    """
    numbers, steps = split_numbers(eta, eta_col)
    cu, length = boundaries_of(cu_seqlens)
    (q, k, v, w, b), (step, factor), (S, c, G, a, position) = tokens, steps, states
    tensors = TTTTensors(q, k, v, w, b, step, factor, S, c, G, a, position, cu)
    return tensors, flags._replace(eta=numbers[0], eta_col=numbers[1], tokens=length)


def run_across_ranks(t: TTTTensors, flags: TTTFlags, context: ContextParallel) -> TTTResult:
    """Check, plan and run a call whose sequences span the ranks of a context."""
    with ranked_call(flags.op, context, t.q) as ranked:
        options = _make_plan(t, flags, context)
    tensors = _as_tensors(t, flags)
    if ranked.compares:
        ranked.assert_same(_alike_on_ranks(tensors, options))
    return ttt_across_ranks(tensors, options, context)


def _make_plan(t: TTTTensors, flags: TTTFlags, context: ContextParallel | None = None) -> TTTOptions:
    """Check the call and return its options."""
    packed, scale = _check_call(t, flags, context)
    options = TTTOptions(
        operator=flags.op,
        recurrent=flags.recurrent,
        residual=flags.residual,
        scale=scale,
        eps=float(flags.eps),
        chunk_size=flags.chunk_size,
        state_v_first=flags.state_v_first,
        state_dtype=flags.state_dtype or check.state_dtypes(t.q)[0],
        final_state=flags.final_state,
        # A traced program decides itself what to save for its backward.
        save=check.any_requires_grad(t[:7] if flags.recurrent else t[:12]) and not traced(),
        keep_states=flags.keep_states,
        backend="triton",
    )
    return options._replace(backend=_plan(t, flags, packed, options, context).backend)


def _run(options: TTTOptions, t: TTTTensors, flags: TTTFlags) -> tuple[Any, ...]:
    """The output and the final states, or None for each of them."""
    found: tuple[Tensor, ...] = apply(
        options.operator,
        TTT,
        *in_autocast_dtype(t.q, t.k, t.v),
        *(t.w, t.b),
        *_steps(t, flags),
        *_states(t, flags),
        t.cu_seqlens,
        options,
    )
    return found if options.final_state else (found[0], *(None,) * (len(found) - 1))


TTT_LINEAR = PublicOperator(_make_plan, _run)


def _as_tensors(t: TTTTensors, flags: TTTFlags) -> TTTTensors:
    """The call's tensors as an implementation takes them."""
    q, k, v = in_autocast_dtype(t.q, t.k, t.v)
    (eta, col), (S, c, G, a, position) = _steps(t, flags), _states(t, flags)
    return TTTTensors(q, k, v, t.w, t.b, eta, col, S, c, G, a, position, t.cu_seqlens)


def _steps(t: TTTTensors, flags: TTTFlags) -> tuple[Tensor, Tensor | None]:
    """Step sizes and their factors as tensors [B, T, HV, 1]."""
    col = t.eta_col if flags.eta_col is None else flags.eta_col
    eta = column(t.v, t.eta if flags.eta is None else flags.eta)
    return eta, None if col is None else column(t.v, col)


def _states(t: TTTTensors, flags: TTTFlags) -> list[Any]:
    """The states; those that a recurrent call resumes are constants to autograd."""
    return [x.detach() if flags.recurrent and x is not None else x for x in t[7:12]]


def _plan(
    t: TTTTensors, flags: TTTFlags, packed: int | None, options: TTTOptions, context: ContextParallel | None
) -> Plan:
    """Launches of both directions and their backend. packed: first result of `_check_call`."""
    q, k, v = in_autocast_dtype(t.q, t.k, t.v)
    B, T, _, D = v.shape
    stages, C = ("ttt_open",) if flags.recurrent else ("ttt",), flags.chunk_size
    return table.plan(
        flags.op,
        v.device,
        flags.backend,
        forward=stages,
        backward=stages,
        grids=() if t.cu_seqlens is None else ("chunk_grid",),
        dtypes=table.dtypes(q, k, v),
        chunk_size=C,
        parts=lambda: workspace.part_count(B, T, packed, C, chunks_per_part(v, C)),
        collectives=() if context is None else _collectives(context, v),
        kernel_copies=alignment_copies(q=q, k=k, v=v) if explaining() else (),
        tma_copies=tma_copies(q, k, v) if explaining() else (),
        keys=lambda: _launch_keys(v.device, q.dtype, D, C),
        sizes=() if q.dtype == torch.float64 else (("ttt", f"{dtype_word(q.dtype)} K{int(D)} C{C}"),),
        trials=lambda: (_trial(_as_tensors(t, flags), options),),
        unrun=int(D) % 8 != 0,
    )


def _trial(t: TTTTensors, options: TTTOptions) -> Trial:
    """A small call with the kernels of this one, which never starts inside a mini-batch."""
    q, k, v = t[:3]
    return Trial(
        options.operator,
        "ttt_fwd",
        (
            wide_sample(q, "unit", "BT"),
            wide_sample(k, "unit", "BT"),
            wide_sample(v, "normal", "BT"),
            wide_sample(t.w, "weight", ""),
            wide_sample(t.b, "step", ""),
            sample(t.eta, "step", "BT"),
            sample(t.eta_col, "weight", "BT"),
            wide_sample(t.state, "normal", "N", widths=2),
            wide_sample(t.bias, "normal", "N"),
            None,
            None,
            None,
            boundary_sample(t.cu_seqlens),
        ),
        tuple(options._replace(scale=max(v.shape[3], LEAST_IN_TRIAL) ** -0.5)),
        ("o", "state", "state_bias"),
        sequences=-(-STATES // v.shape[2]),
        packed=t.cu_seqlens is not None,
        gradients=options.save,
        rounding="inputs",
    )


def wide_sample(x: Tensor | None, kind: str, lead: str, widths: int = 1) -> Sample | None:
    """Sample of a tensor whose last dimensions are D, with at least `LEAST_IN_TRIAL` channels."""
    found = sample(x, kind, lead)
    if found is None:
        return None
    return found._replace(rest=(*found.rest[:-widths], *[max(n, LEAST_IN_TRIAL) for n in found.rest[-widths:]]))


def _collectives(context: ContextParallel, v: Tensor) -> tuple[str, ...]:
    """Descriptions of the call's collectives, one for each direction."""
    depth, (B, _, HV, D) = context.partition.depth, v.shape
    size = f"{B} x {HV} x {D + 1} x {D} for each sequence handed on"
    return tuple(f"{depth} all-gathers {way} of {size}" for way in ("forward", "backward")) if depth else ()


def _launch_keys(device: torch.device, dtype: torch.dtype, D: int, C: int) -> list[tuple[str, LaunchKey]]:
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


def _check_call(t: TTTTensors, flags: TTTFlags, context: ContextParallel | None) -> tuple[int | None, float]:
    """Run all checks of a call. Their order decides which of several errors is reported.

    Returns:
        N of a packed batch and of every recurrent call, or None if each row is a sequence; the factor of q.
    """
    op, q, k, v = flags.op, t.q, t.k, t.v
    states: tuple[Any, ...] = t[7:12]
    check.flag(
        op,
        output_final_state=flags.final_state,
        state_v_first=flags.state_v_first,
        disable_recompute=flags.keep_states,
        batch_invariant=flags.batch_invariant,
    )
    eta, col = t.eta if flags.eta is None else flags.eta, t.eta_col if flags.eta_col is None else flags.eta_col
    N = check_tokens(op, q, k, v, t.w, t.b, eta, col, t.cu_seqlens, flags.tokens)
    given = N if context is None else _check_context(op, context, q, t.cu_seqlens, flags.chunk_size)
    if not flags.recurrent:
        check.dtype_option(op, "state_dtype", flags.state_dtype, check.state_dtypes(q))
        _check_initial(op, v, given, *states[:2], v_first=flags.state_v_first)
    elif any(x is not None for x in states):
        _check_ttt_state(op, v, given, *states)
    check_form(op, flags.chunk_size, flags.residual, flags.eps, q.dtype)
    q, k, v = in_autocast_dtype(q, k, v)
    scale = int(v.shape[-1]) ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    check.same_attribute(op, "dtype", q=q, k=k, v=v)
    return None if t.cu_seqlens is None and not flags.recurrent else N, scale


def check_tokens(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    b: Tensor,
    eta: Tensor | float,
    eta_col: Tensor | float | None,
    cu_seqlens: Tensor | None,
    tokens: int | None,
) -> int:
    """Check the token tensors and the boundaries (results of `boundaries_of`); return the number of sequences."""
    step, factor = (x if isinstance(x, Tensor) else None for x in (eta, eta_col))
    sizes = check.shapes(
        op,
        optional=[name for name, x in (("eta", step), ("eta_col", factor)) if x is None],
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        w=(w, "HV V"),
        b=(b, "HV V"),
        eta=(step, "B T HV" if step is not None and step.ndim == 3 else "B T HV 1"),
        eta_col=(factor, "B T HV" if factor is not None and factor.ndim == 3 else "B T HV 1"),
    )
    if step is None:
        check.number(op, "eta", eta)
    if factor is None and eta_col is not None:
        check.number(op, "eta_col", eta_col)
    check.head_groups(op, sizes["H"], sizes["HV"])
    check.any_width(op, "K", "q and k", sizes["K"], most=WIDEST)
    if sizes["V"] != sizes["K"]:
        raise ValueError(f"{op}: v must have the width of q and k, V = K = {sizes['K']}, got {sizes['V']}")
    check.floating(op, q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    check.same_attribute(op, "device", q=q, k=k, v=v, w=w, b=b, eta=step, eta_col=factor)
    if cu_seqlens is None:
        return sizes["B"]
    return packed_boundaries(op, q, cu_seqlens, tokens).shape[0] - 1


def _check_context(op: str, context: ContextParallel, q: Tensor, cu: Tensor | None, chunk_size: int) -> int:
    """Check that ranks' borders lie between mini-batches; return the number of sequences that begin on this rank."""
    check_shard(op, context, "q", q, cu)
    for piece in (piece for chain in context.partition.chains for piece in chain[:-1]):
        end = piece.done + piece.length
        if chunk_size in CHUNK_SIZES and end % chunk_size:
            raise ValueError(
                f"{op}: cp_context must cut sequences between mini-batches, at multiples of chunk_size = {chunk_size} "
                f"tokens, got sequence {piece.sequence} cut after {end}; layout='fragments' cuts anywhere"
            )
    return q.shape[0] * len(context.starts)


def _check_initial(op: str, v: Tensor, N: int, state: Tensor | None, bias: Tensor | None, *, v_first: bool) -> None:
    order = "N HV V K" if v_first else "N HV K V"
    named = {"initial_state": (state, order), "initial_state_bias": (bias, "N HV 1 V")}
    _check_states(op, v, N, named, optional=tuple(named))


def _check_ttt_state(
    op: str, v: Tensor, N: int, state: Tensor, bias: Tensor, grad: Tensor, bias_grad: Tensor, position: Tensor
) -> None:
    """Check the fields of a TTTState."""
    check.tensor(op, "state.position", position)
    named: dict[str, tuple[Tensor | None, str]] = {
        "state.state": (state, "N HV K V"),
        "state.bias": (bias, "N HV 1 V"),
        "state.grad": (grad, "N HV K V"),
        "state.bias_grad": (bias_grad, "N HV 1 V"),
    }
    _check_states(op, v, N, named)
    check.rows(op, "state.position", position, [N], form="[N]", v=v)


def _check_states(
    op: str, v: Tensor, N: int, states: Mapping[str, tuple[Tensor | None, str]], *, optional: tuple[str, ...] = ()
) -> None:
    """Check shapes, device and dtypes of states against the tokens."""
    sizes = {"N": N, "HV": v.shape[2], "K": v.shape[3], "V": v.shape[3]}
    check.shapes(op, optional=optional, known=sizes, **states)
    tensors = {name: state for name, (state, _) in states.items()}
    check.floating(op, check.state_dtypes(v), **tensors)
    check.same_attribute(op, "device", v=v, **tensors)


def check_form(op: str, chunk_size: int, residual: str, eps: float, dtype: torch.dtype) -> None:
    """Check the model's options: mini-batch size, residual and eps."""
    check.choice(op, "chunk_size", chunk_size, CHUNK_SIZES)
    check.choice(op, "residual", residual, RESIDUALS)
    check.epsilon(op, eps, torch.float64 if dtype == torch.float64 else torch.float32)


def split_numbers(*given: Any) -> tuple[tuple[float | None, ...], tuple[Any, ...]]:
    """Split arguments into numbers and non-numbers, each with None in the place of the others."""
    numbers = tuple([x if isinstance(x, float | int) else None for x in given])
    return numbers, tuple([x if number is None else None for x, number in zip(given, numbers, strict=True)])


def column(v: Tensor, eta: Tensor | float) -> Tensor:
    """Step sizes, or their factors, as a tensor [B, T, HV, 1]."""
    if isinstance(eta, Tensor):
        return eta if eta.ndim == 4 else eta.unsqueeze(-1)
    return torch.full((1, 1, 1, 1), float(eta), dtype=check.state_dtypes(v)[0], device=v.device).expand(*v.shape[:3], 1)
