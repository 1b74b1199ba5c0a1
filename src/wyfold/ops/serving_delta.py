"""The delta family for serving: states in the slots of a pool, updated in place, without a gradient."""

from __future__ import annotations

from torch import Tensor

from wyfold.ops.delta_arguments import GateFlags
from wyfold.ops.plan_cache import any_requires_grad
from wyfold.ops.serving_call import Arithmetic, SlotFlags, call_served
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import replayed
from wyfold.runtime.torch_ops import in_autocast_dtype


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
            may lie apart, the numbers of one head's state may not; on a GPU, distances that are no multiples of 16
            numbers cost time and other last bits. Arithmetic is float32; a state is rounded as it is stored.
        state_indices: [N] int32 or int64 slot of each row; None: row n is in slot n.
        state_v_first: Layout of the pool. Has no default: where K = V the two look alike.
        has_initial_state: [N] bool. False: the row starts from zeros, whatever its slot holds. None: all True.
        output_state_indices: [N] int32 or int64 slot each state is written to; one that is no slot is not written.
        pad_slot_id: Slots are numbers above this one.
        out: Shape of v, overlapping no other tensor; it is written and returned. Dtype of v, or float32 beside 16 bits:
            a float32 state may have a readout above 65,504, which float16 does not hold.

    All other arguments mean what they mean to `chunk_gated_delta_rule` and `chunk_kda`.

    Returns:
        o: Shape of v; `out` if that was given.

    Raises:
        TypeError: an argument of the wrong Python type.
        ValueError: a wrong shape, dtype, device or combination, an argument that requires a gradient, or inside
            `checked` live slots that are not distinct, or one that is written and that another row starts from. Slots
            that nothing is written to, those that skipped rows name to end in, may be any.
        UnsupportedError: no backend, or not the demanded one, serves the device and dtypes.

    Examples:
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
        return call_served(op, tokens, slots, gate, arithmetic, swapped=True)
    return call_served(op, tokens, slots, gate, arithmetic)


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
    safe_gate: bool = False,
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
        safe_gate: Raise log gates below `lower_bound` (default -5, and then in [-5, 0)) to it, as `chunk_kda` does.
        lower_bound: Of the bounded gate; None: the softplus gate.
        allow_neg_eigval: Write strength is twice the sigmoid.
        out: [N, HV, V], dtype of mixed_qkv or, of 16 bits, float32; it is written and returned.

    All other arguments and errors: `decode`.

    Returns:
        o: [N, HV, V].

    Examples:
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
    sizes = *_pair(op, "heads", heads), *_pair(op, "dims", dims)
    gate = GateFlags(False, True, A_log, dt_bias, safe_gate, lower_bound)
    slots = SlotFlags(pool, state_indices, state_v_first, has_initial_state, output_state_indices, pad_slot_id, out)
    arithmetic = Arithmetic(scale, True, True, allow_neg_eigval, backend)

    def run() -> Tensor:
        return _decode_packed(op, mixed_qkv, raw_g, raw_beta, slots, sizes, gate, arithmetic)

    tensors = (
        mixed_qkv, raw_g, raw_beta, pool, state_indices, has_initial_state, output_state_indices, out, A_log, dt_bias,
    )  # fmt: skip
    values = op, state_v_first, pad_slot_id, *sizes, scale, safe_gate, lower_bound, allow_neg_eigval, backend
    return replayed(tensors, values, run)


def _decode_packed(
    op: str,
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    slots: SlotFlags,
    sizes: tuple[int, int, int, int],
    gate: GateFlags,
    arithmetic: Arithmetic,
) -> Tensor:
    """`decode_packed` as `decode`: q, k and v are views, and the gate's kind follows from its shape."""
    (H, HV, K, V), out = sizes, slots.out
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
    gate = gate._replace(channel=raw_g.ndim == 3)
    into = slots._replace(out=None if out is None else out[:, None])
    try:
        o = call_served(op, tokens, into, gate, arithmetic)
    except ValueError:
        # Its checks name q, k, v, g and beta, which the caller did not give.
        _check_packed(op, mixed_qkv, raw_g, raw_beta, slots, sizes, gate)
        raise
    return o[:, 0] if out is None else out


def _check_packed(
    op: str,
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    slots: SlotFlags,
    sizes: tuple[int, int, int, int],
    gate: GateFlags,
) -> None:
    """Raise what `call_served` refuses in the names of `decode_packed`'s arguments, where they differ."""
    H, HV, K, V = sizes
    check.head_groups(op, H, HV, keys="q and k in heads", values="heads")
    check.width(op, "K", "dims", K)
    check.width(op, "V", "dims", V)
    given = {"mixed_qkv": mixed_qkv, "raw_g": raw_g, "raw_beta": raw_beta}
    check.floating(op, mixed_qkv=mixed_qkv, raw_g=raw_g, raw_beta=raw_beta)
    check.alike(op, "device", **given, A_log=gate.A_log, dt_bias=gate.dt_bias, pool=slots.pool, out=slots.out)
    check.output_dtype(op, slots.out, mixed_qkv=in_autocast_dtype(mixed_qkv)[0])
    for name, x in given.items():
        if any_requires_grad([x]):
            raise ValueError(f"{op}: {name} must not require a gradient, this operator has none; see torch.no_grad")


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
    return call_served(op, (q, k, v, g, beta), slots, gate, arithmetic, cu_seqlens=cu_seqlens)


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

    What `chunk_*` does, with initial and final states in the slots of a pool. Bit for bit from a float32 pool, where
    `chunk_*` cuts no sequence into segments: `prefill` never does, `chunk_*` does it to long sequences of small batches
    on a GPU unless `max_splits=1` or `batch_invariant=True` is given. Rows of one token may stand among long ones;
    those that only decode are cheaper in `decode`.

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
            not stored, nor is any of a skipped row. Those that are stored must be distinct: which of two that go to one
            slot comes last is not said. `checked` looks for it.

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
    return call_served(op, (q, k, v, g, beta), slots, gate, arithmetic, cu_seqlens=cu_seqlens, chunked=True)


def _is_channel(g: Tensor | None) -> bool:
    return isinstance(g, Tensor) and g.ndim == 4


def _pair(op: str, name: str, value: object) -> tuple[int, int]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise TypeError(f"{op}: {name} must be two ints, got {value!r}")
    return check.integer(op, name, value[0], least=1), check.integer(op, name, value[1], least=1)
