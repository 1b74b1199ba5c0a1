"""DeltaNet: the delta rule without a gate."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.delta_arguments import ChunkFlags, Flags, GateFlags
from wyfold.ops.delta_call import call_delta
from wyfold.runtime.layout import SequenceLayout

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
    """Delta rule over whole sequences, chunk by chunk.

        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t


    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        beta: [B, T, HV] any float. Write strength; None: 1.

    All other arguments, results and errors: `chunk_gated_delta_rule`.

    Source:
        DeltaNet, arXiv:2406.06484, the delta rule and its chunkwise form.
    """
    return call_delta(
        "chunk_delta_rule",
        q,
        k,
        v,
        None,
        beta,
        GateFlags(),
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
    """Delta rule, token by token.

        S <- S + beta_t k_t (v_t - S^T k_t)^T
        o_t = scale S^T q_t


    Means the same as the chunk form, with the arithmetic of the recurrence itself: the form for decoding. Its
    backward starts from states every 64 tokens and rebuilds the others.

    Args:
        q: [B, T, H, K] float32, float16, bfloat16, or float64.
        k: [B, T, H, K], dtype of q.
        v: [B, T, HV, V], dtype of q.
        beta: [B, T, HV] any float. Write strength; None: 1.

    All other arguments, results and errors: `chunk_gated_delta_rule`.

    Source:
        DeltaNet, arXiv:2406.06484.
    """
    return call_delta(
        "fused_recurrent_delta_rule",
        q,
        k,
        v,
        None,
        beta,
        GateFlags(),
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
