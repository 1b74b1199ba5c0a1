"""fla's causal language models of this family, as models of transformers: same configurations, names and state_dicts.

Importing this module registers the configurations and models with `AutoConfig`, `AutoModel` and
`AutoModelForCausalLM`, as importing `fla.models` does. Mixers: `wyfold.integrations.fla.layers`. Needs transformers.

A model is an embedding, blocks, a norm and a head without bias. A block is

    x = x + attn(norm(x));  x = x + mlp(norm(x))
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from wyfold.integrations.fla.cache import Cache
from wyfold.integrations.fla.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from wyfold.integrations.fla.modules import GatedMLP, RMSNorm
from wyfold.runtime.check import UnsupportedError

_OFF = {
    "attn": "softmax attention in some layers",
    "attnres_block_size": "attention over earlier layers' outputs",
    "use_l2warp": "a penalty on the logits",
}
"""Fields that must be off, and what they would switch on."""


class _Config(PreTrainedConfig):
    """Fields that the three configurations share. transformers makes a dataclass of it and of its subclasses."""

    keys_to_ignore_at_inference: ClassVar[list[str]] = ["past_key_values"]

    attn_mode: str = "chunk"
    hidden_size: int = 2048
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    conv_size: int = 4
    max_position_embeddings: int = 2048
    hidden_ratio: int | None = 4
    intermediate_size: int | None = None
    hidden_act: str = "swish"
    norm_eps: float = 1e-6
    attn: Any = None
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    fuse_norm: bool = True
    fuse_swiglu: bool = True
    fuse_cross_entropy: bool = True
    use_l2warp: bool = False
    vocab_size: int = 32000
    attnres_block_size: int | None = None

    def __post_init__(self, **others: Any) -> None:
        for name, what in _OFF.items():
            if (value := getattr(self, name)) not in (None, False):
                raise UnsupportedError(
                    f"{type(self).__name__}: {name}={value!r} is not offered",
                    {"wyfold": f"it means {what}; fla's own model has it"},
                )
        super().__post_init__(**others)


class DeltaNetConfig(_Config):
    """Configuration of a DeltaNet model; the fields are those of fla's class, given by name.

    `attn`, `attnres_block_size` and `use_l2warp` raise UnsupportedError. The `fuse_` fields choose among fla's kernels;
    they are kept and not needed.
    """

    model_type = "delta_net"

    expand_k: float = 1.0
    expand_v: float = 1.0
    use_gate: bool = False
    use_beta: bool = True
    use_output_norm: bool = True
    num_heads: int = 16
    qk_norm: str = "l2"
    qk_activation: str = "silu"
    num_hidden_layers: int = 24
    fuse_linear_cross_entropy: bool = False


class GatedDeltaNetConfig(_Config):
    """Configuration of a Gated DeltaNet model, as `DeltaNetConfig`."""

    model_type = "gated_deltanet"

    expand_v: float = 2.0
    use_gate: bool = True
    head_dim: int = 256
    num_heads: int = 6
    num_v_heads: int | None = None
    num_hidden_layers: int = 21
    fuse_linear_cross_entropy: bool = False
    output_gate_activation: str = "swish"


class KDAConfig(_Config):
    """Configuration of a Kimi Delta Attention model, as `DeltaNetConfig`."""

    model_type = "kda"

    expand_v: float = 1.0
    safe_gate: bool = False
    lower_bound: float | None = None
    head_dim: int = 128
    num_heads: int = 16
    num_v_heads: int | None = None
    num_hidden_layers: int = 24


def _mixer(config: Any, layer_idx: int) -> nn.Module:
    """The token mixer of one block."""

    def settings(*names: str) -> dict[str, Any]:
        return {name: getattr(config, name) for name in names}

    shared = settings("hidden_size", "expand_v", "num_heads", "use_short_conv", "allow_neg_eigval", "conv_size")
    shared |= {"mode": config.attn_mode, "layer_idx": layer_idx, "norm_eps": config.norm_eps}
    if config.model_type == "delta_net":
        return DeltaNet(**shared, **settings("expand_k", "use_beta", "use_gate", "qk_norm", "qk_activation"))
    if config.model_type == "gated_deltanet":
        return GatedDeltaNet(**shared, **settings("head_dim", "num_v_heads", "use_gate", "output_gate_activation"))
    return KimiDeltaAttention(**shared, **settings("head_dim", "num_v_heads", "safe_gate", "lower_bound"))


_CACHE = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"
"""Name of the cache in outputs of this version of transformers."""


class _Block(GradientCheckpointingLayer):
    """Mixer and network of one layer, each behind a norm and beside a residual."""

    def __init__(self, config: _Config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.attn_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.attn: nn.Module = _mixer(config, layer_idx)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.hidden_ratio, config.intermediate_size, config.hidden_act)

    def forward(self, hidden_states: Tensor, **options: Any) -> tuple[Tensor, None, Any]:
        """The next layer's input [B, T, D], None and the cache; `options` are those of the mixer."""
        y, _, past_key_values = self.attn(self.attn_norm(hidden_states), **options)
        y, residual = self.mlp_norm(y, residual=hidden_states, prenorm=True)
        return residual + self.mlp(y), None, past_key_values


