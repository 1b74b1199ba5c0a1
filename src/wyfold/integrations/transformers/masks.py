"""Padding and document boundaries in the attention masks of transformers.

    [B, T] or [B, past + T]     padding mask, zero for padding
    [B or 1, H or 1, T, keys]   bool, or float added to the scores; prepared by the model or the caller
    {layer type: mask}          prepared by `generate` for a static cache; that of recurrent layers is [B, T]
    BlockMask                   flex attention

Recurrent layers read padding from two-dimensional masks only, and so do these functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RECURRENT = "linear_attention"
"""Layer type of the delta-rule layers in a dict of masks."""


def padding(op: str, mask: Any) -> Tensor | None:
    """[B, past + T] padding mask, zero for padding; None without a two-dimensional mask.

    Args:
        op: Name for messages.
        mask: Mask in any form.

    Raises:
        ValueError: A dict has no entry for recurrent layers, so its padding cannot be found.
    """
    if isinstance(mask, dict):
        if RECURRENT not in mask:
            raise ValueError(
                f"{op}: attention_mask must have an entry {RECURRENT!r} where it is a dict, got {', '.join(mask)}"
            )
        mask = mask[RECURRENT]
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def packed_mask(op: str, mask: Any, starts: Tensor) -> Any:
    """Mask to pass to the model with packed documents.

    Without a mask, models build one that separates documents. A four-dimensional mask is used unchanged, so it must
    separate them itself.

    Args:
        op: Name for messages.
        mask: Mask in any form; a [B, T] mask is already known to have no padding.
        starts: [B, T] bool, True where a document begins.

    Raises:
        ValueError: The mask lets a token attend to another document, or its contents cannot be read.
    """
    if isinstance(mask, dict):
        kept = {layers: packed_mask(op, part, starts) for layers, part in mask.items()}
        return None if all(part is None for part in kept.values()) else kept
    if mask is None or (isinstance(mask, Tensor) and mask.ndim == 2):
        return None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        what = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"{op}: attention_mask must be None, [B, T] or [B, 1, T, T] with packed documents, got {what}; leave it "
            "out, and one is made from the boundaries"
        )
    if not torch.compiler.is_compiling():
        _check_apart(op, mask, starts)
    return mask


def _check_apart(op: str, mask: Tensor, starts: Tensor) -> None:
    B, T = starts.shape
    if mask.shape[0] not in (1, B) or list(mask.shape[2:]) != [T, T]:
        raise ValueError(
            f"{op}: attention_mask must be [B, 1, T, T] = [{B}, 1, {T}, {T}] with packed documents, got "
            f"{list(mask.shape)}"
        )
    attended = mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask != 0
    document = starts.flatten().cumsum(0).view(B, T).to(mask.device)
    other = document[:, None, :, None] != document[:, None, None, :]
    if bool((attended & other).any()):
        raise ValueError(
            f"{op}: attention_mask must keep packed documents apart, got one by which a token attends to another "
            "document; leave it out, and one is made from the boundaries"
        )
