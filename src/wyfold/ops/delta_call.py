"""One call of the delta family: what the six public operators share, from checks to results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from wyfold.ops.context_call import agreed, check_share
from wyfold.parallel import segments, split
from wyfold.parallel.context import ContextParallel
from wyfold.pipelines.delta import delta
from wyfold.pipelines.delta_context import delta_across
from wyfold.pipelines.delta_parts import chunks_per_part
from wyfold.pipelines.delta_records import DeltaTensors
from wyfold.pipelines.rows import vectors
from wyfold.runtime import check, launch
from wyfold.runtime.chunks import Cut, likely_segments, most_borders
from wyfold.runtime.layout import SequenceLayout, boundaries, boundaries_of, legal_boundaries
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.plan import explaining
from wyfold.runtime.recall import recalled, zeros
from wyfold.runtime.register import autocast_dtype, constant_to_compilers, in_autocast_dtype
from wyfold.stages import table

STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHUNK_SIZES = (16, 32, 64)
STEEPEST_BOUND = -5.0  # the gates a bounded diagonal block can hold in float32 (docs/algorithm.md, section 5)


class GateFlags(NamedTuple):
    """The field's gate flags; `channel` says which operator asks."""

    channel: bool = False
    in_kernel: bool = False
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    safe: bool = False
    lower_bound: float | None = None


class ChunkFlags(NamedTuple):
    """What only the chunk forms take; None in its place means token by token."""

    chunk_size: int | None
    disable_recompute: bool
    cu_seqlens_cpu: Tensor | None
    cp_context: ContextParallel | None
    max_splits: int | None


class Flags(NamedTuple):
    """Arguments that every form takes and that are no tensors."""

    scale: float | None
    output_final_state: bool
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    state_v_first: bool
    state_dtype: torch.dtype | None
    return_intermediate_states: bool
    checkpoint_every: int | None
    batch_invariant: bool
    backend: str | None


def call_delta(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: GateFlags,
    chunk: ChunkFlags | None,
    *,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | SequenceLayout | None,
    flags: Flags,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    """Check, decide, run. The arguments are those of the public operators (`chunk_gated_delta_rule` defines them)."""

    def run() -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
        return _call_delta(op, q, k, v, g, beta, gate, chunk, initial_state, cu_seqlens, flags)

    if chunk is not None and chunk.max_splits is None and _none_long(op, q, cu_seqlens, chunk.cu_seqlens_cpu):
        chunk = chunk._replace(max_splits=1)
    size, keep, on_cpu, context, splits = chunk or _TOKENS
    if context is not None:
        return run()
    cu, tokens = boundaries_of(cu_seqlens)
    tensors = q, k, v, g, beta, initial_state, gate.A_log, gate.dt_bias, cu, on_cpu
    values = op, gate.in_kernel, gate.safe, gate.lower_bound, chunk is None, size, keep, splits, tokens, *flags
    return recalled(tensors, (*values, segments.forcing()), run)


_TOKENS = (None,) * 5  # of `ChunkFlags`, token by token


def _none_long(op: str, q: object, cu_seqlens: object, on_cpu: object) -> bool:
    """Whether the host knows that no sequence of a long buffer is long enough to be cut."""
    if cu_seqlens is None or not isinstance(q, Tensor) or q.ndim < 2 or segments.forcing() is not None:
        return False
    if torch.compiler.is_compiling() or q.shape[1] < segments.SHORTEST:
        return False
    longest = cu_seqlens.longest if isinstance(cu_seqlens, SequenceLayout) else None
    if longest is None and isinstance(on_cpu, Tensor) and check.readable(on_cpu):
        longest = max(boundaries(op, on_cpu, "cu_seqlens_cpu").diff().tolist(), default=0)
    # Whatever the chunk is, none has as many of them as the shortest that is cut.
    return longest is not None and longest <= segments.SHORTEST - max(CHUNK_SIZES)


def _call_delta(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    gate: GateFlags,
    chunk: ChunkFlags | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | SequenceLayout | None,
    flags: Flags,
) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]:
    on_cpu, context = (None, None) if chunk is None else (chunk.cu_seqlens_cpu, chunk.cp_context)
    given = q, k, v, g, beta, initial_state, gate.A_log, gate.dt_bias

    def decide() -> DeltaOptions:
        key = _decided_by(op, given, cu_seqlens, gate, chunk, flags)
        return decided(key, lambda: _decide(op, *given[:6], gate, chunk, cu_seqlens, flags))

    if context is None:
        options = decide()
    else:
        options = agreed(op, context, q, decide, lambda options: _alike_on_ranks(options, *given[:5]))
    q, k, v = in_autocast_dtype(q, k, v)
    cu = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, SequenceLayout) else cu_seqlens
    tensors = DeltaTensors(q, k, v, *given[3:], cu, on_cpu)
    o, final_state, states = delta(tensors, options) if context is None else delta_across(tensors, options, context)
    final = final_state if flags.output_final_state else None
    return (o, final, states) if flags.return_intermediate_states else (o, final)


