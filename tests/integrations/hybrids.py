"""Tiny hybrids of transformers, random from their configurations."""

from typing import Any

import torch

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
GDN = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "kimi_linear")


def hybrid(family: str, **changes: Any) -> Any:
    """A causal language model of three layers, attention in the middle; OLMo's has K 16 and V 32.

    Its states fade within tens of tokens, where fresh ones of some families fade within one: documents that leak show.
    """
    torch.manual_seed(7)
    model = _made(family, changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)
    return model.eval()


def _made(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    qwen = {**SIZES, **GDN}
    experts = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 16}
    if family == "qwen3_next":
        config = transformers.Qwen3NextConfig(**{**qwen, **experts, **changes})
        return transformers.Qwen3NextForCausalLM(config)
    if family == "qwen3_5":
        return transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**{**qwen, **changes}))
    if family == "qwen3_5_moe":
        config = transformers.Qwen3_5MoeTextConfig(**{**qwen, **experts, **changes})
        return transformers.Qwen3_5MoeForCausalLM(config)
    if family == "olmo_hybrid":
        widths = {"linear_num_value_heads": 2, "linear_value_head_dim": 32}
        return transformers.OlmoHybridForCausalLM(transformers.OlmoHybridConfig(**{**qwen, **widths, **changes}))
    attention = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    heads = {"num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 2}
    config = transformers.KimiLinearConfig(**{**SIZES, **EXPERTS, **attention, **heads, **changes})
    return transformers.KimiLinearForCausalLM(config)
