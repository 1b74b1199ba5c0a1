"""Softmax of PaTH attention in PyTorch, chunk of queries by chunk of queries, and its adjoint.

A chunk of queries holds products with one chunk or block of keys at a time, so memory is linear in the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.path_records import BLOCK_CHUNKS, PathCall


def path_attention(call: PathCall, rows: list[slice], o: Tensor, lse: Tensor) -> None:
    """Write the outputs, and the logarithms of the sums of exponentials of their logits.

    Args:
        call: Tokens and factors.
        rows: Rows of each chunk that hold queries.
        o: [n, R, G, C, V].
        lse: [n, R, G, C].
    """
    for i, part in _with_queries(rows):
        queries = _Queries.of(call, i, part)
        total = _Softmax(queries.own_logits(call, i, part), call.x.v[i])
        for keys in _keys_before(call, i):
            total.add(queries.logits(call, keys), keys.v)
            queries = queries.before(call, keys)
        shape = o[i, :, :, part].shape
        o[i, :, :, part] = (total.values / total.sums).view(shape)
        lse[i, :, :, part] = (total.largest + total.sums.log()).view(shape[:-1])


def path_attention_bwd(call: PathCall, rows: list[slice], lse: Tensor, do: Tensor, d: PathCall) -> None:
    """Add to `d` the gradients of what the softmax reads.

    Weights of one chunk of queries are kept for all keys. The output is not read: its rounding would be an error of
    every gradient.

    Args:
        call, rows, lse: As in `path_attention`.
        do: [n, R, G, C, V] gradient of the output.
        d: Gradients: `PathCall.zeros`, or with those of other results.
    """
    for i, part in _with_queries(rows):
        incoming, base = (t[i, :, :, part].flatten(1, 2) for t in (do, lse[..., None]))
        queries, met = _Queries.of(call, i, part), []
        own = _Weights.of(queries.own_logits(call, i, part), base, incoming, call.x.v[i])
        delta = own.average()
        for keys, dkeys in zip(_keys_before(call, i), _keys_before(d, i), strict=True):
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
            grad = _map_bwd(call, keys, queries.x, grad, d) + call.scale * torch.bmm(ds, keys.k)
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


def _with_queries(rows: list[slice]) -> list[tuple[int, slice]]:
    """Chunks that hold queries, and their rows."""
    return [(i, part) for i, part in enumerate(rows) if part.start < part.stop]


class _Keys(NamedTuple):
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


def _keys_before(call: PathCall, i: int) -> Iterator[_Keys]:
    """Keys before chunk i, from near to far."""
    decays, block = call.decays, i // BLOCK_CHUNKS
    for c in reversed(range(block * BLOCK_CHUNKS, i)):
        sums = (None, None) if decays is None else (decays.end[c], decays.total[c])
        yield _Keys("chunk", c, call.chunks.k[c], call.x.v[c], *sums)
    for b in reversed(range(block)):
        sums = (None, None) if decays is None else (decays.block_end[b], decays.block_total[b])
        yield _Keys("block", b, call.blocks.k[b], call.blocks.v[b], *sums)
    if call.past is not None:
        yield _Keys("past", 0, call.past.k, call.past.v, call.past.end, None)


class _Queries(NamedTuple):
    """Rows of one chunk of queries, at the start of the keys that they met last.

    Attributes:
        x: [R, G r, K].
        passed: [R, G, r] sum of log gates between these keys and each query; None without a gate.
    """

    x: Tensor
    passed: Tensor | None

    @classmethod
    def of(cls, call: PathCall, i: int, part: slice) -> _Queries:
        """Rows `part` of chunk i at the chunk's start."""
        q = call.chunks.q[i].unflatten(1, (-1, call.x.k.shape[2]))
        return cls(q[:, :, part].flatten(1, 2), None if call.decays is None else call.decays.start[i, :, :, part])

    def own_logits(self, call: PathCall, i: int, part: slice) -> Tensor:
        """[R, G r, C] logits of the keys of the queries' own chunk; minus infinity for later ones."""
        column = torch.arange(call.x.k.shape[2], device=self.x.device)
        logits = call.scale * call.chunks.Z[i].unflatten(1, (-1, column.shape[0]))[:, :, part]
        if call.decays is not None:
            logits = logits + call.gate * call.decays.inside[i, :, :, part]
        return logits.masked_fill(column > column[part, None], -torch.inf).flatten(1, 2)

    def logits(self, call: PathCall, keys: _Keys) -> Tensor:
        """[R, G r, S] logits of keys."""
        products = call.scale * torch.bmm(self.x, keys.k.mT)
        if keys.end is None:
            return products
        sums = keys.end[:, :, None] if self.passed is None else self.passed[..., None] + keys.end[:, :, None]
        return (products.unflatten(1, (keys.end.shape[1], -1)) + call.gate * sums).flatten(1, 2)

    def before(self, call: PathCall, keys: _Keys) -> _Queries:
        """The same rows at the start of the keys."""
        x = self.x
        if keys.kind == "chunk":
            x = x - torch.bmm(torch.bmm(x, call.x.w[keys.at].mT), call.chunks.W[keys.at])
        elif keys.kind == "block":
            x = torch.bmm(x, call.blocks.M[keys.at])
        passed = self.passed
        return _Queries(x, passed if passed is None or keys.total is None else passed + keys.total[..., None])


def _map_bwd(call: PathCall, keys: _Keys, x: Tensor, grad: Tensor, d: PathCall) -> Tensor:
    """Gradient of rows x at the end of the keys from `grad`, at their start; those of the map are added to `d`."""
    if keys.kind == "chunk":
        w, W = call.x.w[keys.at], call.chunks.W[keys.at]
        du = -torch.bmm(grad, W.mT)
        d.chunks.W[keys.at] -= torch.bmm(torch.bmm(x, w.mT).mT, grad)
        d.x.w[keys.at] += torch.bmm(du.mT, x)
        return grad + torch.bmm(du, w)
    if keys.kind == "block":
        d.blocks.M[keys.at] += torch.bmm(x.mT, grad)
        return torch.bmm(grad, call.blocks.M[keys.at].mT)
    return grad


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