def _alike_on_ranks(
    options: DeltaOptions, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None
) -> dict[str, object]:
    """What must be equal on all ranks of a call: what they tell each other has its sizes, and one model all options."""
    (B, _, H, K), (HV, V) = q.shape, v.shape[2:]
    sizes = {"B": B, "H": H, "HV": HV, "K": K, "V": V, "dtype of q": in_autocast_dtype(q)[0].dtype}
    given = {f"{name} given": x is not None for name, x in (("g", g), ("beta", beta))}
    local = (
        "operator",
        "state_v_first",
        "state_dtype",
        "final_state",
        "chunk_size",
        "keep_factors",
        "backend",
        "segment_chunks",
        "segments",
    )
    asked = {name: value for name, value in options._asdict().items() if name not in local}
    # Whether a backward follows, and with it that every rank takes part in its collective.
    return {**sizes, **given, **asked, "requires_grad": asked.pop("save")}


MOST_DECISIONS = 4096
_decisions: dict[tuple[Any, ...], Any] = {}
"""What calls asked for came to: checks and plans look at metadata, and are the same for the same metadata."""


Decision = TypeVar("Decision")


def decided(key: tuple[Any, ...] | None, decide: Callable[[], Decision]) -> Decision:
    """What `decide` says, asked once for every key; None is no key."""
    found: Decision | None = None if key is None else _decisions.get(key)
    if found is None:
        found = decide()
        if key is not None and not zeros(key[1][0]):
            if len(_decisions) >= MOST_DECISIONS:
                _decisions.clear()
            _decisions[key] = found
    return found


def _decided_by(
    op: str,
    given: tuple[Tensor | None, ...],
    cu_seqlens: Tensor | SequenceLayout | None,
    gate: GateFlags,
    chunk: ChunkFlags | None,
    flags: Flags,
) -> tuple[Any, ...] | None:
    """Everything that `_decide` looks at, by value; None if a decision must not be reused."""
    tokens = 0
    if isinstance(cu_seqlens, SequenceLayout):
        tokens, cu_seqlens = cu_seqlens.tokens, cu_seqlens.cu_seqlens
    size, keep, on_cpu, context, splits = chunk or (None,) * 5
    shared = None if context is None else context.sizes
    # Boundaries on the CPU are compared with those beside the tokens where both can be read.
    if on_cpu is not None and isinstance(given[0], Tensor) and given[0].device.type == "cpu":
        return None
    asked = (
        gate.channel,
        gate.in_kernel,
        gate.safe,
        gate.lower_bound,
        chunk is None,
        size,
        keep,
        splits,
        segments.forcing(),
    )
    values = op, tokens, shared, *asked, *flags
    return decision_key((*given, cu_seqlens, on_cpu), values, flags.backend)


