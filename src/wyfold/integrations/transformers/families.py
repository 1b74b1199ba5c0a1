"""Model types of transformers with delta-rule layers, and the names in their modelling files."""

from __future__ import annotations

import importlib
import sys
from dataclasses import dataclass
from types import ModuleType

from torch import nn

_ROOT = "transformers.models"


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        name: Name of the folder under `transformers.models`.
        model: Name of the class that owns the decoder layers and receives positions.
        norm: Name of the gated norm's class.
        channel: The decay is per key channel (KDA) instead of per head (GDN).
        rounds: The norm rounds to its input's dtype before the weight.
        separable: The other layers can separate documents in a row. False for attention that selects tokens by an index
            over the whole row.
    """

    name: str
    model: str
    norm: str
    channel: bool = False
    rounds: bool = True
    separable: bool = True

    @property
    def module_name(self) -> str:
        return f"{_ROOT}.{self.name}.modeling_{self.name}"

    @property
    def loaded(self) -> bool:
        return self.module_name in sys.modules

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.module_name)

    @property
    def functions(self) -> dict[str, str]:
        """Purpose -> name of the function in the module."""
        chunk, recurrent = (
            ("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention")
            if self.channel
            else ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule")
        )
        return {
            "chunk": chunk,
            "recurrent": recurrent,
            "conv": "causal_conv1d_fn",
            "conv_update": "causal_conv1d_update",
        }


FAMILIES = {
    family.name: family
    for family in (
        Family("qwen3_next", "Qwen3NextModel", "Qwen3NextRMSNormGated"),
        Family("qwen3_5", "Qwen3_5TextModel", "Qwen3_5RMSNormGated"),
        Family("qwen3_5_moe", "Qwen3_5MoeTextModel", "Qwen3_5MoeRMSNormGated"),
        Family("qwen4_exp", "Qwen4ExpTextModel", "Qwen4ExpTextRMSNormGated", separable=False),
        Family("olmo_hybrid", "OlmoHybridModel", "OlmoHybridRMSNormGated"),
        Family("lara_mini", "LaraMiniModel", "LaraMiniRMSNormGated", rounds=False),
        Family("kimi_linear", "KimiLinearModel", "KimiLinearRMSNormGated", channel=True, rounds=False),
        Family("bailing_hybrid", "BailingHybridModel", "BailingHybridRMSNormGated", channel=True, rounds=False),
        Family(
            "glm5_next", "Glm5NextTextModel", "Glm5NextTextRMSNormGated", channel=True, rounds=False, separable=False
        ),
    )
}


def chosen(target: nn.Module | str | list[str] | tuple[str, ...] | None) -> list[Family]:
    """Model types selected by `patch`'s target.

    Raises:
        TypeError: target is neither a module, nor names, nor None.
        ValueError: A name is unknown, there is no name, or target has no delta-rule layers.
    """
    known = ", ".join(FAMILIES)
    if target is None:
        found = [family for family in FAMILIES.values() if family.loaded]
        if not found:
            raise ValueError(
                f"patch: target must be given as long as no model type is loaded, got None; types are {known}"
            )
        return found
    if isinstance(target, nn.Module):
        modules = {cls.__module__ for part in target.modules() for cls in type(part).__mro__}
        found = [family for family in FAMILIES.values() if family.module_name in modules]
        if not found:
            raise ValueError(f"patch: target must be a model of {known}, got {type(target).__name__}")
        return found
    names = [target] if isinstance(target, str) else target
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"patch: target must be a model, type names or None, got {type(target).__name__}")
    if not names:
        raise ValueError(f"patch: target must name at least one type, got {names!r}; types are {known}")
    for name in names:
        if name not in FAMILIES:
            raise ValueError(f"patch: target must be of {known}, got {name!r}")
    return [FAMILIES[name] for name in dict.fromkeys(names)]
