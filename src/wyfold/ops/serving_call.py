"""Shared implementation of the delta family's serving operators, from checks to the result."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.row_alignment import alignment_copies, tma_copies
from wyfold.autograd.serving_delta import DeltaServing, serve
from wyfold.kernels import table
from wyfold.kernels.trial import TOKENS, Sample, Trial, boundary_sample, sample, with_sequences
from wyfold.ops.chunking import best_chunk_size
from wyfold.ops.delta_arguments import GateFlags
from wyfold.ops.delta_checks import check_boundaries, check_gate, check_tensors
from wyfold.ops.delta_plan import launch_keys, launch_sizes, token_samples
from wyfold.ops.plan_cache import cached_plan, plan_key, refuse_gradients
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.plan import explaining
from wyfold.runtime.replay_cache import replayed
from wyfold.runtime.torch_ops import in_autocast_dtype, refuse_transforms

INDICES = (torch.int32, torch.int64)


class SlotFlags(NamedTuple):
    """Arguments that locate states in pools, named as in `decode`, `verify` and `prefill`.

    Attributes:
        v_first: state_v_first.
        each: Keep the state after every token (`verify`).
    """

    pool: Tensor
    state_indices: Tensor | None
    v_first: bool
    has_initial_state: Tensor | None
    output_state_indices: Tensor | None
    pad_slot_id: int
    out: Tensor | None
    num_accepted_tokens: Tensor | None = None
    each: bool = False
    checkpoint_every: int | None = None
    checkpoint_pool: Tensor | None = None
    checkpoint_indices: Tensor | None = None


class Arithmetic(NamedTuple):
    """Non-tensor arguments that the differentiable operators have too, named as in `chunk_gated_delta_rule`."""

    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    backend: str | None


def call_served(
    op: str,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    slots: SlotFlags,
    gate: GateFlags,
    arithmetic: Arithmetic,
    *,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    swapped: bool = False,
    chunked: bool = False,
) -> Tensor:
    """Check, plan and run a call.

    Args:
        op: Operator's name, for messages.
        tokens: q, k, v, g and beta.
        slots: Location of the states.
        gate: Gate arguments.
        arithmetic: Other options.
        cu_seqlens: Boundaries of packed sequences.
        swapped: Tokens are [1, N, ..] instead of [N, 1, ..].
        chunked: Use the chunk form instead of the recurrence.

    Returns:
        o: Shape of v.
    """

    def run() -> Tensor:
        return _call_served(op, tokens, slots, gate, arithmetic, cu_seqlens, swapped=swapped, chunked=chunked)

    pool, source, v_first, given, target, pad, out, accepted, each, every, *checkpoints = slots
    _, in_kernel, A_log, dt_bias, safe, lower_bound = gate
    cu, T = boundaries_of(cu_seqlens)
    tensors = *tokens, pool, source, given, target, out, accepted, *checkpoints, A_log, dt_bias, cu
    values = op, v_first, pad, each, every, in_kernel, safe, lower_bound, T, swapped, chunked, *arithmetic
    return replayed(tensors, values, run)


def _call_served(
    op: str,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    slots: SlotFlags,
    gate: GateFlags,
    arithmetic: Arithmetic,
    cu_seqlens: Tensor | SequenceLayout | None,
    *,
    swapped: bool,
    chunked: bool,
) -> Tensor:
    q, k, v, g, beta, out = *tokens, slots.out
    refuse_transforms(op, *tokens, slots.pool, out)
    if swapped:
        q, k, v, g, beta, out = map(_swap_batch_time, (q, k, v, g, beta, out))
    call = ServingCall(op, q, k, v, g, beta, out, cu_seqlens, slots, gate, arithmetic, chunked)
    options = cached_plan(_plan_key(call), lambda: _make_plan(call))
    q, k, v = in_autocast_dtype(q, k, v)
    o = v.new_empty(v.shape) if out is None else out
    source, checkpoints = slots.state_indices, slots.checkpoint_indices
    if source is not None and not slots.each:
        source = source[:, None]
    if checkpoints is not None:
        checkpoints = checkpoints.flatten()
    cu = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, SequenceLayout) else cu_seqlens
    serve(
        DeltaServing(
            q, k, v, g, beta, gate.A_log, gate.dt_bias, cu, slots.pool, source, slots.output_state_indices,
            slots.has_initial_state, slots.num_accepted_tokens, slots.checkpoint_pool, checkpoints, o, slots.each,
            slots.pad_slot_id,
        ),
        options,
    )  # fmt: skip
    if slots.out is not None:
        return slots.out
    return o.transpose(0, 1) if swapped else o


class ServingCall(NamedTuple):
    """Arguments of one call, with tokens and `out` as [N, 1, ..] or packed."""

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    out: Tensor | None
    cu_seqlens: Tensor | SequenceLayout | None
    slots: SlotFlags
    gate: GateFlags
    arithmetic: Arithmetic
    chunked: bool


def _plan_key(call: ServingCall) -> tuple[Any, ...] | None:
    """Cache key of everything `_make_plan` reads; None if the plan must not be reused."""
    slots, gate, cu, tokens = call.slots, call.gate, call.cu_seqlens, 0
    if isinstance(cu, SequenceLayout):
        tokens, cu = cu.tokens, cu.cu_seqlens
    indices = slots.state_indices, slots.output_state_indices, slots.has_initial_state, slots.num_accepted_tokens
    pools = slots.pool, slots.checkpoint_pool
    tensors = *call[1:7], cu, *pools, *indices, slots.checkpoint_indices, gate.A_log, gate.dt_bias
    strides = [x.stride() if isinstance(x, Tensor) else None for x in (*pools, call.out)]
    flags = slots.v_first, slots.pad_slot_id, slots.each, gate.channel, gate.in_kernel, gate.safe, gate.lower_bound
    return plan_key(
        tensors,
        (call.op, tokens, *strides, slots.checkpoint_every, call.chunked, *flags, *call.arithmetic),
        call.arithmetic.backend,
    )


def _make_plan(call: ServingCall) -> DeltaOptions:
    """Check the call and return its options."""
    op, q, k, v, g, beta, out, cu_seqlens, slots, gate, (scale, norm, logit, doubled, backend), chunked = call
    sizes = check_tensors(op, q, k, v, g, beta, gate)
    q, k, v = in_autocast_dtype(q, k, v)
    check.same_attribute(op, "dtype", q=q, k=k, v=v)
    cu, N = check_boundaries(op, q, cu_seqlens, None, sizes["B"], sizes["T"])
    _check_slots(op, q, slots, {**sizes, "N": N})
    if slots.each and cu is None and slots.state_indices is not None and sizes["T"] > slots.state_indices.shape[1]:
        columns = slots.state_indices.shape[1]
        raise ValueError(f"{op}: state_indices must have a column for each of T = {sizes['T']} tokens, got {columns}")
    if check.checking_contents():
        _check_distinct(op, q, slots, cu, {**sizes, "N": N})
    if out is not None:
        check.shapes(op, known=sizes, out=(out, "B T HV V"))
        check.output_dtype(op, out, v=v)
        check.same_attribute(op, "device", v=v, out=out)
        check.no_overlap(op, out=out)
    check.flag(op, use_qk_l2norm_in_kernel=norm, use_beta_sigmoid_in_kernel=logit, allow_neg_eigval=doubled)
    if doubled and not logit:
        raise ValueError(
            f"{op}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, got "
            "use_beta_sigmoid_in_kernel=False; scale a ready-made beta yourself"
        )
    if logit and beta is None:
        raise ValueError(f"{op}: beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    activation, lower_bound, clamp = check_gate(op, g, gate, sizes, cu)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "pool": slots.pool}
    given |= {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "out": out}
    refuse_gradients(op, given)
    chunk_size = best_chunk_size(q, v, channel_gate=gate.channel) if chunked else 1 if slots.each else 64
    every = _check_checkpoints(op, q, slots, chunk_size, sizes, packed=cu is not None) if chunked else int(slots.each)
    if check.checking_contents() and chunked:
        _check_distinct_checkpoints(op, q, slots, cu, every, {**sizes, "N": N})

    def keys() -> list[tuple[str, str]]:
        if not chunked:
            recurrent: Any = table.kernel_module("recurrent", "triton")
            order = {"v_first": slots.v_first, "alone": cu is None and not slots.each and sizes["T"] == 1}
            return [("recurrent", recurrent.served_key(slots.pool, sizes["K"], sizes["V"], g, **order))]
        found = launch_keys((("prepare", "scan"), ()), q, v, g, chunk_size, N, kept=every > 0, norm=norm)
        if out is not None and out.dtype != v.dtype:
            found = [(stage, f"{key} wide" if stage == "scan" else key) for stage, key in found]
        return [("state_pool", ""), *found] if every else found

    options = DeltaOptions(
        operator=op,
        recurrent=not chunked,
        scale=int(sizes["K"]) ** -0.5 if scale is None else check.number(op, "scale", scale),
        qk_l2norm=norm,
        activation=activation,
        lower_bound=lower_bound,
        clamp=clamp,
        beta_logit=logit,
        beta_most=2.0 if doubled else 1.0,
        state_v_first=slots.v_first,
        state_dtype=torch.float64 if q.dtype == torch.float64 else torch.float32,
        final_state=True,
        chunk_size=chunk_size,
        checkpoint_every=every,
        save=False,
        keep_factors=False,
        backend="triton",
    )
    plan = table.plan(
        op,
        q.device,
        backend,
        forward=("state_pool", "prepare", "scan") if chunked else ("prepare", "recurrent"),
        kept=("state_pool",) if every else (),
        dtypes=table.dtypes(*given.values(), slots.checkpoint_pool),
        chunk_size=chunk_size if chunked else None,
        sizes=launch_sizes(q, chunk_size) if chunked else (),
        kernel_copies=alignment_copies(q=q, k=k, g=g if gate.channel else None) if chunked and explaining() else (),
        tma_copies=tma_copies(q, k, v) if chunked and explaining() else (),
        keys=keys,
        trials=lambda: _trials(call, q, k, v, cu, N, options),
    )
    return options._replace(backend=plan.backend)


def _trials(
    call: ServingCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu: Tensor | None,
    sequences: int,
    options: DeltaOptions,
) -> tuple[Trial, ...]:
    """Small calls with the kernels of this one.

    Args:
        call: The call.
        q, k, v: Its tokens, in the dtype of an active autocast.
        cu: Its boundaries, or None.
        sequences: N.
        options: Its options.
    """
    slots, gate, every = call.slots, call.gate, options.checkpoint_every
    tokens = max(TOKENS, 2 * every + 9)
    if options.recurrent:
        tokens = 1 if q.shape[1] == 1 and cu is None else 5
    small = Trial(
        call.op,
        "serve",
        (
            *token_samples(q, k, v, call.g, call.beta, options),
            sample(gate.A_log, "A_log", ""),
            sample(gate.dt_bias, "dt_bias", ""),
            boundary_sample(cu),
            sample(slots.pool, "normal", "S"),
            *slot_samples(slots.state_indices, slots.output_state_indices, each=slots.each),
            sample(slots.has_initial_state, "flags", "N"),
            sample(slots.num_accepted_tokens, "accepted", "N"),
            sample(slots.checkpoint_pool, "normal", "R"),
            None if slots.checkpoint_indices is None else Sample("rows", slots.checkpoint_indices.dtype, "R", ()),
            sample(v if call.out is None else call.out, "normal", "BT"),
        ),
        (slots.each, -1, *options._replace(scale=q.shape[-1] ** -0.5)),
        (),
        tokens=tokens,
        packed=cu is not None,
        gradients=False,
        rounding="once" if options.recurrent else "chunks",
        written=tokens if slots.each else 1,
    )
    if options.recurrent:
        return (small._replace(sequences=9),)
    found = with_sequences(small, sequences, v)
    if slots.checkpoint_pool is None:
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


def _check_checkpoints(
    op: str, q: Tensor, slots: SlotFlags, chunk_size: int, sizes: dict[str, int], *, packed: bool
) -> int:
    """Check the checkpoint arguments; return the tokens between stored states, or 0 if none are stored."""
    given = slots.checkpoint_every, slots.checkpoint_pool, slots.checkpoint_indices
    if all(x is None for x in given):
        return 0
    if any(x is None for x in given):
        names = "checkpoint_every", "checkpoint_pool", "checkpoint_indices"
        missing = ", ".join(name for name, x in zip(names, given, strict=True) if x is None)
        raise ValueError(
            f"{op}: checkpoint_every, checkpoint_pool and checkpoint_indices must come together, got no {missing}"
        )
    every = check.integer(op, "checkpoint_every", slots.checkpoint_every, least=1)
    if every % chunk_size:
        raise ValueError(f"{op}: checkpoint_every must be a multiple of the chunk, {chunk_size}, got {every}")
    _check_pool(op, "checkpoint_pool", q, slots.checkpoint_pool, slots.v_first, sizes)
    rows = [sizes["T"] // every] if packed else [sizes["B"], sizes["T"] // every]
    _check_rows(op, q, "checkpoint_indices", slots.checkpoint_indices, rows, INDICES)
    return every


def _check_slots(op: str, q: Tensor, slots: SlotFlags, sizes: dict[str, int]) -> None:
    """Check the pool and the index tensors."""
    check.flag(op, state_v_first=slots.v_first)
    check.integer(op, "pad_slot_id", slots.pad_slot_id, least=-1)
    N = sizes["N"]
    _check_pool(op, "pool", q, slots.pool, slots.v_first, sizes)
    rows = [N, slots.state_indices.shape[1]] if slots.each and slots.state_indices is not None else [N]
    _check_rows(op, q, "has_initial_state", slots.has_initial_state, [N], (torch.bool,))
    _check_rows(op, q, "num_accepted_tokens", slots.num_accepted_tokens, [N], INDICES)
    indices = {"state_indices": slots.state_indices, "output_state_indices": slots.output_state_indices}
    for name, x in indices.items():
        _check_rows(op, q, name, x, rows, INDICES)


def _check_distinct(op: str, q: Tensor, slots: SlotFlags, cu: Tensor | None, sizes: dict[str, int]) -> None:
    """Check that no slot is written twice, or written by one row and read by another.

    Indices of skipped rows and columns after a row's last token are ignored.
    """
    given, accepted, N = slots.has_initial_state, slots.num_accepted_tokens, sizes["N"]
    indices = slots.state_indices, slots.output_state_indices
    rows = torch.arange(N, device=q.device)
    if not all(x is None or check.readable(x) for x in (*indices, given, accepted, cu, rows)):
        return
    source, target = (None if x is None else x.to(torch.int64).view(N, x.shape[1:].numel()) for x in indices)
    source = rows[:, None] if source is None else source
    _check_distinct_slots(op, "state_indices", source, _live_slots(source, slots.pool, slots))
    if target is None:
        return
    column = rows * 0 if accepted is None else (accepted.to(torch.int64) - 1).clamp(0, source.shape[1] - 1)
    entry = source.gather(1, column[:, None])
    live = _live_slots(entry, slots.pool, slots)
    tokens = (rows * 0 + sizes["T"] if cu is None else cu.diff())[:, None]
    written = live & _live_slots(target, slots.pool, slots)
    if slots.each:
        written &= torch.arange(target.shape[1], device=q.device) < tokens
    _check_distinct_slots(op, "output_state_indices", target, written)
    read = live if given is None else live & given[:, None]
    if torch.isin(target[written & (target != entry)], entry[read]).any():
        got = f"got {target.squeeze(1).tolist()} beside {source.squeeze(1).tolist()}"
        raise ValueError(f"{op}: output_state_indices must name no slot that another row starts from, {got}")


def _check_distinct_checkpoints(
    op: str, q: Tensor, slots: SlotFlags, cu: Tensor | None, every: int, sizes: dict[str, int]
) -> None:
    """Check that no two checkpoints go to one slot.

    Indices of skipped sequences, and those past the last checkpoint of a packed batch, are ignored.
    """
    source, indices, pool = slots.state_indices, slots.checkpoint_indices, slots.checkpoint_pool
    rows = torch.arange(sizes["N"], device=q.device)
    if indices is None or pool is None or not all(x is None or check.readable(x) for x in (source, indices, cu, rows)):
        return
    live = _live_slots(rows if source is None else source, slots.pool, slots)
    states = rows * 0 + sizes["T"] // every if cu is None else cu.diff() // every
    of_live = live.repeat_interleave(states)
    indices = indices.flatten()[:, None]
    written = _live_slots(indices, pool, slots)
    written[: of_live.numel()] &= of_live[:, None]
    written[of_live.numel() :] = False
    _check_distinct_slots(op, "checkpoint_indices", indices, written)


def _live_slots(x: Tensor, pool: Tensor, slots: SlotFlags) -> Tensor:
    """Mask of the indices that are live slots of a pool."""
    return (x > slots.pad_slot_id) & (x < pool.shape[0])


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


def _swap_batch_time(x: Any) -> Any:
    """Swap the first two dimensions of a tensor; return anything else as it is, for a later check to refuse."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.ndim > 1 else x