def decision_key(tensors: tuple[Any, ...], values: tuple[Any, ...], backend: str | None) -> tuple[Any, ...] | None:
    """A call by what is decided from it: its tensors' metadata, q's first; other values; and what is around it.

    None if a decision must not be reused: where contents are looked at, where a call is made for its plan alone, where
    sizes may be symbols, and for what is nothing legal.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or check.checking_contents() or explaining() or q is None:
        return None
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    metadata = tuple([None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors])
    around = keeps_gradients(tensors), autocast_dtype(q.device.type), table.refusal(q.device, backend)
    types = tuple(map(type, values))  # True is 1 to a dictionary, but no flag
    try:
        hash(values)
    except TypeError:  # an argument that is nothing legal
        return None
    return metadata, (values, types), around


_PLAIN = frozenset((NoneType, Tensor, torch.nn.Parameter))


def keeps_gradients(given: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def _decide(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    initial_state: Tensor | None,
    gate: GateFlags,
    chunk: ChunkFlags | None,
    cu_seqlens: Tensor | SequenceLayout | None,
    flags: Flags,
) -> DeltaOptions:
    """What will run, if every check is passed."""
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
    sizes = check_tensors(op, q, k, v, g, beta, gate)
    q, k, v = in_autocast_dtype(q, k, v)
    check.alike(op, "dtype", q=q, k=k, v=v)
    on_cpu, context = (None, None) if chunk is None else (chunk.cu_seqlens_cpu, chunk.cp_context)
    cu, N = check_boundaries(op, q, cu_seqlens, on_cpu, sizes["B"], sizes["T"])
    given_states = N
    if context is not None:
        check_share(op, context, "q", q, cu_seqlens)
        if flags.return_intermediate_states:
            raise ValueError(f"{op}: return_intermediate_states must be False with cp_context, got True")
        cu, N = context.boundaries(sizes["B"], q.device), sizes["B"] * len(context.pieces)
        given_states = sizes["B"] * len(context.starts)
    _check_state(op, q, initial_state, flags.state_dtype, flags.state_v_first, {**sizes, "N": given_states})
    if flags.allow_neg_eigval and not flags.use_beta_sigmoid_in_kernel:
        raise ValueError(
            f"{op}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True, "
            "got use_beta_sigmoid_in_kernel=False; scale a ready-made beta yourself"
        )
    if flags.use_beta_sigmoid_in_kernel and beta is None:
        raise ValueError(f"{op}: beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    activation, lower_bound, clamp = check_gate(op, g, gate, sizes, cu)
    scale = sizes["K"] ** -0.5 if flags.scale is None else check.number(op, "scale", flags.scale)
    every = _check_checkpoints(op, flags.return_intermediate_states, flags.checkpoint_every)
    chunk_size = _chunk_size(op, q, v, gate, chunk, every)

    recurrent = chunk is None
    cut = _cut(op, q, v, chunk, chunk_size, every, flags, packed=cu is not None)
    between = ("summary", "fold") if cut.chunks else ()
    likely = likely_segments(N, sizes["B"] * sizes["T"], chunk_size, cut)
    stages = (
        (("prepare", "recurrent"),) * 2
        if recurrent
        else (("prepare", *between, "scan"), ("prepare", *between, "scan_bwd", "gradients"))
    )
    given = q, k, v, g, beta, initial_state, gate.A_log, gate.dt_bias
    save = keeps_gradients(given)
    per_part = chunks_per_part(q, v, state_per_token=recurrent and save)
    stored = initial_state.dtype if initial_state is not None else flags.state_dtype or torch.float32
    plan = table.plan(
        op,
        q.device,
        flags.backend,
        forward=stages[0],
        backward=stages[1],
        dtypes=table.dtypes(*given),
        chunk_size=chunk_size,
        parts=split.part_count(sizes["B"], sizes["T"], None if cu is None else N, chunk_size, per_part),
        segments=cut.segments(-(-sizes["T"] // chunk_size)),
        collectives=() if context is None else _collectives(context, sizes),
        sizes=launch_sizes(q, chunk_size) if not recurrent else (),
        kernel_copies=_copied(q=q, k=k, g=g if gate.channel else None) if explaining() and not recurrent else (),
        keys=lambda: (
            token_keys(q, v, g, stored, v_first=flags.state_v_first)
            if recurrent
            else launch_keys(stages, q, v, g, chunk_size, likely, kept=every > 0)
        ),
    )
    return DeltaOptions(
        operator=op,
        recurrent=recurrent,
        scale=scale,
        qk_l2norm=flags.use_qk_l2norm_in_kernel,
        activation=activation,
        lower_bound=lower_bound,
        clamp=clamp,
        beta_logit=flags.use_beta_sigmoid_in_kernel,
        beta_most=2.0 if flags.allow_neg_eigval else 1.0,
        state_v_first=flags.state_v_first,
        state_dtype=flags.state_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32),
        final_state=flags.output_final_state,
        chunk_size=chunk_size,
        checkpoint_every=every,
        save=save,
        keep_factors=chunk is not None and chunk.disable_recompute,
        backend=plan.backend,
        segment_chunks=cut.chunks,
        segments=cut.most,
    )


@constant_to_compilers
def _processors(device: torch.device) -> int:
    return launch.processors(device)


def _cut(
    op: str, q: Tensor, v: Tensor, chunk: ChunkFlags | None, chunk_size: int, every: int, flags: Flags, *, packed: bool
) -> Cut:
    """How a call's long sequences are cut into segments, `WHOLE` if none of its could be long enough.

    Eager launches gain nothing by it; states on the way are those of one scan.
    """
    if chunk is None:
        return segments.WHOLE
    if chunk.max_splits is not None:
        check.integer(op, "max_splits", chunk.max_splits, least=1)
    eager = flags.backend == "eager" or (flags.backend is None and q.device.type != "cuda")
    if flags.batch_invariant or every or (eager and segments.forcing() is None):
        return segments.WHOLE
    B, T, HV, V = v.shape
    # As long as the last chunk would make it: sequences that are counted by chunks must not be asked for their tokens.
    if -(-T // chunk_size) * chunk_size < segments.SHORTEST and segments.forcing() is None:
        return segments.WHOLE
    cut = segments.cut(HV, q.shape[-1], V, chunk_size, _processors(q.device), chunk.max_splits)
    return cut if cut.chunks and most_borders(B, T, chunk_size, packed, cut) else segments.WHOLE


def _copied(**rows: Tensor | None) -> tuple[str, ...]:
    """Names of those whose rows kernels cannot read as they lie."""
    return tuple([name for name, x in rows.items() if x is not None and not vectors(x)])


def launch_sizes(q: Tensor, chunk_size: int) -> tuple[tuple[str, str], ...]:
    """What may be too large for a card (`beyond` in support.json)."""
    if q.dtype == torch.float64:
        return ()
    key = f"{launch.dtype_word(q.dtype)} K{q.shape[-1]} C{chunk_size}"
    return ("prepare", key), ("scan", key)


def launch_keys(
    stages: tuple[tuple[str, ...], ...],
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    chunk_size: int,
    scanned: int,
    *,
    kept: bool,
) -> list[tuple[str, str]]:
    """(stage, what its configuration depends on) of a call's kernels; scanned: sequences, or likely segments."""
    prepare: Any = table.launches("prepare", "triton")
    gate, folded = prepare.gate_kind(g), prepare.reads_folded(g)
    key = prepare.launch_key(q.dtype, q.shape[-1], v.shape[-1], chunk_size, gate, folded)
    keys = dict.fromkeys(stages[0] + stages[1], key)
    keys["scan"] = table.launches("scan", "triton").scan_key(key, scanned, v, kept=kept)
    if "scan_bwd" in keys:
        keys["scan_bwd"] = table.launches("scan_bwd", "triton").scan_bwd_key(key, scanned, v)
    if "gradients" in keys:
        keys["gradients"] = table.launches("gradients", "triton").gradients_key(key, q, v)
    back = []
    if "summary" in keys:
        keys["summary"], back = f"{key} fwd", [("summary", f"{key} bwd")]
    return [*keys.items(), *back]