class _PreTrained(PreTrainedModel):
    config_class = _Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["_Block"]
    _is_stateful = True
    _input_embed_layer = "embeddings"

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's parameters; transformers calls it for modules that no checkpoint has filled."""
        std = self.config.initializer_range
        if isinstance(module, GatedDeltaNet | KimiDeltaAttention):
            if not getattr(module.A_log, "_is_hf_initialized", False) and module.A_log.device.type != "meta":
                module.reset_parameters()
        elif isinstance(module, nn.Linear | nn.Conv1d | nn.Embedding):
            nn.init.normal_(module.weight, std=std)
            if getattr(module, "bias", None) is not None:
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]
        elif callable(reset := getattr(module, "reset_parameters", None)):
            reset()


class _Model(_PreTrained):
    """Embedding, blocks and norm."""

    def __init__(self, config: _Config):
        super().__init__(config)
        self.padding_idx, self.vocab_size = config.pad_token_id, config.vocab_size
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(_Block(config, number) for number in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        """Hidden states [B, T, D] of tokens [B, T] or of embeddings [B, T, D].

        Args:
            cache: The name of past_key_values since transformers 5.24.
            options: Keywords of the mixers, as `cu_seqlens`.

        Raises:
            ValueError: Both or neither of input_ids and inputs_embeds are given, or two caches; or a cache is to be
                filled while activations are recomputed in training.
        """
        if (input_ids is None) is (inputs_embeds is None):
            raise ValueError(f"{type(self).__name__}: one of input_ids and inputs_embeds must be given")
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if use_cache and self.training and self.gradient_checkpointing:
            raise ValueError(f"{type(self).__name__}: use_cache must be False with gradient checkpointing, got True")
        past_key_values = _one_of(type(self).__name__, past_key_values, cache)
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and not isinstance(past_key_values, Cache):
            past_key_values = Cache.from_legacy_cache(past_key_values)
        every: tuple[Tensor, ...] = ()
        for layer in self.layers:
            every += (hidden,)
            hidden, _, past_key_values = layer(
                hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                use_cache=use_cache,
                **options,
            )
        hidden = self.norm(hidden)
        every += (hidden,)
        output = BaseModelOutputWithPast(
            last_hidden_state=hidden,
            hidden_states=every if output_hidden_states else None,
            **{_CACHE: past_key_values},
        )
        return output if _named(self.config, return_dict) else output.to_tuple()


class _ForCausalLM(_PreTrained, GenerationMixin):
    """`_Model` and a head that predicts the next token."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embeddings.weight"}
    model_class: ClassVar[type[_Model]]

    def __init__(self, config: _Config):
        super().__init__(config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head: nn.Module = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.criterion: nn.Module | None = None
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def get_decoder(self) -> _Model:
        return self.model

    def set_decoder(self, decoder: _Model) -> None:
        self.model = decoder

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Any = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        logits_to_keep: int | Tensor | None = 0,
        num_items_in_batch: int | Tensor | None = None,
        cache: Any = None,
        **options: Any,
    ) -> Any:
        """Logits [B, T, vocab], and the loss if there are labels.

        Args:
            labels: [B, T]. The token after each position is predicted; -100 is not.
            logits_to_keep: How many last positions get logits, or which; 0, None, and any with labels: all.
            num_items_in_batch: Divide the summed loss by it. None: the mean.
            cache: The name of past_key_values since transformers 5.24.
            options: Keywords of the mixers, as `cu_seqlens`.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            past_key_values=_one_of(type(self).__name__, past_key_values, cache),
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **options,
        )
        hidden = outputs.last_hidden_state
        if labels is None and logits_to_keep is not None:
            hidden = hidden[:, -logits_to_keep:] if isinstance(logits_to_keep, int) else hidden[:, logits_to_keep]
        logits = self.lm_head(hidden)
        output = CausalLMOutputWithPast(
            loss=None if labels is None else self._loss(logits, labels, num_items_in_batch),
            logits=logits,
            hidden_states=outputs.hidden_states,
            **{_CACHE: getattr(outputs, _CACHE)},
        )
        return output if _named(self.config, return_dict) else output.to_tuple()

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: int | Tensor | None) -> Tensor:
        """Cross entropy of the token after each position, in float32; `self.criterion` replaces it."""
        after = F.pad(labels.to(logits.device)[..., 1:], (0, 1), value=-100)
        rows, targets = logits.float().flatten(0, -2), after.flatten()
        if self.criterion is not None:
            loss: Tensor = self.criterion(rows, targets)
            if num_items_in_batch is not None:
                raise UnsupportedError(
                    "num_items_in_batch is not offered with a criterion",
                    {"wyfold": "divide in the criterion"},
                )
            return loss
        if num_items_in_batch is None:
            return F.cross_entropy(rows, targets)
        return F.cross_entropy(rows, targets, reduction="sum") / num_items_in_batch


