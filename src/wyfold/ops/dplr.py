"""DPLR: the delta rule whose transition is diagonal plus low rank; IPLR: without a decay."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
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
    """Diagonal-plus-low-rank delta rule over whole sequences, computed chunk by chunk.

        w_t = S^T a_t
        S <- diag(exp(gk_t)) S + b_t w_t^T + k_t v_t^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. Nothing bounds a and b: where no transition
    diag(exp(gk_t)) + b_t a_t^T enlarges a vector, all factors of the chunk form are bounded by the lengths of q, k
    and b. The bitwise guarantees are those of `chunk_gated_delta_rule`.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Written along; need not have unit length.
        v: [B, T, HV, V], dtype of q; value head j reads head j // (HV // H) of q, k, a and b.
        a: [B, T, H, K], dtype of q. Reads the state before the token's decay.
        b: [B, T, H, K], dtype of q. What a reads is added along b.
        gk: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; -inf resets the channel.
            None: no decay. The sign is checked inside `wyfold.checked()` only.
        safe_gate: Raise log decays to `lower_bound` from below. Raised entries get no gradient. Not needed for
            accuracy: every log decay from 0 to minus infinity is exact.
        lower_bound: In [-5, 0), with `safe_gate`. None: -5.

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
        Diagonal-plus-low-rank transitions: RWKV-7, arXiv:2503.14456; the WY form of a chunk: DeltaNet,
        arXiv:2406.06484, Eqs. (8) and (9).

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, gk = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> a, b = -kk, 0.5 * kk
        >>> o, state = wyfold.chunk_dplr_delta_rule(q, k, v, a, b, -gk.abs(), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_dplr_delta_rule",
        channel=True,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        batch_invariant=batch_invariant,
        max_splits=max_splits,
        rule="given",
        names=(("g", "gk"),),
    )
    given = q, k, v, gk, None, initial_state, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu, (a, b, None))
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_dplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    gk: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    backend: str | None = None,
) -> Result:
    """Diagonal-plus-low-rank delta rule, computed token by token: the form for decoding.

        w_t = S^T a_t
        S <- diag(exp(gk_t)) S + b_t w_t^T + k_t v_t^T
        o_t = scale S^T q_t

    Same function as `chunk_dplr_delta_rule`, evaluated as the recurrence is written; last bits may differ.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Written along; need not have unit length.
        v: [B, T, HV, V], dtype of q; value head j reads head j // (HV // H) of q, k, a and b.
        a: [B, T, H, K], dtype of q. Reads the state before the token's decay.
        b: [B, T, H, K], dtype of q. What a reads is added along b.
        gk: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; -inf resets the channel.
            None: no decay. The sign is checked inside `wyfold.checked()` only.
        safe_gate, lower_bound: As in `chunk_dplr_delta_rule`.

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
        Diagonal-plus-low-rank transitions: RWKV-7, arXiv:2503.14456; the WY form of a chunk: DeltaNet,
        arXiv:2406.06484, Eqs. (8) and (9).

    Examples:
        >>> import torch, wyfold
        >>> q, k, v, gk = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> a, b = -kk, 0.5 * kk
        >>> o, state = wyfold.fused_recurrent_dplr_delta_rule(q, k, v, a, b, -gk.abs(), output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_dplr_delta_rule",
        channel=True,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        safe_gate=safe_gate,
        lower_bound=lower_bound,
        rule="given",
        names=(("g", "gk"),),
    )
    given = q, k, v, gk, None, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(a, b, None)))


def chunk_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
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
    """Identity-plus-low-rank delta rule over whole sequences, computed chunk by chunk.

        w_t = S^T a_t
        S <- S + b_t w_t^T + k_t v_t^T
        o_t = scale S^T q_t

    `chunk_dplr_delta_rule` without a decay.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Written along; need not have unit length.
        v: [B, T, HV, V], dtype of q; value head j reads head j // (HV // H) of q, k, a and b.
        a: [B, T, H, K], dtype of q. Reads the state of the token before.
        b: [B, T, H, K], dtype of q. What a reads is added along b.

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
        Identity-plus-low-rank transitions: DeltaNet, arXiv:2406.06484, section 2.2; with negative eigenvalues,
        arXiv:2411.12537.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> a, b = -kk, 0.5 * kk
        >>> o, state = wyfold.chunk_iplr_delta_rule(q, k, v, a, b, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_iplr_delta_rule",
        channel=True,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        batch_invariant=batch_invariant,
        max_splits=max_splits,
        rule="given",
    )
    given = q, k, v, None, None, initial_state, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu, (a, b, None))
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_iplr_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    backend: str | None = None,
) -> Result:
    """Identity-plus-low-rank delta rule, computed token by token.

        w_t = S^T a_t
        S <- S + b_t w_t^T + k_t v_t^T
        o_t = scale S^T q_t

    `fused_recurrent_dplr_delta_rule` without a decay.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q. Written along; need not have unit length.
        v: [B, T, HV, V], dtype of q; value head j reads head j // (HV // H) of q, k, a and b.
        a: [B, T, H, K], dtype of q. Reads the state of the token before.
        b: [B, T, H, K], dtype of q. What a reads is added along b.

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
        Identity-plus-low-rank transitions: DeltaNet, arXiv:2406.06484, section 2.2; with negative eigenvalues,
        arXiv:2411.12537.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> a, b = -kk, 0.5 * kk
        >>> o, state = wyfold.fused_recurrent_iplr_delta_rule(q, k, v, a, b, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_iplr_delta_rule",
        channel=True,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        backend=backend,
        rule="given",
    )
    given = q, k, v, None, None, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(a, b, None)))