def token_keys(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    stored: torch.dtype,
    *,
    v_first: bool,
    backward: bool = True,
    alone: bool = False,
) -> list[tuple[str, str]]:
    """The same of a call token by token: its walk, the walk back, and what gathers the gradients."""
    module: Any = table.launches("recurrent", "triton")
    K, V = q.shape[-1], v.shape[-1]
    walk_back = [("recurrent", module.launch_key_bwd(K, V)), ("recurrent", "gather")]
    there = module.launch_key(stored, K, V, g, v_first=v_first, alone=alone)
    return [("recurrent", there), *(walk_back if backward else [])]


def check_tensors(
    op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor | None, gate: GateFlags
) -> dict[str, int]:
    sizes = check.shapes(
        op,
        optional=("g", "beta"),
        q=(q, "B T H K"),
        k=(k, "B T H K"),
        v=(v, "B T HV V"),
        g=(g, "B T HV K" if gate.channel else "B T HV"),
        beta=(beta, "B T HV"),
    )
    check.head_groups(op, sizes["H"], sizes["HV"])
    check.width(op, "K", "q and k", sizes["K"])
    check.width(op, "V", "v", sizes["V"])
    check.floating(op, q=q, k=k, v=v, g=g, beta=beta, A_log=gate.A_log, dt_bias=gate.dt_bias)
    check.alike(op, "device", q=q, k=k, v=v, g=g, beta=beta, A_log=gate.A_log, dt_bias=gate.dt_bias)
    return sizes