def _one_of(model: str, past_key_values: Any, cache: Any) -> Any:
    """The cache, given under either name."""
    if past_key_values is not None and cache is not None:
        raise ValueError(f"{model}: past_key_values must come without its new name cache, got both")
    return cache if past_key_values is None else past_key_values


def _named(config: Any, return_dict: bool | None) -> bool:
    return bool(config.return_dict if return_dict is None else return_dict)


class DeltaNetModel(_Model):
    """DeltaNet without a head."""

    config_class = DeltaNetConfig


class DeltaNetForCausalLM(_ForCausalLM):
    """DeltaNet language model."""

    config_class = DeltaNetConfig
    model_class = DeltaNetModel


class GatedDeltaNetModel(_Model):
    """Gated DeltaNet without a head."""

    config_class = GatedDeltaNetConfig


class GatedDeltaNetForCausalLM(_ForCausalLM):
    """Gated DeltaNet language model."""

    config_class = GatedDeltaNetConfig
    model_class = GatedDeltaNetModel


class KDAModel(_Model):
    """Kimi Delta Attention without a head."""

    config_class = KDAConfig


class KDAForCausalLM(_ForCausalLM):
    """Kimi Delta Attention language model."""

    config_class = KDAConfig
    model_class = KDAModel


for _config, _base, _causal in (
    (DeltaNetConfig, DeltaNetModel, DeltaNetForCausalLM),
    (GatedDeltaNetConfig, GatedDeltaNetModel, GatedDeltaNetForCausalLM),
    (KDAConfig, KDAModel, KDAForCausalLM),
):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
    AutoModel.register(_config, _base, exist_ok=True)
    AutoModelForCausalLM.register(_config, _causal, exist_ok=True)
