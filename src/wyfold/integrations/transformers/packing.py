"""Packed documents: one set of boundaries for attention, convolution and recurrence.

The models accept packed documents as restarting positions or as `cu_seq_lens_q`. Attention separates them by positions,
if there is no mask and no cache. The delta-rule layers read only `cu_seq_lens_q`. `settled` rewrites a call so that all
layers read the same boundaries, or refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.integrations.transformers.arguments import CACHES
from wyfold.integrations.transformers.masks import packed_mask, padding
from wyfold.runtime import check
from wyfold.runtime.differentiation import exporting
from wyfold.runtime.layout import boundaries as checked_boundaries
from wyfold.runtime.layout import legal_boundaries

Call = dict[str, Any]


def settled(op: str, call: Call) -> Call:
    """Make the keywords of a model's forward consistent.

    A call without packed documents is returned unchanged. Reading positions synchronises with the device once. In
    compiled code, given boundaries are trusted, because tensors cannot be read there. Positions without boundaries
    break the graph; `torch.export`, which needs a single graph, refuses them.

    Args:
        op: Model type, for messages.
        call: Keywords of the text model's forward.

    Returns:
        The same keywords. With packed documents: `cu_seq_lens_q` [N+1] over all rows of the flattened batch,
        `position_ids` that restart at each boundary, no padding mask, and `use_cache=False`.

    Raises:
        ValueError: Packed documents come with a cache, a padding mask with padding, or a mask that connects documents;
            positions and boundaries disagree; boundaries are given under another name; or a cache would be filled from
            rows with padding on the right.
    """
    _refuse_other_names(op, call)
    tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] < 2:
        return call
    B, T = tokens.shape[:2]
    cached = any(call.get(name) is not None for name in CACHES)
    whole = padding(op, call.get("attention_mask"))
    if whole is not None and (cached or call.get("use_cache")):
        _refuse_right_padding(op, whole, T)
    mask = None if whole is None else whole[:, -T:].to(tokens.device)
    named, given = _given(op, call, tokens)
    starts = _position_starts(call.get("position_ids"), tokens, mask, bounded=given is not None)
    if given is None:
        if starts is None:
            return call
        if exporting():
            raise ValueError(
                f"{op}: position_ids must be left out of an exported call, which cannot read whether documents begin "
                "in them; give cu_seq_lens_q for packed documents, or patch with packing=False where there are none"
            )
        if int(starts.sum()) == B:
            return call
        named, given = "position_ids", starts
    _refuse_cache(op, call, cached, named)
    if not torch.compiler.is_compiling():
        _check_contents(op, named, given, starts, mask)
    boundaries = call.get("cu_seq_lens_q")
    boundaries = _boundaries(given) if boundaries is None else boundaries.to(tokens.device)
    whole_mask = packed_mask(op, call.get("attention_mask"), given)
    positions = _restarted(call.get("position_ids"), given)
    kept = {"position_ids": positions, "attention_mask": whole_mask, "cu_seq_lens_q": boundaries}
    return {**call, **kept, "use_cache": False}


def _refuse_other_names(op: str, call: Call) -> None:
    """Refuse boundaries under names that layers ignore, or that collide with their own arguments."""
    if call.get("cu_seqlens") is not None:
        raise ValueError(f"{op}: boundaries must be given as cu_seq_lens_q, got cu_seqlens")
    if call.get("cu_seq_lens_q") is None and call.get("cu_seq_lens_k") is not None:
        raise ValueError(f"{op}: boundaries must be given as cu_seq_lens_q, got cu_seq_lens_k alone")


def _given(op: str, call: Call, tokens: Tensor) -> tuple[str, Tensor | None]:
    """Name of the argument with boundaries, and [B, T] bool, True where a document begins; None without boundaries."""
    B, T = tokens.shape[:2]
    seq_idx = call.get("seq_idx")
    changes = None if seq_idx is None else _changes(op, seq_idx, B, T).to(tokens.device)
    if call.get("cu_seq_lens_q") is None:
        return "seq_idx", changes
    starts = _starts_of(op, "cu_seq_lens_q", call["cu_seq_lens_q"], tokens)
    others = {"seq_idx": changes}
    if call.get("cu_seq_lens_k") is not None:
        others["cu_seq_lens_k"] = _starts_of(op, "cu_seq_lens_k", call["cu_seq_lens_k"], tokens)
    for name, other in others.items():
        if other is not None and not torch.compiler.is_compiling() and not torch.equal(other, starts):
            raise ValueError(
                f"{op}: {name} must have the boundaries of cu_seq_lens_q, got {int(other.sum())} documents and "
                f"{int(starts.sum())}, or other lengths; give one of the two"
            )
    return "cu_seq_lens_q", starts


def _position_starts(
    position_ids: Tensor | None, tokens: Tensor, mask: Tensor | None, *, bounded: bool
) -> Tensor | None:
    """[B, T] bool, True at a row's first token and where positions begin again; None if they do not tell.

    Multimodal models take [4, B, T]: text, time, height, width. The first are read. Without them, [3, B, T], a position
    repeats within an image, and only the first token of a document has three zeros. If boundaries are given, these are
    not compared: as rotations are relative, a document may begin at any position. Positions of padding are arbitrary
    and ignored.
    """
    if position_ids is None or (_is_pictorial(position_ids) and bounded):
        return None
    B, T = tokens.shape[:2]
    position_ids = position_ids.to(tokens.device)
    if _is_pictorial(position_ids):
        starts = (position_ids == 0).all(0).expand(B, T).clone()
    elif position_ids.ndim == 3 and position_ids.shape[0] != 4:
        return None
    else:
        positions = (position_ids[0] if position_ids.ndim == 3 else position_ids).expand(B, T)
        starts = torch.ones_like(positions, dtype=torch.bool)
        starts[:, 1:] = positions.diff() != 1
    starts[:, 0] = True
    if mask is not None:
        real = mask != 0
        starts[:, 1:] &= real[:, 1:] & real[:, :-1]
    return starts


def _is_pictorial(position_ids: Tensor) -> bool:
    """Whether positions are those of time, height and width alone."""
    return position_ids.ndim == 3 and position_ids.shape[0] == 3


def _restarted(position_ids: Tensor | None, starts: Tensor) -> Tensor:
    """Positions by which attention separates documents: the given ones, completed where they lack text positions."""
    if position_ids is None:
        return _positions(starts)
    if not _is_pictorial(position_ids):
        return position_ids
    given = position_ids.to(starts.device)
    return torch.cat([_positions(starts)[None], given.expand(3, *starts.shape)])


def _changes(op: str, seq_idx: Tensor, B: int, T: int) -> Tensor:
    """[B, T] bool, True at a row's first token and where the sequence index changes."""
    if list(check.tensor(op, "seq_idx", seq_idx).shape) != [B, T]:
        raise ValueError(f"{op}: seq_idx must be [B, T] = [{B}, {T}], got {list(seq_idx.shape)}")
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return starts


