"""Checks of a decoder's call, and its loss."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wyfold.context_parallel.agreement import digest, short
from wyfold.context_parallel.context import ContextParallel
from wyfold.layers.cache import DecodingCache
from wyfold.layers.layer_call import computes_as_stored
from wyfold.layers.pools import PooledCache
from wyfold.runtime import check
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.torch_modes import autocast_dtype

if TYPE_CHECKING:
    from wyfold.models.decoder import Decoder

_SHORT = 60  # maximal characters of a setting in a message
IGNORED = -100  # label without a loss, as in torch.nn.functional.cross_entropy


def check_call(
    model: Decoder,
    ids: Tensor,
    labels: Tensor | None,
    layout: SequenceLayout | None,
    cache: DecodingCache | PooledCache | None,
    cp_context: ContextParallel | None,
    places: Tensor | None,
) -> None:
    """Refuse arguments of `Decoder.forward` that do not fit together."""
    check_ids(model, ids, layout, cache)
    if cp_context is not None and (layout is not None or cache is not None):
        given = "a layout" if layout is not None else "a cache"
        raise ValueError(f"Decoder: cp_context must come without layout and cache, got {given}")
    if cp_context is not None:
        cp_context.check_tokens("Decoder", ids, "ids")
    if places is not None:
        if cp_context is not None:
            raise ValueError("Decoder: places must come without cp_context, got one")
        if check.tensor("Decoder", "places", places).ndim != 2 or places.shape[0] != ids.shape[0]:
            raise ValueError(f"Decoder: places must be [B, n], B = {ids.shape[0]}, got {list(places.shape)}")
        check.floating("Decoder", (torch.int64,), places=places)
        check.same_attribute("Decoder", "device", ids=ids, places=places)
        _require_inside("places", places, ids.shape[1])
    if labels is not None:
        wanted = ids if places is None else places
        if check.tensor("Decoder", "labels", labels).shape != wanted.shape:
            form = "[B, T]" if places is None else "[B, n]"
            raise ValueError(f"Decoder: labels must be {form} = {list(wanted.shape)}, got {list(labels.shape)}")
        check.floating("Decoder", (torch.int64,), labels=labels)
        check.same_attribute("Decoder", "device", ids=ids, labels=labels)
        _require_inside("labels", labels, model.config.vocab_size, f"or {IGNORED}")


def check_ids(
    model: Decoder, ids: Tensor, layout: SequenceLayout | None, cache: DecodingCache | PooledCache | None
) -> None:
    """Refuse ids, a layout and a cache that do not fit together."""
    B, T = check.shapes("Decoder", ids=(ids, "B T")).values()
    check.floating("Decoder", check.INDICES, ids=ids)
    _require_device(model, ids)
    _require_inside("ids", ids, model.config.vocab_size)
    if layout is not None and not isinstance(layout, SequenceLayout):
        raise TypeError(f"Decoder: layout must be a SequenceLayout or None, got {type(layout).__name__}")
    if layout is not None and (B, T) != (1, layout.tokens):
        wanted = [1, layout.tokens]
        raise ValueError(f"Decoder: ids must be [1, T] = {wanted} for its layout, got {list(ids.shape)}")
    if cache is None:
        return
    if not isinstance(cache, DecodingCache | PooledCache):
        raise TypeError(f"Decoder: cache must be a DecodingCache, a PooledCache or None, got {type(cache).__name__}")
    if len(cache.layers) != len(model.blocks):
        raise ValueError(f"Decoder: cache must have {len(model.blocks)} layers, got {len(cache.layers)}")
    N = B if layout is None else layout.max_seqs
    if cache.batch_size != N:
        raise ValueError(f"Decoder: cache must hold the {N} sequences of ids, got {cache.batch_size}")


def _require_device(model: Decoder, ids: Tensor) -> None:
    """Check that ids are where the embedding is. PyTorch's own returns unset memory for ids on the meta device."""
    embedding = model.embedding
    weight = getattr(embedding, "weight", None)
    if type(weight) is not nn.Parameter or weight.device.type == "meta" or not computes_as_stored(embedding):
        return
    if ids.device != weight.device:
        raise ValueError(f"Decoder: ids must be on {weight.device}, as the embedding is, got {ids.device}")


def _require_inside(name: str, x: Tensor, size: int, besides: str = "") -> None:
    """Check that indices are in range; on a GPU this is left to PyTorch's kernels, to avoid a synchronisation."""
    if not check.readable(x):
        return
    kept = x[x != IGNORED] if besides else x
    if kept.numel() == 0:
        return
    least, most = (int(i) for i in kept.aminmax())
    if least < 0 or most >= size:
        allowed = f"[0, {size}) {besides}".rstrip()
        raise ValueError(f"Decoder: {name} must be in {allowed}, got {least if least < 0 else most}")


def alike_on_ranks(model: Decoder, ids: Tensor, labels: Tensor | None) -> dict[str, object]:
    """Properties that must be equal on all ranks of a call."""
    parameters = tuple((x.shape, x.dtype, x.requires_grad) for x in model.parameters())
    return {
        "B": ids.shape[0],
        "labels given": labels is not None,
        **{f"config.{name}": short(value, _SHORT) for name, value in vars(model.config).items()},
        "the parameters": _summary(parameters),
        "the dtype of autocast": autocast_dtype(ids.device.type),
        "requires_grad": torch.is_grad_enabled() and any(requires_grad for _, _, requires_grad in parameters),
        "recompute": ", ".join(dict.fromkeys(str(getattr(block, "recomputed", None)) for block in model.blocks)),
        "checked() open": check.checking_contents(),
    }


@lru_cache(maxsize=64)
def _summary(parameters: tuple[tuple[torch.Size, torch.dtype, bool], ...]) -> str:
    """Summary and digest of the parameters' shapes, dtypes and requires_grad, compared between ranks."""
    numbers = sum(shape.numel() for shape, _, _ in parameters)
    dtypes = ", ".join(sorted({str(dtype).removeprefix("torch.") for _, dtype, _ in parameters}))
    return f"{len(parameters)} of {numbers} numbers, {dtypes} ({digest(repr(parameters))})"


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    layout: SequenceLayout | None,
    cp_context: ContextParallel | None,
    places: Tensor | None,
) -> Tensor:
    """Mean cross entropy of a call, as `Decoder.forward` documents it."""
    if layout is not None:
        inside = layout.sequence_ids >= 0
        labels = torch.where(inside if places is None else inside[places], labels, IGNORED)
    if cp_context is not None:
        labels = torch.where(cp_context.sequence_ids(labels.device) >= 0, labels, IGNORED)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    counted = (labels != IGNORED).sum()
    if cp_context is not None:
        counted = cp_context.all_gather(counted).sum()
    return total / counted.clamp(min=1)
