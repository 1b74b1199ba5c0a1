"""What a call would run, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from wyfold.runtime.plan import Plan, settled_by


def explain(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """The plan of `op(*args, **kwargs)`, without running it.

    Args:
        op: A public operator of wyfold.
        args, kwargs: Its arguments; meta tensors do.

    Returns:
        Plan with backend, launches, chunk size, parts, copies, and why other backends were refused.

    Raises:
        TypeError, ValueError: What the call itself would raise.

    Examples:
        >>> import torch, wyfold
        >>> q = torch.empty(1, 100, 4, 64, device="meta")
        >>> wyfold.explain(wyfold.chunk_delta_rule, q, q, q).backend
        'eager'
    """
    if not callable(op):
        raise TypeError(f"explain: op must be an operator of wyfold, the function itself, got {op!r}")
    return settled_by(lambda: op(*args, **kwargs))
