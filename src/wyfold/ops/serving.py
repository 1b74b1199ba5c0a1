"""The delta family for serving: states in the slots of a pool, updated in place, without a gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from wyfold.ops.delta_call import (
    STATE_DTYPES,
    GateFlags,
    best_chunk_size,
    check_boundaries,
    check_gate,
    check_tensors,
    decided,
    decision_key,
    keeps_gradients,
    launch_keys,
    token_keys,
)
from wyfold.pipelines.serving import Serving, serve
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.options import DeltaOptions
from wyfold.runtime.register import in_autocast_dtype
from wyfold.stages import table

INDICES = (torch.int32, torch.int64)


class SlotFlags(NamedTuple):
    """Where the states of a call are, as the operators take it."""

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
    """Arguments that the operators share with the differentiable ones."""

    scale: float | None
    use_qk_l2norm_in_kernel: bool
    use_beta_sigmoid_in_kernel: bool
    allow_neg_eigval: bool
    backend: str | None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    pool: Tensor,
    state_indices: Tensor | None = None,
    *,
    state_v_first: bool,
    has_initial_state: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> Tensor:
    """One token of each of N sequences whose states lie in a pool; the pool is updated in place.

        S = pool[state_indices[n]]          zeros where has_initial_state[n] is False
        S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q
        pool[state_indices[n]] = S          or pool[output_state_indices[n]]

    DeltaNet where g is None, GDN where it is [N, 1, HV], KDA where it is [N, 1, HV, K]. A token has the bits that
    `fused_recurrent_*` gives it from the same float32 state. No gradient; nothing waits for the device.

    A row is skipped if its slot is not above `pad_slot_id` or not in the pool: none of its slots is read or written,
    and its output is zero. The live slots of a call must be distinct, and none that is written one that another row
    reads: which write comes last is not said.

    Args:
        q: [N, 1, H, K] or [1, N, H, K] float32, float16, bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [N, 1, HV, V], or [1, N, HV, V], dtype of q. HV is a multiple of H.
        g: [N, 1, HV] or [N, 1, HV, K], N and 1 as in q, any float, or None. Natural log of the decay, <= 0.
        beta: [N, 1, HV] any float. Write strength; None: 1.
        pool: [slots, HV, K, V], or [slots, HV, V, K] with state_v_first; float32, bfloat16 or float16. Slots and heads
            may lie apart, the numbers of one head's state may not. Arithmetic is float32; a state is rounded as it is
            stored.
        state_indices: [N] int32 or int64 slot of each row; None: row n is in slot n.
        state_v_first: Layout of the pool. Has no default: where K = V the two look alike.
        has_initial_state: [N] bool. False: the row starts from zeros, whatever its slot holds. None: all True.
        output_state_indices: [N] int32 or int64 slot each state is written to; one that is no slot is not written.
        pad_slot_id: Slots are numbers above this one.
        out: Shape and dtype of v, overlapping no other tensor; it is written and returned.

    All other arguments mean what they mean to `chunk_gated_delta_rule` and `chunk_kda`.

    Returns:
        o: Shape of v; `out` if that was given.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: a wrong shape, dtype, device or combination, an argument that requires a gradient, or inside
            `checked` live slots that are not distinct.
        UnsupportedError: no backend, or not the demanded one, serves the device and dtypes.

    Example:
        >>> import torch
        >>> from wyfold import serving
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(3, 1, 2, 16), dim=-1) for _ in range(3))
        >>> pool, slots = torch.zeros(8, 2, 16, 16), torch.tensor([5, 0, -1])
        >>> o = serving.decode(q, k, v, None, torch.rand(3, 1, 2), pool, slots, state_v_first=False)
        >>> [bool(x.any()) for x in pool], [bool(x.any()) for x in o]
        ([True, False, False, False, False, True, False, False], [True, True, False])

    Source:
        The recurrences: arXiv:2406.06484v5, arXiv:2412.06464v3, arXiv:2510.26692.
    """
    op = "decode"
    slots = SlotFlags(
        pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, out
    )  # fmt: skip
    gate = GateFlags(_is_channel(g), use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound)
    arithmetic = Arithmetic(
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, backend
    )  # fmt: skip
    tokens = q, k, v, g, beta
    if check.tensor(op, "q", q).ndim == 4 and q.shape[1] != 1:
        if q.shape[0] != 1:
            raise ValueError(f"{op}: q must be [N, 1, H, K] or [1, N, H, K], got {list(q.shape)}")
        return _served(op, tokens, slots, gate, arithmetic, turned=True)
    return _served(op, tokens, slots, gate, arithmetic)


def decode_packed(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    pool: Tensor,
    state_indices: Tensor | None = None,
    *,
    heads: tuple[int, int],
    dims: tuple[int, int],
    state_v_first: bool,
    has_initial_state: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    scale: float | None = None,
    lower_bound: float | None = None,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> Tensor:
    """`decode` from what a layer projects: q, k and v side by side, gate and write strength before activation.

    Norm of q and k, gate activation and sigmoid happen inside, always; on a GPU all of it is one launch.

    Args:
        mixed_qkv: [N, D], D = 2 H K + HV V: q, k and v of each row, after the short convolution, heads one after
            another.
        raw_g: [N, HV] (GDN), or [N, HV, K] or [N, HV * K] (KDA), any float. Pre-activation.
        raw_beta: [N, HV] any float. Logit.
        A_log: HV elements, any float, or None (rate 1).
        dt_bias: [HV] (GDN), or [HV, K] or [HV * K] (KDA), any float, or None (0).
        heads: (H, HV).
        dims: (K, V).
        lower_bound: Of the bounded gate; None: the softplus gate.
        allow_neg_eigval: Write strength is twice the sigmoid.
        out: [N, HV, V], dtype of mixed_qkv; it is written and returned.

    All other arguments and errors: `decode`.

    Returns:
        o: [N, HV, V].

    Example:
        >>> import torch
        >>> from wyfold import serving
        >>> pool = torch.zeros(8, 4, 16, 32)
        >>> mixed = torch.randn(3, 2 * 2 * 16 + 4 * 32)
        >>> serving.decode_packed(
        ...     mixed, torch.randn(3, 4), torch.randn(3, 4), torch.zeros(4), None, pool, torch.tensor([1, 4, 2]),
        ...     heads=(2, 4), dims=(16, 32), state_v_first=False,
        ... ).shape
        torch.Size([3, 4, 32])
    """
    op = "decode_packed"
    H, HV = _pair(op, "heads", heads)
    K, V = _pair(op, "dims", dims)
    width = 2 * H * K + HV * V
    if check.tensor(op, "mixed_qkv", mixed_qkv).ndim != 2 or mixed_qkv.shape[1] != width:
        raise ValueError(f"{op}: mixed_qkv must be [N, 2 H K + HV V] = [N, {width}], got {list(mixed_qkv.shape)}")
    N = mixed_qkv.shape[0]
    shape = list(check.tensor(op, "raw_g", raw_g).shape)
    if shape not in ([N, HV], [N, HV, K], [N, HV * K]):
        wanted = f"[{N}, {HV}], [{N}, {HV}, {K}] or [{N}, {HV * K}]"
        raise ValueError(f"{op}: raw_g must be [N, HV], [N, HV, K] or [N, HV * K] = {wanted}, got {shape}")
    check.shapes(op, known={"N": N, "HV": HV}, raw_beta=(raw_beta, "N HV"))
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], 1)
    if shape == [N, HV * K] and shape != [N, HV]:
        raw_g = raw_g.unflatten(1, (HV, K))
    if out is not None:
        check.shapes(op, known={"N": N, "HV": HV, "V": V}, out=(out, "N HV V"))
    tokens = (
        q.unflatten(1, (H, K))[:, None], k.unflatten(1, (H, K))[:, None], v.unflatten(1, (HV, V))[:, None],
        raw_g[:, None], raw_beta[:, None],
    )  # fmt: skip
    gate = GateFlags(raw_g.ndim == 3, True, A_log, dt_bias, False, lower_bound)
    into = None if out is None else out[:, None]
    slots = SlotFlags(
        pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, into
    )  # fmt: skip
    o = _served(op, tokens, slots, gate, Arithmetic(scale, True, True, allow_neg_eigval, backend))
    return o[:, 0] if out is None else out


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    pool: Tensor,
    state_indices: Tensor,
    *,
    state_v_first: bool,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    num_accepted_tokens: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> Tensor:
    """A few drafted tokens of each sequence, with the state after each of them kept.

        S = pool[state_indices[n, max(num_accepted_tokens[n], 1) - 1]]
        after token j:  pool[state_indices[n, j]] = S

    So the call that follows starts behind the tokens that were accepted meanwhile, by their number alone: nothing is
    rolled back or copied. From a float32 pool its results have the bits of as many single steps.

    Args:
        q: [N, T, H, K] with T of at most C drafted tokens, or packed [1, T, H, K] with cu_seqlens; float32, float16,
            bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [N, T, HV, V], or packed.
        g, beta: As `decode` takes them, with T tokens.
        state_indices: [N, C] int32 or int64 slots of each sequence, one per drafted token. A sequence whose first slot
            of the call is none is skipped; after a token whose slot is none nothing is written.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into one row, of at most C tokens each, or a
            `SequenceLayout`. States after tokens beyond C are not kept.
        num_accepted_tokens: [N] int32 or int64. How many tokens of the previous call were accepted; None and 0 start
            from column 0, numbers above C from the last one.
        output_state_indices: [N, C] int32 or int64. States are written there instead.

    All other arguments, results and errors: `decode`.

    Returns:
        o: Shape of v, zero past the last boundary; `out` if that was given.
    """
    op = "verify"
    if check.tensor(op, "state_indices", state_indices).ndim != 2 or state_indices.shape[1] < 1:
        raise ValueError(f"{op}: state_indices must be [N, C] with C >= 1, got {list(state_indices.shape)}")
    slots = SlotFlags(
        pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, out,
        num_accepted_tokens, each=True,
    )  # fmt: skip
    gate = GateFlags(_is_channel(g), use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound)
    arithmetic = Arithmetic(
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, backend
    )  # fmt: skip
    return _served(op, (q, k, v, g, beta), slots, gate, arithmetic, cu_seqlens=cu_seqlens)


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    pool: Tensor,
    state_indices: Tensor | None = None,
    *,
    state_v_first: bool,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    checkpoint_every: int | None = None,
    checkpoint_pool: Tensor | None = None,
    checkpoint_indices: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    pad_slot_id: int = -1,
    out: Tensor | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Tokens of each sequence, any number of them, chunk by chunk, from the pool and into it.

    What `chunk_*` does, with initial and final states in the slots of a pool: from a float32 pool, bit for bit. Rows of
    one token may stand among long ones; those that only decode are cheaper in `decode`.

    Args:
        q: [B, T, H, K], or packed [1, T, H, K] with cu_seqlens; float32, float16, bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [B, T, HV, V], dtype of q.
        g, beta: As `decode` takes them, with T tokens.
        state_indices: [N] int32 or int64 slot of each sequence; N is B unless packed. None: sequence n is in slot n.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into one row, or a `SequenceLayout`. An empty
            sequence leaves its state as it is, or zero if it starts from zeros.
        checkpoint_every: Store the states after so many tokens of each sequence, twice as many, and so on: a multiple
            of the chunk (docs of `chunk_gated_delta_rule`), in checkpoint_pool.
        checkpoint_pool: Another pool of that layout.
        checkpoint_indices: [B, T // checkpoint_every] int32 or int64 slot of each such state in checkpoint_pool; packed
            [T // checkpoint_every], a sequence's first at `SequenceLayout.checkpoint_offsets`. One that is no slot is
            not stored.

    All other arguments, results and errors: `decode`.

    Returns:
        o: Shape of v, zero past the last boundary; `out` if that was given.
    """
    op = "prefill"
    slots = SlotFlags(
        pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, out,
        checkpoint_every=checkpoint_every, checkpoint_pool=checkpoint_pool, checkpoint_indices=checkpoint_indices,
    )  # fmt: skip
    gate = GateFlags(_is_channel(g), use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound)
    arithmetic = Arithmetic(
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, backend
    )  # fmt: skip
    return _served(op, (q, k, v, g, beta), slots, gate, arithmetic, cu_seqlens=cu_seqlens, chunked=True)


