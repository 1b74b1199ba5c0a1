"""Arguments of the functions that are patched, resolved by their real signatures when a patch is made.

transformers renames parameters between minor versions. A check that looks for a keyword under its former name never
sees it and passes everything, so every name that is relied upon has to be a parameter of what is patched.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CACHES = ("past_key_values", "cache")
"""Names of a text model's cache: up to 5.23, and since 5.24."""

RULE = ("query", "key", "value", "g", "beta", "initial_state", "output_final_state", "use_qk_l2norm_in_kernel")
EXPECTED = {
    "chunk": RULE,
    "recurrent": RULE,
    "conv": ("weight", "bias", "activation"),
    "conv_update": ("conv_state", "weight", "bias", "activation"),
    "norm": ("hidden_states", "gate"),
    "forward": ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache"),
}
"""What is patched -> parameters it must have. The convolved tensor is handed over by position."""


def missing_parameters(purpose: str, stock: Callable[..., Any]) -> list[str]:
    """Names in `EXPECTED` that are no parameters of a function."""
    parameters = inspect.signature(stock).parameters
    return [name for name in EXPECTED[purpose] if name not in parameters]


@dataclass(frozen=True)
class Arguments:
    """Parameters of a text model's `forward`.

    Attributes:
        positional: Names in order, without the module.
        cache: Name of the cache.
    """

    positional: tuple[str, ...]
    cache: str

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Arguments:
        """Read the signature of a class's `forward`.

        Raises:
            LookupError: a parameter that packing relies on is absent. Says which.
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
            TypeError: too many positional arguments, or one given twice, as Python does.
        """
        if len(args) > len(self.positional):
            raise TypeError(f"{op}: forward takes {len(self.positional)} positional arguments, got {len(args)}")
        given = dict(zip(self.positional, args))
        for name in given:
            if name in kwargs:
                raise TypeError(f"{op}: {name} must be given once, got it by position and by name")
        return {**given, **kwargs}
