"""fla's layers, models and checkpoints as Wyfold's layers and decoders, and back."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wyfold.integrations.fla.checkpoint_files import read_config, read_weights
from wyfold.integrations.fla.mixer_weights import (
    KINDS,
    Mixer,
    our_arguments,
    our_attention,
    our_attention_weights,
    our_weights,
    their_arguments,
    their_attention,
    their_attention_weights,
    their_weights,
)
from wyfold.layers.attention import SoftmaxAttention
from wyfold.models import disk
from wyfold.models.config import DecoderConfig
from wyfold.models.decoder import Decoder
from wyfold.runtime import files
from wyfold.runtime.check import UnsupportedError

_DEFAULTS: dict[str, Any] = {
    "hidden_size": 2048,
    "use_short_conv": True,
    "allow_neg_eigval": False,
    "conv_size": 4,
    "expand_v": 1.0,
    "num_heads": 16,
    "hidden_ratio": 4,
    "intermediate_size": None,
    "hidden_act": "swish",
    "num_hidden_layers": 24,
    "norm_eps": 1e-6,
    "attn": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
    "attnres_block_size": None,
    "use_l2warp": False,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "delta_net": {
        **_DEFAULTS,
        "expand_k": 1.0,
        "use_gate": False,
        "use_beta": True,
        "qk_norm": "l2",
        "qk_activation": "silu",
    },
    "gated_deltanet": {
        **_DEFAULTS,
        "expand_v": 2.0,
        "use_gate": True,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "num_hidden_layers": 21,
        "output_gate_activation": "swish",
    },
    "gated_deltaproduct": {
        **_DEFAULTS,
        "expand_v": 2.0,
        "head_dim": 256,
        "num_heads": 6,
        "num_v_heads": None,
        "num_hidden_layers": 21,
        "allow_neg_eigval": False,
        "num_householder": 1,
        "use_output_gate": True,
        "use_forget_gate": False,
    },
    "gla": {
        **{key: value for key, value in _DEFAULTS.items() if key != "allow_neg_eigval"},
        "use_short_conv": False,
        "num_heads": 4,
        "expand_k": 0.5,
        "num_kv_heads": None,
        "feature_map": None,
        "use_output_gate": True,
        "clamp_min": None,
        "elementwise_affine": True,
    },
    "kda": {**_DEFAULTS, "safe_gate": False, "lower_bound": None, "head_dim": 128, "num_v_heads": None},
}
"""Model type -> fields that decide what a model computes, with the defaults of fla 0.5.2 and 0.6.0."""

WITHOUT_EFFECT = frozenset(
    """model_type architectures auto_map _name_or_path transformers_version dtype torch_dtype attn_mode
    max_position_embeddings use_cache pad_token_id bos_token_id eos_token_id initializer_range fuse_norm fuse_swiglu
    fuse_cross_entropy fuse_linear_cross_entropy use_output_norm return_dict output_attentions output_hidden_states
    id2label label2id problem_type chunk_size_feed_forward is_encoder_decoder use_gk use_gv""".split()
)
"""Fields that do not change a model's logits."""


