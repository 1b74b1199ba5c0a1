"""Comba: the gated delta rule that reads the state along another key than it writes along."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
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
    chunk_size: int | None = None,
    batch_invariant: bool = False,
    max_splits: int | None = None,
    disable_recompute: bool = False,
    cu_seqlens_cpu: Tensor | None = None,
    cp_context: ContextParallel | None = None,
    backend: str | None = None,
) -> Result:
    """Comba over whole sequences, computed chunk by chunk.

        u = v_t - S^T p_t
        S <- exp(g_t) S + beta_t k_t u^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. The state is read before the token's decay. The bitwise guarantees
    are those of `chunk_gated_delta_rule`.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64. The paper's output correction, q - d k, is the caller's.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
        p: [B, T, H, K], dtype of q. Key along which the state is read before the write; the paper's is k times a number
            per head. None: k. Gated DeltaNet is p = exp(g) k.
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; -inf resets the state. None: no decay. The
            sign is checked inside `wyfold.checked()` only.
        beta: [B, T, HV] any float. Write strength; None: 1.
        use_qk_l2norm_in_kernel: Normalise the rows of q, k and p.

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
        Comba, arXiv:2506.02475; Eq. (5) has the output correction.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
        >>> o, state = wyfold.chunk_comba(q, k, v, 0.8 * k, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_comba",
        channel=False,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        batch_invariant=batch_invariant,
        max_splits=max_splits,
        rule="feedback",
        names=(("a", "p"),),
    )
    given = q, k, v, g, beta, initial_state, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu, (k if p is None else p, None, None))
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_comba(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
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
    backend: str | None = None,
) -> Result:
    """Comba, computed token by token: the form for decoding.

        u = v_t - S^T p_t
        S <- exp(g_t) S + beta_t k_t u^T
        o_t = scale S^T q_t

    Same function as `chunk_comba`, evaluated as the recurrence is written; last bits may differ.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64. The paper's output correction, q - d k, is the caller's.
        k: [B, T, H, K], dtype of q. Rows of unit length, or `use_qk_l2norm_in_kernel`.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H).
        p: [B, T, H, K], dtype of q. Key along which the state is read before the write; the paper's is k times a number
            per head. None: k. Gated DeltaNet is p = exp(g) k.
        g: [B, T, HV] any float. Natural log of the decay per token, <= 0; -inf resets the state. None: no decay. The
            sign is checked inside `wyfold.checked()` only.
        beta: [B, T, HV] any float. Write strength; None: 1.
        use_qk_l2norm_in_kernel: Normalise the rows of q, k and p.

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
        Comba, arXiv:2506.02475; Eq. (5) has the output correction.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> g, beta = -torch.rand(1, 100, 2), torch.rand(1, 100, 2)
        >>> o, state = wyfold.fused_recurrent_comba(q, k, v, 0.8 * k, g, beta, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_comba",
        channel=False,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        rule="feedback",
        names=(("a", "p"),),
    )
    given = q, k, v, g, beta, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(k if p is None else p, None, None)))
