"""Configuration of a decoder: sizes, and a pattern of mixers."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from wyfold import layers
from wyfold.runtime import check
from wyfold.runtime.pattern import ALIASES, MOST_LAYERS, canonical, parse

MIXERS: dict[str, type[nn.Module]] = {
    "delta_net": layers.DeltaNet,
    "gated_delta_net": layers.GatedDeltaNet,
    "kda": layers.KimiDeltaAttention,
    "gated_delta_net2": layers.GatedDeltaNet2,
    "gated_delta_product": layers.GatedDeltaProduct,
    "gla": layers.GatedLinearAttention,
    "rwkv7": layers.RWKV7TimeMix,
    "ttt_linear": layers.TTTLinear,
    "path_attention": layers.PaTHAttention,
    "attention": layers.SoftmaxAttention,
}
LARGEST = {"vocab_size": 2**31 - 1, "mlp_size": 2**28}
WIDEST = 2**24
"""Maximum of all other sizes; the bytes of a matrix of such sizes fit into 64 bits."""
NOT_IN_SHAPES = ("head_dim", "norm_eps", "options")
"""Fields that change results without changing the name or shape of a tensor. `head_dim` is one, because attention with
4 heads of 64 has the tensors of 8 heads of 32. All other fields follow from names and shapes and these three."""


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Configuration of a `Decoder`.

    Args:
        vocab_size: Token ids are 0 to vocab_size - 1. 256 for bytes.
        hidden_size: Width of the residual stream.
        num_layers: Number of blocks.
        pattern: Names of mixers with optional counts, such as "kda*3 attention", repeated to num_layers. Names:
            delta_net, gated_delta_net (gdn), kda, gated_delta_net2 (gdn2), gated_delta_product (gdp), gla,
            rwkv7, ttt_linear, path_attention, attention.
        num_heads, num_v_heads, head_dim, head_v_dim, conv_size: Passed to every mixer that has such an argument.
        mlp_size: Inner width of the MLP. None: 8/3 of hidden_size, rounded up to a multiple of 16.
        tied: Use the embedding as the output matrix.
        norm_eps: eps of the norms of the residual stream.
        options: Mixer's name -> additional or overriding arguments: {"attention": {"window": 256}}.

    Raises:
        TypeError: A field has the wrong type; the message names it.
        ValueError: A field is out of range or unknown to its mixer; the message names it.

    Examples:
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
            _check_size(field, getattr(self, field))
        for field in ("num_v_heads", "head_v_dim", "mlp_size"):
            if getattr(self, field) is not None:
                _check_size(field, getattr(self, field))
        check.flag(name, tied=self.tied)
        if check.epsilon(name, self.norm_eps, name="norm_eps") > 1:
            raise ValueError(f"{name}: norm_eps must be at most 1, got {self.norm_eps}")
        parse(self.pattern)
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
        period = parse(self.pattern)
        return tuple(period[i % len(period)] for i in range(self.num_layers))

    def mixer(self, name: str, *, backend: str | None = None, number: int | None = None) -> nn.Module:
        """A new mixer.

        Args:
            name: Canonical name.
            backend: Backend of its operators.
            number: Number of its block. None: that of the first block with such a mixer.
        """
        shared = ("hidden_size", "num_heads", "num_v_heads", "head_dim", "head_v_dim", "conv_size")
        known = inspect.signature(MIXERS[name]).parameters
        arguments = {field: getattr(self, field) for field in shared if field in known}
        if "backend" in known:  # softmax attention has none: it is PyTorch's on every device
            arguments["backend"] = backend
        if "layer_idx" in known and number is not None:  # counted among the layers of this kind
            arguments["layer_idx"] = self.layers[:number].count(name)
            arguments["num_layers"] = self.layers.count(name)
        return MIXERS[name](**arguments | dict(self.options.get(name, {})))

    def _check_mixer(self, name: str) -> None:
        """Build a mixer on the meta device, and raise its errors under the name of the configuration's field."""
        try:
            with torch.device("meta"):
                self.mixer(name)
        except (OverflowError, RuntimeError) as error:  # sizes whose product exceeds 64 bits
            reason = str(error).partition("\n")[0]
            raise ValueError(f"DecoderConfig: sizes must fit into memory, got more in {name}: {reason}") from error
        except (TypeError, ValueError) as error:
            argument, _, complaint = str(error).partition(": ")[2].partition(" ")
            field = argument
            if argument in self.options.get(name, {}):
                field = f"options[{name!r}][{argument!r}]"
            elif not hasattr(self, argument):  # an argument of a submodule, which has another name there
                field = f"options[{name!r}]: {argument}"
            raise type(error)(f"DecoderConfig: {field} {complaint}, in {name}") from error

    def to_json(self) -> str:
        """The fields as a JSON object."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, required: Collection[str] = ()) -> DecoderConfig:
        """Parse the output of `to_json`; a missing field has its default.

        Args:
            text: A JSON object.
            required: Fields that must be present. `Decoder.load` requires head_dim, norm_eps and options, because a
                default could give another model with the same tensors. It compares the names and shapes of the tensors
                with those that follow from the other fields.

        Raises:
            ValueError: text is not a JSON object; a number is not finite; a required field is missing; a field is
                given twice, unknown to this version, or has a value of the wrong type or range.
        """
        try:
            fields = json.loads(
                text, parse_constant=_refuse_constant, parse_int=_read_integer, object_pairs_hook=_once_each
            )
        except RecursionError:
            raise ValueError("DecoderConfig: text must be a JSON object, got brackets nested too deeply") from None
        except json.JSONDecodeError as error:
            raise ValueError(f"DecoderConfig: text must be a JSON object, got none ({error})") from error
        if not isinstance(fields, dict):
            raise ValueError(f"DecoderConfig: text must be a JSON object, got {type(fields).__name__}")
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := fields.keys() - known:
            raise ValueError(f"DecoderConfig: fields must be known to this version, got {', '.join(sorted(unknown))}")
        if missing := set(required) - fields.keys():
            raise ValueError(
                f"DecoderConfig: {', '.join(sorted(missing))} must be given, because no tensor's shape shows what the "
                "model was trained with; add what is missing to the JSON object"
            )
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(str(error)) from error


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"DecoderConfig: numbers must be finite, got {word}")


def _read_integer(word: str) -> int:
    if len(word) > 18:
        raise ValueError(f"DecoderConfig: whole numbers must have at most 18 digits, got {len(word)}")
    return int(word)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object's dict, refusing repeated names."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"DecoderConfig: fields must be given once, got {twice} twice")
    return fields


def _check_size(field: str, value: object) -> None:
    """Check that a size is an integer from 1 to the field's maximum."""
    size = check.integer("DecoderConfig", field, value, least=1)
    most = MOST_LAYERS if field == "num_layers" else LARGEST.get(field, WIDEST)
    if size > most:
        # Python refuses to format an integer of thousands of digits.
        got = size if size < 2**64 else f"a number of {size.bit_length()} bits"
        raise ValueError(f"DecoderConfig: {field} must be at most {most}, got {got}")


def _check_options(mixer: str, options: Mapping[str, Any]) -> None:
    name = canonical("options", mixer)
    if not isinstance(options, Mapping):
        raise TypeError(f"DecoderConfig: options[{mixer!r}] must map names to values, got {type(options).__name__}")
    # Set for all layers; an argument of the decoder, never stored; set by the position in the pattern.
    elsewhere = ("hidden_size", "backend", "layer_idx", "num_layers")
    known = [option for option in inspect.signature(MIXERS[name]).parameters if option not in elsewhere]
    for option in options:
        if option not in known:
            raise ValueError(f"DecoderConfig: options[{mixer!r}] must be among {', '.join(known)}, got {option!r}")
