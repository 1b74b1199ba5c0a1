"""What a decoder is made of: sizes, and a pattern of mixers."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from wyfold import layers
from wyfold.runtime import check

MIXERS: dict[str, type[nn.Module]] = {
    "delta_net": layers.DeltaNet,
    "gated_delta_net": layers.GatedDeltaNet,
    "kda": layers.KimiDeltaAttention,
    "ttt_linear": layers.TTTLinear,
    "attention": layers.SoftmaxAttention,
}
ALIASES = {"gdn": "gated_delta_net"}


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What a decoder is made of.

    Args:
        vocab_size: Token ids are 0 to vocab_size - 1. 256 for bytes.
        hidden_size: Width of the residual stream.
        num_layers: Blocks.
        pattern: Names of mixers, each with an optional count, "kda*3 attention", repeated to num_layers: delta_net,
            gated_delta_net (gdn), kda, ttt_linear, attention.
        num_heads, num_v_heads, head_dim, head_v_dim, conv_size: Passed to every mixer that takes them.
        mlp_size: Inner width of the MLP; None = 8/3 of hidden_size, up to a multiple of 16.
        tied: Whether the output matrix is the embedding.
        norm_eps: eps of the norms of the residual stream.
        options: Mixer's name -> its further or differing arguments: {"attention": {"window": 256}}.

    Raises:
        TypeError, ValueError: naming the field.

    Example:
        >>> DecoderConfig(pattern="gdn*2 attention", num_layers=4).layers
        ('gated_delta_net', 'gated_delta_net', 'attention', 'gated_delta_net')
    """

    vocab_size: int = 256
    hidden_size: int = 256
    num_layers: int = 4
    pattern: str = "gdn*3 attention"
    num_heads: int = 4
    num_v_heads: int | None = None
    head_dim: int = 64
    head_v_dim: int | None = None
    conv_size: int = 4
    mlp_size: int | None = None
    tied: bool = True
    norm_eps: float = 1e-6
    options: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        name = "DecoderConfig"
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "head_dim", "conv_size"):
            check.integer(name, field, getattr(self, field), least=1)
        for field in ("num_v_heads", "head_v_dim", "mlp_size"):
            if getattr(self, field) is not None:
                check.integer(name, field, getattr(self, field), least=1)
        check.flag(name, tied=self.tied)
        check.number(name, "norm_eps", self.norm_eps)
        _parse(self.pattern)
        if not isinstance(self.options, Mapping):
            raise TypeError(f"{name}: options must map mixers to their options, got {type(self.options).__name__}")
        for mixer, options in self.options.items():
            _check_options(mixer, options)
        owned = {ALIASES.get(mixer, mixer): dict(options) for mixer, options in self.options.items()}
        object.__setattr__(self, "options", owned)
        for mixer in dict.fromkeys((*self.layers, *owned)):
            self._check_mixer(mixer)

    @property
    def layers(self) -> tuple[str, ...]:
        """Name of each layer's mixer."""
        period = _parse(self.pattern)
        return tuple(period[i % len(period)] for i in range(self.num_layers))

    def mixer(self, name: str, *, backend: str | None = None) -> nn.Module:
        """A fresh mixer of that name, its operators on `backend`."""
        shared = ("hidden_size", "num_heads", "num_v_heads", "head_dim", "head_v_dim", "conv_size")
        known = inspect.signature(MIXERS[name]).parameters
        arguments = {field: getattr(self, field) for field in shared if field in known}
        if "backend" in known:  # softmax attention is PyTorch's own, on every device
            arguments["backend"] = backend
        return MIXERS[name](**arguments | dict(self.options.get(name, {})))

    def _check_mixer(self, name: str) -> None:
        """A mixer's own refusal, now and under the name of the field it comes from."""
        try:
            with torch.device("meta"):
                self.mixer(name)
        except (TypeError, ValueError) as error:
            argument, _, complaint = str(error).partition(": ")[2].partition(" ")
            field = argument
            if argument in self.options.get(name, {}):
                field = f"options[{name!r}][{argument!r}]"
            elif not hasattr(self, argument):  # of a part of the mixer, which calls it by a shorter name
                field = f"options[{name!r}]: {argument}"
            raise type(error)(f"DecoderConfig: {field} {complaint}, in {name}") from error

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> DecoderConfig:
        """The configuration that `to_json` wrote.

        Raises:
            ValueError: no JSON object, or a field this version does not know.
        """
        fields = json.loads(text)
        if not isinstance(fields, dict):
            raise ValueError(f"DecoderConfig: text must be a JSON object, got {type(fields).__name__}")
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"DecoderConfig: fields must be known to this version, got {', '.join(sorted(unknown))}")
        return cls(**fields)


def _parse(pattern: str) -> tuple[str, ...]:
    """One period of a pattern: canonical names, in order."""
    if not isinstance(pattern, str):
        raise TypeError(f"DecoderConfig: pattern must be a str, got {type(pattern).__name__}")
    period: list[str] = []
    for entry in pattern.split():
        name, star, count = entry.partition("*")
        if star and not (count.isdecimal() and int(count) > 0):
            raise ValueError(f"DecoderConfig: pattern must have a count of at least 1 after a *, got {entry!r}")
        period += [_canonical("pattern", name)] * (int(count) if star else 1)
    if not period:
        raise ValueError(f"DecoderConfig: pattern must name at least one mixer, got {pattern!r}")
    return tuple(period)


def _canonical(field: str, name: str) -> str:
    """A mixer's name without aliases."""
    name = ALIASES.get(name, name)
    if name not in MIXERS:
        raise ValueError(f"DecoderConfig: {field} must name {', '.join((*MIXERS, *ALIASES))}, got {name!r}")
    return name


def _check_options(mixer: str, options: Mapping[str, Any]) -> None:
    name = _canonical("options", mixer)
    if not isinstance(options, Mapping):
        raise TypeError(f"DecoderConfig: options[{mixer!r}] must map names to values, got {type(options).__name__}")
    elsewhere = ("hidden_size", "backend")  # one for all layers; and the decoder's own, which no configuration keeps
    known = [option for option in inspect.signature(MIXERS[name]).parameters if option not in elsewhere]
    for option in options:
        if option not in known:
            raise ValueError(f"DecoderConfig: options[{mixer!r}] must be among {', '.join(known)}, got {option!r}")
