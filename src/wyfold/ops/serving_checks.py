"""Argument checks of a serving call of the delta family, and its arguments as records."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.ops.delta_checks import (
    COLUMN_SHAPES,
    PAIRED,
    CheckedDelta,
    GateFlags,
    cast_columns,
    check_boundaries,
    check_gate,
    check_strength,
    check_tensors,
)
from wyfold.runtime import check
from wyfold.runtime.torch_ops import in_autocast_dtype

FLOATS = ("q", "k", "v", "g", "beta", "pool", "A_log", "dt_bias", "out", "a", "b", "w")
"""Fields of `ServingTensors` that hold floats, without the pool of checkpoints."""


class ServingRule(NamedTuple):
    """A rule by its name in `decode`, `verify` and `prefill`.

    Attributes:
        rule, erases: As of `DeltaOptions`.
        channel: Its gate has a decay per key channel; None for either kind.
        required, optional: Those of a, b and w that it reads. The others, and beta, must be None; "delta" reads beta.
        flags: Flags that must be False.
    """

    rule: str
    erases: bool = True
    channel: bool | None = None
    required: str = ""
    optional: str = ""
    flags: tuple[str, ...] = ()


_LOGIT = ("use_beta_sigmoid_in_kernel", "allow_neg_eigval")
_INSIDE = ("use_qk_l2norm_in_kernel", "use_gate_in_kernel", *_LOGIT)

RULES = {
    "delta": ServingRule("delta"),
    "gla": ServingRule("delta", erases=False, flags=(*_INSIDE, "safe_gate")),
    "dplr": ServingRule("given", channel=True, required="ab", flags=_INSIDE),
    "gdn2": ServingRule("keys", channel=True, optional="bw", flags=_LOGIT),
}


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
    a: Tensor | None = None
    b: Tensor | None = None
    w: Tensor | None = None


class ServingFlags(NamedTuple):
    """Arguments of a call that are no tensors, named as in `decode`, `verify` and `prefill`.

    Attributes:
        op: Operator's name, for messages.
        channel: One decay per key channel (KDA) instead of one per head.
        rule: One of `RULES`.
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
    rule: str = "delta"


def check_rule(t: ServingTensors, flags: ServingFlags) -> None:
    """Refuse tensors and flags that a rule does not have."""
    op, name = flags.op, flags.rule
    check.choice(op, "rule", name, tuple(RULES))
    rule = RULES[name]
    for column in "abw":
        if getattr(t, column) is None and column in rule.required:
            raise ValueError(f"{op}: {column} must be given with rule={name!r}, got None")
        if getattr(t, column) is not None and column not in rule.required + rule.optional:
            given = type(getattr(t, column)).__name__
            raise ValueError(f"{op}: {column} must be None with rule={name!r}, got {given}")
    if t.beta is not None and name != "delta":
        raise ValueError(f"{op}: beta must be None with rule={name!r}, got {type(t.beta).__name__}")
    check.flag(op, **{flag: getattr(flags, flag) for flag in (*rule.flags, "safe_gate")})
    for flag in rule.flags:
        if getattr(flags, flag):
            raise ValueError(f"{op}: {flag} must be False with rule={name!r}, got True")
    if flags.lower_bound is not None and "use_gate_in_kernel" in rule.flags and not flags.safe_gate:
        wanted = "be None" if "safe_gate" in rule.flags else "come with safe_gate=True"
        raise ValueError(f"{op}: lower_bound must {wanted} with rule={name!r}, got {flags.lower_bound}")


def check_call(t: ServingTensors, flags: ServingFlags) -> CheckedDelta:
    """Run all checks except those of checkpoints and segments. `every` is that of a call without checkpoints."""
    op, rule = flags.op, RULES[flags.rule].rule
    tokens: dict[str, Any] = dict(zip(ServingTensors._fields[:7], t[:7], strict=True))
    tokens |= {name: getattr(t, name) for name in COLUMN_SHAPES[rule]}
    sizes = check_tensors(op, tokens, channel=flags.channel, rule=rule, pooled=True)
    q, k, v = in_autocast_dtype(*t[:3])
    further = dict(zip("abw", cast_columns((t.a, t.b, t.w), rule), strict=True))
    check.same_attribute(op, "dtype", q=q, k=k, v=v, **{name: further[name] for name in PAIRED[rule]})
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
    check.no_gradients(op, {name: getattr(t, name) for name in (*FLOATS, "checkpoint_pool")})
    scale = int(sizes["K"]) ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    return CheckedDelta(sizes, sizes["N"], cu is not None, activation, lower_bound, clamp, scale, int(flags.each))


def check_checkpoints(t: ServingTensors, flags: ServingFlags, chunk_size: int, sizes: dict[str, int]) -> int:
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
    check.rows(op, "checkpoint_indices", t.checkpoint_indices, rows, q=t.q)
    return every


def _check_slots(t: ServingTensors, flags: ServingFlags, sizes: dict[str, int]) -> None:
    """Check the pool and the index tensors."""
    op, q, N = flags.op, t.q, sizes["N"]
    check.flag(op, state_v_first=flags.state_v_first)
    check.integer(op, "pad_slot_id", flags.pad_slot_id, least=-1)
    _check_pool(op, "pool", q, t.pool, flags.state_v_first, sizes)
    rows = [N, t.state_indices.shape[1]] if flags.each and t.state_indices is not None else [N]
    check.rows(op, "has_initial_state", t.has_initial_state, [N], dtypes=(torch.bool,), q=q)
    check.rows(op, "num_accepted_tokens", t.num_accepted_tokens, [N], q=q)
    check.rows(op, "state_indices", t.state_indices, rows, q=q)
    check.rows(op, "output_state_indices", t.output_state_indices, rows, q=q)


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


def check_distinct_checkpoints(t: ServingTensors, flags: ServingFlags, every: int, sizes: dict[str, int]) -> None:
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