def _collectives(context: ContextParallel, sizes: dict[str, int]) -> tuple[str, ...]:
    """What the ranks of a call tell each other, one line for each direction."""
    B, HV, K, V = (sizes[letter] for letter in ("B", "HV", "K", "V"))
    counts = {"forward": context.shares.most_leaving, "backward": context.shares.most_entering}
    return tuple(
        f"all-gather {direction} of {count * B} x {HV} x {K} x {V + K} from each rank"
        for direction, count in counts.items()
        if count
    )


def check_boundaries(
    op: str, q: Tensor, cu_seqlens: Tensor | SequenceLayout | None, on_cpu: Tensor | None, B: int, T: int
) -> tuple[Tensor | None, int]:
    """The boundaries as a tensor, and the number of sequences."""
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
            raise ValueError(f"{op}: cu_seqlens_cpu must hold the boundaries of cu_seqlens, got others")
    return cu, cu.shape[0] - 1


def packed_boundaries(op: str, x: Tensor, cu_seqlens: Tensor | SequenceLayout) -> Tensor:
    """cu_seqlens of a packed batch [1, T, ...] as a tensor on x's device."""
    if isinstance(cu_seqlens, SequenceLayout):
        if cu_seqlens.tokens != x.shape[1]:
            raise ValueError(f"{op}: cu_seqlens must be a layout of T = {x.shape[1]} tokens, got {cu_seqlens.tokens}")
        cu_seqlens = cu_seqlens.cu_seqlens
    cu = boundaries(op, cu_seqlens)
    if x.shape[0] != 1:
        raise ValueError(f"{op}: cu_seqlens must come with a batch of B = 1, got B = {x.shape[0]}")
    if cu.device != x.device:
        raise ValueError(f"{op}: cu_seqlens must be on {x.device}, got {cu.device}")
    return cu


