"""What layers remember between calls.

A layer keeps what it needs to go on in a `LayerCache`, a plain dict of tensors whose first dimension is the sequence.
It starts empty, and each call replaces its tensors by their successors without writing into them: a shallow copy of
the dict is a snapshot to return to. A `DecodingCache` holds one per layer of a model.

The dict's size does not grow with the tokens seen, softmax attention without a window excepted.

To serve, a layer of the delta family keeps many sequences in a `LayerPool` instead, each in a slot, and updates those
that a call names in place; no gradient passes. `DecodingPools` holds one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from wyfold.ops.context_call import context_of
from wyfold.parallel.context import ContextParallel
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.register import autocast_dtype

LayerCache: TypeAlias = dict[str, Tensor]


class DecodingCache:
    """The caches of a model's layers, moved and reordered together.

    Args:
        layers: One `LayerCache` per layer, empty for a fresh start.
        batch_size: N, sequences that go on together.

    Example:
        >>> import torch
        >>> cache = DecodingCache([{"state": torch.arange(3.0)}], batch_size=3)
        >>> cache.reorder(torch.tensor([2, 0])).layers[0]["state"]
        tensor([2., 0.])
    """

    def __init__(self, layers: Sequence[LayerCache], batch_size: int):
        self.layers = list(layers)
        self.batch_size = check.integer("DecodingCache", "batch_size", batch_size, least=1)

    def reorder(self, rows: Tensor) -> DecodingCache:
        """Row i becomes what row rows[i] was, in place: beams, finished sequences dropped, a prompt forked.

        Args:
            rows: [N'] int64. Repeats and another length are allowed.
        """
        check.shapes("DecodingCache.reorder", rows=(rows, "N"))
        self._replace(lambda x: x.index_select(0, rows.to(x.device)))
        self.batch_size = rows.shape[0]
        return self

    def detach(self) -> DecodingCache:
        """Forget in place how the tensors were computed: training goes on from here without a gradient to the past."""
        self._replace(Tensor.detach)
        return self

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> DecodingCache:
        """Move in place; `dtype` changes floating point tensors alone, and recurrent states stay in it."""
        self._replace(lambda x: x.to(device=device, dtype=dtype if x.is_floating_point() else None))
        return self

    def snapshot(self) -> DecodingCache:
        """A second cache with the same contents; free, since later calls replace tensors and write into none."""
        return DecodingCache([dict(layer) for layer in self.layers], self.batch_size)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors hold."""
        return sum(x.nbytes for layer in self.layers for x in layer.values())

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        for layer in self.layers:
            for name, x in layer.items():
                layer[name] = change(x)


class LayerPool(NamedTuple):
    """What a layer remembers of many sequences, and which of them a call is for; updated in place.

    Attributes:
        conv: [slots, D, W-1] latest inputs of the short convolution.
        state: [slots, HV, V, K] states, V-first.
        slots: [N] int32 or int64 slot of each sequence of a call; None: sequence n is in slot n.
        given: [N] bool, False where a sequence starts, whatever its slot holds; None: everywhere True.
    """

    conv: Tensor
    state: Tensor
    slots: Tensor | None = None
    given: Tensor | None = None


class PooledCache(NamedTuple):
    """The pools of a model's layers for one call of N = batch_size sequences; from `DecodingPools.at`."""

    layers: tuple[LayerPool, ...]
    batch_size: int


class DecodingPools:
    """The pools of a model's layers, zeros at first. What one call wrote the next one finds; nothing else is allocated.

    Args:
        layers: One `LayerPool` per layer, all of so many slots.

    Example:
        >>> import torch
        >>> from wyfold.models import Decoder, DecoderConfig
        >>> model = Decoder(DecoderConfig(hidden_size=32, num_layers=2, pattern="gdn", num_heads=2, head_dim=16))
        >>> pools = model.new_pools(8)
        >>> with torch.no_grad():
        ...     _ = model(torch.randint(256, (2, 9)), cache=pools.at(torch.tensor([5, 0])))
        >>> [bool(state.any()) for state in pools.layers[0].state]
        [True, False, False, False, False, True, False, False]
    """

    def __init__(self, layers: Sequence[LayerPool]):
        self.layers = tuple(layers)

    def at(self, slots: Tensor | None = None, has_initial_state: Tensor | None = None) -> PooledCache:
        """The `cache=` of a call.

        Args:
            slots: [N] int32 or int64, distinct; one that is none is skipped, and its rows of the output mean nothing.
                None: every slot, in order.
            has_initial_state: [N] bool. False: the sequence starts, whatever its slot holds.
        """
        N = self.layers[0].state.shape[0] if slots is None else slots.shape[0]
        return PooledCache(tuple(pool._replace(slots=slots, given=has_initial_state) for pool in self.layers), N)

    @property
    def nbytes(self) -> int:
        """Bytes that the pools hold."""
        return sum(pool.conv.nbytes + pool.state.nbytes for pool in self.layers)


def sequences(
    layer: str,
    x: Tensor,
    width: int,
    reader: nn.Module,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    holds: tuple[str, ...],
    cp_context: ContextParallel | None = None,
) -> int:
    """N, the sequences of a layer's input, once the input, its layout and the cache agree.

    Args:
        layer: Name for messages.
        x: [B, T, width].
        width: The layer's hidden_size.
        reader: The layer's first projection of x.
        layout: Boundaries of a packed input, for which B is 1; None if each row is a sequence.
        cache: Tensors [N, ...], or empty, or None.
        holds: Names of the tensors in the layer's cache: with another layer's it would silently start afresh.
        cp_context: In the place of layout and cache; N are then the sequences that begin on this rank. That x is its
            share is for the operators to say, on all ranks at once.

    Raises:
        TypeError: an argument of another type; x of another dtype than the parameters, but for an open autocast.
        ValueError: a shape that differs from what the other arguments imply.
    """
    B, T = check.shapes(layer, x=(x, f"B T {width}")).values()
    check.floating(layer, x=x)
    _of_parameters(layer, x, reader)
    if cp_context is not None:
        context_of(layer, cp_context)
        if layout is not None or cache is not None:
            given = "a layout" if layout is not None else "a cache"
            raise ValueError(f"{layer}: cp_context must come without layout and cache, got {given}")
        return B * len(cp_context.starts)
    N = B
    if layout is not None:
        if not isinstance(layout, SequenceLayout):
            raise TypeError(f"{layer}: layout must be a SequenceLayout or None, got {type(layout).__name__}")
        if (B, T) != (1, layout.tokens):
            wanted = [1, layout.tokens, width]
            raise ValueError(f"{layer}: x must be [1, T, hidden_size] = {wanted} for its layout, got {list(x.shape)}")
        N = layout.max_seqs
    if cache is not None:
        if not isinstance(cache, dict):
            raise TypeError(f"{layer}: cache must be a dict of tensors or None, got {type(cache).__name__}")
        if cache and not cache.keys() >= set(holds):
            raise ValueError(
                f"{layer}: cache must be empty or hold {', '.join(holds)}, got {', '.join(map(str, cache))}"
            )
        for name, held in cache.items():
            if check.tensor(layer, f"cache[{name!r}]", held).shape[:1] != (N,):
                raise ValueError(f"{layer}: cache must hold the {N} sequences of x, got {name!r} {list(held.shape)}")
    return N


def _of_parameters(layer: str, x: Tensor, reader: nn.Module) -> None:
    """Refuse an x that PyTorch would, in its own words, once it is multiplied.

    What somebody else has put in the projection's place, with quantized parameters for one, judges for itself.
    """
    if type(reader) is not nn.Linear or autocast_dtype(x.device.type) is not None:
        return
    wanted = reader.weight.dtype
    if x.dtype != wanted:
        expected, got = (str(dtype).removeprefix("torch.") for dtype in (wanted, x.dtype))
        raise TypeError(f"{layer}: x must be {expected}, as the layer's parameters are, or under autocast, got {got}")
