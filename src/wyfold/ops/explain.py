"""`explain`: the plan of a call, without running it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wyfold.runtime.check import UnsupportedError
from wyfold.runtime.plan import Plan, plan_of


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """Plan of `op(*args, **kwargs)`, without running it.

    A plan has fields for programs, and prints as text for people, without what says nothing about the call.

    Args:
        op: A public operator of wyfold.
        args, kwargs: Its arguments; meta tensors suffice.

    Returns:
        Plan with backend, launches, chunk size, parts, copies, and the reasons against other backends.

    Raises:
        TypeError: op is not callable, or the call itself would raise it.
        ValueError: The call itself would raise it.
        UnsupportedError: The call itself would raise it, with the same message: the reason, and what to do.

    Examples:
        >>> import torch, wyfold
        >>> q = torch.empty(1, 100, 4, 64, device="meta")
        >>> wyfold.explain(wyfold.chunk_delta_rule, q, q, q).backend
        'eager'
    """
    if not callable(op):
        raise TypeError(f"explain: op must be an operator of wyfold, the function itself, got {op!r}")
    try:
        return plan_of(lambda: op(*args, **kwargs))
    except UnsupportedError as refusal:
        raise refusal.with_traceback(None) from None  # without the operator's inner frames
