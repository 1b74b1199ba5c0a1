"""vLLM's GDN layer on Wyfold: prompts, single tokens and drafted tokens.

States are [slots, HV, V, K]. Slot 0 is vLLM's null block: a row with that slot is skipped.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from wyfold import serving
from wyfold.integrations.engine_hooks import environment_value, with_fallback
from wyfold.runtime.unsupported import UnsupportedError

MODULE = "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn"
NULL_SLOT = 0

log = logging.getLogger("vllm.wyfold")


def install(module: ModuleType) -> str | None:
    """Replace the kernels that vLLM's module of Qwen's GDN layer calls.

    Prompts: an out-of-tree replacement of the operator class `ChunkGatedDeltaRule`. Single and drafted tokens: the
    functions of the module. Drafted tokens take a fused CUDA kernel in vLLM, unless it is disabled here. An explicit
    `VLLM_GDN_DECODE_KERNEL` is respected.
    """
    if not module.current_platform.is_cuda():
        return "Wyfold's GDN kernels in vLLM need an NVIDIA GPU. vLLM keeps its own."
    prefill = prefill_operator(module)
    module.CustomOp.register_oot(prefill, name=module.ChunkGatedDeltaRule.__name__)
    for name, ours in (
        ("fused_recurrent_gated_delta_rule_packed_decode", decode),
        ("fused_sigmoid_gating_delta_rule_update", verify),
    ):
        setattr(module, name, with_fallback(ours, getattr(module, name), log))
    drafts = "and drafted tokens"
    if environment_value("VLLM_GDN_DECODE_KERNEL") is not None:
        drafts = "(drafted tokens by VLLM_GDN_DECODE_KERNEL)"
    else:
        module.QwenGatedDeltaNetAttention._can_use_fused_gdn_mtp_decode = _use_no_fused_kernel
    return f"Wyfold serves vLLM's GDN layers: prompts, single tokens {drafts}."


def _use_no_fused_kernel(self: Any, attn_metadata: Any) -> bool:
    """Replacement of the layer's `_can_use_fused_gdn_mtp_decode`: drafted tokens take the function replaced above."""
    return False


def prefill_operator(module: ModuleType) -> type:
    """Return a subclass of vLLM's `ChunkGatedDeltaRule` that runs Wyfold's prefill.

    An explicit `--gdn-prefill-backend` is respected: only "auto" selects Wyfold.
    """
    base: Any = module.ChunkGatedDeltaRule

    class WyfoldChunkGatedDeltaRule(base):
        def __init__(self) -> None:
            super().__init__()
            requested, _ = module._resolve_gdn_prefill_backend(module.get_current_vllm_config())
            if requested != "auto":
                log.info("Wyfold leaves GDN prompts to vLLM, because --gdn-prefill-backend is %s.", requested)
                return
            # vLLM plans checkpoints for FlashInfer, and metadata for others, by this name. Wyfold needs neither.
            self.gdn_prefill_backend = "triton"
            self._forward_method = with_fallback(prefill, self.forward_native, log)

    return WyfoldChunkGatedDeltaRule


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    output_final_state: bool,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    core_attn_out: Tensor | None = None,
    aiter_prefill_metadata: object | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run prompts chunk by chunk, as `ChunkGatedDeltaRule` does.

    Args:
        q, k: [1, T, H, K].
        v: [1, T, HV, V].
        g: [1, T, HV] natural log of the decay.
        beta: [1, T, HV] write strength.
        initial_state: [N, HV, V, K] states, gathered from the pool. Not written.
        output_final_state: Return the states after the last tokens.
        cu_seqlens: [N+1] boundaries.
        core_attn_out: Buffer whose first elements also receive the output, if given.
        chunk_indices, chunk_offsets, aiter_prefill_metadata: Unused. Other kernels of vLLM need them.

    Returns:
        o: [1, T, HV, V], dtype of v.
        final_state: [N, HV, V, K] float32, or None. vLLM scatters it into the pool.
    """
    states = initial_state.to(torch.float32, copy=True)
    o = serving.prefill(
        q, k, v, g, beta, states, state_v_first=True, cu_seqlens=cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    if core_attn_out is not None:
        core_attn_out.view(-1)[: o.numel()].copy_(o.view(-1))
    return o, states if output_final_state else None


def decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run one token per row, as `fused_recurrent_gated_delta_rule_packed_decode` does.

    Args:
        mixed_qkv: [N, 2 H K + HV V] q, k and v after the convolution.
        a, b: [N, HV] pre-activations of the gate and of the write strength.
        A_log, dt_bias: [HV].
        initial_state: [slots, HV, V, K] pool, updated in place.
        out: [N, 1, HV, V], written.
        ssm_state_indices: [N] slots.

    Returns:
        out, initial_state: The tensors given.
    """
    if not use_qk_l2norm_in_kernel:
        raise UnsupportedError("decode_packed: use_qk_l2norm_in_kernel must be True, got False", {})
    HV, V, K = initial_state.shape[-3:]
    H = (mixed_qkv.shape[1] - HV * V) // (2 * K)
    serving.decode_packed(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, ssm_state_indices, heads=(H, HV), dims=(K, V),
        state_v_first=True, pad_slot_id=NULL_SLOT, out=out[:, 0], scale=scale,
    )  # fmt: skip
    return out, initial_state