def _served(
    op: str,
    tokens: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    slots: SlotFlags,
    gate: GateFlags,
    arithmetic: Arithmetic,
    *,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    turned: bool = False,
    chunked: bool = False,
) -> Tensor:
    """Check, decide, run. `turned`: tokens are [1, N, ..]. `chunked`: not token by token."""
    q, k, v, g, beta, out = *tokens, slots.out
    if turned:
        q, k, v, g, beta, out = map(_turned, (q, k, v, g, beta, out))
    call = _Call(op, q, k, v, g, beta, out, cu_seqlens, slots, gate, arithmetic, chunked)
    options = decided(_decided_by(call), lambda: _decide(call))
    q, k, v = in_autocast_dtype(q, k, v)
    o = v.new_empty(v.shape) if out is None else out
    source, between = slots.state_indices, slots.checkpoint_indices
    if source is not None and not slots.each:
        source = source[:, None]
    if between is not None:
        between = between.reshape(-1, 1)
    cu = cu_seqlens.cu_seqlens if isinstance(cu_seqlens, SequenceLayout) else cu_seqlens
    serve(
        Serving(
            q, k, v, g, beta, gate.A_log, gate.dt_bias, cu, slots.pool, source, slots.output_state_indices,
            slots.has_initial_state, slots.num_accepted_tokens, slots.checkpoint_pool, between, o, slots.each,
            slots.pad_slot_id,
        ),
        options,
    )  # fmt: skip
    if slots.out is not None:
        return slots.out
    return o.transpose(0, 1) if turned else o


