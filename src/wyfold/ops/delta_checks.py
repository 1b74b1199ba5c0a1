"""Argument checks of the delta family. Their order decides which of several errors is reported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.autograd.delta_records import DeltaTensors
from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_widths import WIDEST_KEY, WIDEST_LOW_RANK, WIDEST_VALUE
from wyfold.ops.rank_agreement import check_shard
from wyfold.runtime import check
from wyfold.runtime.layout import boundaries, legal_boundaries, packed_boundaries
from wyfold.runtime.torch_ops import in_autocast_dtype

STEEPEST_BOUND = -5.0  # lowest log gate that a diagonal block can represent in float32 (docs/algorithm.md, section 5)


OptionalColumns = tuple[Tensor | None, Tensor | None, Tensor | None]
"""a, b and w of a call."""

NO_NAMES: Mapping[str, str] = {}

COLUMN_SHAPES: dict[str, dict[str, str]] = {
    "delta": {},
    "given": {"a": "B T H K", "b": "B T H K"},
    "rates": {"a": "B T H K", "b": "B T H K"},
    "keys": {"b": "B T HV K", "w": "B T HV V"},
    "feedback": {"a": "B T H K"},
}
"""Rule -> shapes of its further tokens."""

PAIRED = {"delta": "", "given": "ab", "rates": "ab", "keys": "", "feedback": "a"}
"""Rule -> its further tokens that have the dtype of q; the others may have any."""


class DeltaFlags(NamedTuple):
    """Arguments of a call that are no tensors, named as in `chunk_kda`.

    Attributes:
        op: Operator's name, for messages.
        channel: One decay per key channel (KDA) instead of one per head.
        recurrent: Token by token instead of chunk by chunk.
        tokens: Length of the buffer of a `SequenceLayout`, else None.
        rule, erases: As of `DeltaOptions`; properties of the operator.
        names: Field of `DeltaTensors` -> its name in the operator's signature, where that differs.
        updates: Of a token, each of which is a row of the call. Then `checkpoint_every` is so many times the argument.
    """

    op: str
    channel: bool
    recurrent: bool
    scale: float | None = None
    output_final_state: bool = False
    use_qk_l2norm_in_kernel: bool = False
    use_beta_sigmoid_in_kernel: bool = False
    allow_neg_eigval: bool = False
    state_v_first: bool = False
    state_dtype: torch.dtype | None = None
    return_intermediate_states: bool = False
    checkpoint_every: int | None = None
    batch_invariant: bool = False
    backend: str | None = None
    use_gate_in_kernel: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    chunk_size: int | None = None
    disable_recompute: bool = False
    max_splits: int | None = None
    tokens: int | None = None
    rule: str = "delta"
    erases: bool = True
    names: tuple[tuple[str, str], ...] = ()
    updates: int = 1

    def name(self, argument: str) -> str:
        """Name of an argument in the operator's signature."""
        return dict(self.names).get(argument, argument)


class GateFlags(NamedTuple):
    """Arguments of a gate that are no tensors, named as in `chunk_kda`; `channel` as of `DeltaFlags`."""

    channel: bool
    use_gate_in_kernel: bool
    safe_gate: bool
    lower_bound: float | None


class CheckedDelta(NamedTuple):
    """What the checks of a delta-family call find, with defaults applied.

    Attributes:
        sizes: Sizes of the letters B, T, H, HV, K, V.
        sequences: N; with a context, the pieces of sequences on this rank.
        packed: Sequences are packed into one row.
        activation, lower_bound, clamp: Gate options, as in `DeltaOptions`.
        scale: Factor of q.
        every: Tokens between returned intermediate states; 0: none are returned.
    """

    sizes: dict[str, int]
    sequences: int
    packed: bool
    activation: str
    lower_bound: float
    clamp: float
    scale: float
    every: int


