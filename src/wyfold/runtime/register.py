"""Registration of operators with torch: one scheme, define + impl + fake, for every forward and every backward.

The gradient belongs to the `torch.autograd.Function` that calls the pair; a registered operator itself has none. That
is a third of the host time of `register_autograd`, and a compiler sees one opaque node with known shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("wyfold", "DEF")


def register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Callable[..., Any]:
    """Define torch.ops.wyfold.<name> for every device and return it.

    Args:
        schema: "name(Tensor x, ...) -> (Tensor y, ...)". Outputs never alias inputs.
        run: The implementation. Runs without autograd.
        fake: Outputs' shapes and dtypes from the inputs' metadata alone.
    """
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, _outside_autocast(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"wyfold::{name}", fake, lib=_library)
    return getattr(torch.ops.wyfold, name).default


def _outside_autocast(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the dtypes it was given: the products inside it would else be cast as a layer's are."""

    @functools.wraps(run)
    def outside_autocast(*arguments: Any) -> Any:
        device = next(x.device.type for x in arguments if isinstance(x, Tensor))
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return run(*arguments)
        with torch.autocast(device, enabled=False):
            return run(*arguments)

    return outside_autocast
