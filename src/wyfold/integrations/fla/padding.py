"""Between padded batches and packed sequences, under fla's names (`fla.layers.utils`).

A mask is [B, S], nonzero at tokens and zero at padding, on any side. Tokens are packed row after row into [total, ..].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from wyfold.integrations.fla.indices import prepare_cu_seqlens_from_mask
from wyfold.layers.layer_call import require_like_parameters
from wyfold.runtime import check
from wyfold.runtime.layout import boundaries_of, packed_boundaries


def get_unpad_data(attention_mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """Where a mask's tokens lie; waits for its device.

    Args:
        attention_mask: [B, S].

    Returns:
        indices: [total] places of the tokens in the flattened batch.
        cu_seqlens: [B+1] int32 boundaries of the packed rows.
        longest: Tokens of the longest row.
    """
    indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask)
    return indices, cu_seqlens, int(cu_seqlens.diff().max())


def get_unpad_indices_and_cu(attention_mask: Tensor, q_len: int | None = None) -> tuple[Tensor, Tensor]:
    """Indices and boundaries as of `get_unpad_data`, of the last `q_len` columns of the mask if given."""
    check.shapes("get_unpad_indices_and_cu", attention_mask=(attention_mask, "B S"))
    mask = attention_mask if q_len is None else attention_mask[:, -q_len:]
    return mask.flatten().nonzero().flatten(), prepare_cu_seqlens_from_mask(mask != 0)


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` [total] of x [n, ..]. Differentiable."""
    return x.index_select(0, indices.long())


