"""DeltaNet: the delta rule without a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    chunk_size: int | None = None,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Delta rule over whole sequences, computed chunk by chunk.

        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. The same function as `chunk_gated_delta_rule` without a gate, with
    the same bitwise guarantees.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`; beta |k|^2 <= 2 keeps the state
            bounded.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
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
        DeltaNet, arXiv:2406.06484: delta rule in section 2.2; chunkwise form in Eqs. (8) and (9).

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> beta = torch.rand(1, 100, 2)
        >>> o, state = wyfold.chunk_delta_rule(q, k, v, beta, use_qk_l2norm_in_kernel=True, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_delta_rule",
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
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        max_splits=max_splits,
    )
    given = q, k, v, None, beta, initial_state, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu)
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
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
    backend: str | None = None,
) -> Result:
    """Delta rule, computed token by token: the form for decoding.

        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t

    Same function as `chunk_delta_rule`, evaluated as the recurrence is written; last bits may differ. The backward
    keeps a state every 64 tokens and recomputes those between.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
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
        DeltaNet, arXiv:2406.06484, section 2.2.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(2, 1, 2, 64) for _ in range(3))
        >>> state = torch.zeros(2, 2, 64, 64)
        >>> o, state = wyfold.fused_recurrent_delta_rule(
        ...     q, k, v, use_qk_l2norm_in_kernel=True, initial_state=state, output_final_state=True
        ... )
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_delta_rule",
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
    )
    given = q, k, v, None, beta, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens))
