"""The delta family for serving: states live in pool slots, updated in place, without a gradient."""

from __future__ import annotations

from torch import Tensor

from wyfold.ops.delta_plan import known_short
from wyfold.ops.serving_call import SERVING
from wyfold.ops.serving_checks import RULES, ServingFlags, ServingTensors
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout, boundaries_of
from wyfold.runtime.replay_cache import planned


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
    rule: str = "delta",
    a: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
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
    """One token of each of N sequences; their states in the pool are updated in place.

        S = pool[state_indices[n]]          zeros where has_initial_state[n] is False
        S <- exp(g) S;   S <- S + beta k (v - S^T k)^T;   o = scale S^T q
        pool[state_indices[n]] = S          or pool[output_state_indices[n]]

    DeltaNet if g is None, GDN if it is [N, 1, HV], KDA if it is [N, 1, HV, K]. A token has the bits of
    `fused_recurrent_*` from the same float32 state. No gradient and no device synchronisation.

    With another `rule`, the update of the state is that of another operator, and beta is None:

    - "gla": `fused_recurrent_gla`. Norm and gate are the caller's: flags of theirs are refused.
    - "dplr": `fused_recurrent_dplr_delta_rule` with gk = g; IPLR if g is None; RWKV-7 with scale=1.
    - "gdn2": `fused_recurrent_gdn2`.

    "dplr" and "gdn2" copy states out of the pool and back, around the kernel of the whole-sequence operator.

    A row is skipped if its slot is not above `pad_slot_id` or not in the pool: the pool is not accessed for it, and its
    output is zero. The live slots of a call must be distinct, and no row may write a slot that another row reads; the
    order of such accesses is undefined.

    Args:
        q: [N, 1, H, K] or [1, N, H, K] float32, float16, bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [N, 1, HV, V], or [1, N, HV, V], dtype of q. HV is a multiple of H.
        g: [N, 1, HV] or [N, 1, HV, K], N and 1 as in q, any float, or None. Natural log of the decay, <= 0:
            checked inside `wyfold.checked()` only.
        beta: [N, 1, HV] any float. Write strength; None: 1.
        pool: [slots, HV, K, V], or [slots, HV, V, K] with state_v_first; float32, bfloat16 or float16. Slots and heads
            may have any strides; one head's state is contiguous. On a GPU, strides that are not multiples of 16
            elements are slower and change last bits. Arithmetic is float32; states are rounded when stored.
        state_indices: [N] int32 or int64 slot of each row. None: row n uses slot n.
        state_v_first: Layout of the pool. No default, because the shape does not show it where K = V.
        rule: "delta", "gla", "dplr" or "gdn2".
        a, b: [N, 1, H, K], dtype of q. Erasing row and column of "dplr". b of "gdn2": [N, 1, HV, K] any float, the
            erase gate; None: 1.
        w: [N, 1, HV, V] any float. Write gate of "gdn2"; None: 1.
        has_initial_state: [N] bool. False: the row starts from zeros and ignores its slot. None: all True.
        output_state_indices: [N] int32 or int64 slot each state is written to. None: state_indices. A state whose
            index is not a slot is not written.
        pad_slot_id: Indices up to and including this one mark padding rows.
        out: Output buffer, returned: shape of v. Dtype of v, or float32 for 16-bit v: a float32 state can produce
            outputs above 65,504, which float16 cannot represent. Must not overlap other tensors.
        use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound: As in `chunk_gated_delta_rule` (g per head) and
            `chunk_kda` (g per channel).
        scale, use_qk_l2norm_in_kernel, use_beta_sigmoid_in_kernel, allow_neg_eigval, backend: As in
            `chunk_gated_delta_rule`.

    Returns:
        o: Shape of v; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, device or combination is wrong, or an argument requires a gradient. Inside
            `checked` also: live slots are not distinct, or a row writes a slot that another row reads. Slots that are
            never written, those of skipped rows, are exempt.
        UnsupportedError: No backend, or not the demanded one, serves the device and dtypes.

    Source:
        DeltaNet, arXiv:2406.06484, section 2.2; Gated DeltaNet, arXiv:2412.06464v3, Eq. (10); Kimi Linear,
        arXiv:2510.26692, Eq. (1). Other rules: as their operators.

    Examples:
        >>> import torch
        >>> from wyfold import serving
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(3, 1, 2, 16), dim=-1) for _ in range(3))
        >>> pool, slots = torch.zeros(8, 2, 16, 16), torch.tensor([5, 0, -1])
        >>> o = serving.decode(q, k, v, None, torch.rand(3, 1, 2), pool, slots, state_v_first=False)
        >>> [bool(x.any()) for x in pool], [bool(x.any()) for x in o]
        ([True, False, False, False, False, True, False, False], [True, True, False])
    """
    swapped = check.tensor("decode", "q", q).ndim == 4 and q.shape[1] != 1
    if swapped and q.shape[0] != 1:
        raise ValueError(f"decode: q must be [N, 1, H, K] or [1, N, H, K], got {list(q.shape)}")
    flags = ServingFlags(
        op="decode",
        channel=_is_channel(g, rule),
        state_v_first=state_v_first,
        pad_slot_id=pad_slot_id,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        backend=backend,
        rule=rule,
        swapped=swapped,
    )
    tensors = ServingTensors(
        q, k, v, g, beta, A_log, dt_bias, None, pool, state_indices, output_state_indices, has_initial_state,
        None, None, None, out, a, b, w,
    )  # fmt: skip
    return planned(SERVING, tensors, flags)


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
    rule: str = "delta",
    a: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
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
    """Process a few drafted tokens of each sequence and keep the state after each: speculative decoding.

        S = pool[state_indices[n, max(num_accepted_tokens[n], 1) - 1]]
        for each token j:
            S <- exp(g_j) S;   S <- S + beta_j k_j (v_j - S^T k_j)^T;   o_j = scale S^T q_j
            pool[state_indices[n, j]] = S           or the update of another `rule`

    The next call starts from the state after the last accepted token, selected by `num_accepted_tokens`: no rollback
    and no copy. With a float32 pool the results are bit-identical to as many single steps.

    Args:
        q: [N, T, H, K] with T of at most C drafted tokens, or packed [1, T, H, K] with cu_seqlens; float32, float16,
            bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [N, T, HV, V], or packed [1, T, HV, V], dtype of q.
        g: [N, T, HV] or [N, T, HV, K], or packed, any float, or None. Natural log of the decay, <= 0:
            checked inside `wyfold.checked()` only.
        beta: [N, T, HV], or packed, any float. Write strength; None: 1.
        state_indices: [N, C] int32 or int64 slots of each sequence, one per drafted token. A sequence is skipped if the
            slot it would start from is invalid. The state after a token with an invalid slot is not written.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into one row, of at most C tokens each, or a
            `SequenceLayout`. States after tokens beyond C are not kept.
        num_accepted_tokens: [N] int32 or int64. Number of tokens of the previous call that were accepted. None and 0
            start from column 0, numbers above C from the last column.
        output_state_indices: [N, C] int32 or int64 slots the states are written to. None: state_indices.

    Arguments not listed here are those of `decode`.

    Returns:
        o: Shape of v, zero past the last boundary; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, device or combination is wrong, T exceeds C, or an argument requires a gradient.
            Inside `checked` also: live slots are not distinct, or a sequence writes a slot that another one reads.
        UnsupportedError: No backend, or not the demanded one, serves the device and dtypes.

    Source:
        DeltaNet, arXiv:2406.06484, section 2.2; Gated DeltaNet, arXiv:2412.06464v3, Eq. (10); Kimi Linear,
        arXiv:2510.26692, Eq. (1).

    Examples:
        >>> import torch
        >>> from wyfold import serving
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(2, 3, 2, 16), dim=-1) for _ in range(3))
        >>> pool, slots = torch.zeros(8, 2, 16, 16), torch.tensor([[0, 1, 2], [3, 4, 5]])
        >>> o = serving.verify(q, k, v, None, None, pool, slots, state_v_first=False)
        >>> o = serving.verify(
        ...     q, k, v, None, None, pool, slots, state_v_first=False, num_accepted_tokens=torch.tensor([2, 3])
        ... )
        >>> o.shape
        torch.Size([2, 3, 2, 16])
    """
    op = "verify"
    if check.tensor(op, "state_indices", state_indices).ndim != 2 or state_indices.shape[1] < 1:
        raise ValueError(f"{op}: state_indices must be [N, C] with C >= 1, got {list(state_indices.shape)}")
    cu, tokens = boundaries_of(cu_seqlens)
    flags = ServingFlags(
        op=op,
        channel=_is_channel(g, rule),
        state_v_first=state_v_first,
        pad_slot_id=pad_slot_id,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        backend=backend,
        rule=rule,
        each=True,
        tokens=tokens,
    )
    tensors = ServingTensors(
        q, k, v, g, beta, A_log, dt_bias, cu, pool, state_indices, output_state_indices, has_initial_state,
        num_accepted_tokens, None, None, out, a, b, w,
    )  # fmt: skip
    return planned(SERVING, tensors, flags)


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
    rule: str = "delta",
    a: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
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
    max_splits: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Process any number of tokens of each sequence chunk by chunk, with initial and final states in pool slots.

        S = pool[state_indices[n]]          zeros where has_initial_state[n] is False
        for each token t:   S <- exp(g_t) S;   S <- S + beta_t k_t (v_t - S^T k_t)^T;   o_t = scale S^T q_t
        pool[state_indices[n]] = S          or pool[output_state_indices[n]]

    With a float32 pool, bit-identical to `chunk_delta_rule`, `chunk_gated_delta_rule` or `chunk_kda` with the same
    `max_splits`: like them it cuts long sequences into segments on a GPU, unless `max_splits=1` or checkpoints are
    stored. Sequences of one token may be mixed with long ones; `decode` is faster for a batch of single tokens.

    With another `rule`, the update is that of `chunk_gla`, `chunk_dplr_delta_rule` or `chunk_gdn2`.

    Args:
        q: [B, T, H, K], or packed [1, T, H, K] with cu_seqlens; float32, float16, bfloat16, or float64 (`eager`).
        k: Shape and dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV] or [B, T, HV, K] any float, or None. Natural log of the decay, <= 0:
            checked inside `wyfold.checked()` only.
        beta: [B, T, HV] any float. Write strength; None: 1.
        state_indices: [N] int32 or int64 slot of each sequence; N is B unless packed. None: sequence n uses slot n.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into one row, or a `SequenceLayout`. An empty
            sequence leaves its state unchanged, or sets it to zero where `has_initial_state` is False.
        checkpoint_every: Also store, in checkpoint_pool, the states after every so many tokens of each sequence. A
            multiple of the chunk size (see `chunk_gated_delta_rule`).
        checkpoint_pool: Pool for those states, with the layout of pool.
        checkpoint_indices: [B, T // checkpoint_every] int32 or int64 slot of each such state in checkpoint_pool; packed
            [T // checkpoint_every], with a sequence's first at `SequenceLayout.checkpoint_offsets`. States with an
            invalid slot and those of skipped sequences are not stored. Valid slots must be distinct; `checked` tests
            it.
        max_splits: As in `chunk_gated_delta_rule`.

    Arguments not listed here are those of `decode`.

    Returns:
        o: Shape of v, zero past the last boundary; `out` if given.

    Raises:
        TypeError: An argument has the wrong Python type.
        ValueError: A shape, dtype, device or combination is wrong, or an argument requires a gradient. Inside
            `checked` also: live slots are not distinct, or a sequence writes a slot that another one reads.
        UnsupportedError: No backend, or not the demanded one, serves the device and dtypes.

    Source:
        Chunkwise forms: DeltaNet, arXiv:2406.06484, Eqs. (8) and (9); Gated DeltaNet, arXiv:2412.06464v3, section 3.3;
        Kimi Linear, arXiv:2510.26692, Eqs. (3) to (9).

    Examples:
        >>> import torch, wyfold
        >>> from wyfold import serving
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(1, 100, 2, 16), dim=-1) for _ in range(3))
        >>> pool = torch.zeros(8, 2, 16, 16)
        >>> o = serving.prefill(q, k, v, None, None, pool, torch.tensor([5]), state_v_first=False)
        >>> whole, state = wyfold.chunk_delta_rule(q, k, v, output_final_state=True)
        >>> torch.equal(o, whole), torch.equal(pool[5], state[0])
        (True, True)
    """
    cu, tokens = boundaries_of(cu_seqlens)
    flags = ServingFlags(
        op="prefill",
        channel=_is_channel(g, rule),
        state_v_first=state_v_first,
        pad_slot_id=pad_slot_id,
        scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        backend=backend,
        rule=rule,
        chunked=True,
        checkpoint_every=checkpoint_every,
        tokens=tokens,
        max_splits=1 if max_splits is None and known_short("prefill", q, v, cu_seqlens, None) else max_splits,
    )
    tensors = ServingTensors(
        q, k, v, g, beta, A_log, dt_bias, cu, pool, state_indices, output_state_indices, has_initial_state,
        None, checkpoint_pool, checkpoint_indices, out, a, b, w,
    )  # fmt: skip
    return planned(SERVING, tensors, flags)


def _is_channel(g: Tensor | None, rule: str) -> bool:
    """Whether the gate has a decay per key channel, by the rule or by the shape of g."""
    known = RULES[rule].channel if isinstance(rule, str) and rule in RULES else None
    return isinstance(g, Tensor) and g.ndim == 4 if known is None else known
