"""Readers for the transformers layers that `from_hf` copies, which refuse what a copy would leave out.

Layers of other model types have similar names. A parameter that is not read, or a setting that is assumed, would give
a copy with other results.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

EXACT = "LaraMiniRMSNormGated"
"""The one norm in layers of Gated DeltaNet that does not round before its weight."""


def parameters(op: str, layer: nn.Module, needed: Collection[str], optional: Collection[str] = ()) -> dict[str, Tensor]:
    """Copy a layer's parameters, which must be exactly those that `from_hf` reads.

    Args:
        op: Name for messages.
        layer: A layer of transformers.
        needed: Names of parameters that the layer must have.
        optional: Names of those that it may have.

    Raises:
        ValueError: Parameters are missing, or there are others.
    """
    source = {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}
    missing, others = set(needed) - source.keys(), source.keys() - {*needed, *optional}
    if missing or others:
        found = [f"no {', '.join(sorted(missing))}"] if missing else []
        found += [f"also {', '.join(sorted(others))}"] if others else []
        raise ValueError(
            f"{op}: layer must have the parameters that are copied, got {type(layer).__name__} with "
            f"{' and '.join(found)}"
        )
    return source


def require_silu(op: str, layer: Any) -> None:
    """Refuse a layer whose convolution has another activation."""
    if layer.activation not in ("silu", "swish"):
        raise ValueError(f"{op}: layer must have the activation silu after its convolution, got {layer.activation!r}")


def norm_settings(op: str, norm: Any) -> dict[str, Any]:
    """Activation and eps of a gated norm, by the names of `GatedRMSNorm`."""
    if norm.activation not in ("silu", "swish", "sigmoid"):
        raise ValueError(f"{op}: layer must have a norm gated by silu or sigmoid, got {norm.activation!r}")
    return {"activation": norm.activation, "eps": norm.variance_epsilon}


def rounds(norm: nn.Module) -> bool:
    """Whether a norm of Gated DeltaNet rounds to its input's dtype before the weight."""
    return type(norm).__name__ != EXACT


def refuse_settings(op: str, module: nn.Module, known: Collection[str]) -> None:
    """Refuse a module with public attributes besides the known ones, whose effect a copy would leave out.

    Of these, `forward` is set by hooks.
    """
    expected = {*known, "training", "forward"}
    others = [name for name in vars(module) if not name.startswith("_") and name not in expected]
    if others:
        raise ValueError(f"{op}: layer must have a gate without further settings, got {', '.join(sorted(others))}")
