"""Adjoint of the softmax: each chunk of queries meets its keys again, then takes gradients back over them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.path_attention.eager.keys import keys_before
from wyfold.kernels.path_attention.eager.queries import Queries, before_bwd, with_queries
from wyfold.kernels.path_records import PathCall


def path_attention_bwd(call: PathCall, rows: list[slice], lse: Tensor, do: Tensor, d: PathCall) -> None:
    """Add to `d` the gradients of what the softmax reads.

    Weights of one chunk of queries are kept for all keys. The output is not read: its rounding would be an error of
    every gradient.

    Args:
        call, rows, lse: As in `path_attention`.
        do: [n, R, G, C, V] gradient of the output.
        d: Gradients: `PathCall.zeros`, or with those of other results.
    """
    for i, part in with_queries(rows):
        incoming, base = (t[i, :, :, part].flatten(1, 2) for t in (do, lse[..., None]))
        queries, met = Queries.of(call, i, part), []
        own = _Weights.of(queries.own_logits(call, i, part), base, incoming, call.x.v[i])
        delta = own.average()
        for keys, dkeys in zip(keys_before(call, i), keys_before(d, i), strict=True):
            weights = _Weights.of(queries.logits(call, keys), base, incoming, keys.v)
            delta = delta + weights.average()
            met.append((queries, keys, dkeys, weights))
            queries = queries.before(call, keys)
        heads = lse.shape[2], -1
        grad = torch.zeros_like(queries.x)
        passed = torch.zeros_like(lse[i, :, :, part])  # gradient of the sums of log gates since the last keys
        others = torch.zeros_like(delta)  # sum of the gradients of the logits of all keys but the query's own
        for queries, keys, dkeys, weights in reversed(met):
            ds = weights.p * (weights.dp - delta)
            dkeys.v.add_(torch.bmm(weights.p.mT, incoming))
            dkeys.k.add_(call.scale * torch.bmm(ds.mT, queries.x))
            grad = before_bwd(call, keys, queries.x, grad, d) + call.scale * torch.bmm(ds, keys.k)
            others = others + ds.sum(-1, keepdim=True)
            if dkeys.end is not None:
                by_head = call.gate * ds.unflatten(1, heads)
                if dkeys.total is not None:
                    dkeys.total.add_(passed.sum(-1))
                dkeys.end.add_(by_head.sum(2))
                passed = passed + by_head.sum(3)
        ds = _with_own_key(own.p * (own.dp - delta), others, part)
        d.x.v[i] += torch.bmm(own.p.mT, incoming)
        d.chunks.Z[i].unflatten(1, heads)[:, :, part] = call.scale * ds.unflatten(1, heads)
        d.chunks.q[i].unflatten(1, heads)[:, :, part] = grad.unflatten(1, heads)
        if d.decays is not None:
            d.decays.inside[i, :, :, part] = call.gate * ds.unflatten(1, heads)
            d.decays.start[i, :, :, part] = passed


class _Weights(NamedTuple):
    """Weights of a tile of keys, and their gradients.

    Attributes:
        p, dp: [R, G r, S].
    """

    p: Tensor
    dp: Tensor

    @classmethod
    def of(cls, logits: Tensor, lse: Tensor, do: Tensor, v: Tensor) -> _Weights:
        """Weights from logits and the logarithm of the sum of exponentials; gradients from the output's."""
        return cls((logits - lse).exp(), torch.bmm(do, v.mT))

    def average(self) -> Tensor:
        """[R, G r, 1] sum of the gradients, weighted."""
        return (self.p * self.dp).sum(-1, keepdim=True)


def _with_own_key(ds: Tensor, others: Tensor, part: slice) -> Tensor:
    """Gradient of the logits of a chunk's keys, where that of a query's own key follows from all others.

    The gradients of a query's logits sum to zero. The own key often has nearly all weight, and the difference that is
    its gradient would be lost in rounding; of a query that sees no other key, it would not be zero.
    """
    column = torch.arange(ds.shape[-1], device=ds.device)
    own = (column == column[part, None]).repeat(ds.shape[1] // column[part].shape[0], 1)
    ds = ds.masked_fill(own, 0)
    return torch.where(own, -(others + ds.sum(-1, keepdim=True)), ds)