def _check_state(
    op: str,
    q: Tensor,
    initial_state: Tensor | None,
    state_dtype: torch.dtype | None,
    state_v_first: bool,
    sizes: dict[str, int],
) -> None:
    dtypes = (torch.float64, *STATE_DTYPES) if q.dtype == torch.float64 else STATE_DTYPES
    check.dtype_option(op, "state_dtype", state_dtype, dtypes)
    order = "N HV V K" if state_v_first else "N HV K V"
    check.shapes(op, optional=("initial_state",), known=sizes, initial_state=(initial_state, order))
    check.floating(op, dtypes, initial_state=initial_state)
    check.alike(op, "device", q=q, initial_state=initial_state)


def check_gate(
    op: str, g: Tensor | None, gate: GateFlags, sizes: dict[str, int], cu: Tensor | None
) -> tuple[str, float, float]:
    """Activation, its lower bound, and the clamp; 0 for none."""
    check.flag(op, use_gate_in_kernel=gate.in_kernel, safe_gate=gate.safe)
    bound = None if gate.lower_bound is None else check.number(op, "lower_bound", gate.lower_bound)
    if bound is not None and bound >= 0:
        raise ValueError(f"{op}: lower_bound must be below 0, got {bound}")
    if gate.safe and bound is not None and bound < STEEPEST_BOUND:
        raise ValueError(f"{op}: lower_bound must be in [-5, 0) with safe_gate=True, got {bound}")
    if not gate.in_kernel:
        given = {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "lower_bound": None if gate.safe else bound}
        for name, value in given.items():
            if value is not None:
                raise ValueError(f"{op}: {name} must come with use_gate_in_kernel=True, got use_gate_in_kernel=False")
    if (gate.in_kernel or gate.safe) and g is None:
        flag = "use_gate_in_kernel" if gate.in_kernel else "safe_gate"
        raise ValueError(f"{op}: g must be given with {flag}=True, got None")
    _check_parameters(op, gate, sizes)
    clamp = (bound or STEEPEST_BOUND) if gate.safe else 0.0
    if not gate.in_kernel:
        if g is not None:
            check.log_gates(op, g, cu, least=clamp or -math.inf)
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


def _chunk_size(op: str, q: Tensor, v: Tensor, gate: GateFlags, chunk: ChunkFlags | None, every: int) -> int:
    """Rows of a chunk; for the recurrent form, whose bits do not depend on it, the distance of the kept states."""
    if chunk is None:
        return math.gcd(every, 64)
    check.flag(op, disable_recompute=chunk.disable_recompute)
    if chunk.chunk_size is not None:
        check.choice(op, "chunk_size", chunk.chunk_size, CHUNK_SIZES)
    size = chunk.chunk_size or best_chunk_size(q, v, channel_gate=gate.channel)
    if every % size:
        raise ValueError(f"{op}: checkpoint_every must be a multiple of chunk_size = {size}, got {every}")
    return size


def best_chunk_size(q: Tensor, v: Tensor, *, channel_gate: bool) -> int:
    """Fastest rows of a chunk, by device, kind of gate and widths alone (docs/facts.md, CPU-3, H200-5 and H200-9)."""
    if q.device.type == "cpu":
        return 32 if q.shape[-1] * v.shape[-1] >= 128 * 128 else 16
    if not channel_gate:
        return 64
    # A text has a value for compilers too, to which widths may be symbols.
    widths = f"K{q.shape[-1]} V{v.shape[-1]} C64 channel GR{v.shape[2] // q.shape[2]}"
    return 64 if _gathered_whole(q.device, q.dtype, widths) else 32


@constant_to_compilers
def _gathered_whole(device: torch.device, dtype: torch.dtype, widths: str) -> bool:
    """Whether gradients of a channel gate's chunks of 64 are gathered by the kernel that has registers for them."""
    if device.type != "cuda" or not launch.support(device).proof or dtype not in table.FLOATS:
        return False
    return launch.offers(launch.architecture(device), "gradients.gluon", f"{launch.dtype_word(dtype)} {widths}")
