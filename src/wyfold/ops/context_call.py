"""What operators ask of a `ContextParallel` before the ranks of a group run them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from wyfold.parallel.context import ContextParallel

Decision = TypeVar("Decision")


def context_of(op: str, context: object) -> ContextParallel:
    """The context, if it is one."""
    if not isinstance(context, ContextParallel):
        raise TypeError(f"{op}: cp_context must be a ContextParallel or None, got {type(context).__name__}")
    return context


def agreed(
    op: str,
    context: object,
    x: object,
    decide: Callable[[], Decision],
    describe: Callable[[Decision], Mapping[str, object]] | None = None,
) -> Decision:
    """What `decide` says, once all ranks are known to do the same (`ContextParallel.agreed`).

    Args:
        op: Operator's name.
        context: What the caller gave as cp_context.
        x: A tensor of the call, beside which ranks compare; whatever else is wrong with it.
        decide: Checks this rank's arguments.
        describe: Gives what must be equal on all ranks. None: nothing is compared here, but in the operator that is
            called next; ranks that wait there receive this rank's refusal.

    Raises:
        TypeError: no context, or this rank's own refusal.
        ValueError: this rank's own refusal; another rank refused, or is about to do something else.
    """
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    return context_of(op, context).agreed(op, device, decide, describe)


def check_share(op: str, context: ContextParallel, name: str, x: Tensor, cu_seqlens: object) -> None:
    """x [B, T, ...] is this rank's share, and the boundaries are the context's alone."""
    if cu_seqlens is not None:
        raise ValueError(f"{op}: cu_seqlens must be None with cp_context, which has the boundaries, got both")
    context.check_tokens(op, x, name)
