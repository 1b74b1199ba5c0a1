"""`low_rank_gradients` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import GradientOutputs, LowRankBorders, LowRankFactors, LowRankGradients, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.eager import Columns, columns_bwd, early, pair_grams_bwd, read_from_start
from wyfold.tile.decay.eager import across, from_start, gate_gradient, log_gate_tokens_bwd, to_end
from wyfold.tile.index.eager import from_chunks, sum_groups
from wyfold.tile.norm.eager import l2norm_bwd


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


def unload(
    found: LowRankGradients,
    inputs: LowRankInputs,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    out: GradientOutputs,
) -> None:
    """Apply the adjoints of the rule, of norm, grouping and activations, and write every token's gradients once.

    Args:
        found, inputs: Gradient and input tiles of the part.
        g, A_log, dt_bias, table, options: As given to `load`.
        out: Output views of the part's tokens, written; None where a gradient is not requested. The parameters'
            gradients are added to.
    """
    HV, tokens = found.v.shape[0] // max(1, table.chunks), inputs.tokens
    d = columns_bwd(options.rule, tokens, Columns(found.a, found.b, found.k, found.v))
    rows = (
        (out.q, found.q, inputs.q, inputs.rq),
        (out.k, d.k, tokens.k, inputs.rk),
        (out.a, d.a, tokens.a, inputs.ra),
        (out.v, d.v, None, None),
        (out.b, d.b, None, None),
        (out.w, d.w, None, None),
        (None if out.beta is None else out.beta[..., None], d.beta, None, None),
    )
    for token_gradient, dx, y, r in rows:
        if token_gradient is not None and dx is not None:
            H = token_gradient.shape[2]
            dx = sum_groups(dx, H, HV)
            if y is not None and r is not None:
                dx = l2norm_bwd(y[:: HV // H], r[:: HV // H], dx)
            from_chunks(dx, table, token_gradient)
    log_gate_tokens_bwd(found.g, g, A_log, dt_bias, table, options, (out.g, out.A_log, out.dt_bias))
