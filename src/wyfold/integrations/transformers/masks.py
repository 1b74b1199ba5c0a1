"""Attention masks in the forms that transformers makes, and what they say about padding and documents.

    [B, T] or [B, past + T]     padding, zero where a token is none
    [B or 1, H or 1, T, keys]   bool, or float added to the scores: prepared, or made by the caller
    {layer type: mask}          what `generate` prepares for a static cache; recurrent layers' is [B, T]
    BlockMask                   flex attention's

Recurrent layers read padding from two dimensions alone, so this is what padding means here too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

RECURRENT = "linear_attention"
"""Layer type of the delta-rule layers in a dict of masks."""


def padding(mask: Any, T: int) -> Tensor | None:
    """[B, T] mask of the tokens of this call, zero where there is padding; None where no mask says so."""
    if isinstance(mask, dict):
        mask = mask.get(RECURRENT)
    return mask[:, -T:] if isinstance(mask, Tensor) and mask.ndim == 2 else None


def packed_mask(op: str, mask: Any, starts: Tensor) -> Any:
    """The mask to hand on with packed documents.

    Without one, models make a mask that keeps documents apart. A mask of four dimensions is used as it is, and has to.

    Args:
        op: For messages.
        mask: In any form; [B, T] has been seen to have no padding.
        starts: [B, T] bool, True where a document begins.

    Raises:
        ValueError: a mask that lets a token attend to another document, or whose contents cannot be read.
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