def verify(
    A_log: Tensor,
    a: Tensor,
    b: Tensor,
    dt_bias: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run single or drafted tokens, as `fused_sigmoid_gating_delta_rule_update` does.

    Args:
        A_log, dt_bias: [HV].
        a, b: [T, HV] pre-activations of the gate and of the write strength.
        q, k: [1, T, H, K].
        v: [1, T, HV, V].
        beta, threshold: Parameters of the softplus. Must be 1 and 20; above 20 the softplus is its argument to within
            2.1e-9.
        initial_state: [slots, HV, V, K] pool, updated in place.
        cu_seqlens: [N+1] boundaries of the rows' tokens.
        ssm_state_indices: [N, C] slots after each drafted token, or [N] for single tokens. More rows than N are legal.
        num_accepted_tokens: [N] accepted tokens of the previous call, from whose slot a row starts.

    Returns:
        o: [1, T, HV, V], dtype of v.
        initial_state: The tensor given.
    """
    if beta != 1.0 or threshold != 20.0 or is_kda or not inplace_final_state:
        raise UnsupportedError(
            "verify: needs beta=1, threshold=20, is_kda=False and inplace_final_state=True, got "
            f"{beta=}, {threshold=}, {is_kda=}, {inplace_final_state=}",
            {},
        )
    if initial_state is None or ssm_state_indices is None or cu_seqlens is None:
        raise UnsupportedError("verify: needs initial_state, ssm_state_indices and cu_seqlens, got None", {})
    T, HV = v.shape[1], v.shape[2]
    slots, accepted = rows(cu_seqlens, ssm_state_indices, num_accepted_tokens)
    o = serving.verify(
        q, k, v, a.view(1, T, HV), b.view(1, T, HV), initial_state, slots,
        state_v_first=True, cu_seqlens=cu_seqlens, pad_slot_id=NULL_SLOT, use_gate_in_kernel=True, A_log=A_log,
        dt_bias=dt_bias, use_beta_sigmoid_in_kernel=True, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        num_accepted_tokens=accepted,
    )  # fmt: skip
    return o, initial_state


def rows(cu_seqlens: Tensor, state_indices: Tensor, num_accepted_tokens: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Slots [N, C] and accepted tokens [N] of the N rows that cu_seqlens has. vLLM's buffers may have more rows."""
    N = len(cu_seqlens) - 1
    slots = state_indices[:N]
    accepted = None if num_accepted_tokens is None else num_accepted_tokens[:N]
    return slots if slots.ndim == 2 else slots[:, None], accepted
