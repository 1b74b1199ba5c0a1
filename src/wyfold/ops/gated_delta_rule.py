"""GDN: the delta rule with one decay per token and value head."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    chunk_size: int | None = None,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Gated delta rule over whole sequences, computed chunk by chunk.

    The result is that of this recurrence, per value head, from S = initial_state or zeros:

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Causal. A packed batch is bit-identical to its sequences run alone. A call split at a multiple of `chunk_size`
    tokens, with the state passed on, is bit-identical to one call, except where a GPU scans a long sequence in
    segments (`max_splits`).

    Tokens come before heads, [B, T, H, ..]; there is no `head_first`. Pass head-first tensors [B, H, T, ..] as
    `x.transpose(1, 2)`: a view, no copy, and the same bits as contiguous tensors.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64. K from 1 to 256. Any strides: kernels
            first copy those of q, k, v and of o's gradient (which may be expanded) whose row alignment or strides they
            cannot read; `explain` names the copied arguments. Never written.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`; beta |k|^2 <= 2 keeps the
            state bounded.
        v: [B, T, HV, V], dtype of q. V from 1 to 512; value head j reads key head j // (HV // H).
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; -inf resets the state. None: no decay. The
            sign is checked inside `wyfold.checked()` only: elsewhere g > 0 is no error, and the state grows.
        beta: [B, T, HV] any float. Write strength in [0, 1], or [0, 2] with negative eigenvalues. None: 1.
        scale: Factor of q; the state is not scaled. None: K ** -0.5.
        initial_state: [N, HV, K, V] float32, bfloat16 or float16; N = B, or the number of packed sequences. None:
            zeros.
        output_final_state: Return the states after the last tokens.
        use_qk_l2norm_in_kernel: Normalise rows of q and k to x (sum x^2 + 1e-6)^(-1/2). Their length must stay below
            1.8e19 (float64: 1.3e154). Beyond it the sum of squares overflows; the row is then 0 or NaN, depending on
            the backend.
        use_beta_sigmoid_in_kernel: beta is a logit; its sigmoid is used.
        allow_neg_eigval: With the sigmoid: use twice the sigmoid, in [0, 2] (arXiv:2411.12537).
        state_v_first: States are [N, HV, V, K], in and out.
        state_dtype: Storage of returned states: float32 (default), bfloat16 or float16. None with float64 inputs:
            float64.
        cu_seqlens: [N+1] int32 or int64 boundaries of sequences packed into B = 1, or a `SequenceLayout`. Empty
            sequences are legal. Rows past the last boundary are never read; their outputs and gradients are zero.
        return_intermediate_states: Also return the states after every `checkpoint_every` tokens of each sequence. They
            have no gradient.
        checkpoint_every: Tokens between returned states, a multiple of `chunk_size`. None: 64.
        batch_invariant: Forbid segments. The bits of a row then do not depend on the number of rows B. The bits of a
            packed sequence depend on no other sequence, with or without this flag.
        use_gate_in_kernel: g is the pre-activation; the decay is -exp(A_log) softplus(g + dt_bias).
        A_log: [HV] any float. Natural log of the rate; any shape with HV elements. None: rate 1.
        dt_bias: [HV] any float. Bias of the pre-activation. None: 0.
        chunk_size: 16, 32 or 64. None on the CPU: 16, or 32 if K V >= 128^2. None on a GPU: 64, but 32 for KDA, except
            on sm_90 in bfloat16 with K = V = 128 and HV = H. The size affects last bits only.
        max_splits: Maximal number of segments of a sequence, scanned in parallel on a GPU; 1: none. None: chosen from
            the sequence's length, B, heads, widths and the card alone; `explain` reports it.
        disable_recompute: Keep the chunks' factors for the backward: more memory, less time, same bits.
        cu_seqlens_cpu: [N+1] copy of the boundaries on the CPU. Saves a device synchronisation; changes no bit.
        cp_context: From `wyfold.cp.build_cp_context`, instead of cu_seqlens. The tensors are this rank's shard of a
            buffer split over a process group. Initial states are given for the sequences that begin on this rank
            (`starts`); final states are returned for those that end on it (`ends`). Each rank gets its partial
            gradient of a parameter; the sum over ranks is the gradient. One all-gather in each direction.
        backend: "eager", "triton" or "gluon" demands that backend. None: the best available one.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] in `state_dtype`, or None without `output_final_state`. An empty sequence returns
            its initial state bit for bit.
        states: Only with `return_intermediate_states`: [B, T // n, HV, K, V] after n, 2n, ... tokens; packed
            [T // n, HV, K, V], with sequence i's first row at `SequenceLayout.checkpoint_offsets(n)[i]` and zeros in
            unused rows.

    Differentiable once in every tensor argument, through o and the final state. A gradient has its argument's dtype.

    Raises:
        TypeError: An argument has the wrong Python type, or a keyword is unknown.
        ValueError: A shape, dtype, device, range or combination of options is wrong; the message names the argument.
        UnsupportedError: The backend cannot serve the call; `.reasons` explains why for each backend.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3: Eq. (10) in section 3.1; chunkwise form in section 3.3.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
        >>> o, state = wyfold.chunk_gated_delta_rule(
        ...     q, k, v, g, beta, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))

        Head-first tensors, in and out:

        >>> head_first = [x.transpose(1, 2).contiguous() for x in (q, k, v, g, beta)]
        >>> o2, _ = wyfold.chunk_gated_delta_rule(
        ...     *(x.transpose(1, 2) for x in head_first), use_qk_l2norm_in_kernel=True
        ... )
        >>> torch.equal(o2, o), o2.transpose(1, 2).shape
        (True, torch.Size([1, 2, 100, 64]))
    """
    flags = DeltaFlags(
        op="chunk_gated_delta_rule",
        channel=False,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        use_gate_in_kernel=use_gate_in_kernel,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        max_splits=max_splits,
    )
    given = q, k, v, g, beta, initial_state, A_log, dt_bias
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu)
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    backend: str | None = None,
) -> Result:
    """Gated delta rule, computed token by token: the form for decoding.

        S <- exp(g_t) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Same function as `chunk_gated_delta_rule`, evaluated as the recurrence is written; last bits may differ. The
    backward keeps a state every 64 tokens and recomputes those between.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; None: no decay. The sign is checked inside
            `wyfold.checked()` only.
        beta: [B, T, HV] any float. Write strength; None: 1.

    Arguments not listed here are those of `chunk_gated_delta_rule`.

    Returns:
        o: [B, T, HV, V], dtype of v.
        final_state: [N, HV, K, V] in `state_dtype`, or None without `output_final_state`.
        states: Only with `return_intermediate_states`; as `chunk_gated_delta_rule` returns them.

    Differentiable once in every tensor argument, through o and the final state.

    Raises:
        TypeError: An argument has the wrong Python type, or a keyword is unknown.
        ValueError: A shape, dtype, device, range or combination of options is wrong; the message names the argument.
        UnsupportedError: The backend cannot serve the call; `.reasons` explains why for each backend.

    Source:
        Gated DeltaNet, arXiv:2412.06464v3, Eq. (10) in section 3.1.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.nn.functional.normalize(torch.randn(1, 5, 2, 16), dim=-1) for _ in range(3))
        >>> g, beta, state = -torch.rand(1, 5, 2), torch.rand(1, 5, 2), None
        >>> for t in range(5):
        ...     token = (x[:, t : t + 1] for x in (q, k, v, g, beta))
        ...     o, state = wyfold.fused_recurrent_gated_delta_rule(
        ...         *token, initial_state=state, output_final_state=True
        ...     )
        >>> whole, _ = wyfold.chunk_gated_delta_rule(q, k, v, g, beta)
        >>> torch.allclose(o, whole[:, -1:], atol=1e-5)
        True
    """
    flags = DeltaFlags(
        op="fused_recurrent_gated_delta_rule",
        channel=False,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        use_gate_in_kernel=use_gate_in_kernel,
    )
    given = q, k, v, g, beta, initial_state, A_log, dt_bias
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens))


chunk_gdn = chunk_gated_delta_rule
fused_recurrent_gdn = fused_recurrent_gated_delta_rule