class FlaCheckpoint(NamedTuple):
    """A layer or a language model as fla has it.

    Attributes:
        config: Arguments of the layer's constructor, or the fields of the model's configuration.
        weights: The state_dict.
    """

    config: dict[str, Any]
    weights: dict[str, Tensor]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write config.json and model.safetensors, from which fla's `from_pretrained` loads a model.

        Raises:
            ValueError: This is a layer, which has no such form.
            ImportError: safetensors is not installed.
        """
        if "model_type" not in self.config:
            raise ValueError("FlaCheckpoint.save: it must hold a language model, got a layer")
        Path(folder).mkdir(parents=True, exist_ok=True)
        disk.write_tensors(Path(folder) / files.WEIGHTS_FILE, self.weights)
        files.write(Path(folder) / files.CONFIG_FILE, json.dumps(self.config, indent=2) + "\n")


def from_fla(source: nn.Module | str | os.PathLike[str], *, backend: str | None = None) -> Mixer | Decoder:
    """Wyfold's form of one of fla's layers, language models or checkpoints, with the same outputs.

    Args:
        source: A layer of fla (DeltaNet, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct, GatedLinearAttention,
            KimiDeltaAttention), a causal language model of these, or a
            folder with its config.json and safetensors. Objects of the stand-in are fla's, too. Never changed.
        backend: Backend of every operator in the result.

    Returns:
        The layer of `wyfold.layers` with that name, or a `Decoder`; in evaluation mode if source is. Parameters are
        copies, with the device and dtype of the source.

    Raises:
        TypeError: source is neither a layer nor a language model of fla's, nor a folder.
        FileNotFoundError: The folder lacks a file.
        ValueError: A field of the configuration or a tensor is unknown or missing; the message names it.
        UnsupportedError: An option that Wyfold's layers do not have, such as `use_short_conv=False`.
        ImportError: safetensors is not installed, and source is a folder.

    Examples:
        >>> import torch
        >>> from wyfold.integrations.fla import from_fla, layers
        >>> theirs = layers.GatedDeltaNet(hidden_size=32, head_dim=16, expand_v=1, num_heads=2)
        >>> ours, x = from_fla(theirs), torch.randn(1, 5, 32)
        >>> torch.testing.assert_close(ours(x), theirs(x)[0])
    """
    if isinstance(source, str | os.PathLike):
        return _decoder(read_config(Path(source)), read_weights(Path(source)), backend).eval()
    if not isinstance(source, nn.Module):
        raise TypeError(f"from_fla: source must be a module of fla or a folder, got {type(source).__name__}")
    weights = _copies(source.state_dict())
    name = type(source).__name__
    if name in KINDS and hasattr(source, "q_proj"):
        return _layer(name, _layer_options(name, source), weights, backend).train(source.training)
    config: Any = getattr(source, "config", None)
    if not hasattr(config, "to_diff_dict") or name not in {kind.architecture for kind in KINDS.values()}:
        known = [*KINDS, *(kind.architecture for kind in KINDS.values() if kind.architecture)]
        raise TypeError(f"from_fla: source must be one of fla's {', '.join(known)}, got {name}")
    return _decoder(config.to_diff_dict(), weights, backend).train(source.training)


def to_fla(module: Mixer | Decoder) -> FlaCheckpoint:
    """fla's form of a layer or decoder, with the same outputs.

    Args:
        module: A `DeltaNet`, `GatedDeltaNet`, `GatedDeltaNet2`, `GatedDeltaProduct`, `GatedLinearAttention` or
            `KimiDeltaAttention` of `wyfold.layers`; or a `Decoder` whose layers are all of one of these, except for
            those of softmax attention. fla has no language model with `GatedDeltaNet2`.

    Returns:
        Configuration and weights; the weights are copies. For a layer: `fla.layers.GatedDeltaNet(**config)` and its
        `load_state_dict(weights)`. For a decoder: `save(folder)`, then
        `AutoModelForCausalLM.from_pretrained(folder)`.

    Raises:
        TypeError: module is neither.
        UnsupportedError: fla's layer or model lacks an option.
    """
    if isinstance(module, Mixer) and type(module).__name__ in KINDS:
        return FlaCheckpoint(their_arguments(module), _copies(their_weights(module)))
    if not isinstance(module, Decoder):
        raise TypeError(f"to_fla: module must be one of {', '.join(KINDS)} or a Decoder, got {type(module).__name__}")
    config = module.config
    patterns = {kind.pattern: kind for kind in KINDS.values() if kind.model_type}
    others = sorted(set(config.layers) - {"attention"})
    if len(others) != 1 or others[0] not in patterns:
        raise UnsupportedError(
            "to_fla: a model of fla has layers of one kind, and softmax attention",
            {"fla": f"the pattern must name one of {', '.join(patterns)}, got {config.pattern!r}"},
        )
    kind = patterns[others[0]]
    mixers: list[Any] = [block.mixer for block in module.blocks]
    attention = [number for number, mixer in enumerate(mixers) if isinstance(mixer, SoftmaxAttention)]
    arguments = their_arguments(mixers[config.layers.index(kind.pattern)])
    for option in ("gate_low_rank_dim", "gate_logit_normalizer"):  # of a layer alone; a model of fla has 16
        if arguments.pop(option, 16) != 16:
            raise UnsupportedError("to_fla: a model of fla has no option for its decays", {"fla": f"{option} is 16"})
    if attention:
        arguments["attn"] = their_attention(mixers[attention[0]], attention)
    if arguments["norm_eps"] != config.norm_eps:
        raise UnsupportedError(
            "to_fla: a model of fla has one norm_eps",
            {"fla": f"that of the layers is {arguments['norm_eps']}, that of the residual stream {config.norm_eps}"},
        )
    weights = {"model.embeddings.weight": module.embedding.weight, "model.norm.weight": module.norm.weight}
    if module.head is not None:
        weights["lm_head.weight"] = module.head.weight
    for number, block in enumerate(module.blocks):
        weights |= {f"model.layers.{number}.{name}": tensor for name, tensor in _their_block(block).items()}
    fields = {
        "model_type": kind.model_type,
        "architectures": [kind.architecture],
        "dtype": str(module.embedding.weight.dtype).removeprefix("torch."),
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_layers,
        "intermediate_size": module.blocks[0].mlp.out.in_features,  # type: ignore[union-attr]  # a SwiGLU
        "tie_word_embeddings": config.tied,
        **arguments,
    }
    return FlaCheckpoint(fields, _copies(weights))


def _copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in weights.items()}


# --- layers ----------------------------------------------------------------------------------------------------------


def _layer(name: str, given: Mapping[str, Any], weights: Mapping[str, Tensor], backend: str | None) -> Mixer:
    arguments = our_arguments(name, given)
    with torch.device("meta"):
        ours = KINDS[name].ours(**arguments, backend=backend)
    ours.load_state_dict(our_weights(name, weights, arguments["num_v_heads"]), assign=True)
    return ours


def _layer_options(name: str, layer: Any) -> dict[str, Any]:
    """Arguments of the constructor of one of fla's layers, from its attributes."""
    fields = "hidden_size num_heads num_v_heads expand_k expand_v head_dim conv_size allow_neg_eigval lower_bound"
    fields += " num_householder use_forget_gate num_kv_heads gate_logit_normalizer use_short_conv"
    found = {field: getattr(layer, field) for field in fields.split() if hasattr(layer, field)}
    found |= {option: getattr(layer, option) for option in KINDS[name].fixed if hasattr(layer, option)}
    if name == "GatedLinearAttention":
        found |= {"gate_low_rank_dim": layer.gk_proj[0].out_features, "fuse_norm": hasattr(layer, "g_norm_swish_gate")}
        norm = layer.g_norm_swish_gate if found["fuse_norm"] else layer.g_norm
        return {**found, "feature_map": getattr(layer, "feature_map_fn", None), "norm_eps": norm.eps}
    if hasattr(layer.o_norm, "activation"):
        found["output_gate_activation"] = layer.o_norm.activation
    return {**found, "norm_eps": layer.o_norm.eps}


