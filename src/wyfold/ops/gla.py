"""Gated linear attention: a decayed sum of outer products, with a gate per key channel, per head, or none.

The kernels are those of the delta rules, with `DeltaOptions.erases` off. Columns of the state do not depend on each
other, so a decay per value channel is computed with a value head for each channel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_call import DELTA, delta_arguments, run_across_ranks
from wyfold.ops.delta_checks import DeltaFlags
from wyfold.ops.value_channels import split_value_channels
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay_cache import planned

Result = tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor]


def chunk_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
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
    """Gated linear attention over whole sequences, computed chunk by chunk.

        S <- diag(exp(g_t)) S + k_t v_t^T
        o_t = scale S^T q_t

    Per value head, from S = initial_state or zeros. With one decay per head it is simple GLA, of which Mamba-2 and
    Lightning attention are cases, and without a gate linear attention. The bitwise guarantees are those of
    `chunk_gated_delta_rule`. Keys need no unit length.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q; value head j reads key head j // (HV // H). V is at most 512.
        g: [B, T, HV, K] any float, or [B, T, HV] for one decay per head. Natural log of the decay per token, <= 0; -inf
            resets; computed in float32. None: no decay. The sign is checked inside `wyfold.checked()` only.

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
        GLA, arXiv:2312.06635, section 4.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
        >>> g = torch.nn.functional.logsigmoid(torch.randn(1, 100, 2, 64)) / 16
        >>> o, state = wyfold.chunk_gla(q, k, v, g, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    op = "chunk_gla"
    columns = split_value_channels(op, q, k, v, g, None, initial_state, state_v_first)
    flags = DeltaFlags(
        op=op,
        channel=columns.channel,
        recurrent=False,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        erases=False,
        chunk_size=chunk_size,
        disable_recompute=disable_recompute,
        max_splits=max_splits,
    )
    given = q, k, columns.v, columns.g, None, columns.states, None, None
    tensors, flags = delta_arguments(flags, given, cu_seqlens, cu_seqlens_cpu)
    return columns.joined(
        planned(DELTA, tensors, flags) if cp_context is None else run_across_ranks(tensors, flags, cp_context)
    )


def fused_recurrent_gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    state_v_first: bool = False,
    state_dtype: torch.dtype | None = None,
    cu_seqlens: Tensor | SequenceLayout | None = None,
    return_intermediate_states: bool = False,
    checkpoint_every: int | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Result:
    """Gated linear attention, computed token by token: the form for decoding.

        S <- diag(exp(g_t)) S diag(exp(gv_t)) + k_t v_t^T
        o_t = scale S^T q_t

    Same function as `chunk_gla`, evaluated as the recurrence is written; last bits may differ. The backward keeps a
    state every 64 tokens and recomputes those between. With gv, every value channel is computed as a head of 8 columns,
    at 8 times the work.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q. V is at most 512.
        g: [B, T, HV, K] any float, or [B, T, HV] for one decay per head. Natural log of the decay per token, <= 0;
            None: no decay.
        gv: [B, T, HV, V] any float. Natural log of the decay per token and value channel, <= 0. None: no decay.

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
        GLA, arXiv:2312.06635, section 4.

    Examples:
        >>> import torch, wyfold
        >>> q, k, v = (torch.randn(2, 1, 2, 64) for _ in range(3))
        >>> g, state = -torch.rand(2, 1, 2, 64), torch.zeros(2, 2, 64, 64)
        >>> o, state = wyfold.fused_recurrent_gla(q, k, v, g, initial_state=state, output_final_state=True)
        >>> o.shape, state.shape
        (torch.Size([2, 1, 2, 64]), torch.Size([2, 2, 64, 64]))
    """
    op = "fused_recurrent_gla"
    columns = split_value_channels(op, q, k, v, g, gv, initial_state, state_v_first, cu_seqlens)
    flags = DeltaFlags(
        op=op,
        channel=columns.channel,
        recurrent=True,
        scale=scale,
        output_final_state=output_final_state,
        state_v_first=state_v_first,
        state_dtype=state_dtype,
        return_intermediate_states=return_intermediate_states,
        checkpoint_every=checkpoint_every,
        batch_invariant=batch_invariant,
        backend=backend,
        erases=False,
    )
    given = q, k, columns.v, columns.g, None, columns.states, None, None
    return columns.joined(planned(DELTA, *delta_arguments(flags, given, cu_seqlens)))
