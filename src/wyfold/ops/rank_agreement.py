"""What operators ask of a `ContextParallel` before the ranks of a group run them together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime.torch_ops import autocast_dtype

Planned = TypeVar("Planned")


def context_of(op: str, context: object) -> ContextParallel:
    """The context, if it is one."""
    if not isinstance(context, ContextParallel):
        raise TypeError(f"{op}: cp_context must be a ContextParallel or None, got {type(context).__name__}")
    return context


def ranks_agree(
    op: str,
    context: object,
    x: object,
    make_plan: Callable[[], Planned],
    describe: Callable[[Planned], Mapping[str, object]] | None = None,
    module: Hashable = None,
) -> Planned:
    """What `make_plan` says, once all ranks are known to do the same (`ContextParallel.ranks_agree`).

    Args:
        op: Operator's name.
        context: What the caller gave as cp_context.
        x: A tensor of the call, beside which ranks compare; whatever else is wrong with it.
        make_plan: Checks this rank's arguments.
        describe: Gives what must be equal on all ranks. None: nothing is compared here, but in the operator that is
            called next; ranks that wait there receive this rank's refusal.
        module: Of a module's call, settings that are among the compared ones; its calls differ by them and by B. None:
            an operator is called, whose calls differ by the shape and dtype of x.

    Raises:
        TypeError: no context, or this rank's own refusal.
        ValueError: this rank's own refusal; another rank refused, or is about to do something else.
    """
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    found = context_of(op, context)
    return found.ranks_agree(op, device, make_plan, describe, kind=_kind(found, x, module))


def _kind(context: ContextParallel, x: object, module: Hashable) -> Hashable:
    """`kind` of `ContextParallel.ranks_agree`.

    Left out is what differs only where x is wrong: T, the width and dtype of a module's input, and B beside boundaries.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    rows = x.shape[0] if context.dense else 1
    return rows, (x.shape[2:], autocast_dtype(x.device.type) or x.dtype) if module is None else module


def check_share(op: str, context: ContextParallel, name: str, x: Tensor, cu_seqlens: object) -> None:
    """x [B, T, ...] is this rank's share, and the boundaries are the context's alone."""
    if cu_seqlens is not None:
        raise ValueError(f"{op}: cu_seqlens must be None with cp_context, which has the boundaries, got both")
    context.check_tokens(op, x, name)