# --- language models -------------------------------------------------------------------------------------------------


def _decoder(given: Mapping[str, Any], weights: dict[str, Tensor], backend: str | None) -> Decoder:
    name, fields = _fields(given)
    arguments = our_arguments(name, fields)
    kind = KINDS[name]
    names_of_sizes = ("num_heads", "num_v_heads", "head_dim", "head_v_dim", "conv_size")
    sizes = {key: arguments.pop(key) for key in names_of_sizes if key in arguments}
    attention, shape = our_attention(fields["attn"], fields["hidden_size"])
    names = ["attention" if number in attention else kind.pattern for number in range(fields["num_hidden_layers"])]
    config = DecoderConfig(
        vocab_size=fields["vocab_size"],
        hidden_size=arguments.pop("hidden_size"),
        num_layers=fields["num_hidden_layers"],
        pattern=" ".join(f"{mixer}*{len(list(run))}" for mixer, run in itertools.groupby(names)),
        mlp_size=_mlp_size(fields),
        tied=fields["tie_word_embeddings"],
        norm_eps=fields["norm_eps"],
        options={kind.pattern: arguments, **({"attention": shape} if attention else {})},
        **sizes,
    )
    with torch.device("meta"):
        ours = Decoder(config, backend=backend)
    renamed = {"embedding.weight": _take(weights, "model.embeddings.weight")}
    renamed["norm.weight"] = _take(weights, "model.norm.weight")
    if config.tied:
        weights.pop("lm_head.weight", None)
    else:
        renamed["head.weight"] = _take(weights, "lm_head.weight")
    for number in range(config.num_layers):
        block = f"model.layers.{number}."
        taken = {key.removeprefix(block): weights.pop(key) for key in [*weights] if key.startswith(block)}
        mixer = None if number in attention else name
        for key, tensor in _our_block(mixer, block, taken, sizes["num_v_heads"]).items():
            renamed[f"blocks.{number}.{key}"] = tensor
    if weights:
        raise ValueError(f"from_fla: every tensor must be known, got {', '.join(sorted(weights))}")
    ours.load_state_dict(renamed, assign=True)
    return ours


