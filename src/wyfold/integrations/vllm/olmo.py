"""vLLM's GDN layer of OLMo-Hybrid on Wyfold: prompts, single tokens and drafted tokens.

The layer computes its gate and its write strength, which is in [0, 2], in another launch. States are [slots, HV, V, K].
Slot 0 is vLLM's null block.
"""

from __future__ import annotations

import logging
from types import ModuleType

from torch import Tensor

from wyfold import serving
from wyfold.integrations.engine_hooks import with_fallback
from wyfold.integrations.vllm import gdn
from wyfold.runtime.unsupported import UnsupportedError

MODULE = "vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn"

log = logging.getLogger("vllm.wyfold")


def install(module: ModuleType) -> str | None:
    """Replace the two functions that vLLM's layer of OLMo-Hybrid calls."""
    if not module.current_platform.is_cuda():
        return None  # the GDN layer of Qwen, which this module imports, has logged it
    for name, ours in (("chunk_gated_delta_rule", prefill), ("fused_recurrent_gated_delta_rule", verify)):
        setattr(module, name, with_fallback(ours, getattr(module, name), log))
    return "Wyfold serves vLLM's GDN layers of OLMo-Hybrid: prompts, single tokens and drafted tokens."


def prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    chunk_offsets: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    core_attn_out: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Run prompts chunk by chunk, as vLLM's `chunk_gated_delta_rule` does.

    Arguments and results are those of `gdn.prefill`; `scale` must be None.
    """
    if initial_state is None or scale is not None:
        raise UnsupportedError("prefill: needs initial_state and no scale", {})
    return gdn.prefill(
        q, k, v, g, beta, initial_state, output_final_state, cu_seqlens,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel, core_attn_out=core_attn_out,
    )  # fmt: skip


def verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    inplace_final_state: bool = True,
    cu_seqlens: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Run single or drafted tokens, as vLLM's `fused_recurrent_gated_delta_rule` does.

    Args:
        g: [1, T, HV] natural log of the decay. beta: [1, T, HV] write strength.

    Other arguments and results are those of `gdn.verify`.
    """
    if initial_state is None or ssm_state_indices is None or cu_seqlens is None or not inplace_final_state:
        raise UnsupportedError("verify: needs a pool that is updated in place, slots and cu_seqlens", {})
    slots, accepted = gdn.rows(cu_seqlens, ssm_state_indices, num_accepted_tokens)
    o = serving.verify(
        q, k, v, g, beta, initial_state, slots, state_v_first=True,
        cu_seqlens=cu_seqlens, pad_slot_id=gdn.NULL_SLOT, scale=scale, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        num_accepted_tokens=accepted,
    )  # fmt: skip
    return o, initial_state
