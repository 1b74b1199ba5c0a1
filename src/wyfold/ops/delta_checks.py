"""Argument checks of the delta family. Their order decides which of several errors is reported."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.ops.delta_arguments import ColumnArguments, DeltaCall, Flags, GateFlags
from wyfold.ops.rank_agreement import check_shard
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries, legal_boundaries, packed_boundaries
from wyfold.runtime.torch_ops import in_autocast_dtype

STEEPEST_BOUND = -5.0  # lowest log gate that a diagonal block can represent in float32 (docs/algorithm.md, section 5)


class CheckedDelta(NamedTuple):
    """A checked delta-family call, with defaults applied.

    Attributes:
        q, k, v: In the dtype of an active autocast.
        sizes: Sizes of the letters B, T, H, HV, K, V.
        packed: Sequences are packed into one row.
        sequences: N; with a context, the pieces of sequences on this rank.
        activation, lower_bound, clamp: Gate options, as in `DeltaOptions`.
        scale: Factor of q.
        every: Tokens between returned intermediate states; 0: none are returned.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sizes: dict[str, int]
    packed: bool
    sequences: int
    activation: str
    lower_bound: float
    clamp: float
    scale: float
    every: int


def check_call(call: DeltaCall) -> CheckedDelta:
    """Run all checks except those of chunk size and segments (`chunking`)."""
    op, q, k, v, g, beta, initial_state, cu_seqlens, gate, chunk, flags, _ = call
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
    sizes = check_tensors(op, q, k, v, g, beta, gate, call.columns)
    q, k, v = in_autocast_dtype(q, k, v)
    check.same_attribute(op, "dtype", **_named(call.columns, q=q, k=k, v=v, **paired_columns(call)))
    on_cpu, context = (None, None) if chunk is None else (chunk.cu_seqlens_cpu, chunk.cp_context)
    cu, N = check_boundaries(op, q, cu_seqlens, on_cpu, sizes["B"], sizes["T"])
    given_states = N
    if context is not None:
        check_shard(op, context, "q", q, cu_seqlens)
        if flags.return_intermediate_states:
            raise ValueError(f"{op}: return_intermediate_states must be False with cp_context, got True")
        cu, N = context.boundaries(sizes["B"], q.device), sizes["B"] * len(context.pieces)
        given_states = sizes["B"] * len(context.starts)
    _check_state(op, q, initial_state, flags, {**sizes, "N": given_states})
    _check_strength(op, beta, flags)
    if call.rule in ("given", "rates") and gate.lower_bound is not None and not gate.safe:
        raise ValueError(f"{op}: lower_bound must come with safe_gate=True, got safe_gate={gate.safe!r}")
    activation, lower_bound, clamp = check_gate(op, g, gate, sizes, cu, name=_names(call.columns).get("g", "g"))
    # An int: torch.jit traces sizes as tensors, whose powers are float32.
    scale = int(sizes["K"]) ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    every = _check_checkpoints(op, flags.return_intermediate_states, flags.checkpoint_every)
    return CheckedDelta(q, k, v, sizes, cu is not None, N, activation, lower_bound, clamp, scale, every)


def check_tensors(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: GateFlags,
    columns: ColumnArguments | None = None,
) -> dict[str, int]:
    shapes: dict[str, tuple[Tensor | None, str]] = {
        "q": (q, "B T H K"),
        "k": (k, "B T H K"),
        "v": (v, "B T HV V"),
        "g": (g, "B T HV K" if gate.channel else "B T HV"),
        "beta": (beta, "B T HV"),
    }
    optional = ["g", "beta"]
    if columns is not None:
        shapes |= {name: (getattr(columns, name), shape) for name, shape in COLUMN_SHAPES[columns.rule].items()}
        optional += ["a", "b", "w"] if columns.rule == "keys" else []
    tensors = {name: x for name, (x, _) in shapes.items()}
    names = _names(columns)
    sizes = check.shapes(op, optional=[names.get(name, name) for name in optional], **_named(columns, **shapes))
    check.head_groups(op, sizes["H"], sizes["HV"], keys=f"{names.get('q', 'q')} and k")
    check.width(op, "K", f"{names.get('q', 'q')} and k", sizes["K"])
    check.width(op, "V", "v", sizes["V"])
    given = _named(columns, **tensors) | {"A_log": gate.A_log, "dt_bias": gate.dt_bias}
    check.floating(op, **given)
    check.same_attribute(op, "device", **given)
    return sizes


COLUMN_SHAPES = {
    "given": {"a": "B T H K", "b": "B T H K"},
    "rates": {"a": "B T H K", "b": "B T H K"},
    "keys": {"a": "B T H K", "b": "B T HV K", "w": "B T HV V"},
}
"""Rule -> shapes of its further tokens."""

PAIRED = {"delta": "", "given": "ab", "rates": "ab", "keys": "a"}
"""Rule -> its further tokens that have the dtype of q; the others may have any."""


def paired_columns(call: DeltaCall) -> dict[str, Tensor | None]:
    """Further tokens that have the dtype of q, by name, in the dtype of an active autocast."""
    tokens = zip("abw", call.column_tensors, strict=True)
    return {name: None if x is None else in_autocast_dtype(x)[0] for name, x in tokens if name in PAIRED[call.rule]}


