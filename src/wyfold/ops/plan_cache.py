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
from wyfold.runtime.replay_cache import zeros
from wyfold.runtime.torch_ops import autocast_dtype

Decision = TypeVar("Decision")

MOST = 4096
"""Decisions kept; when there are more, all are forgotten."""

_decisions: dict[tuple[Any, ...], Any] = {}


def decided(key: tuple[Any, ...] | None, decide: Callable[[], Decision]) -> Decision:
    """What `decide` says, asked once for every key; None is no key."""
    found: Decision | None = None if key is None else _decisions.get(key)
    if found is None:
        found = decide()
        if key is not None and not zeros(key[1][0]):
            if len(_decisions) >= MOST:
                _decisions.clear()
            _decisions[key] = found
    return found


def decision_key(tensors: tuple[Any, ...], values: tuple[Any, ...], backend: str | None) -> tuple[Any, ...] | None:
    """A call by what is decided from it: its tensors' metadata, q's first; other values; and what is around it.

    None if a decision must not be reused: where contents are looked at, where a call is made for its plan alone, where
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
    around = keeps_gradients(tensors), autocast_dtype(q.device.type), table.refusal(q.device, backend)
    types = tuple(map(type, values))  # True is 1 to a dictionary, but no flag
    try:
        hash(values)
    except TypeError:  # an argument that is nothing legal
        return None
    return metadata, (values, types), around


_PLAIN = frozenset((NoneType, Tensor, torch.nn.Parameter))


def keeps_gradients(given: Iterable[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given)