def check_call(t: DeltaTensors, flags: DeltaFlags, context: ContextParallel | None) -> CheckedDelta:
    """Run all checks except those of chunk size and segments (`delta_plan`)."""
    op = flags.op
    check.flag(
        op,
        output_final_state=flags.output_final_state,
        use_qk_l2norm_in_kernel=flags.use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=flags.use_beta_sigmoid_in_kernel,
        allow_neg_eigval=flags.allow_neg_eigval,
        state_v_first=flags.state_v_first,
        return_intermediate_states=flags.return_intermediate_states,
        batch_invariant=flags.batch_invariant,
    )
    given = {"q": t.q, "k": t.k, "v": t.v, "g": t.g, "beta": t.beta, "A_log": t.A_log, "dt_bias": t.dt_bias}
    given |= {name: getattr(t, name) for name in COLUMN_SHAPES[flags.rule]}
    sizes = check_tensors(op, given, channel=flags.channel, rule=flags.rule, names=dict(flags.names))
    q, k, v = in_autocast_dtype(*t[:3])
    paired = {
        name: x
        for name, x in zip("abw", cast_columns((t.a, t.b, t.w), flags.rule), strict=True)
        if name in PAIRED[flags.rule]
    }
    alike = {"q": q, "k": k, "v": v, **paired}
    check.same_attribute(op, "dtype", **{flags.name(name): x for name, x in alike.items()})
    cu, N = t.cu_seqlens, check_boundaries(op, q, t.cu_seqlens, flags.tokens, t.cu_seqlens_cpu)
    given_states = N
    if context is not None:
        check_shard(op, context, "q", q, cu)
        if flags.return_intermediate_states:
            raise ValueError(f"{op}: return_intermediate_states must be False with cp_context, got True")
        cu, N = context.boundaries(sizes["B"], q.device), sizes["B"] * len(context.pieces)
        given_states = sizes["B"] * len(context.starts)
    _check_state(op, q, t.initial_state, flags, {**sizes, "N": given_states})
    check_strength(op, t.beta, logit=flags.use_beta_sigmoid_in_kernel, doubled=flags.allow_neg_eigval)
    gate = GateFlags(flags.channel, flags.use_gate_in_kernel, flags.safe_gate, flags.lower_bound)
    if flags.rule in ("given", "rates") and flags.lower_bound is not None and not flags.safe_gate:
        raise ValueError(f"{op}: lower_bound must come with safe_gate=True, got safe_gate={flags.safe_gate!r}")
    activation, lower_bound, clamp = check_gate(op, t.g, t.A_log, t.dt_bias, gate, sizes, cu, name=flags.name("g"))
    # An int: torch.jit traces sizes as tensors, whose powers are float32.
    scale = int(sizes["K"]) ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    every = _check_checkpoints(op, flags.return_intermediate_states, flags.checkpoint_every)
    return CheckedDelta(sizes, N, cu is not None, activation, lower_bound, clamp, scale, every)


def check_tensors(
    op: str,
    given: dict[str, Tensor | None],
    *,
    channel: bool,
    rule: str = "delta",
    names: Mapping[str, str] = NO_NAMES,
    pooled: bool = False,
) -> dict[str, int]:
    """Check shapes, widths, dtypes and devices; return the sizes of the letters B, T, H, HV, K and V.

    Args:
        op: Operator's name, for messages.
        given: Tokens and gate parameters by their names in `DeltaTensors`.
        channel, rule: As of `DeltaFlags`.
        names: Their names in the operator's signature, where these differ.
        pooled: States are in a pool, which kernels update in place. Widths must then be those of kernels.
    """
    shapes = {"q": "B T H K", "k": "B T H K", "v": "B T HV V", "g": "B T HV K" if channel else "B T HV"}
    shapes |= {"beta": "B T HV", **COLUMN_SHAPES[rule]}
    optional = ["g", "beta", *(["b", "w"] if rule == "keys" else [])]
    patterns: dict[str, Any] = {names.get(name, name): (given[name], shape) for name, shape in shapes.items()}
    sizes = check.shapes(op, optional=[names.get(name, name) for name in optional], **patterns)
    check.head_groups(op, sizes["H"], sizes["HV"], keys=f"{names.get('q', 'q')} and k")
    keys = f"{names.get('q', 'q')} and k"
    if pooled:
        check.width(op, "K", keys, sizes["K"])
        check.width(op, "V", "v", sizes["V"], most=WIDEST_VALUE if rule == "delta" else WIDEST_LOW_RANK)
    else:
        check.any_width(op, "K", keys, sizes["K"], most=WIDEST_KEY)
        check.any_width(op, "V", "v", sizes["V"], most=WIDEST_VALUE)
    named: dict[str, Any] = {names.get(name, name): x for name, x in given.items()}
    check.floating(op, **named)
    check.same_attribute(op, "device", **named)
    return sizes


def cast_columns(columns: OptionalColumns, rule: str) -> OptionalColumns:
    """a, b and w; those that have the dtype of q, in the dtype of an active autocast."""
    a, b, w = (
        in_autocast_dtype(x)[0] if x is not None and name in PAIRED[rule] else x
        for name, x in zip("abw", columns, strict=True)
    )
    return a, b, w


def check_boundaries(
    op: str, q: Tensor, cu_seqlens: Tensor | None, tokens: int | None, on_cpu: Tensor | None = None
) -> int:
    """Check the boundaries, `cu_seqlens` and `tokens` as of `boundaries_of`; return the number of sequences."""
    if cu_seqlens is None:
        if on_cpu is not None:
            raise ValueError(f"{op}: cu_seqlens_cpu must come with cu_seqlens, got cu_seqlens=None")
        return q.shape[0]
    cu = packed_boundaries(op, q, cu_seqlens, tokens)
    if on_cpu is not None:
        boundaries(op, on_cpu, "cu_seqlens_cpu")
        if on_cpu.device.type != "cpu" or on_cpu.shape != cu.shape:
            got = f"{list(on_cpu.shape)} on {on_cpu.device.type}"
            raise ValueError(f"{op}: cu_seqlens_cpu must be cu_seqlens on the CPU, {list(cu.shape)}, got {got}")
        check_copy(op, q, cu, on_cpu)
    return cu.shape[0] - 1