def _names(columns: ColumnArguments | None) -> dict[str, str]:
    """Argument of a call -> its name in the operator's signature, where that differs."""
    return {} if columns is None else dict(columns.names)


def _named(columns: ColumnArguments | None, **arguments: Any) -> dict[str, Any]:
    """The arguments under their names in the operator's signature."""
    names = _names(columns)
    return {names.get(name, name): value for name, value in arguments.items()}


def check_boundaries(
    op: str, q: Tensor, cu_seqlens: Tensor | SequenceLayout | None, on_cpu: Tensor | None, B: int, T: int
) -> tuple[Tensor | None, int]:
    """Check the boundaries; return them as a tensor, and the number of sequences."""
    if cu_seqlens is None:
        if on_cpu is not None:
            raise ValueError(f"{op}: cu_seqlens_cpu must come with cu_seqlens, got cu_seqlens=None")
        return None, B
    cu = packed_boundaries(op, q, cu_seqlens)
    if on_cpu is not None:
        boundaries(op, on_cpu, "cu_seqlens_cpu")
        if on_cpu.device.type != "cpu" or on_cpu.shape != cu.shape:
            got = f"{list(on_cpu.shape)} on {on_cpu.device.type}"
            raise ValueError(f"{op}: cu_seqlens_cpu must be cu_seqlens on the CPU, {list(cu.shape)}, got {got}")
        if (
            check.readable(cu)
            and check.readable(on_cpu)
            and not torch.equal(legal_boundaries(op, on_cpu, T, "cu_seqlens_cpu"), legal_boundaries(op, cu, T))
        ):
            raise ValueError(f"{op}: cu_seqlens_cpu must hold the boundaries of cu_seqlens, got different ones")
    return cu, cu.shape[0] - 1


def _check_state(op: str, q: Tensor, initial_state: Tensor | None, flags: Flags, sizes: dict[str, int]) -> None:
    dtypes = check.state_dtypes(q)
    check.dtype_option(op, "state_dtype", flags.state_dtype, dtypes)
    order = "N HV V K" if flags.state_v_first else "N HV K V"
    check.shapes(op, optional=("initial_state",), known=sizes, initial_state=(initial_state, order))
    check.floating(op, dtypes, initial_state=initial_state)
    check.same_attribute(op, "device", q=q, initial_state=initial_state)


def _check_strength(op: str, beta: Tensor | None, flags: Flags) -> None:
    if flags.allow_neg_eigval and not flags.use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{op}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, "
            "got use_beta_sigmoid_in_kernel=False; scale a ready-made beta yourself"
        )
    if flags.use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError(f"{op}: beta must be given with use_beta_sigmoid_in_kernel=True, got None")


def check_gate(
    op: str, g: Tensor | None, gate: GateFlags, sizes: dict[str, int], cu: Tensor | None, *, name: str = "g"
) -> tuple[str, float, float]:
    """Check the gate; return its activation, the lower bound and the clamp, each 0 if unused."""
    check.flag(op, use_gate_in_kernel=gate.in_kernel, safe_gate=gate.safe)
    bound = None if gate.lower_bound is None else check.number(op, "lower_bound", gate.lower_bound)
    if bound is not None and bound >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {bound}")
    if gate.safe and bound is not None and bound < STEEPEST_BOUND:
        raise ValueError(f"{op}: lower_bound must be in [-5, 0) with safe_gate=True, got {bound}")
    if not gate.in_kernel:
        given = {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "lower_bound": None if gate.safe else bound}
        for parameter, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{op}: {parameter} must come with use_gate_in_kernel=True, got use_gate_in_kernel=False"
                )
    if (gate.in_kernel or gate.safe) and g is None:
        flag = "use_gate_in_kernel" if gate.in_kernel else "safe_gate"
        raise ValueError(f"{op}: {name} must be given with {flag}=True, got None")
    _check_parameters(op, gate, sizes)
    clamp = (bound or STEEPEST_BOUND) if gate.safe else 0.0
    if not gate.in_kernel:
        if g is not None:
            check.log_gates(op, g, cu, least=clamp or -math.inf, name=name)
        return "given", 0.0, clamp
    return ("softplus", 0.0, clamp) if bound is None else ("bounded", bound, clamp)


def _check_parameters(op: str, gate: GateFlags, sizes: dict[str, int]) -> None:
    HV, K = sizes["HV"], sizes["K"]
    if gate.A_log is not None and gate.A_log.numel() != HV:
        raise ValueError(f"{op}: A_log must have HV = {HV} elements, got {list(gate.A_log.shape)}")
    if gate.dt_bias is not None:
        legal = ([HV, K], [HV * K]) if gate.channel else ([HV],)
        if list(gate.dt_bias.shape) not in legal:
            wanted = "[HV, K] or [HV * K]" if gate.channel else "[HV]"
            raise ValueError(
                f"{op}: dt_bias must be {wanted} = {' or '.join(map(str, legal))}, got {list(gate.dt_bias.shape)}"
            )


def _check_checkpoints(op: str, wanted: bool, every: int | None) -> int:
    if not wanted:
        if every is not None:
            raise ValueError(f"{op}: checkpoint_every must come with return_intermediate_states=True, got {every}")
        return 0
    return 64 if every is None else check.integer(op, "checkpoint_every", every, least=1)
