"""Checks of a context-parallel call that need the other ranks, or the context."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from wyfold.context_parallel.agreement import RankedCall
from wyfold.context_parallel.context import ContextParallel
from wyfold.runtime.torch_modes import autocast_dtype


def ranked_call(op: str, context: object, x: object, module: Hashable = None) -> RankedCall:
    """The comparison of a call between ranks (`RankedCall`).

    Args:
        op: Operator's name, for messages.
        context: The caller's cp_context.
        x: A tensor of the call; ranks compare on its device. It may still be invalid.
        module: For a module's call, compared settings that identify it, together with B. None: an operator's call,
            identified by the shape and dtype of x.

    Raises:
        TypeError: context is not a ContextParallel.
    """
    found = context_of(op, context)
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    return RankedCall(found.agreement, op, device, _kind(found, x, module))


def context_of(op: str, context: object) -> ContextParallel:
    """Return the context, or raise TypeError if it is not one."""
    if not isinstance(context, ContextParallel):
        raise TypeError(f"{op}: cp_context must be a ContextParallel or None, got {type(context).__name__}")
    return context


def _kind(context: ContextParallel, x: object, module: Hashable) -> Hashable:
    """Identity of a call for `RankedCall`.

    Properties that differ only for an invalid x are left out: T, the width and dtype of a module's input, and B of a
    packed batch.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        return None
    rows = x.shape[0] if context.dense else 1
    return rows, (x.shape[2:], autocast_dtype(x.device.type) or x.dtype) if module is None else module


def check_shard(op: str, context: ContextParallel, name: str, x: Tensor, cu_seqlens: object) -> None:
    """Check that x [B, T, ...] is this rank's shard, and that only the context has boundaries."""
    if cu_seqlens is not None:
        raise ValueError(f"{op}: cu_seqlens must be None with cp_context, which has the boundaries, got both")
    context.check_tokens(op, x, name)
