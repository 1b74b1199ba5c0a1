"""Softmax of each chunk of queries over its own chunk of keys and all keys before it."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.path_attention.eager.keys import keys_before
from wyfold.kernels.path_attention.eager.queries import Queries, with_queries
from wyfold.kernels.path_records import PathCall


def path_attention(call: PathCall, rows: list[slice], o: Tensor, lse: Tensor) -> None:
    """Write the outputs, and the logarithms of the sums of exponentials of their logits.

    Args:
        call: Tokens and factors.
        rows: Rows of each chunk that hold queries.
        o: [n, R, G, C, V].
        lse: [n, R, G, C].
    """
    for i, part in with_queries(rows):
        queries = Queries.of(call, i, part)
        total = _Softmax(queries.own_logits(call, i, part), call.x.v[i])
        for keys in keys_before(call, i):
            total.add(queries.logits(call, keys), keys.v)
            queries = queries.before(call, keys)
        shape = o[i, :, :, part].shape
        o[i, :, :, part] = (total.values / total.sums).view(shape)
        lse[i, :, :, part] = (total.largest + total.sums.log()).view(shape[:-1])


class _Softmax:
    """Weighted sum of values whose weights are exponentials of logits, over tiles of keys that come one by one.

    Attributes:
        largest: [R, r, 1] largest logit.
        sums: [R, r, 1] sum of exponentials of logits less the largest.
        values: [R, r, V] the same sum of the values.
    """

    def __init__(self, logits: Tensor, v: Tensor):
        self.largest = logits.amax(-1, keepdim=True)
        weights = (logits - self.largest).exp()
        self.sums, self.values = weights.sum(-1, keepdim=True), torch.bmm(weights, v)

    def add(self, logits: Tensor, v: Tensor) -> None:
        """Add a tile of keys."""
        largest = torch.maximum(self.largest, logits.amax(-1, keepdim=True))
        shrink, weights = (self.largest - largest).exp(), (logits - largest).exp()
        self.sums = shrink * self.sums + weights.sum(-1, keepdim=True)
        self.values = shrink * self.values + torch.bmm(weights, v)
        self.largest = largest
