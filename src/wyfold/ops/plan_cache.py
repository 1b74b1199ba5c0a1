"""What calls asked for came to, kept: checks and plans look at metadata, and are the same for the same metadata."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
"""Plans kept; when there are more, all are forgotten."""

_plans: dict[tuple[Any, ...], Any] = {}


def cached_plan(key: tuple[Any, ...] | None, make_plan: Callable[[], Planned]) -> Planned:
    """What `make_plan` says, asked once for every key; None is no key."""
    found: Planned | None = None if key is None else _plans.get(key)
    if found is None:
        found = make_plan()
        if key is not None and not zero_positions(key[1][0]):
            if len(_plans) >= MAX_PLANS:
                _plans.clear()
            _plans[key] = found
    return found


def plan_key(tensors: tuple[Any, ...], values: tuple[Any, ...], backend: str | None) -> tuple[Any, ...] | None:
    """A call by what is decided from it: its tensors' metadata, q's first; other values; and what is around it.

    None if a plan must not be reused: where contents are looked at, where a call is made for its plan alone, where
    sizes may be symbols, and for what is nothing legal.
    """
    q = tensors[0]
    if torch.compiler.is_compiling() or check.checking_contents() or explaining() or q is None:
        return None
    if not _PLAIN.issuperset(map(type, tensors)):
        return None
    try:
        metadata = tuple([None if x is None else (x.shape, x.dtype, x.device, x.layout) for x in tensors])
    except RuntimeError:  # a nested tensor, which has no shape
        return None
    around = any_requires_grad(tensors), autocast_dtype(q.device.type), table.refusal(q.device, backend)
    types = tuple(map(type, values))  # True is 1 to a dictionary, but no flag
    try:
        hash(values)
    except TypeError:  # an argument that is nothing legal
        return None
    return metadata, (values, types), around


_PLAIN = frozenset((NoneType, Tensor, torch.nn.Parameter))


def any_requires_grad(given: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
