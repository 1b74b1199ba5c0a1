"""Layers and models whose outputs fla-core 0.6.0 has computed: how each is built, filled and called.

`fla_recorded.json` holds what fla itself gave; the same functions run on fla's classes and on those of the stand-in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

B, T, STEPS, WIDTH, VOCAB = 2, 9, 3, 32, 17

_GDN = {"hidden_size": WIDTH, "head_dim": 16, "num_heads": 2, "layer_idx": 0}

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "delta": ("DeltaNet", {"hidden_size": WIDTH, "num_heads": 2, "layer_idx": 0}),
    "delta, gated, doubled beta": (
        "DeltaNet",
        {"d_model": WIDTH, "num_heads": 2, "use_gate": True, "allow_neg_eigval": True, "layer_idx": 0, "conv_size": 3},
    ),
    "delta, relu and sums": (
        "DeltaNet",
        {"hidden_size": WIDTH, "num_heads": 2, "qk_activation": "relu", "qk_norm": "sum", "layer_idx": 0},
    ),
    "delta, elu, no beta": (
        "DeltaNet",
        {"hidden_size": WIDTH, "num_heads": 2, "qk_activation": "elu", "use_beta": False, "layer_idx": 0},
    ),
    "delta, no convolution": (
        "DeltaNet",
        {"hidden_size": WIDTH, "num_heads": 2, "use_short_conv": False, "expand_v": 2.0, "layer_idx": 0},
    ),
    "gdn": ("GatedDeltaNet", {**_GDN, "expand_v": 1}),
    "gdn, wide values, groups": (
        "GatedDeltaNet",
        {**_GDN, "expand_v": 2, "num_v_heads": 4, "output_gate_activation": "sigmoid", "conv_bias": True},
    ),
    "gdn, no gate, doubled beta": (
        "GatedDeltaNet",
        {**_GDN, "expand_v": 1, "use_gate": False, "allow_neg_eigval": True, "use_short_conv": False},
    ),
    "kda": ("KimiDeltaAttention", _GDN),
    "kda, bounded, wide values": (
        "KimiDeltaAttention",
        {**_GDN, "expand_v": 2, "safe_gate": True, "lower_bound": -5.0, "allow_neg_eigval": True, "conv_bias": True},
    ),
}

ADDED: dict[str, tuple[str, dict[str, Any]]] = {
    "gdn2": ("GatedDeltaNet2", _GDN),
    "gdn2, groups, wide values, no convolution": (
        "GatedDeltaNet2",
        {**_GDN, "num_v_heads": 4, "expand_v": 2, "use_short_conv": False, "allow_neg_eigval": True},
    ),
    "gdp": ("GatedDeltaProduct", {**_GDN, "expand_v": 1}),
    "gdp, three updates, no gates, groups": (
        "GatedDeltaProduct",
        {
            **_GDN,
            "expand_v": 2,
            "num_v_heads": 4,
            "num_householder": 3,
            "use_forget_gate": False,
            "use_output_gate": False,
            "allow_neg_eigval": False,
            "conv_bias": True,
        },
    ),
    "gla": ("GatedLinearAttention", {"hidden_size": WIDTH, "num_heads": 2, "layer_idx": 0}),
    "gla, shared keys, convolution, clamp": (
        "GatedLinearAttention",
        {
            "hidden_size": WIDTH,
            "num_heads": 4,
            "num_kv_heads": 2,
            "expand_k": 1.0,
            "use_short_conv": True,
            "clamp_min": -0.02,
            "fuse_norm": False,
            "layer_idx": 0,
        },
    ),
}
"""Layers without a record of what fla gave."""

_MODEL = {"hidden_size": WIDTH, "num_hidden_layers": 2, "vocab_size": VOCAB, "num_heads": 2, "intermediate_size": 40}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "DeltaNet": ("delta_net", _MODEL),
    "GatedDeltaNet": ("gated_deltanet", {**_MODEL, "head_dim": 16, "expand_v": 1.0, "tie_word_embeddings": True}),
    "KDA": ("kda", {**_MODEL, "head_dim": 16, "num_v_heads": 2}),
}


def wave(shape: Any, phase: float) -> Tensor:
    """Numbers in (-1, 1) that are the same everywhere."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float64) * 0.737 + phase).sin().float().reshape(shape)


@torch.no_grad()
def fill(module: nn.Module) -> dict[str, list[int]]:
    """Set every parameter from its place among the sorted names; return names and shapes."""
    parameters = dict(sorted(module.named_parameters()))
    for phase, (name, parameter) in enumerate(parameters.items()):
        values = wave(parameter.shape, 1.7 * phase)
        parameter.copy_(1 + values / 2 if "norm" in name else values / 2)
    return {name: list(x.shape) for name, x in sorted(module.state_dict().items())}


@torch.no_grad()
def run_layer(layer: nn.Module, cache: Any) -> dict[str, Tensor]:
    """A padded batch, then single tokens from the cache, and the last states."""
    layer.eval()
    x = wave((B, T + STEPS, WIDTH), 0.3)
    mask = torch.ones(B, T + STEPS, dtype=torch.long)
    mask[1, :4] = 0
    y, _, _ = layer(x[:, :T], attention_mask=mask[:, :T], past_key_values=cache, use_cache=True)
    rows = [y]
    for t in range(T, T + STEPS):
        y, _, _ = layer(x[:, t : t + 1], attention_mask=mask[:, : t + 1], past_key_values=cache, use_cache=True)
        rows.append(y)
    return {"y": torch.cat(rows, 1), "state": cache[0]["recurrent_state"]}


@torch.no_grad()
def run_model(model: Any) -> dict[str, Tensor]:
    """Logits, the loss, and logits of packed sequences."""
    model.eval()
    ids = (torch.arange(B * T).reshape(B, T) * 7) % VOCAB
    out = model(ids, labels=ids, use_cache=False)
    cu_seqlens = torch.tensor([0, 5, T], dtype=torch.int32)
    packed = model(ids[:1], cu_seqlens=cu_seqlens, use_cache=False)
    return {"logits": out.logits, "loss": out.loss, "packed": packed.logits}