class _Call(NamedTuple):
    """One call as it is checked: tokens are [N, 1, ..] or packed, and so is `out`."""

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


def _decided_by(call: _Call) -> tuple[Any, ...] | None:
    """Everything that `_decide` looks at, by value; None if a decision must not be reused."""
    slots, gate, cu, tokens = call.slots, call.gate, call.cu_seqlens, 0
    if isinstance(cu, SequenceLayout):
        tokens, cu = cu.tokens, cu.cu_seqlens
    indices = slots.state_indices, slots.output_state_indices, slots.has_initial_state, slots.num_accepted_tokens
    pools = slots.pool, slots.checkpoint_pool
    tensors = *call[1:7], cu, *pools, *indices, slots.checkpoint_indices, gate.A_log, gate.dt_bias
    steps = *(x.stride() if isinstance(x, Tensor) else None for x in pools), slots.checkpoint_every, call.chunked
    flags = slots.v_first, slots.pad_slot_id, slots.each, gate.channel, gate.in_kernel, gate.safe, gate.lower_bound
    return decision_key(tensors, (call.op, tokens, *steps, *flags, *call.arithmetic), call.arithmetic.backend)


def _decide(call: _Call) -> DeltaOptions:
    """What will run, if every check is passed."""
    op, q, k, v, g, beta, out, cu_seqlens, slots, gate, (scale, norm, logit, doubled, backend), chunked = call
    sizes = check_tensors(op, q, k, v, g, beta, gate)
    q, k, v = in_autocast_dtype(q, k, v)
    check.alike(op, "dtype", q=q, k=k, v=v)
    cu, N = check_boundaries(op, q, cu_seqlens, None, sizes["B"], sizes["T"])
    _check_slots(op, q, slots, {**sizes, "N": N})
    if slots.each and cu is None and slots.state_indices is not None and sizes["T"] > slots.state_indices.shape[1]:
        raise ValueError(f"{op}: state_indices must have a column for each of T = {sizes['T']} tokens")
    if out is not None:
        check.shapes(op, known=sizes, out=(out, "B T HV V"))
        check.alike(op, "dtype", v=v, out=out)
        check.alike(op, "device", v=v, out=out)
    check.flag(op, use_qk_l2norm_in_kernel=norm, use_beta_sigmoid_in_kernel=logit, allow_neg_eigval=doubled)
    if doubled and not logit:
        raise ValueError(f"{op}: allow_neg_eigval must come with use_beta_sigmoid_in_kernel=True")
    if logit and beta is None:
        raise ValueError(f"{op}: beta must be given with use_beta_sigmoid_in_kernel=True, got None")
    activation, lower_bound, clamp = check_gate(op, g, gate, sizes, cu)
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "pool": slots.pool}
    given |= {"A_log": gate.A_log, "dt_bias": gate.dt_bias, "out": out}
    for name, x in given.items():
        if keeps_gradients([x]):
            raise ValueError(f"{op}: {name} must not require a gradient, this operator has none; see torch.no_grad")
    chunk_size = best_chunk_size(q, v, channel_gate=gate.channel) if chunked else 1 if slots.each else 64
    every = _check_checkpoints(op, q, slots, chunk_size, sizes, packed=cu is not None) if chunked else int(slots.each)

    def keys() -> list[tuple[str, str]]:
        if not chunked:
            return token_keys(q, v, g, slots.pool.dtype, v_first=slots.v_first, backward=False)
        return [("slots", ""), *launch_keys((("prepare", "scan"), ()), q, v, g, chunk_size, N)]

    plan = table.plan(
        op,
        q.device,
        backend,
        forward=("slots", "prepare", "scan") if chunked else ("prepare", "recurrent"),
        dtypes=table.dtypes(*given.values(), slots.checkpoint_pool),
        chunk_size=chunk_size if chunked else None,
        keys=keys,
    )
    return DeltaOptions(
        operator=op,
        recurrent=not chunked,
        scale=sizes["K"] ** -0.5 if scale is None else check.number(op, "scale", scale),
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
        backend=plan.backend,
    )


