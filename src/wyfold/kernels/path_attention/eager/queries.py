"""Rows of queries on their way from their own chunk to the first keys: their logits, and the maps between keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.path_attention.eager.keys import Keys
from wyfold.kernels.path_records import PathCall


def with_queries(rows: list[slice]) -> list[tuple[int, slice]]:
    """Chunks that hold queries, and their rows."""
    return [(i, part) for i, part in enumerate(rows) if part.start < part.stop]


class Queries(NamedTuple):
    """Rows of one chunk of queries, at the start of the keys that they met last.

    Attributes:
        x: [R, G r, K].
        passed: [R, G, r] sum of log gates between these keys and each query; None without a gate.
    """

    x: Tensor
    passed: Tensor | None

    @classmethod
    def of(cls, call: PathCall, i: int, part: slice) -> Queries:
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

    def logits(self, call: PathCall, keys: Keys) -> Tensor:
        """[R, G r, S] logits of keys."""
        products = call.scale * torch.bmm(self.x, keys.k.mT)
        if keys.end is None:
            return products
        sums = keys.end[:, :, None] if self.passed is None else self.passed[..., None] + keys.end[:, :, None]
        return (products.unflatten(1, (keys.end.shape[1], -1)) + call.gate * sums).flatten(1, 2)

    def before(self, call: PathCall, keys: Keys) -> Queries:
        """The same rows at the start of the keys."""
        x = self.x
        if keys.kind == "chunk":
            x = x - torch.bmm(torch.bmm(x, call.x.w[keys.at].mT), call.chunks.W[keys.at])
        elif keys.kind == "block":
            x = torch.bmm(x, call.blocks.M[keys.at])
        passed = self.passed
        return Queries(x, passed if passed is None or keys.total is None else passed + keys.total[..., None])


def before_bwd(call: PathCall, keys: Keys, x: Tensor, grad: Tensor, d: PathCall) -> Tensor:
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
