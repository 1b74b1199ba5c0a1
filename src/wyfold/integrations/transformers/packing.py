"""Documents that share a row: one set of boundaries for attention, convolution and recurrence.

The models take packed documents as positions that begin again, or as `cu_seq_lens_q`. Attention keeps such documents
apart if it is told by positions, has no mask and no cache; the delta-rule layers know of them by `cu_seq_lens_q` alone.
`settled` brings a call into the form in which every layer reads the same boundaries, or refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.runtime import check
from wyfold.runtime.layout import legal_boundaries

Call = dict[str, Any]


def settled(op: str, call: Call) -> Call:
    """The keywords of a model's forward, made consistent.

    A call without packed documents is returned as it came. Reading positions waits for the device once. Inside compiled
    code given boundaries are believed, since nothing can be read there; positions alone break the graph.

    Args:
        op: Who asks, for messages.
        call: Keywords of the text model's forward.

    Returns:
        The same keywords, and where documents are packed: `cu_seq_lens_q` [N+1] int32 over all rows laid one after
        another, `position_ids` that begin again at each boundary, no mask, and `use_cache=False`.

    Raises:
        ValueError: documents are packed, and a cache or a mask with padding is asked for as well; or positions
            and boundaries disagree; or a cache would be filled from rows with padding on the right.
    """
    tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if not isinstance(tokens, Tensor) or tokens.ndim < 2 or tokens.shape[1] < 2:
        return call
    B, T = tokens.shape[:2]
    cached = call.get("past_key_values") is not None
    mask = call.get("attention_mask")
    mask = mask[:, -T:] if isinstance(mask, Tensor) and mask.ndim == 2 else None
    if cached and mask is not None:
        _refuse_right_padding(op, mask)
    positions = _text_positions(call.get("position_ids"), B, T)
    starts = None if positions is None else _starts(positions, mask)
    boundaries = call.get("cu_seq_lens_q")
    if boundaries is None and call.get("seq_idx") is not None:
        boundaries = _boundaries(_changes(op, call["seq_idx"], B, T))
    if boundaries is None:
        if starts is None or int(starts.sum()) == B:
            return call
        boundaries = _boundaries(starts)
    _refuse_cache(op, call, cached)
    given = _given_starts(boundaries, B, T)
    if not torch.compiler.is_compiling():
        _check_contents(op, boundaries, starts, given, mask)
    whole_mask = {} if mask is None else {"attention_mask": None}
    restarted = {} if positions is not None else {"position_ids": _positions(given)}
    return {**call, **whole_mask, **restarted, "cu_seq_lens_q": boundaries, "use_cache": False}


def _text_positions(position_ids: Tensor | None, B: int, T: int) -> Tensor | None:
    """[B, T] positions in the text; None where there are none.

    Multimodal models stack them: text, time, height, width. Without the first of the four, positions repeat within
    one picture and say nothing about documents.
    """
    if position_ids is None:
        return None
    if position_ids.ndim == 3:
        if position_ids.shape[0] != 4:
            return None
        position_ids = position_ids[0]
    return position_ids.expand(B, T)


def _starts(positions: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T] bool: a row begins, or its position is not the one after the token before.

    Beside padding positions are whatever their maker left there.
    """
    starts = torch.ones_like(positions, dtype=torch.bool)
    starts[:, 1:] = positions.diff() != 1
    if mask is not None:
        real = mask != 0
        starts[:, 1:] &= real[:, 1:] & real[:, :-1]
    return starts


def _changes(op: str, seq_idx: Tensor, B: int, T: int) -> Tensor:
    """[B, T] bool: a row begins, or the number of the sequence changes."""
    if list(seq_idx.shape) != [B, T]:
        raise ValueError(f"{op}: seq_idx must be [B, T] = [{B}, {T}], got {list(seq_idx.shape)}")
    starts = torch.ones_like(seq_idx, dtype=torch.bool)
    starts[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return starts


def _boundaries(starts: Tensor) -> Tensor:
    """[N+1] int32 of rows laid one after another."""
    first = starts.flatten().nonzero().flatten()
    return torch.cat([first, first.new_tensor([starts.numel()])]).to(torch.int32)


def _given_starts(boundaries: Tensor, B: int, T: int) -> Tensor:
    """[B, T] bool of boundaries; an empty document at the end falls beside the batch."""
    starts = torch.zeros(B * T + 1, dtype=torch.bool, device=boundaries.device)
    return starts.index_fill(0, boundaries[:-1].clamp(0, B * T).long(), True)[: B * T].view(B, T)


def _positions(starts: Tensor) -> Tensor:
    """[B, T] int64 that count from 0 at each start."""
    token = torch.arange(starts.shape[1], device=starts.device).expand_as(starts)
    return token - torch.where(starts, token, 0).cummax(1).values


def _refuse_cache(op: str, call: Call, cached: bool) -> None:
    if cached or call.get("use_cache"):
        raise ValueError(
            f"{op}: use_cache must be False with packed documents, got {'a cache' if cached else True}; a row of "
            "several documents has no one state to go on from"
        )


def _check_contents(op: str, boundaries: Tensor, starts: Tensor | None, given: Tensor, mask: Tensor | None) -> None:
    """Boundaries are boundaries of this batch, positions say the same, and no token is padding."""
    tokens = given.numel()
    last = int(legal_boundaries(op, boundaries, tokens)[-1])
    if last != tokens:
        raise ValueError(f"{op}: cu_seq_lens_q must end at B * T = {tokens}, got {last}")
    if not bool(given[:, 0].all()):
        raise ValueError(f"{op}: cu_seq_lens_q must have a boundary where a row of the batch begins")
    if mask is not None and not bool((mask != 0).all()):
        raise ValueError(
            f"{op}: attention_mask must be None or all ones with packed documents, got padding; leave the padding out"
        )
    if starts is not None and not torch.equal(starts, given):
        raise ValueError(
            f"{op}: position_ids must begin again where cu_seq_lens_q or seq_idx has a boundary and nowhere else, got "
            f"{int(starts.sum())} documents by position and {int(given.sum())} by boundary; give one of the two"
        )


def _refuse_right_padding(op: str, mask: Tensor) -> None:
    """The tokens of padding would go into the state that is carried on."""
    if check.readable(mask) and bool(((mask[:, :-1] != 0) & (mask[:, 1:] == 0)).any()):
        raise ValueError(
            f"{op}: attention_mask must have its padding on the left where a cache is filled, got padding on the right"
        )