def _fields(given: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Name of the layer's class, and all fields of the configuration that have an effect.

    Raises:
        ValueError: The model type or a field is unknown.
        UnsupportedError: A field asks for what a decoder does not have.
    """
    types = {kind.model_type: name for name, kind in KINDS.items() if kind.model_type}
    model_type = given.get("model_type")
    if model_type not in types:
        raise ValueError(f"from_fla: model_type must be among {', '.join(types)}, got {model_type!r}")
    defaults = DEFAULTS[model_type]
    if unknown := given.keys() - defaults.keys() - WITHOUT_EFFECT:
        raise ValueError(f"from_fla: fields of the configuration must be known, got {', '.join(sorted(unknown))}")
    fields = {**defaults, **{field: value for field, value in given.items() if field in defaults}}
    for field, value in {"attnres_block_size": None, "use_l2warp": False, "hidden_act": "swish"}.items():
        if fields[field] != value:
            raise UnsupportedError(
                f"from_fla: {field}={fields[field]!r} is not offered", {"wyfold": f"the decoder has {value!r} only"}
            )
    return types[model_type], fields


def _mlp_size(fields: Mapping[str, Any]) -> int:
    """Inner width of fla's MLP: as given, or 2/3 of hidden_ratio * hidden_size, rounded up to a multiple of 256."""
    if fields["intermediate_size"] is not None:
        return int(fields["intermediate_size"])
    ratio = 4 if fields["hidden_ratio"] is None else fields["hidden_ratio"]
    return -(-int(fields["hidden_size"] * ratio * 2 / 3) // 256) * 256


def _our_block(name: str | None, block: str, theirs: dict[str, Tensor], HV: int) -> dict[str, Tensor]:
    """Tensors of Wyfold's block, from those of fla's. name: class of the mixer; None is softmax attention."""
    up = [_take(theirs, f"mlp.{part}_proj.weight", block) for part in ("gate", "up")]
    ours = {
        "mixer_norm.weight": _take(theirs, "attn_norm.weight", block),
        "mlp_norm.weight": _take(theirs, "mlp_norm.weight", block),
        "mlp.up.weight": torch.cat(up),
        "mlp.out.weight": _take(theirs, "mlp.down_proj.weight", block),
    }
    # What is left beside the mixer's tensors is refused with them, under its name.
    given = {key.removeprefix("attn."): tensor for key, tensor in theirs.items()}
    mixer = our_attention_weights(given) if name is None else our_weights(name, given, HV)
    return {**ours, **{f"mixer.{key}": tensor for key, tensor in mixer.items()}}


def _their_block(block: Any) -> dict[str, Tensor]:
    """Views of Wyfold's tensors, as fla's block has them."""
    gate, up = block.mlp.up.weight.chunk(2)
    attention = isinstance(block.mixer, SoftmaxAttention)
    mixer = their_attention_weights(block.mixer) if attention else their_weights(block.mixer)
    return {
        "attn_norm.weight": block.mixer_norm.weight,
        "mlp_norm.weight": block.mlp_norm.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": block.mlp.out.weight,
        **{f"attn.{key}": tensor for key, tensor in mixer.items()},
    }


def _take(weights: dict[str, Tensor], name: str, prefix: str = "") -> Tensor:
    if name not in weights:
        raise ValueError(f"from_fla: the checkpoint must have the tensor {prefix}{name}, got none of this name")
    return weights.pop(name)
