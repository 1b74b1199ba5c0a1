"""A layer's call: its input, layout, cache and context are checked, and its rule runs from the cache's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from wyfold.context_parallel.context import ContextParallel
from wyfold.layers.cache import COUNTS, LayerCache, require_cache
from wyfold.ops.rank_agreement import ranked_call
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.torch_modes import autocast_dtype

# A chunk is padded to 16 tokens or more, so the recurrence is less work for up to this many tokens.
RECURRENT_TOKENS = 8


def sequences(
    layer: str,
    x: Tensor,
    width: int,
    reader: nn.Module,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    holds: Mapping[str, str],
    cp_context: ContextParallel | None = None,
    alike: Callable[[Tensor], Mapping[str, object]] | None = None,
) -> int:
    """Check a layer's input, layout and cache against each other; return N, the number of sequences.

    Args:
        layer: Name for messages.
        x: [B, T, width].
        width: The layer's hidden_size.
        reader: The layer's first projection of x.
        layout: Boundaries of a packed input, for which B is 1. None: each row is a sequence.
        cache: Tensors [N, ...], or empty, or None.
        holds: Name of each tensor in the layer's cache -> its shape, as of `check.shapes`.
        cp_context: Instead of layout and cache; N is then the number of sequences that begin on this rank. An error on
            one rank in the first call of a kind is raised on all ranks.
        alike: Returns the properties that must be equal on all ranks. None: the layer's operators compare theirs.

    Raises:
        TypeError: An argument has the wrong type, or x has another dtype than the parameters outside autocast.
        ValueError: A shape contradicts the other arguments.
    """
    given = layer, x, width, reader, layout, cache, holds, cp_context
    if cp_context is None:
        return _count(*given)
    with ranked_call(layer, cp_context, x, module=()) as ranked:
        N = _count(*given)
    if ranked.compares:
        ranked.assert_same(None if alike is None else alike(x))
    return N


def run_rule(
    forms: tuple[Callable[..., Any], Callable[..., Any]],
    rows: Sequence[Any],
    *,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    cp_context: ContextParallel | None,
    backend: str | None,
    options: Mapping[str, Any] | None = None,
) -> Tensor:
    """Run a layer's rule from the state in its cache, and put the state it returns there; return its output.

    Args:
        forms: The chunk and the token-by-token operator. The second runs for a few tokens of a cache.
        rows: What the operators take by position; the first is [B, T, ...].
        layout, cache, cp_context, backend: Of the layer's call.
        options: Further keywords of the operators.
    """
    chunk, recurrent = forms
    state = None if cache is None else cache.get("state")
    rule = chunk if cache is None or rows[0].shape[1] > RECURRENT_TOKENS else recurrent
    # A context is refused with a cache, and the token-by-token form has no such argument.
    across = {} if cp_context is None else {"cp_context": cp_context}
    o: Tensor
    o, state = rule(
        *rows,
        initial_state=state,
        output_final_state=cache is not None,
        state_dtype=None if state is None else state.dtype,
        cu_seqlens=layout,
        backend=backend,
        **(options or {}),
        **across,
    )
    if cache is not None:
        cache["state"] = state
    return o


def _count(
    layer: str,
    x: Tensor,
    width: int,
    reader: nn.Module,
    layout: SequenceLayout | None,
    cache: LayerCache | None,
    holds: Mapping[str, str],
    cp_context: ContextParallel | None,
) -> int:
    """`sequences` without comparison of ranks."""
    B, T = check.shapes(layer, x=(x, f"B T {width}")).values()
    check.floating(layer, x=x)
    require_like_parameters(layer, "x", x, reader)
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
        _check_cache(layer, x, require_cache(layer, cache), holds, N)
    return N


def _check_cache(layer: str, x: Tensor, cache: LayerCache, holds: Mapping[str, str], N: int) -> None:
    """Raise unless the cache is empty or holds this layer's tensors for N sequences; see `sequences`."""
    if len(cache) == 0:
        return
    if not cache.keys() >= holds.keys():  # another layer's cache would silently count as an empty one
        raise ValueError(f"{layer}: cache must be empty or hold {', '.join(holds)}, got {', '.join(map(str, cache))}")
    for name, held in cache.items():
        if check.tensor(layer, f"cache[{name!r}]", held).shape[:1] != (N,):
            raise ValueError(f"{layer}: cache must hold the {N} sequences of x, got {name!r} {list(held.shape)}")
    shapes: dict[str, Any] = {f"cache[{name!r}]": (cache[name], shape) for name, shape in holds.items()}
    check.shapes(layer, known={"N": N}, **shapes)
    for name in holds:
        dtypes = check.INDICES if name in COUNTS else check.FLOATS
        check.floating(layer, dtypes, **{f"cache[{name!r}]": cache[name]})
    check.same_attribute(layer, "device", x=x, **{name: held for name, (held, _) in shapes.items()})


def require_like_parameters(layer: str, name: str, x: Tensor, reader: nn.Module) -> None:
    """Refuse an x whose device or dtype PyTorch's matrix product would refuse, with a clearer message.

    A module that replaces the projection, for example with quantized parameters, checks its input itself.
    """
    if type(reader) is not nn.Linear or not computes_as_stored(reader):
        return
    if x.device != reader.weight.device:
        raise ValueError(
            f"{layer}: {name} must be on {reader.weight.device}, as the layer's parameters are, got {x.device}"
        )
    if autocast_dtype(x.device.type) is not None:
        return
    wanted = reader.weight.dtype
    if x.dtype != wanted:
        expected, got = (str(dtype).removeprefix("torch.") for dtype in (wanted, x.dtype))
        raise TypeError(
            f"{layer}: {name} must be {expected}, as the layer's parameters are, or under autocast, got {got}"
        )


def computes_as_stored(module: nn.Module) -> bool:
    """Whether a module reads its weight as it is stored; a hook may move or cast it before the module's forward."""
    return "forward" not in module.__dict__ and not module._forward_pre_hooks
