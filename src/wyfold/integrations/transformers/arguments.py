"""Parameters of patched functions, compared with those of their replacements when a patch is made.

transformers renames parameters between minor versions. A replacement would then drop an argument, and a check of a
keyword's former name would always pass. Therefore a difference in names, order or defaults is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

CACHES = ("past_key_values", "cache")
"""Names of a text model's cache argument: up to 5.23, and since 5.24."""

FORWARD = ("input_ids", "attention_mask", "position_ids", "inputs_embeds", "use_cache")
"""Parameters of a text model's `forward` that packing reads or sets, besides the cache."""

_Parameters = dict[str, inspect.Parameter]


def difference(stock: Callable[..., Any], ours: Callable[..., Any]) -> str | None:
    """Describe how the parameters of a stock function differ from those of its replacement; None if they do not.

    Names, their order and their defaults are compared. A stock parameter without default is always passed, so the
    replacement's default does not matter.
    """
    theirs, own = _parameters(stock), _parameters(ours, follow_wrapped=False)
    missing = [name for name in own if name not in theirs]
    unknown = [name for name in theirs if name not in own]
    if missing or unknown:
        found = [f"no parameter {', '.join(missing)}"] if missing else []
        found += [f"an unknown parameter {', '.join(unknown)}"] if unknown else []
        return f"has {' and '.join(found)}"
    if list(theirs) != list(own):
        return f"has its parameters in the order {', '.join(theirs)}"
    for name, parameter in theirs.items():
        expected = own[name].default
        if parameter.default not in (inspect.Parameter.empty, expected):
            shown = "no default" if expected is inspect.Parameter.empty else f"the default {expected!r}"
            return f"has the default {parameter.default!r} for {name}, expected {shown}"
    return None


def _parameters(function: Callable[..., Any], follow_wrapped: bool = True) -> _Parameters:
    """Named parameters without self. With the package `kernels` installed, functions are modules with `forward`."""
    callee = type(function).forward if isinstance(function, nn.Module) else function
    parameters = inspect.signature(callee, follow_wrapped=follow_wrapped).parameters
    return {
        name: p for name, p in parameters.items() if name != "self" and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }


@dataclass(frozen=True)
class Arguments:
    """Parameters of a text model's `forward`.

    Attributes:
        positional: Names of positional parameters in order, without self.
    """

    positional: tuple[str, ...]

    @classmethod
    def of(cls, forward: Callable[..., Any]) -> Arguments:
        """Read the signature of a class's `forward`.

        Raises:
            LookupError: A parameter that packing relies on is missing; the message names it.
        """
        parameters = list(inspect.signature(forward).parameters.values())[1:]
        positional = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
        missing = [name for name in FORWARD if name not in positional]
        if not any(name in positional for name in CACHES):
            missing.append(" or ".join(CACHES))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            missing.append("**kwargs")
        if missing:
            raise LookupError(", ".join(missing))
        return cls(positional)

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