def index_put_first_axis(x: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """[first_axis_dim, ..] with the rows of x [total, ..] at `indices`, and zeros elsewhere. Differentiable."""
    return x.new_zeros(first_axis_dim, *x.shape[1:]).index_copy(0, indices.long(), x)


def pad_input(hidden_states: Tensor, indices: Tensor, batch_size: int, seq_len: int) -> Tensor:
    """Tokens [total, ..] at their places in a batch [batch_size, seq_len, ..] of zeros. Differentiable."""
    padded = index_put_first_axis(hidden_states, indices, batch_size * seq_len)
    return padded.unflatten(0, (batch_size, seq_len))


class Unpadded(NamedTuple):
    """Packed queries and states of `unpad_input`.

    Attributes:
        q, states: As given, packed.
        indices: Places of the queries in the flattened batch.
        cu_seqlens: Boundaries of the queries, and of the states.
        longest: Length of the longest query, and of the longest state.
    """

    q: Any
    states: tuple[Tensor, ...]
    indices: Tensor
    cu_seqlens: tuple[Tensor, Tensor]
    longest: tuple[int, int]


def unpad_input(
    q: Tensor | tuple[Tensor, ...],
    states: tuple[Tensor, ...],
    attention_mask: Tensor,
    q_len: int,
    keepdim: bool = False,
) -> Unpadded:
    """Pack queries and states of a padded batch.

    Args:
        q: [B, q_len, ..], or a tuple of such.
        states: Tensors [B, S, ..].
        attention_mask: [B, S].
        q_len: S, or 1 for one new token of each row.
        keepdim: Return [1, total, ..] instead of [total, ..].

    Raises:
        NotImplementedError: q_len is neither.
    """
    indices, cu_seqlens, longest = get_unpad_data(attention_mask)
    B, S = attention_mask.shape
    queries = (q,) if isinstance(q, Tensor) else q
    if q_len not in (1, S):
        raise NotImplementedError(f"unpad_input: q_len must be 1 or the length of the states, {S}, got {q_len}")
    places, bounds, longest_query = indices, cu_seqlens, longest
    if q_len != S:
        bounds = torch.arange(B + 1, dtype=torch.int32, device=attention_mask.device)
        places, longest_query = bounds[:-1], 1
    packed = tuple(index_first_axis(x.flatten(0, 1), places) for x in queries)
    kept = tuple(index_first_axis(x.flatten(0, 1), indices) for x in states)
    if keepdim:
        packed, kept = tuple(x[None] for x in packed), tuple(x[None] for x in kept)
    own = packed[0] if isinstance(q, Tensor) else packed
    return Unpadded(own, kept, places, (bounds, cu_seqlens), (longest_query, longest))


def unpad_hidden_states(
    hidden_states: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None, q_len: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Pack hidden states [B, q_len, ..] by a mask; boundaries given by the caller take precedence.

    Returns:
        [1, total, ..], the places of the tokens and the boundaries; without a mask the states as they came, None and
        the caller's boundaries.
    """
    if cu_seqlens is not None or attention_mask is None:
        return hidden_states, None, cu_seqlens
    indices, cu_seqlens = get_unpad_indices_and_cu(attention_mask, q_len)
    return index_first_axis(hidden_states.flatten(0, 1), indices)[None], indices, cu_seqlens


class Entering(NamedTuple):
    """Tokens of a layer's call, packed where a mask says so, and what the layer has stored.

    Attributes:
        x: [1, total, D], or [B, T, D] without a mask.
        indices: Places of the tokens in the flattened batch, or None.
        cu_seqlens: Boundaries of packed sequences, or None.
        entry: The layer's entry of the cache, or None.
    """

    x: Tensor
    indices: Tensor | None
    cu_seqlens: Tensor | None
    entry: dict[str, Any] | None


def entering(
    layer: nn.Module,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    past_key_values: Any,
    cu_seqlens: Tensor | None,
    *,
    width: int,
    reader: nn.Module,
) -> Entering:
    """Check the arguments that all layers have, and pack the tokens.

    Args:
        layer: The layer, whose class is named in messages.
        hidden_states, attention_mask, past_key_values, cu_seqlens: Of its call.
        width: hidden_size.
        reader: The layer's first projection.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A shape, dtype or device is wrong.
    """
    name = type(layer).__name__
    check.shapes(name, known={"D": width}, hidden_states=(hidden_states, "B T D"))
    B, T, _ = hidden_states.shape
    check.floating(name, hidden_states=hidden_states)
    require_like_parameters(name, "hidden_states", hidden_states, reader)
    if attention_mask is not None and cu_seqlens is None:
        shape = list(check.tensor(name, "attention_mask", attention_mask).shape)
        if len(shape) != 2 or shape[0] != B or shape[1] < T:
            raise ValueError(f"{name}: attention_mask must be [B, S], B = {B}, S >= {T}, got {shape}")
        check.same_attribute(name, "device", hidden_states=hidden_states, attention_mask=attention_mask)
    if cu_seqlens is not None:
        packed_boundaries(name, hidden_states, *boundaries_of(cu_seqlens))
    is_cache = hasattr(past_key_values, "update") and hasattr(past_key_values, "__len__")
    if past_key_values is not None and (isinstance(past_key_values, Mapping) or not is_cache):
        raise TypeError(f"{name}: past_key_values must be a cache, got {type(past_key_values).__name__}")
    return Entering(
        *unpad_hidden_states(hidden_states, cu_seqlens, attention_mask, T), get_layer_cache(layer, past_key_values)
    )


def repad_hidden_states(hidden_states: Tensor, indices: Tensor | None, batch_size: int, q_len: int) -> Tensor:
    """Undo `unpad_hidden_states`; without indices the states as they came."""
    return hidden_states if indices is None else pad_input(hidden_states[0], indices, batch_size, q_len)


def require_cache_layer_idx(module: nn.Module, past_key_values: Any) -> int | None:
    """The module's `layer_idx`.

    Raises:
        ValueError: There is a cache, and the module has no number in it.
    """
    layer_idx: int | None = getattr(module, "layer_idx", None)
    if past_key_values is not None and layer_idx is None:
        raise ValueError(f"{type(module).__name__}: layer_idx must be given with past_key_values, got None")
    return layer_idx


def get_layer_cache(module: nn.Module, past_key_values: Any) -> dict[str, Any] | None:
    """The module's entry of a cache; None without a cache, or before the module's first call."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if past_key_values is None or layer_idx is None or len(past_key_values) <= layer_idx:
        return None
    entry: dict[str, Any] | None = past_key_values[layer_idx]
    return entry


def update_layer_cache(module: nn.Module, past_key_values: Any, **states: Any) -> dict[str, Any] | None:
    """Store a module's new states in a cache; nothing happens without one."""
    layer_idx = require_cache_layer_idx(module, past_key_values)
    if past_key_values is None:
        return None
    entry: dict[str, Any] = past_key_values.update(layer_idx=layer_idx, **states)
    return entry
