"""KDA: the delta rule with one decay per token and key channel."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_kda(
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
    safe_gate: bool = False,
    lower_bound: float | None = None,
    chunk_size: int | None = None,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Kimi Delta Attention over whole sequences, computed chunk by chunk.

        S <- diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros, with one decay per token and key channel. The bitwise guarantees
    are those of `chunk_gated_delta_rule`.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`; beta |k|^2 <= 2 keeps the state
            bounded.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; -inf resets the channel.
            None: no decay. The sign is checked inside `wyfold.checked()` only: elsewhere g > 0 is no error, and the
            state grows.
        beta: [B, T, HV] any float. Write strength; None: 1.
        use_gate_in_kernel: g is the pre-activation; the decay is -exp(A_log) softplus(g + dt_bias), or with a
            `lower_bound` lower_bound sigmoid(exp(A_log) (g + dt_bias)).
        dt_bias: [HV, K] any float, or [HV * K]. Bias of the pre-activation. None: 0.
        safe_gate: Clamp log decays from below at `lower_bound`, which is then in [-5, 0) and defaults to -5. Clamped
            entries get no gradient. Same in every backend.
        lower_bound: < 0. Bound of the activation or of `safe_gate`, natural log per token. None: the softplus gate.

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
        Kimi Linear, arXiv:2510.26692: Eq. (1) in section 3; chunkwise form in Eqs. (3) to (9), section 3.1.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, g = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> o, state = wyfold.chunk_kda(
        ...     q, k, v, g, torch.rand(1, 100, 2), use_gate_in_kernel=True, A_log=torch.zeros(2), lower_bound=-5.0,
        ...     use_qk_l2norm_in_kernel=True, output_final_state=True,
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_kda",
        channel=True,
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
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        max_splits=max_splits,
    )
    given = q, k, v, g, beta, initial_state, A_log, dt_bias
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu)
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_kda(
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
    safe_gate: bool = False,
    lower_bound: float | None = None,
    backend: str | None = None,
) -> Result:
    """Kimi Delta Attention, computed token by token: the form for decoding.

        S <- diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Same function as `chunk_kda`, evaluated as the recurrence is written; last bits may differ. The backward keeps a
    state every 64 tokens and recomputes those between.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; None: no decay. The sign
            is checked inside `wyfold.checked()` only.
        beta: [B, T, HV] any float. Write strength; None: 1.
        use_gate_in_kernel, safe_gate, lower_bound: As in `chunk_kda`.
        dt_bias: [HV, K] any float, or [HV * K]. Bias of the pre-activation. None: 0.

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
        Kimi Linear, arXiv:2510.26692, Eq. (1) in section 3.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, g = (torch.randn(2, 1, 2, 64) for _ in range(4))
        >>> o, state = wyfold.fused_recurrent_kda(
        ...     q, k, v, -g.abs(), use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_kda",
        channel=True,
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
        safe_gate=safe_gate,
        lower_bound=lower_bound,
    )
    given = q, k, v, g, beta, initial_state, A_log, dt_bias
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens))
