"""Decoding caches of layers.

A `LayerCache` holds one layer's state between calls: tensors by name, with one row per sequence. It starts empty. Each
call replaces the tensors and never writes into them, so `snapshot` is free. A `DecodingCache` holds one per layer of a
model.

These classes, and those of `pools`, are not dicts, tuples, dataclasses or registered pytrees. Module wrappers (FSDP2
with a mixed precision policy, accelerate's hooks) rebuild such containers among their arguments, and a layer's writes
to a rebuilt container would be lost. For the same reason `to` works in place.

The size of a cache does not grow with the number of tokens, except for softmax attention without a window and for PaTH
attention.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView
from typing import TypeVar

import torch
from torch import Tensor

from wyfold.runtime import check

ACTIVATIONS = frozenset({"conv", "keys", "values"})
"""Cache tensors with the dtype of the layer's activations; other floating tensors are recurrent states."""

COUNTS = frozenset({"counts", "position", "positions"})
"""Cache tensors of integers."""


class LayerCache:
    """State of one layer for N sequences: tensors by name, replaced by each call.

    Args:
        tensors: Name -> [N, ...], a mapping or another cache; None or empty to start new sequences. The mapping is
            copied, its tensors are not.

    To save a cache, save `dict(cache.items())`; to restore it, pass the loaded tensors to `LayerCache`.

    Raises:
        TypeError: tensors is not a mapping of names to tensors.
        ValueError: A tensor has no dimension N.

    Examples:
        >>> import torch
        >>> from wyfold.layers import DeltaNet, LayerCache
        >>> layer, cache = DeltaNet(hidden_size=32, num_heads=2, head_dim=16), LayerCache()
        >>> _ = layer(torch.randn(3, 5, 32), cache=cache)
        >>> {name: list(x.shape) for name, x in cache.items()}
        {'conv': [3, 96, 3], 'state': [3, 2, 16, 16]}
        >>> tensors = dict(cache.items())  # for torch.save or safetensors
        >>> y = layer(torch.randn(3, 1, 32), cache=LayerCache(tensors))
    """

    def __init__(self, tensors: Mapping[str, Tensor] | LayerCache | None = None):
        if tensors is not None and not isinstance(tensors, Mapping | LayerCache):
            raise TypeError(f"LayerCache: tensors must be a mapping or None, got {type(tensors).__name__}")
        self._tensors: dict[str, Tensor] = {} if tensors is None else dict(tensors.items())
        for name, x in self._tensors.items():
            _check_entry(name, x)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __setitem__(self, name: str, x: Tensor) -> None:
        _check_entry(name, x)
        if not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1:
            # Activation checkpointing repeats the layer from the state its first run left: wrong gradients. A gradient
            # hook that calls a layer with an unrelated cache cannot be distinguished from that here.
            raise RuntimeError(
                "LayerCache: a layer must not be called with a cache inside a backward pass, as activation "
                "checkpointing does, and no cache may be changed there; use the checkpoint without a cache, or the "
                "cache without a checkpoint; a gradient hook that calls a layer has to do so without a cache, or after "
                "the backward"
            )
        self._tensors[name] = x

    def __delitem__(self, name: str) -> None:
        del self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def __copy__(self) -> LayerCache:
        return self.snapshot()

    def __repr__(self) -> str:
        return f"LayerCache({', '.join(f'{name}: {list(x.shape)}' for name, x in self._tensors.items())})"

    def get(self, name: str) -> Tensor | None:
        """The tensor of that name, or None."""
        return self._tensors.get(name)

    def keys(self) -> KeysView[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        """The tensors."""
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        """Names and tensors."""
        return self._tensors.items()

    def update(self, tensors: Mapping[str, Tensor] | LayerCache | Iterable[tuple[str, Tensor]]) -> None:
        """Replace several tensors.

        Args:
            tensors: A mapping, another cache, or pairs of a name and a tensor.

        Raises:
            TypeError: tensors does not map names to tensors; nothing is replaced.
            ValueError: A tensor has no dimension N; nothing is replaced.
        """
        given = dict(tensors.items() if isinstance(tensors, Mapping | LayerCache) else tensors)
        for name, x in given.items():
            _check_entry(name, x)
        for name, x in given.items():
            self[name] = x

    def clear(self) -> None:
        """Remove every tensor; the next call starts new sequences."""
        self._tensors.clear()

    def snapshot(self) -> LayerCache:
        """A second cache with the same tensors. Nothing is copied, because calls replace tensors."""
        return LayerCache(self._tensors)

    def reorder(self, rows: Tensor) -> LayerCache:
        """Replace row i by row rows[i], in place.

        Args:
            rows: [N'] int32 or int64, from 0 to N - 1. Repeats and another length are allowed.

        Raises:
            TypeError: rows is not a tensor; no tensor is replaced.
            ValueError: rows has a wrong dtype or shape, or an index out of range (on a GPU checked only inside
                `checked`); no tensor is replaced.
        """
        _check_rows("LayerCache.reorder", rows, min((x.shape[0] for x in self.values()), default=None))
        self.update([(name, x.index_select(0, rows.to(x.device))) for name, x in self.items()])
        return self

    def detach(self) -> LayerCache:
        """Drop the gradient history of the tensors, in place."""
        self.update([(name, x.detach()) for name, x in self.items()])
        return self

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        state_dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> LayerCache:
        """Move or cast in place.

        Args:
            device: None: the current device.
            dtype: Dtype of the convolution's inputs and of attention's keys and values. None: unchanged.
            state_dtype: Dtype of the recurrent states. None: unchanged. Integers are never cast.
            non_blocking: Allow asynchronous copies.

        Returns:
            The cache itself.

        Raises:
            TypeError: device is a dtype.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(
                f"LayerCache.to: device must be a device or None, got {device}; "
                "cast activations by dtype= and recurrent states by state_dtype="
            )
        moved = []
        for name, x in self.items():
            wanted = (dtype if name in ACTIVATIONS else state_dtype) if x.is_floating_point() else None
            moved.append((name, x.to(device=device, dtype=wanted, non_blocking=non_blocking)))
        self.update(moved)
        return self

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(x.nbytes for x in self.values())


class DecodingCache:
    """Caches of all layers of a model, moved and reordered together.

    Args:
        layers: One `LayerCache` per layer, empty to start new sequences.
        batch_size: N, number of sequences.

    Raises:
        TypeError: An entry of layers is not a `LayerCache`.
        ValueError: batch_size < 1.

    Examples:
        >>> import torch
        >>> from wyfold.layers import LayerCache
        >>> cache = DecodingCache([LayerCache({"state": torch.arange(3.0)})], batch_size=3)
        >>> cache.reorder(torch.tensor([2, 0])).layers[0]["state"]
        tensor([2., 0.])
    """

    def __init__(self, layers: Sequence[LayerCache], batch_size: int):
        self.layers = list(each_layer("DecodingCache", layers, LayerCache))
        self.batch_size = check.integer("DecodingCache", "batch_size", batch_size, least=1)

    def reorder(self, rows: Tensor) -> DecodingCache:
        """Replace row i by row rows[i], in place: for beam search, to drop finished sequences, or to fork a prompt.

        Args:
            rows: [N'] int32 or int64, from 0 to N - 1. Repeats and another length are allowed.

        Raises:
            TypeError: rows is not a tensor; no layer is reordered.
            ValueError: rows has a wrong dtype or shape, or an index out of range (on a GPU checked only inside
                `checked`); no layer is reordered.
        """
        held = [x.shape[0] for layer in self.layers for x in layer.values()]
        _check_rows("DecodingCache.reorder", rows, min([self.batch_size, *held]))
        for layer in self.layers:
            layer.reorder(rows)
        self.batch_size = rows.shape[0]
        return self

    def detach(self) -> DecodingCache:
        """Drop the gradient history of all tensors, in place: truncated backpropagation through time."""
        for layer in self.layers:
            layer.detach()
        return self

    def to(
        self,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        state_dtype: torch.dtype | None = None,
        non_blocking: bool = False,
    ) -> DecodingCache:
        """Move or cast in place, as `LayerCache.to`: `dtype` does not apply to recurrent states.

        Returns:
            The cache itself.
        """
        for layer in self.layers:
            layer.to(device, dtype, state_dtype=state_dtype, non_blocking=non_blocking)
        return self

    def snapshot(self) -> DecodingCache:
        """A second cache with the same contents. Nothing is copied, because calls replace tensors."""
        return DecodingCache([layer.snapshot() for layer in self.layers], self.batch_size)

    def __copy__(self) -> DecodingCache:
        return self.snapshot()

    @property
    def nbytes(self) -> int:
        """Total size of the tensors in bytes."""
        return sum(layer.nbytes for layer in self.layers)


Part = TypeVar("Part")


def each_layer(op: str, layers: Iterable[Part], kind: type[Part]) -> tuple[Part, ...]:
    """The layers of a cache or of pools; raise unless each is of the kind."""
    if not isinstance(layers, Iterable):
        raise TypeError(f"{op}: layers must be a sequence, got {type(layers).__name__}")
    found = tuple(layers)
    for layer in found:
        if not isinstance(layer, kind):
            raise TypeError(f"{op}: layers must each be a wyfold.layers.{kind.__name__}, got {type(layer).__name__}")
    return found


def _check_entry(name: object, x: object) -> None:
    """Refuse an entry that is not a tensor [N, ...] with a string as its name."""
    if not isinstance(name, str):
        raise TypeError(f"LayerCache: names must be str, got {type(name).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"LayerCache: {name!r} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError(
            f"LayerCache: {name!r} must be [N, ...], a row for each sequence, got a tensor without dimensions"
        )


def _check_rows(op: str, rows: Tensor, count: int | None) -> None:
    """Refuse invalid row indices of a cache with `count` sequences; None: the cache is empty."""
    check.shapes(op, rows=(rows, "N"))
    check.floating(op, check.INDICES, rows=rows)
    if count is None or rows.numel() == 0 or not check.readable(rows):
        return
    least, most = (int(row) for row in rows.aminmax())
    if least < 0 or most >= count:
        raise ValueError(f"{op}: rows must be in [0, {count}), got {least if least < 0 else most}")


def require_cache(layer: str, cache: object) -> LayerCache:
    """Return the cache of a layer's call if it is a `LayerCache`.

    Raises:
        TypeError: cache has another type, for example a dict, which module wrappers would copy.
    """
    if isinstance(cache, LayerCache):
        return cache
    to_do = ""
    if isinstance(cache, Mapping):
        to_do = (
            "; pass LayerCache(), which wrappers of modules do not copy, or LayerCache(tensors) to go on from tensors"
        )
    raise TypeError(f"{layer}: cache must be a wyfold.layers.LayerCache or None, got {type(cache).__name__}{to_do}")