def _boundaries(starts: Tensor) -> Tensor:
    """[N+1] int32 boundaries over the flattened batch."""
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([starts.numel()])]).to(torch.int32)


def _starts_of(op: str, name: str, given: Tensor, tokens: Tensor) -> Tensor:
    """[B, T] bool, True where a document begins; an empty last document begins after the batch and is dropped."""
    B, T = tokens.shape[:2]
    boundaries = checked_boundaries(op, given, name).to(tokens.device)
    if not torch.compiler.is_compiling():
        last = int(legal_boundaries(op, boundaries, B * T, name)[-1])
        if last != B * T:
            raise ValueError(f"{op}: {name} must end at B * T = {B * T}, got {last}")
    starts = torch.zeros(B * T + 1, dtype=torch.bool, device=boundaries.device)
    return starts.index_fill(0, boundaries[:-1].clamp(0, B * T).long(), True)[: B * T].view(B, T)


def _positions(starts: Tensor) -> Tensor:
    """[B, T] int64 positions that count from 0 at each start."""
    token = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return token - torch.where(starts, token, 0).cummax(1).values


def _refuse_cache(op: str, call: Call, cached: bool, named: str) -> None:
    if cached or call.get("use_cache"):
        beside = (
            "; where they begin again beside padding, give attention_mask [B, T]" if named == "position_ids" else ""
        )
        raise ValueError(
            f"{op}: use_cache must be False with packed documents, got {'a cache' if cached else True}; a row of "
            f"several documents has no one state to go on from. Documents are read from {named}{beside}"
        )


def _check_contents(op: str, named: str, given: Tensor, starts: Tensor | None, mask: Tensor | None) -> None:
    """Check that every row begins a document, positions agree with boundaries, and there is no padding."""
    if not bool(given[:, 0].all()):
        raise ValueError(f"{op}: {named} must have a boundary where a row of the batch begins")
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            f"{op}: attention_mask must be None or all ones with packed documents, got padding; leave the padding out"
        )
    if starts is not None and not torch.equal(starts, given):
        raise ValueError(
            f"{op}: position_ids must begin again where {named} has a boundary and nowhere else, got "
            f"{int(starts.sum())} documents by position and {int(given.sum())} by boundary; give one of the two"
        )


def _refuse_right_padding(op: str, mask: Tensor, T: int) -> None:
    """Refuse padding after a token, in this call or an earlier one, because it would enter the cached state."""
    if check.readable(mask) and bool(((mask != 0).cummax(1).values & (mask == 0))[:, -T:].any()):
        raise ValueError(
            f"{op}: attention_mask must have its padding on the left where a cache is filled, got padding on the right"
        )
