"""vLLM's KDA kernels of GLM-5.3 on Wyfold: prompts where vLLM does not choose FlashKDA, single and drafted tokens.

States are [slots, H, V, K]. Slot 0 is vLLM's null block.
"""

from __future__ import annotations

import logging
from types import ModuleType

import torch
from torch import Tensor

from wyfold import serving
from wyfold.integrations.engine_hooks import with_fallback
from wyfold.integrations.vllm import kda
from wyfold.runtime.unsupported import UnsupportedError

MODULE = "vllm.models.glm5next.nvidia.ops.third_party.kda"

log = logging.getLogger("vllm.wyfold")


def install(module: ModuleType) -> str | None:
    """Replace the two functions of vLLM's package of KDA kernels that its GLM-5.3 layer imports."""
    for name, ours in (("chunk_kda_with_fused_gate", prefill), ("fused_recurrent_kda", verify)):
        setattr(module, name, with_fallback(ours, getattr(module, name), log))
    return (
        "Wyfold serves vLLM's KDA layers of GLM-5.3: single and drafted tokens, and prompts where vLLM does not "
        "choose FlashKDA."
    )


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    raw_g: Tensor,
    beta: Tensor,
    A_log: Tensor,
    g_bias: Tensor | None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float = -5.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor | None]:
    """Run prompts chunk by chunk, as `chunk_kda_with_fused_gate` of GLM-5.3 does.

    Args:
        beta: [1, T, H] write strength, after its sigmoid.
        safe_gate: The gate is the bounded one. False: the softplus gate, without `lower_bound`.

    Other arguments and results are those of `kda.prefill`.
    """
    if initial_state is None:
        raise UnsupportedError("prefill: initial_state must be a tensor, got None", {})
    states = initial_state.to(torch.float32, copy=True)
    o = serving.prefill(
        q, k, v, raw_g.reshape(*v.shape[:3], -1), beta.reshape(v.shape[:3]), states, state_v_first=True,
        cu_seqlens=cu_seqlens, use_gate_in_kernel=True, A_log=A_log.reshape(-1),
        dt_bias=None if g_bias is None else g_bias.reshape(-1), lower_bound=lower_bound if safe_gate else None,
        scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
    )  # fmt: skip
    return o, states if output_final_state else None


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    use_qk_l2norm_in_kernel: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    out: Tensor | None = None,
    sigmoid_beta: bool = False,
    a_log: Tensor | None = None,
    g_bias: Tensor | None = None,
    compute_gate: bool = False,
    lower_bound: float | None = -5.0,
    **kwargs: object,
) -> tuple[Tensor, Tensor]:
    """Run single or drafted tokens, as `fused_recurrent_kda` of GLM-5.3 does.

    Args:
        g: [1, T, H, K] pre-activation of the bounded gate.
        beta: [1, T, H] logit of the write strength.
        sigmoid_beta, compute_gate: Must be True: g and beta are computed inside the launch.
        a_log, g_bias, lower_bound: Parameters of the bounded gate, which must be given.

    Other arguments and results are those of `kda.verify`.
    """
    if beta is None or initial_state is None or cu_seqlens is None or ssm_state_indices is None:
        raise UnsupportedError("verify: beta, initial_state, cu_seqlens and ssm_state_indices must be tensors", {})
    if not compute_gate or not sigmoid_beta or a_log is None or g_bias is None or lower_bound is None:
        raise UnsupportedError(
            "verify: gate and write strength must be computed inside, with a bound, got "
            f"{compute_gate=}, {sigmoid_beta=}, {lower_bound=}",
            {},
        )
    if not use_qk_l2norm_in_kernel or not inplace_final_state or scale is not None:
        raise UnsupportedError(
            "verify: needs use_qk_l2norm_in_kernel, inplace_final_state and no scale, got "
            f"{use_qk_l2norm_in_kernel=}, {inplace_final_state=}, {scale=}",
            {},
        )
    return kda.verify(
        q, k, v, g.reshape(*v.shape[:3], -1), beta.reshape(v.shape[:3]), a_log.reshape(-1), g_bias.reshape(-1),
        lower_bound, initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens, out,
    )  # fmt: skip
