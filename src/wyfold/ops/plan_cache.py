"""Cached plans. Checks and planning depend on metadata only, so equal metadata gives an equal plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import NoneType
from typing import Any, TypeVar

import torch
from torch import Tensor

from wyfold.kernels import table
from wyfold.runtime import check
from wyfold.runtime.plan import explaining
from wyfold.runtime.replay_cache import zero_positions
from wyfold.runtime.torch_ops import autocast_dtype

Planned = TypeVar("Planned")

MAX_PLANS = 4096
"""Capacity of the cache; a full cache is cleared."""

_plans: dict[tuple[Any, ...], Any] = {}


def cached_plan(key: tuple[Any, ...] | None, make_plan: Callable[[], Planned]) -> Planned:
    """Return the plan cached under `key`, or call `make_plan` and cache its result; with None, do not cache."""
    found: Planned | None = None if key is None else _plans.get(key)
    if found is None:
        found = make_plan()
        if key is not None and not zero_positions(key[1][0]):
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = found
    return found


def plan_key(tensors: tuple[Any, ...], values: tuple[Any, ...], backend: str | None) -> tuple[Any, ...] | None:
    """Cache key of a call: metadata of its tensors (q first), other values, and the state of the process.

    None if the plan must not be reused: `checked` reads contents, `explain` needs the plan itself, compilation has
    symbolic sizes, and illegal arguments must be refused each time.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or check.checking_contents() or explaining() or q is None:
        return None
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        metadata = tuple([None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors])
    except RuntimeError:  # a nested tensor has no shape
        return None
    around = any_requires_grad(tensors), autocast_dtype(q.device.type), table.refusal(q.device, backend)
    types = tuple(map(type, values))  # True == 1 as a dictionary key, but 1 is not a legal flag
    try:
        hash(values)
    except TypeError:  # an illegal argument
        return None
    return metadata, (values, types), around


_PLAIN = frozenset((NoneType, Tensor, torch.nn.Parameter))


def any_requires_grad(given: Iterable[Tensor | None]) -> bool:
    """Whether gradients are enabled and one of the tensors requires one."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)


def refuse_gradients(op: str, tensors: Mapping[str, Any]) -> None:
    """Refuse tensors that require a gradient, for an operator without a backward.

    Raises:
        ValueError: A tensor requires a gradient; the message names it.
    """
    for name, x in tensors.items():
        if isinstance(x, Tensor) and any_requires_grad([x]):
            raise ValueError(
                f"{op}: {name} must not require a gradient, got one that does; the operator has no backward, "
                "so call it under torch.no_grad()"
            )