def check_copy(op: str, q: Tensor, cu: Tensor, on_cpu: Tensor) -> None:
    """Raise unless `cu_seqlens_cpu` holds the boundaries of `cu_seqlens`, where both may be read."""
    if not (check.readable(cu) and check.readable(on_cpu)):
        return
    T = q.shape[1]
    if not torch.equal(legal_boundaries(op, on_cpu, T, "cu_seqlens_cpu"), legal_boundaries(op, cu, T)):
        raise ValueError(f"{op}: cu_seqlens_cpu must hold the boundaries of cu_seqlens, got different ones")


def _check_state(op: str, q: Tensor, initial_state: Tensor | None, flags: DeltaFlags, sizes: dict[str, int]) -> None:
    dtypes = check.state_dtypes(q)
    check.dtype_option(op, "state_dtype", flags.state_dtype, dtypes)
    order = "N HV V K" if flags.state_v_first else "N HV K V"
    check.shapes(op, optional=("initial_state",), known=sizes, initial_state=(initial_state, order))
    check.floating(op, dtypes, initial_state=initial_state)
    check.same_attribute(op, "device", q=q, initial_state=initial_state)


def check_strength(op: str, beta: Tensor | None, *, logit: bool, doubled: bool) -> None:
    """Check beta's flags: use_beta_sigmoid_in_kernel (`logit`) and allow_neg_eigval (`doubled`)."""
    if doubled and not logit:
        raise ValueError(
            f"{op}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, "
            "got use_beta_sigmoid_in_kernel=False; scale a ready-made beta yourself"
        )
    if logit and beta is None:
        raise ValueError(f"{op}: beta must be given with use_beta_sigmoid_in_kernel=True, got None")


def check_gate(
    op: str,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    gate: GateFlags,
    sizes: dict[str, int],
    cu: Tensor | None,
    *,
    name: str = "g",
) -> tuple[str, float, float]:
    """Check the gate; return its activation, the lower bound and the clamp, each 0 if unused."""
    inside, safe = gate.use_gate_in_kernel, gate.safe_gate
    check.flag(op, use_gate_in_kernel=inside, safe_gate=safe)
    bound = None if gate.lower_bound is None else check.number(op, "lower_bound", gate.lower_bound)
    if bound is not None and bound >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {bound}")
    if safe and bound is not None and bound < STEEPEST_BOUND:
        raise ValueError(f"{op}: lower_bound must be in [-5, 0) with safe_gate=True, got {bound}")
    if not inside:
        given = {"A_log": A_log, "dt_bias": dt_bias, "lower_bound": None if safe else bound}
        for parameter, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{op}: {parameter} must come with use_gate_in_kernel=True, got use_gate_in_kernel=False"
                )
    if (inside or safe) and g is None:
        flag = "use_gate_in_kernel" if inside else "safe_gate"
        raise ValueError(f"{op}: {name} must be given with {flag}=True, got None")
    _check_parameters(op, A_log, dt_bias, sizes, channel=gate.channel)
    clamp = (bound or STEEPEST_BOUND) if safe else 0.0
    if not inside:
        if g is not None:
            check.log_gates(op, g, cu, least=clamp or -math.inf, name=name)
        return "given", 0.0, clamp
    return ("softplus", 0.0, clamp) if bound is None else ("bounded", bound, clamp)


def _check_parameters(
    op: str, A_log: Tensor | None, dt_bias: Tensor | None, sizes: dict[str, int], *, channel: bool
) -> None:
    HV, K = sizes["HV"], sizes["K"]
    if A_log is not None and A_log.numel() != HV:
        raise ValueError(f"{op}: A_log must have HV = {HV} elements, got {list(A_log.shape)}")
    if dt_bias is not None:
        legal = ([HV, K], [HV * K]) if channel else ([HV],)
        if list(dt_bias.shape) not in legal:
            wanted = "[HV, K] or [HV * K]" if channel else "[HV]"
            raise ValueError(
                f"{op}: dt_bias must be {wanted} = {' or '.join(map(str, legal))}, got {list(dt_bias.shape)}"
            )


def _check_checkpoints(op: str, wanted: bool, every: int | None) -> int:
    if not wanted:
        if every is not None:
            raise ValueError(f"{op}: checkpoint_every must come with return_intermediate_states=True, got {every}")
        return 0
    return 64 if every is None else check.integer(op, "checkpoint_every", every, least=1)
