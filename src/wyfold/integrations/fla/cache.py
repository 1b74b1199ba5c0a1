"""Cache of recurrent and convolution states under fla's names (`fla.models.utils.Cache`). Needs transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from wyfold.runtime.check import UnsupportedError

State = dict[str, Any]
_PARTS = ("recurrent_state", "attn_state", "conv_state", "ffn_state")


class FLALayer(CacheLayerMixin):
    """States of one layer, and the number of tokens they have seen.

    Attributes:
        state: Mapping of `recurrent_state`, `conv_state`, `ffn_state` and `attn_state`, which is a mapping of what
            `PaTHAttention` keeps, or None; None before the first update.
    """

    is_compileable = False
    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.state: State | None = None
        self._seen_tokens = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor | None = None) -> None:
        self.device = key_states.device

    def update(self, *, offset: int = 1, cache_kwargs: object = None, **states: Any) -> State:
        """Replace the given states, keep the others, and count `offset` tokens."""
        if not isinstance(states.get("attn_state"), dict | None):
            raise UnsupportedError(
                "Cache.update: attn_state is not offered", {"wyfold": "keys and values go into a transformers cache"}
            )
        if unknown := states.keys() - set(_PARTS):
            raise TypeError(f"Cache.update: states must be among {_PARTS}, got {sorted(unknown)}")
        if self.state is None:
            self.state = dict.fromkeys(_PARTS)
        self.state.update({name: state for name, state in states.items() if state is not None})
        self._seen_tokens += offset
        self.is_initialized = True
        return self.state

    def get_seq_length(self, cache_position: object = None) -> int:
        return self._seen_tokens

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen_tokens + query_length, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of these beams."""
        self.apply(lambda x: x.index_select(0, beam_idx.to(x.device)))

    batch_select_indices = reorder_cache

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.apply(lambda x: x.repeat_interleave(repeats, 0))

    def crop(self, max_length: int) -> None:
        """Forget tokens after the first `max_length`, which recurrent states cannot: only if there are none."""
        length = max_length if max_length >= 0 else max(0, self._seen_tokens + max_length)
        if length < self._seen_tokens:
            raise NotImplementedError(
                f"Cache.crop: {self._seen_tokens} tokens are part of the recurrent state, and none can be taken back"
            )

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor by `change` of it."""
        self.state = _mapped(self.state, change)

    def offload(self) -> None:
        self.apply(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self.apply(lambda x: x.to(self.device, non_blocking=True))

    def reset(self) -> None:
        self.state, self._seen_tokens, self.is_initialized = None, 0, False


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return type(value)(_mapped(part, change) for part in value) if isinstance(value, tuple | list) else value


class Cache(transformers.Cache):
    """States of all layers of a model.

    Args:
        seen_tokens: Accepted and ignored; layers count what they see.

    Examples:
        >>> import torch
        >>> from wyfold.integrations.fla.cache import Cache
        >>> cache = Cache()
        >>> _ = cache.update(recurrent_state=torch.zeros(1, 2, 8, 8), layer_idx=0, offset=5)
        >>> len(cache), cache.get_seq_length(), cache[0]["recurrent_state"].shape
        (1, 5, torch.Size([1, 2, 8, 8]))
    """

    is_compileable = False

    def __init__(self, seen_tokens: int = 0, **options: Any):
        if options.pop("offloading", False):
            raise NotImplementedError("Cache: offloading must be False, got True")
        super().__init__(layer_class_to_replicate=FLALayer, **options)

    def update(
        self,
        recurrent_state: Any = None,
        attn_state: Any = None,
        conv_state: Any = None,
        ffn_state: Any = None,
        layer_idx: int = 0,
        offset: int | None = 1,
        cache_kwargs: dict[str, Any] | None = None,
    ) -> State:
        """Replace the given states of a layer, keep the others, and count `offset` new tokens.

        Raises:
            UnsupportedError: attn_state holds keys and values as fla's layers keep them.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(FLALayer())
        states = dict(zip(_PARTS, (recurrent_state, attn_state, conv_state, ffn_state), strict=True))
        layer: FLALayer = self.layers[layer_idx]
        return layer.update(offset=1 if offset is None else offset, **states)

    def __getitem__(self, layer_idx: int) -> State | None:
        if layer_idx >= len(self.layers):
            raise KeyError(f"Cache: layer {layer_idx} has no entry yet; there are {len(self.layers)}")
        state: State | None = self.layers[layer_idx].state
        return state

    def __iter__(self) -> Iterator[State | None]:
        return (layer.state for layer in self.layers)

    def get_seq_length(self, layer_idx: int | None = 0, cache_position: object = None) -> int:
        return self.layers[layer_idx or 0].get_seq_length() if len(self.layers) > (layer_idx or 0) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def to_legacy_cache(self) -> tuple[State | None, ...]:
        """The layers' states as a tuple."""
        return tuple(self)

    @classmethod
    @torch.compiler.disable
    def from_legacy_cache(cls, past_key_values: Any = None, seen_tokens: int = 0) -> Cache:
        """A cache with these states; a `Cache` is returned as it is.

        Args:
            past_key_values: Tuple or list of states, as of `to_legacy_cache`; None is an empty cache.
            seen_tokens: Tokens that they have seen.
        """
        if isinstance(past_key_values, cls):
            return past_key_values
        if past_key_values is not None and not isinstance(past_key_values, tuple | list):
            got = type(past_key_values).__name__
            raise TypeError(f"Cache.from_legacy_cache: past_key_values must be a tuple or list of states, got {got}")
        cache = cls()
        for number, state in enumerate(past_key_values or ()):
            cache.update(layer_idx=number, offset=seen_tokens, **(state or {}))
        return cache
