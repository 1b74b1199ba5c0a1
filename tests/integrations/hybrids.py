"""Tiny random hybrid models of transformers."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest
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

LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
PICKS = {"layer_types": ["linear_attention", "indexed_attention", "linear_attention"]}

FAMILIES = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "olmo_hybrid", "lara_mini", "kimi_linear", "bailing_hybrid")
PICKING = ("qwen4_exp", "glm5_next")
"""Types whose attention selects tokens from the whole row."""
ROUTED = ("qwen3_next", "qwen3_5_moe", "lara_mini", "kimi_linear", "bailing_hybrid")
"""Types with experts, of which a router selects 2 of 4 for each token."""
SINCE = {
    "kimi_linear": (5, 17),
    "bailing_hybrid": (5, 20),
    "qwen4_exp": (5, 16),
    "glm5_next": (5, 16),
    "lara_mini": (5, 24),
}
"""Model types that older versions of transformers lack, or define differently, and the first version with them."""


def _installed() -> tuple[int, ...]:
    """Version of transformers; without it, the newest one's."""
    try:
        return tuple(map(int, version("transformers").split(".")[:2]))
    except PackageNotFoundError:
        return (5, 24)


CACHE = "cache" if _installed() >= (5, 24) else "past_key_values"
"""Name of a model's cache argument and output; 5.24 renamed it."""


def skip_older(family: str) -> None:
    """Skip the running test if the installed transformers lacks a model type."""
    since = SINCE.get(family, (5, 15))
    if _installed() < since:
        wanted = ".".join(map(str, since))
        pytest.skip(f"{family} needs transformers {wanted} or newer, installed is {version('transformers')}")


BOUNDED = ("bailing_hybrid", "glm5_next")
"""Types with log decays from -5 to 0 by a sigmoid, which need a bias for weak decays."""


def hybrid(family: str, **changes: Any) -> Any:
    """A causal language model of three layers, with attention in the middle. OLMo's has K 16, V 32; GLM's has no head.

    Decays are set so that states last tens of tokens, which exposes leaks between documents; with default values the
    states of some families last one token.
    """
    torch.manual_seed(7)
    model = _made(family, changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-1, 0) if family in BOUNDED else parameter.uniform_(-4, -1)
            elif name.endswith("dt_bias") and family in BOUNDED:
                parameter.fill_(-6)
    return model.eval()


def _made(family: str, changes: dict[str, Any]) -> Any:
    import transformers

    skip_older(family)
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
    if family == "lara_mini":
        layers = ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]
        sizes = {**qwen, **experts, "num_hidden_layers": 4, "layer_types": layers, "sliding_window": 8}
        sizes.pop("intermediate_size")
        return transformers.LaraMiniForCausalLM(transformers.LaraMiniConfig(**{**sizes, **changes}))
    latent = {**SIZES, **EXPERTS, **LATENT}
    heads = {"num_local_experts": 4, "linear_head_dim": 16, "linear_num_heads": 2}
    if family == "bailing_hybrid":
        groups = {"num_local_experts": 4, "head_dim": 16, "n_group": 1, "topk_group": 1, "num_mtp_layers": 0}
        config = transformers.BailingHybridConfig(**{**latent, **groups, "first_k_dense_replace": 1, **changes})
        return transformers.BailingHybridForCausalLM(config)
    if family == "qwen4_exp":
        index = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 16}
        streams = {"indexer_compress_ratio": 4, "hc_count": 2, "hc_lowrank": 8, "ple_layer_ids": []}
        config = transformers.Qwen4ExpTextConfig(**{**qwen, **experts, **PICKS, **index, **streams, **changes})
        return transformers.Qwen4ExpForCausalLM(config)
    if family == "glm5_next":
        from transformers.models.glm5_next.modeling_glm5_next import Glm5NextTextConfig, Glm5NextTextModel

        index = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 2, "index_kpool": 4, "q_lora_rank": 16}
        widths = {**heads, **PICKS, "qk_rope_head_dim": 0, "n_routed_experts": 4, "hc_mult": 2}
        return Glm5NextTextModel(Glm5NextTextConfig(**{**latent, **index, **widths, **changes}))
    config = transformers.KimiLinearConfig(**{**latent, **heads, **changes})
    return transformers.KimiLinearForCausalLM(config)
