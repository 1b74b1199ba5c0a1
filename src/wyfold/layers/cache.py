"""What layers remember between calls.

A layer keeps what it needs to go on in a `LayerCache`: tensors by name, whose first dimension is the sequence. It
starts empty, and each call replaces its tensors by their successors without writing into them, so `snapshot` is free. A
`DecodingCache` holds one per layer of a model.

A cache is an object that wrappers of modules pass on as it is. Wrappers rebuild dicts, tuples, dataclasses and
registered pytrees among the arguments they cast or move (FSDP2 with a mixed precision policy, accelerate's hooks), and
what a layer writes into a rebuilt container is lost. So these classes are none of those, and `to` works in place.

The size of a cache does not grow with the tokens seen, softmax attention without a window excepted.

To serve, a layer of the delta family keeps many sequences in a `LayerPool` instead, each in a slot, and updates those
that a call names in place; no gradient passes. `DecodingPools` holds one per layer.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence, ValuesView

import torch
from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.ops.rank_agreement import ranks_agree
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.torch_ops import autocast_dtype

ACTIVATIONS = frozenset({"conv", "keys", "values"})
"""Tensors of a cache that have the dtype of the layer's activations; other floats are recurrent states."""


class LayerCache:
    """What one layer remembers of N sequences: tensors by name, replaced by each call.

    Args:
        tensors: Name -> [N, ...], a mapping or another cache; None or empty for a fresh start. The mapping is copied,
            its tensors are not.

    To save a cache, save `dict(cache.items())`; `LayerCache(tensors)` of what was loaded goes on from there.

    Raises:
        TypeError, ValueError: tensors is no mapping, or does not map names to tensors [N, ...].

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
            # A checkpoint runs the layer again from the state that the first run left, which gives wrong gradients. A
            # gradient hook that calls a layer with an unrelated cache cannot be distinguished from that here.
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
            TypeError, ValueError: what is given does not map names to tensors [N, ...]; nothing is replaced.
        """
        given = dict(tensors.items() if isinstance(tensors, Mapping | LayerCache) else tensors)
        for name, x in given.items():
            _check_entry(name, x)
        for name, x in given.items():
            self[name] = x

    def clear(self) -> None:
        """Remove every tensor; the next call starts afresh."""
        self._tensors.clear()

    def snapshot(self) -> LayerCache:
        """A second cache with the same tensors; calls replace tensors and write into none, so nothing is copied."""
        return LayerCache(self._tensors)

    def reorder(self, rows: Tensor) -> LayerCache:
        """Replace row i by row rows[i], in place.

        Args:
            rows: [N'] int32 or int64, from 0 to N - 1. Repeats and another length are allowed.

        Raises:
            TypeError, ValueError: rows is of another type, dtype or shape, or names a row that is not there (on a GPU
                inside `checked`); no tensor is replaced.
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
            device: None leaves tensors where they are.
            dtype: Of the convolution's inputs and of attention's keys and values; recurrent states keep theirs.
            state_dtype: Of the recurrent states. Integers are never cast.
            non_blocking: Whether the copies may run beside the host.

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
        """Bytes that the tensors hold."""
        return sum(x.nbytes for x in self.values())


class DecodingCache:
    """The caches of a model's layers, moved and reordered together.

    Args:
        layers: One `LayerCache` per layer, empty for a fresh start.
        batch_size: N, sequences that go on together.

    Raises:
        TypeError: a layer's cache is no `LayerCache`.

    Examples:
        >>> import torch
        >>> from wyfold.layers import LayerCache
        >>> cache = DecodingCache([LayerCache({"state": torch.arange(3.0)})], batch_size=3)
        >>> cache.reorder(torch.tensor([2, 0])).layers[0]["state"]
        tensor([2., 0.])
    """

    def __init__(self, layers: Sequence[LayerCache], batch_size: int):
        self.layers = list(layers)
        for layer in self.layers:
            if not isinstance(layer, LayerCache):
                raise TypeError(
                    f"DecodingCache: layers must each be a wyfold.layers.LayerCache, got {type(layer).__name__}"
                )
        self.batch_size = check.integer("DecodingCache", "batch_size", batch_size, least=1)

    def reorder(self, rows: Tensor) -> DecodingCache:
        """Row i becomes what row rows[i] was, in place: beams, finished sequences dropped, a prompt forked.

        Args:
            rows: [N'] int32 or int64, from 0 to N - 1. Repeats and another length are allowed.

        Raises:
            TypeError, ValueError: as `LayerCache.reorder`; no layer is reordered.
        """
        held = [x.shape[0] for layer in self.layers for x in layer.values()]
        _check_rows("DecodingCache.reorder", rows, min([self.batch_size, *held]))
        for layer in self.layers:
            layer.reorder(rows)
        self.batch_size = rows.shape[0]
        return self

    def detach(self) -> DecodingCache:
        """Forget in place how the tensors were computed: training goes on from here without a gradient to the past."""
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
        """Move or cast in place, as `LayerCache.to`: `dtype` leaves recurrent states as they are.

        Returns:
            The cache itself.
        """
        for layer in self.layers:
            layer.to(device, dtype, state_dtype=state_dtype, non_blocking=non_blocking)
        return self

    def snapshot(self) -> DecodingCache:
        """A second cache with the same contents; free, since later calls replace tensors and write into none."""
        return DecodingCache([layer.snapshot() for layer in self.layers], self.batch_size)

    def __copy__(self) -> DecodingCache:
        return self.snapshot()

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors hold."""
        return sum(layer.nbytes for layer in self.layers)


class LayerPool:
    """What a layer remembers of many sequences, and which of them a call is for; updated in place.

    Attributes:
        conv: [slots, D, W-1] latest inputs of the short convolution.
        state: [slots, HV, V, K] states, V-first.
        slots: [N] int32 or int64 slot of each sequence of a call; None: sequence n is in slot n.
        given: [N] bool, False where a sequence starts, whatever its slot holds; None: everywhere True.
    """

    def __init__(self, conv: Tensor, state: Tensor, slots: Tensor | None = None, given: Tensor | None = None):
        self.conv, self.state, self.slots, self.given = conv, state, slots, given

    def at(self, slots: Tensor | None, has_initial_state: Tensor | None = None) -> LayerPool:
        """The same pool for a call of these slots."""
        return LayerPool(self.conv, self.state, slots, has_initial_state)

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds."""
        return self.conv.nbytes + self.state.nbytes


class PooledCache:
    """The pools of a model's layers for one call of N = batch_size sequences; from `DecodingPools.at`.

    Attributes:
        layers: One `LayerPool` per layer.
        batch_size: N.
    """

    def __init__(self, layers: Sequence[LayerPool], batch_size: int):
        self.layers, self.batch_size = tuple(layers), batch_size


class DecodingPools:
    """The pools of a model's layers, zeros at first. What one call wrote the next one finds; nothing else is allocated.

    Args:
        layers: One `LayerPool` per layer, all of so many slots.

    Examples:
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
        return PooledCache([pool.at(slots, has_initial_state) for pool in self.layers], N)

    @property
    def nbytes(self) -> int:
        """Bytes that the pools hold."""
        return sum(pool.nbytes for pool in self.layers)


def _check_entry(name: object, x: object) -> None:
    """Refuse what is no tensor of rows under a name."""
    if not isinstance(name, str):
        raise TypeError(f"LayerCache: names must be str, got {type(name).__name__}")
    if not isinstance(x, Tensor):
        raise TypeError(f"LayerCache: {name!r} must be a torch.Tensor, got {type(x).__name__}")
    if x.ndim == 0:
        raise ValueError(
            f"LayerCache: {name!r} must be [N, ...], a row for each sequence, got a tensor without dimensions"
        )


def _check_rows(op: str, rows: Tensor, count: int | None) -> None:
    """Refuse rows that are no row numbers of a cache of `count` sequences; None: the cache is empty."""
    check.shapes(op, rows=(rows, "N"))
    check.floating(op, (torch.int32, torch.int64), rows=rows)
    if count is None or rows.numel() == 0 or not check.readable(rows):
        return
    least, most = (int(row) for row in rows.aminmax())
    if least < 0 or most >= count:
        raise ValueError(f"{op}: rows must be in [0, {count}), got {least if least < 0 else most}")


def require_cache(layer: str, cache: object) -> LayerCache:
    """The cache of a layer's call, if it is a `LayerCache`.

    Raises:
        TypeError: it is something else; a dict among others, of which a wrapper of modules would pass on a copy.
    """
    if isinstance(cache, LayerCache):
        return cache
    to_do = ""
    if isinstance(cache, Mapping):
        to_do = (
            "; pass LayerCache(), which wrappers of modules do not copy, or LayerCache(tensors) to go on from tensors"
        )
    raise TypeError(f"{layer}: cache must be a wyfold.layers.LayerCache or None, got {type(cache).__name__}{to_do}")


def sequences(
    layer: str,
    x: Tensor,
    width: int,
    reader: nn.Module,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    holds: tuple[str, ...],
    cp_context: ContextParallel | None = None,
    alike: Callable[[Tensor], Mapping[str, object]] | None = None,
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
        cp_context: In the place of layout and cache; N are then the sequences that begin on this rank. What one rank
            refuses in the first call of a kind is refused on all.
        alike: Gives what must be equal on all ranks. None: the layer's operators compare it.

    Raises:
        TypeError: an argument of another type; x of another dtype than the parameters, but for an open autocast.
        ValueError: a shape that differs from what the other arguments imply.
    """

    def count() -> int:
        return _count(layer, x, width, reader, layout, cache, holds, cp_context)

    if cp_context is None:
        return count()
    return ranks_agree(layer, cp_context, x, count, None if alike is None else lambda _: alike(x), module=())


def _count(
    layer: str,
    x: Tensor,
    width: int,
    reader: nn.Module,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    holds: tuple[str, ...],
    cp_context: ContextParallel | None,
) -> int:
    """`sequences` of one process."""
    B, T = check.shapes(layer, x=(x, f"B T {width}")).values()
    check.floating(layer, x=x)
    _of_parameters(layer, x, reader)
    if cp_context is not None:
        if layout is not None or cache is not None:
            given = "a layout" if layout is not None else "a cache"
            raise ValueError(f"{layer}: cp_context must come without layout and cache, got {given}")
        cp_context.check_tokens(layer, x, "x")
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
        cache = require_cache(layer, cache)
        if len(cache) and not cache.keys() >= set(holds):
            raise ValueError(
                f"{layer}: cache must be empty or hold {', '.join(holds)}, got {', '.join(map(str, cache))}"
            )
        for name, held in cache.items():
            if check.tensor(layer, f"cache[{name!r}]", held).shape[:1] != (N,):
                raise ValueError(f"{layer}: cache must hold the {N} sequences of x, got {name!r} {list(held.shape)}")
    return N


def _of_parameters(layer: str, x: Tensor, reader: nn.Module) -> None:
    """Refuse an x that PyTorch would, in its own words, once it is multiplied.

    A module that replaces the projection, with quantized parameters for example, checks its input itself.
    """
    if type(reader) is not nn.Linear or autocast_dtype(x.device.type) is not None:
        return
    if "forward" in reader.__dict__ or reader._forward_pre_hooks:  # a hook may cast what is stored in another dtype
        return
    wanted = reader.weight.dtype
    if x.dtype != wanted:
        expected, got = (str(dtype).removeprefix("torch.") for dtype in (wanted, x.dtype))
        raise TypeError(f"{layer}: x must be {expected}, as the layer's parameters are, or under autocast, got {got}")
