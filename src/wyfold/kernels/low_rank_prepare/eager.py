"""`low_rank_prepare` in PyTorch, batched over the chunks and value heads of a part."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankFactors, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.columns.eager import RuleTokens, columns, pair_grams, read_from_start, reads_before
from wyfold.tile.decay.eager import from_start, log_gate_tiles, running_sum, to_end
from wyfold.tile.index.eager import to_chunks, wide
from wyfold.tile.inverse.eager import inverse
from wyfold.tile.norm.eager import l2norm


def load(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    columns_of: tuple[Tensor | None, ...],
) -> LowRankInputs:
    """Cut a part's tokens into tiles, normalised and activated, and make the rule's rows and columns.

    Args:
        q, k, v, g, beta, A_log, dt_bias, table, options: As of `load` of `prepare`.
        columns_of: The tokens a, b and w of the part, [B, T, heads, width] or None each.
    """
    HV, dtype = v.shape[2], wide(q.dtype)
    q, k, v = (to_chunks(x, table, HV, dtype) for x in (q, k, v))
    a, b, w = (None if x is None else to_chunks(x, table, HV, dtype) for x in columns_of)
    rq = rk = ra = None
    if options.qk_l2norm:
        (q, rq), (k, rk) = l2norm(q), l2norm(k)
        if a is not None:
            a, ra = l2norm(a)
    strength = None if beta is None else to_chunks(beta[..., None], table, HV, dtype)
    tokens = RuleTokens(k, v, a, b, w, strength)
    gate = log_gate_tiles(g, A_log, dt_bias, table, options, dtype)
    return LowRankInputs(q, *columns(options.rule, tokens), gate, reads_before(options.rule), tokens, rq, rk, ra)


def fold(inputs: LowRankInputs, kept: LowRankFactors | None = None) -> LowRankFactors:
    """Compute the factors of every chunk; with `kept`, recompute only G, which is cheap."""
    q, a, b, k, _, g, before = inputs[:7]
    G = running_sum(g)
    if kept is not None:
        return kept._replace(G=G)
    Aab, Pqb = pair_grams(a, q, b, G, before=before)
    Aak, Pqk = (Aab, Pqb) if k is b else pair_grams(a, q, k, G, before=before)
    A, rows = inverse(-Aab), read_from_start(a, G, before=before)
    F, E = torch.bmm(Pqb, A), torch.bmm(A.transpose(1, 2), to_end(b, G))
    Q = torch.baddbmm(from_start(q, G), F, rows)
    K = torch.baddbmm(to_end(k, G), Aak.transpose(1, 2), E)
    return LowRankFactors(G, rows, Q, E, K, torch.baddbmm(Pqk, F, Aak), A, F, Aab, Aak, Pqb, Pqk)
