"""Arguments of patched functions, resolved from their signatures when a patch is made.

transformers renames parameters between minor versions, and a check of a keyword's former name would silently pass.
Therefore every name this integration relies on must be a parameter of the patched function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CACHES = ("past_key_values", "cache")
"""Names of a text model's cache argument: up to 5.23, and since 5.24."""

RULE = ("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
EXPECTED = {
    "chunk": RULE,
    "recurrent": RULE,
    "conv": ("weight", "bias", "activation"),
    "conv_update": ("conv_state", "weight", "bias", "activation"),
    "norm": ("hidden_states", "gate"),
    "forward": ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"),
}
"""Purpose of a patched function -> parameters it must have. The convolved tensor is passed by position."""


def missing_parameters(purpose: str, stock: Callable[..., Any]) -> list[str]:
    """Names in `EXPECTED` that a function does not have as parameters."""
    parameters = inspect.signature(stock).parameters
    return [name for name in EXPECTED[purpose] if name not in parameters]


@dataclass(frozen=True)
class Arguments:
    """Parameters of a text model's `forward`.

    Attributes:
        positional: Names of positional parameters in order, without self.
        cache: Name of the cache parameter.
    """

    positional: tuple[str, ...]
    cache: str

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Arguments:
        """Read the signature of a class's `forward`.

        Raises:
            LookupError: A parameter that packing relies on is missing; the message names it.
        """
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        missing = missing_parameters("forward", forward)
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        caches = [name for name in CACHES if name in positional]
        if not caches:
            missing.append(" or ".join(CACHES))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            missing.append("**kwargs")
        if missing:
            raise LookupError(", ".join(missing))
        return cls(positional, caches[0])

    def by_name(self, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments of a call by name.

        Raises:
            TypeError: There are too many positional arguments, or one is given twice.
        """
        if len(args) > len(self.positional):
            raise TypeError(f"{op}: forward takes {len(self.positional)} positional arguments, got {len(args)}")
        given = dict(zip(self.positional, args))
        for name in given:
            if name in kwargs:
                raise TypeError(f"{op}: {name} must be given once, got it by position and by name")
        return {**given, **kwargs}
