"""What follows a prompt: it is read in pieces, then a token is drawn and read, one after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wyfold.layers.cache import DecodingCache, PooledCache
from wyfold.runtime.layout import SequenceLayout
from wyfold.runtime.replay import Replay

if TYPE_CHECKING:
    from wyfold.models.decoder import Decoder

PREFILL_TOKENS = 2048  # a longer prompt is read in pieces, so that its activations do not grow with it
PREFILL_GRID = 64  # packed prompts are cut at multiples of it, where a cut changes no state


@torch.inference_mode()
def continued(
    model: Decoder, ids: Tensor, lengths: list[int] | None, max_new_tokens: int, draw: Draw, stop: int | None
) -> Iterator[Tensor]:
    """The tokens of `Decoder.stream`; lengths: of packed prompts. `forward`'s checks were made there, once for all."""
    N = ids.shape[0] if lengths is None else len(lengths)
    launched = ids.device.type == "cuda" and model.backend != "eager"
    pooled = launched and all(hasattr(block.mixer, "new_pool") for block in model.blocks)
    cache: DecodingCache | PooledCache = model.new_pools(N).at() if pooled else model.new_cache(N)
    step: Callable[[Tensor], Tensor] = partial(_step, model, cache)
    if pooled:
        step = Replay(step)
    logits = model._logits(_read(model, ids, lengths, cache))
    stopped = torch.zeros(N, dtype=torch.bool, device=ids.device)
    for remaining in range(max_new_tokens, 0, -1):
        token = draw(logits)
        if stop is not None:
            token = torch.where(stopped, stop, token)
            stopped = stopped | (token == stop)
        yield token
        if remaining == 1 or (stop is not None and bool(stopped.all())):
            return
        logits = step(token)


def _read(model: Decoder, ids: Tensor, lengths: list[int] | None, cache: DecodingCache | PooledCache) -> Tensor:
    """Hidden states [N, hidden_size] behind the prompts, which are read piece by piece."""
    if lengths is None:
        for part in ids.split(PREFILL_TOKENS, dim=1):
            hidden = model._hidden(part, None, cache)
        return hidden[:, -1]
    begins = [0, *accumulate(lengths)]
    share = max(PREFILL_GRID, PREFILL_TOKENS // len(lengths) // PREFILL_GRID * PREFILL_GRID)
    behind = ids.new_empty(len(lengths), model.config.hidden_size, dtype=model.embedding.weight.dtype)
    for first in range(0, max(lengths), share):
        sizes = [min(max(length - first, 0), share) for length in lengths]
        rows = [ids[:, begin + first : begin + first + size] for begin, size in zip(begins, sizes) if size]
        layout = SequenceLayout.from_lengths(sizes, device=ids.device)
        hidden = model._hidden(torch.cat(rows, 1), layout, cache)
        ended = [n for n, size in enumerate(sizes) if size and first + size == lengths[n]]
        ends = list(accumulate(sizes))
        behind[ended] = hidden[0, [ends[n] - 1 for n in ended]]
    return behind


@dataclass(frozen=True)
class Draw:
    """One token for each row of logits."""

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None
    shared: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, tokens = (logits.float() / self.temperature).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits = logits[:, : self.top_k]
        probability = logits.softmax(dim=-1)
        if self.top_p is not None:
            # A token stays while those before it hold less than top_p, so the likeliest always does.
            before = probability.cumsum(dim=-1) - probability
            probability = torch.where(before < self.top_p, probability, 0)
        if self.shared:  # what torch.multinomial does for one row, its random numbers for all of them
            waiting = torch.empty_like(probability[:1]).exponential_(generator=self.generator)
            rank = (probability / waiting).argmax(dim=-1, keepdim=True)
        else:
            rank = torch.multinomial(probability, 1, generator=self.generator)
        return tokens.gather(1, rank)[:, 0]


def _step(model: Decoder, cache: DecodingCache | PooledCache, token: Tensor) -> Tensor:
    """Logits [N, vocab_size] behind one more token [N] of each sequence."""
    return model._logits(model._hidden(token[:, None], None, cache)[:, -1])
