"""GDN-2: the delta rule with a decay per key channel, an erase gate and a write gate."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    chunk_size: int | None = None,
    batch_invariant: bool = False,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Gated DeltaNet-2 over whole sequences, computed chunk by chunk.

        S <- diag(exp(g_t)) S
        S <- S + k_t (w_t * v_t - S^T (b_t * k_t))^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. With b = w = beta it is `chunk_kda`. The bitwise guarantees are
    those of `chunk_gated_delta_rule`.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; -inf resets the channel.
            None: no decay. The sign is checked inside `wyfold.checked()` only.
        b: [B, T, HV, K] any float. Erase gate of the key channels, in [0, 2]. None: 1.
        w: [B, T, HV, V] any float. Write gate of the value channels, in [0, 1]. None: 1.
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
        Gated DeltaNet-2, arXiv:2605.22791, Eqs. (9) and (10).

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, g = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> erase, write = torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2, 64)
        >>> o, state = wyfold.chunk_gdn2(
        ...     q, k, v, -g.abs(), erase, write, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_gdn2",
        channel=True,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        batch_invariant=batch_invariant,
        max_splits=max_splits,
        rule="keys",
    )
    given = q, k, v, g, None, initial_state, A_log, dt_bias
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu, (None, b, w))
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    b: Tensor | None = None,
    w: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    backend: str | None = None,
) -> Result:
    """Gated DeltaNet-2, computed token by token: the form for decoding.

        S <- diag(exp(g_t)) S
        S <- S + k_t (w_t * v_t - S^T (b_t * k_t))^T
        o_t = scale S^T q_t

    Same function as `chunk_gdn2`, evaluated as the recurrence is written; last bits may differ.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
        g: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; -inf resets the channel.
            None: no decay. The sign is checked inside `wyfold.checked()` only.
        b: [B, T, HV, K] any float. Erase gate of the key channels, in [0, 2]. None: 1.
        w: [B, T, HV, V] any float. Write gate of the value channels, in [0, 1]. None: 1.
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
        Gated DeltaNet-2, arXiv:2605.22791, Eqs. (9) and (10).

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, g = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> erase, write = torch.rand(1, 100, 2, 64), torch.rand(1, 100, 2, 64)
        >>> o, state = wyfold.fused_recurrent_gdn2(
        ...     q, k, v, -g.abs(), erase, write, use_qk_l2norm_in_kernel=True, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_gdn2",
        channel=True,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        use_gate_in_kernel=use_gate_in_kernel,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        rule="keys",
    )
    given = q, k, v, g, None, initial_state, A_log, dt_bias
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(None, b, w)))