def _check_checkpoints(
    op: str, q: Tensor, slots: SlotFlags, chunk_size: int, sizes: dict[str, int], *, packed: bool
) -> int:
    """Tokens between the states that are kept; 0 where none are."""
    given = slots.checkpoint_every, slots.checkpoint_pool, slots.checkpoint_indices
    if all(x is None for x in given):
        return 0
    if any(x is None for x in given):
        raise ValueError(f"{op}: checkpoint_every, checkpoint_pool and checkpoint_indices must come together")
    every = check.integer(op, "checkpoint_every", slots.checkpoint_every, least=1)
    if every % chunk_size:
        raise ValueError(f"{op}: checkpoint_every must be a multiple of the chunk, {chunk_size}, got {every}")
    _check_pool(op, "checkpoint_pool", q, slots.checkpoint_pool, slots.v_first, sizes)
    rows = [sizes["T"] // every] if packed else [sizes["B"], sizes["T"] // every]
    _check_rows(op, q, "checkpoint_indices", slots.checkpoint_indices, rows, INDICES)
    return every


def _check_slots(op: str, q: Tensor, slots: SlotFlags, sizes: dict[str, int]) -> None:
    """The pool, and the tensors that say which of its slots are meant."""
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
        if x is not None and check.checking_contents() and check.readable(x):
            live = x[(x > slots.pad_slot_id) & (x < slots.pool.shape[0])]
            if live.unique().numel() != live.numel():
                raise ValueError(f"{op}: {name} must hold distinct slots, got {x.tolist()}")


def _check_pool(op: str, name: str, q: Tensor, pool: Tensor | None, v_first: bool, sizes: dict[str, int]) -> None:
    check.shapes(op, optional=(), known=sizes, **{name: (pool, "slots HV V K" if v_first else "slots HV K V")})
    pool = check.tensor(op, name, pool)
    check.floating(op, (torch.float64, *STATE_DTYPES) if q.dtype == torch.float64 else STATE_DTYPES, **{name: pool})
    if pool.stride()[2:] != (pool.shape[3], 1) or 0 in pool.stride():
        strides = f"got strides {pool.stride()}"
        raise ValueError(f"{op}: {name} must hold each head's state in one piece, and no two slots in one, {strides}")
    check.alike(op, "device", q=q, **{name: pool})


def _check_rows(
    op: str, q: Tensor, name: str, x: Tensor | None, shape: list[int], dtypes: tuple[torch.dtype, ...]
) -> None:
    """An optional tensor of integers or flags, one per sequence, draft or checkpoint."""
    if x is None:
        return
    if list(check.tensor(op, name, x).shape) != shape or x.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        got = f"{list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
        raise ValueError(f"{op}: {name} must be {shape} {wanted}, got {got}")
    check.alike(op, "device", q=q, **{name: x})


def _turned(x: Any) -> Any:
    """Rows before tokens; what is no such tensor is refused later, under its name."""
    return x.transpose(0, 1) if isinstance(x, Tensor) and x.ndim > 1 else x


def _is_channel(g: Tensor | None) -> bool:
    return isinstance(g, Tensor) and g.ndim == 4


def _pair(op: str, name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{op}: {name} must be two ints, got {value!r}")
    return check.integer(op, name, value[0], least=1), check.integer(op, name, value[1], least=1)
