"""vLLM's KDA kernels on Wyfold: prompts, single tokens and drafted tokens.

Its Kimi Linear layer imports these functions when it runs, and so does its Kimi K3 layer where none of its CUDA kernels
serves the card. States are [slots, H, V, K]. Slot 0 is vLLM's null block.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch
from torch import Tensor

from wyfold import serving
from wyfold.integrations.engine_hooks import with_fallback
from wyfold.integrations.vllm.gdn import NULL_SLOT, rows

MODULE = "vllm.models.kimi_k3.nvidia.ops.third_party.kda"

log = logging.getLogger("vllm.wyfold")


def install(module: ModuleType) -> str | None:
    """Replace the three functions of vLLM's package of KDA kernels that its layers import."""
    for name, ours in (
        ("chunk_kda_with_fused_gate", prefill),
        ("fused_recurrent_kda_packed_decode", decode),
        ("fused_recurrent_kda", verify),
    ):
        setattr(module, name, with_fallback(ours, getattr(module, name), log))
    return "Wyfold serves vLLM's KDA layers of Kimi Linear: prompts, single tokens and drafted tokens."


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    lower_bound: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    out: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Run prompts chunk by chunk, as `chunk_kda_with_fused_gate` does.

    Args:
        q, k, v: [1, T, H, K] and [1, T, H, V].
        raw_g: [1, T, H, K] pre-activation of the gate.
        raw_beta: [1, T, H] logit of the write strength.
        A_log: [H]. g_bias: [H * K] or None.
        initial_state: [N, H, V, K] states, gathered from the pool. Not written. None: zeros.
        lower_bound: Bound of the bounded gate. None: the softplus gate.
        cu_seqlens: [N+1] boundaries.
        out: [1, T, H, V], written and returned, if given.
        kwargs: Ignored, as in vLLM.

    Returns:
        o: [1, T, H, V].
        final_state: [N, H, V, K] float32, or None.
    """
    if initial_state is None:
        N = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
        states = v.new_zeros(N, *v.shape[2:], k.shape[-1], dtype=torch.float32)
    else:
        states = initial_state.to(torch.float32, copy=True)
    o = serving.prefill(
        q, k, v, raw_g, raw_beta, states, state_v_first=True, cu_seqlens=cu_seqlens, use_gate_in_kernel=True,
        A_log=A_log, dt_bias=g_bias, lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, scale=scale,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, out=out,
    )  # fmt: skip
    return o, states if output_final_state else None


def decode(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    initial_state: Tensor,
    state_indices: Tensor,
    scale: float | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run one token per row, as `fused_recurrent_kda_packed_decode` does.

    Args:
        mixed_qkv: [N, 2 H K + H V] q, k and v after the convolution.
        raw_g: [1, N, H, K]. raw_beta: [1, N, H].
        A_log: [H]. dt_bias: [H * K].
        initial_state: [slots, H, V, K] pool, updated in place.
        state_indices: [N] slots.
        out: [1, N, H, V], written and returned, if given.

    Returns:
        o: [1, N, H, V].
        initial_state: The tensor given.
    """
    H, V, K = initial_state.shape[-3:]
    o = serving.decode_packed(
        mixed_qkv, raw_g[0], raw_beta[0], A_log, dt_bias, initial_state, state_indices, heads=(H, H), dims=(K, V),
        state_v_first=True, pad_slot_id=NULL_SLOT, lower_bound=lower_bound, scale=scale,
        out=None if out is None else out[0],
    )  # fmt: skip
    return (o[None] if out is None else out), initial_state


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    initial_state: Tensor,
    cu_seqlens: Tensor,
    ssm_state_indices: Tensor,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    fuse_gate: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Run single or drafted tokens, as `fused_recurrent_kda` does.

    Args:
        q, k, v: [1, T, H, K] and [1, T, H, V].
        raw_g: [1, T, H, K]. raw_beta: [1, T, H].
        A_log: [H]. dt_bias: [H * K] or None.
        initial_state: [slots, H, V, K] pool, updated in place.
        cu_seqlens: [N+1] boundaries of the rows' tokens.
        ssm_state_indices: [N, C] slots after each drafted token, or [N] for single tokens. More rows than N are legal.
        num_accepted_tokens: [N] accepted tokens of the previous call, from whose slot a row starts.
        out: [1, T, H, V], written and returned, if given.
        fuse_gate: Unused. The gate is always computed inside the launch.

    Returns:
        o: [1, T, H, V].
        initial_state: The tensor given.
    """
    slots, accepted = rows(cu_seqlens, ssm_state_indices, num_accepted_tokens)
    o = serving.verify(
        q, k, v, raw_g, raw_beta, initial_state, slots, state_v_first=True,
        cu_seqlens=cu_seqlens, pad_slot_id=NULL_SLOT, use_gate_in_kernel=True, A_log=A_log, dt_bias=dt_bias,
        lower_bound=lower_bound, use_beta_sigmoid_in_kernel=True, use_qk_l2norm_in_kernel=True, out=out,
        num_accepted_tokens=accepted,
    )  # fmt: skip
    return o, initial_state
