"""KDA: the delta rule with one decay per token and key channel."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_arguments import ChunkFlags, Flags, GateFlags
from wyfold.ops.delta_call import call_delta
from wyfold.runtime.layout import SequenceLayout

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
    """Kimi Delta Attention over whole sequences, chunk by chunk.

        S <- diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t


    With `use_gate_in_kernel`, g = -exp(A_log) softplus(g + dt_bias), or with a `lower_bound`
    g = lower_bound * sigmoid(exp(A_log) (g + dt_bias)).

    `safe_gate` raises log gates below `lower_bound` (default -5, and then in [-5, 0)) to it, without gradient, in
    every backend.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; None: no decay.
        beta: [B, T, HV] any float. Write strength; None: 1.
        dt_bias: [HV, K] any float, or [HV * K]. Bias of the activation. None: 0.

    All other arguments, results and errors: `chunk_gated_delta_rule`.

    Source:
        Kimi Linear, arXiv:2510.26692, Kimi Delta Attention.
    """
    return call_delta(
        "chunk_kda",
        q,
        k,
        v,
        g,
        beta,
        GateFlags(True, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound),
        ChunkFlags(chunk_size, disable_recompute, cu_seqlens_cpu, cp_context, max_splits),
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        flags=Flags(
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
        ),
    )


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
    """Kimi Delta Attention, token by token.

        S <- diag(exp(g_t)) S
        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t


    Means the same as the chunk form, with the arithmetic of the recurrence itself: the form for decoding. Its
    backward starts from states every 64 tokens and rebuilds the others.

    With `use_gate_in_kernel`, g = -exp(A_log) softplus(g + dt_bias), or with a `lower_bound`
    g = lower_bound * sigmoid(exp(A_log) (g + dt_bias)).

    `safe_gate` raises log gates below `lower_bound` (default -5, and then in [-5, 0)) to it, without gradient, in
    every backend.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; None: no decay.
        beta: [B, T, HV] any float. Write strength; None: 1.
        dt_bias: [HV, K] any float, or [HV * K]. Bias of the activation. None: 0.

    All other arguments, results and errors: `chunk_gated_delta_rule`.

    Source:
        Kimi Linear, arXiv:2510.26692.
    """
    return call_delta(
        "fused_recurrent_kda",
        q,
        k,
        v,
        g,
        beta,
        GateFlags(True, use_gate_in_kernel, A_log, dt_bias, safe_gate, lower_bound),
        None,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        flags=Flags(
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
        ),
    )
