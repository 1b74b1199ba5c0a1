"""Generation: prefill the prompt in pieces, then sample and feed back one token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from wyfold.layers.cache import DecodingCache
from wyfold.layers.pools import PooledCache
from wyfold.runtime.cuda_graph import Replay
from wyfold.runtime.layout import SequenceLayout

if TYPE_CHECKING:
    from wyfold.models.decoder import Decoder

PREFILL_TOKENS = 2048  # longer prompts are prefilled in pieces, to bound the memory of activations
SHARP = 1e-6  # below this temperature logits / temperature can exceed float32's range
PREFILL_GRID = 64  # packed prompts are split at multiples of this, where a split changes no state


def continued(
    model: Decoder, ids: Tensor, lengths: list[int] | None, max_new_tokens: int, draw: Draw, stop: int | None
) -> Iterator[Tensor]:
    """Yield the tokens of `Decoder.stream`. lengths: of packed prompts, else None.

    Every step calls the model, so that wrappers' hooks run, which gather or fetch parameters.
    """
    # Parameters that FSDP gathers in inference mode could not be differentiated afterwards.
    mode = torch.inference_mode if _plain(model, ids.device) else torch.no_grad
    return mode()(_continued)(model, ids, lengths, max_new_tokens, draw, stop)


def _continued(
    model: Decoder, ids: Tensor, lengths: list[int] | None, max_new_tokens: int, draw: Draw, stop: int | None
) -> Iterator[Tensor]:
    N = ids.shape[0] if lengths is None else len(lengths)
    # A CUDA graph replays launches only, neither collectives nor hooks on the host.
    launched = ids.device.type == "cuda" and model.backend != "eager" and _plain(model, ids.device)
    pooled = launched and all(getattr(block.mixer, "has_pool", False) for block in model.blocks)
    cache: DecodingCache | PooledCache = model.new_pools(N).at() if pooled else model.new_cache(N)
    step: Callable[[Tensor], Tensor] = partial(_step, model, cache)
    if pooled:
        step = Replay(step)
    logits = _read(model, ids, lengths, cache)
    stopped = torch.zeros(N, dtype=torch.bool, device=ids.device)
    for remaining in range(max_new_tokens, 0, -1):
        token = draw(logits)
        if stop is not None:
            token = torch.where(stopped, stop, token)
            stopped = stopped | (token == stop)
        yield token
        if remaining == 1 or (stop is not None and _everywhere(model, bool(stopped.all()))):
            return
        logits = step(token)


def _plain(model: Decoder, device: torch.device) -> bool:
    """Whether every parameter is an ordinary tensor on that device, neither sharded nor offloaded."""
    return all(type(x) is torch.nn.Parameter and x.device == device for x in model.parameters())


def _everywhere(model: Decoder, ended: bool) -> bool:
    """Whether generation has ended in all processes that share sharded parameters; until then all call the model."""
    meshes = {mesh: None for x in model.parameters() if (mesh := getattr(x, "device_mesh", None)) is not None}
    for mesh in meshes:  # ordered by parameter, which is the same in every process
        flag = torch.tensor(ended, dtype=torch.int32, device=mesh.device_type)
        for dimension in range(mesh.ndim):
            torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=mesh.get_group(dimension))
        ended = bool(flag)
    return ended


def _read(model: Decoder, ids: Tensor, lengths: list[int] | None, cache: DecodingCache | PooledCache) -> Tensor:
    """Prefill the prompts piece by piece; return the logits [N, vocab_size] after each."""
    if lengths is None:
        *before, last = ids.split(PREFILL_TOKENS, dim=1)
        for part in before:
            model(part, cache=cache, places=part.new_empty(len(part), 0, dtype=torch.int64))
        end = torch.full((len(last), 1), last.shape[1] - 1, device=ids.device)
        return model(last, cache=cache, places=end)[0][:, 0]
    begins = [0, *accumulate(lengths)]
    share = max(PREFILL_GRID, PREFILL_TOKENS // len(lengths) // PREFILL_GRID * PREFILL_GRID)
    found: list[Tensor] = [ids] * len(lengths)
    for first in range(0, max(lengths), share):
        sizes = [min(max(length - first, 0), share) for length in lengths]
        rows = [ids[:, begin + first : begin + first + size] for begin, size in zip(begins, sizes) if size]
        layout = SequenceLayout.from_lengths(sizes, device=ids.device)
        ended = [n for n, size in enumerate(sizes) if size and first + size == lengths[n]]
        ends = list(accumulate(sizes))
        places = torch.tensor([[ends[n] - 1 for n in ended]], dtype=torch.int64, device=ids.device)
        logits, _ = model(torch.cat(rows, 1), layout=layout, cache=cache, places=places)
        for n, row in zip(ended, logits[0], strict=True):
            found[n] = row
    return torch.stack(found)


@dataclass(frozen=True)
class Draw:
    """Sampler: draws one token for each row of logits.

    Attributes:
        temperature: Divisor of the logits; 0: the likeliest token.
        top_k: Sample among the k likeliest. None: all.
        top_p: Sample among the likeliest tokens that together have this probability. None: all.
        generator: Source of random numbers. None: PyTorch's default.
        shared: All rows use the same random numbers, those of a single row.
    """

    temperature: float
    top_k: int | None
    top_p: float | None
    generator: torch.Generator | None
    shared: bool = False

    def __call__(self, logits: Tensor) -> Tensor:
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        logits, tokens = self._heated(logits).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            logits = logits[:, : min(self.top_k, logits.shape[1])]
        probability = logits.softmax(dim=-1)
        if self.top_p is not None:
            # Keep a token while the likelier ones sum to less than top_p; the likeliest is always kept.
            before = probability.cumsum(dim=-1) - probability
            stays = before < self.top_p
            stays[:, 0] = True  # also if top_p underflows to 0 in float32
            probability = torch.where(stays, probability, 0)
        if self.shared:  # torch.multinomial's algorithm for one row, with its random numbers for all rows
            waiting = torch.empty_like(probability[:1]).exponential_(generator=self.generator)
            rank = (probability / waiting).argmax(dim=-1, keepdim=True)
        else:
            rank = torch.multinomial(probability, 1, generator=self.generator)
        return tokens.gather(1, rank)[:, 0]

    def _heated(self, logits: Tensor) -> Tensor:
        """Logits [N, vocab_size] over the temperature; for a very low one shifted by their maximum, in float64."""
        if self.temperature >= SHARP:
            return logits.float() / self.temperature
        logits = logits.double()
        return (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature


def _step(model: Decoder, cache: DecodingCache | PooledCache, token: Tensor) -> Tensor:
    """Feed one token [N] of each sequence; return the logits [N, vocab_size] after it."""
    logits: Tensor = model(token[:, None], cache=cache)[0]
    return logits[:, -1]
