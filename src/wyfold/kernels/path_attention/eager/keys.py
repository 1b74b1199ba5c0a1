"""Keys that a chunk of queries meets together: an earlier chunk of its block, a block, or earlier calls."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from wyfold.kernels.path_records import BLOCK_CHUNKS, PathCall


def keys_before(call: PathCall, i: int) -> Iterator[Keys]:
    """Keys before chunk i, from near to far."""
    decays, block = call.decays, i // BLOCK_CHUNKS
    for c in reversed(range(block * BLOCK_CHUNKS, i)):
        sums = (None, None) if decays is None else (decays.end[c], decays.total[c])
        yield Keys("chunk", c, call.chunks.k[c], call.x.v[c], *sums)
    for b in reversed(range(block)):
        sums = (None, None) if decays is None else (decays.block_end[b], decays.block_total[b])
        yield Keys("block", b, call.blocks.k[b], call.blocks.v[b], *sums)
    if call.past is not None:
        yield Keys("past", 0, call.past.k, call.past.v, call.past.end, None)


class Keys(NamedTuple):
    """Keys that a chunk of queries meets together; of gradients, the same.

    Attributes:
        kind: "chunk", "block" or "past".
        at: Number of the chunk or block.
        k, v: [R, S, K] and [R, S, V].
        end: [R, G, S] sums of log gates that follow each key; None without a gate.
        total: [R, G] sum of log gates of all of them; None without a gate, and for keys of earlier calls.
    """

    kind: str
    at: int
    k: Tensor
    v: Tensor
    end: Tensor | None
    total: Tensor | None
