"""Gradients of the tiles of chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankBorders, LowRankFactors, LowRankGradients, LowRankInputs
from wyfold.tile.columns.eager import early, pair_grams_bwd, read_from_start
from wyfold.tile.decay.eager import across, from_start, gate_gradient, to_end


def gradients(inputs: LowRankInputs, factors: LowRankFactors, borders: LowRankBorders, do: Tensor) -> LowRankGradients:
    """Gradients of a part's rows, columns, values and gates. `do` [n, C, V] includes the scale."""
    q, a, b, k, v, _, before = inputs[:7]
    S, dS, U, Z = borders
    G, S_T, dS_T = factors.G, S.transpose(1, 2), dS.transpose(1, 2)
    W = torch.bmm(factors.A, torch.baddbmm(U, factors.Aak, v))
    X = torch.baddbmm(Z, factors.F.transpose(1, 2), do)
    dv = torch.baddbmm(torch.bmm(factors.K, dS), factors.P.transpose(1, 2), do)

    dq_read = from_start(torch.bmm(do, S_T), G)
    da_read = read_from_start(torch.bmm(X, S_T), G, before=before)
    dq, da, dcolumns = dq_read.clone(), da_read.clone(), []
    written, pairs = torch.zeros_like(q), None if G is None else torch.zeros_like(G)
    erased, stored = (b, W, (factors.Aab, factors.Pqb)), (k, v, (factors.Aak, factors.Pqk))
    for column, value, grams in ((k, W + v, stored[2]),) if b is k else (erased, stored):
        value_T = value.transpose(1, 2)
        dgrams = torch.bmm(X, value_T).tril_(-1), torch.bmm(do, value_T).tril_()
        through = pair_grams_bwd(a, q, column, G, grams, dgrams, before=before)
        dcolumn_write = to_end(torch.bmm(value, dS_T), G)
        dq.add_(through.q)
        da.add_(through.a)
        written.add_(column * dcolumn_write)
        dcolumns.append(through.column.add_(dcolumn_write))
        if pairs is not None and through.g is not None:
            pairs.add_(through.g)
    dg, decay = None, across(G)
    if G is not None and decay is not None and pairs is not None:
        erasing = a * da_read
        read = q * dq_read + (early(erasing) if before else erasing)
        dg = gate_gradient(read, written, (S * dS).sum(-1) * decay[..., 0], G, pairs)
    return LowRankGradients(dq, da, dcolumns[0], dcolumns[-1], dv, dg)
