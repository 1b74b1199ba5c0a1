"""RWKV-7's recurrence: the DPLR delta rule under RWKV-7's names, with scale 1."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = 1.0,
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
    """RWKV-7's recurrence over whole sequences, computed chunk by chunk.

        u_t = S^T a_t
        S <- diag(exp(w_t)) S + b_t u_t^T + k_t v_t^T
        o_t = scale S^T r_t

    `chunk_dplr_delta_rule` with q = r, gk = w and scale 1.

    Args:
        r: [B, T, H, K] float32, float16, bfloat16, or float64. Receptance: the query.
        w: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; the paper's is
            -exp(-0.5) sigmoid(..). None: no decay. The sign is checked inside `wyfold.checked()` only.
        k: [B, T, H, K], dtype of r. Replacement key, written along.
        v: [B, T, HV, V], dtype of r; value head j reads head j // (HV // H) of the others.
        a: [B, T, H, K], dtype of r. Removal key, negated, of unit length. Reads the state before the token's decay.
        b: [B, T, H, K], dtype of r. The removal key times the in-context learning rate.
        scale: Factor of r. None: K ** -0.5.
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
        RWKV-7, arXiv:2503.14456: the weighted key-value state.

    Examples:
        >>> import torch, wyfold
        >>> r, k, v, w = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> rate = torch.rand(1, 100, 2, 64)
        >>> w = -0.6 * w.sigmoid()
        >>> o, state = wyfold.chunk_rwkv7(r, w, k, v, -kk, rate * kk, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="chunk_rwkv7",
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
        names=(("q", "r"), ("g", "w")),
    )
    given = r, k, v, w, None, initial_state, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu, (a, b, None))
    return planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)


def fused_recurrent_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    scale: float | None = 1.0,
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
    """RWKV-7's recurrence, computed token by token: the form for decoding.

        u_t = S^T a_t
        S <- diag(exp(w_t)) S + b_t u_t^T + k_t v_t^T
        o_t = scale S^T r_t

    `fused_recurrent_dplr_delta_rule` with q = r, gk = w and scale 1.

    Args:
        r: [B, T, H, K] float32, float16, bfloat16, or float64. Receptance: the query.
        w: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; the paper's is
            -exp(-0.5) sigmoid(..). None: no decay. The sign is checked inside `wyfold.checked()` only.
        k: [B, T, H, K], dtype of r. Replacement key, written along.
        v: [B, T, HV, V], dtype of r; value head j reads head j // (HV // H) of the others.
        a: [B, T, H, K], dtype of r. Removal key, negated, of unit length. Reads the state before the token's decay.
        b: [B, T, H, K], dtype of r. The removal key times the in-context learning rate.
        scale: Factor of r. None: K ** -0.5.
        safe_gate, lower_bound: As in `chunk_rwkv7`.

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
        RWKV-7, arXiv:2503.14456: the weighted key-value state.

    Examples:
        >>> import torch, wyfold
        >>> r, k, v, w = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> rate = torch.rand(1, 100, 2, 64)
        >>> w = -0.6 * w.sigmoid()
        >>> o, state = wyfold.fused_recurrent_rwkv7(r, w, k, v, -kk, rate * kk, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_recurrent_rwkv7",
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
        names=(("q", "r"), ("g", "w")),
    )
    given = r, k, v, w, None, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(a, b, None)))


def fused_mul_recurrent_rwkv7(
    r: Tensor,
    w: Tensor | None,
    k: Tensor,
    v: Tensor,
    kk: Tensor,
    a: Tensor,
    *,
    scale: float | None = 1.0,
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
    """RWKV-7's recurrence, computed token by token from removal key and learning rate.

        u_t = S^T kk_t
        S <- diag(exp(w_t)) S - (a_t * kk_t) u_t^T + k_t v_t^T
        o_t = scale S^T r_t

    `fused_recurrent_rwkv7` with a = -kk and b = kk * a, made in the precision of the state.

    Args:
        r: [B, T, H, K] float32, float16, bfloat16, or float64. Receptance: the query.
        w: [B, T, HV, K] any float. Natural log of the decay per token and key channel, <= 0; the paper's is
            -exp(-0.5) sigmoid(..). None: no decay. The sign is checked inside `wyfold.checked()` only.
        k: [B, T, H, K], dtype of r. Replacement key, written along.
        v: [B, T, HV, V], dtype of r; value head j reads head j // (HV // H) of the others.
        kk: [B, T, H, K], dtype of r. Removal key of unit length.
        a: [B, T, H, K], dtype of r. In-context learning rate in [0, 1].
        scale: Factor of r. None: K ** -0.5.
        safe_gate, lower_bound: As in `chunk_rwkv7`.

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
        RWKV-7, arXiv:2503.14456: the weighted key-value state.

    Examples:
        >>> import torch, wyfold
        >>> r, k, v, w = (torch.randn(1, 100, 2, 64) for _ in range(4))
        >>> kk = torch.nn.functional.normalize(torch.randn(1, 100, 2, 64), dim=-1)
        >>> rate = torch.rand(1, 100, 2, 64)
        >>> w = -0.6 * w.sigmoid()
        >>> o, state = wyfold.fused_mul_recurrent_rwkv7(r, w, k, v, kk, rate, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    flags = DeltaFlags(
        op="fused_mul_recurrent_rwkv7",
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
        rule="rates",
        names=(("q", "r"), ("g", "w"), ("a", "kk"), ("b", "a")),
    )
    given = r, k, v, w, None, initial_state, None, None
    return planned(DELTA, *delta_arguments(flags, given, cu_seqlens, columns=(kk, a, None)))
