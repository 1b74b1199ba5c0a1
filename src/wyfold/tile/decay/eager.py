"""The gate in PyTorch: log gates, decays, decayed grams and their adjoints, for every kind of gate.

G is the running sum of the log gate inside its chunk, natural log: None without a gate (DeltaNet), [n, C, 1] with one
number per token (GDN), [n, C, K] with one per key channel (KDA). Every exponential below is of a number <= 0.
Rows are tokens; `in`, `out` and `across` are exp(G), exp(G_last - G) and exp(G_last).
"""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.runtime.options import DeltaOptions
from wyfold.tile.activation.eager import sigmoid, sigmoid_bwd, softplus
from wyfold.tile.decay.channel import eager as channel
from wyfold.tile.decay.channel.eager import channel_grams, channel_grams_bwd, exclusive_sum, suffix_sum
from wyfold.tile.index.eager import from_chunks, to_chunks


def log_gate_floor(dtype: torch.dtype) -> float:
    """Smallest log gate; its exponential is 0 in dtype, so a gate of -inf becomes a clean reset."""
    return -746.0 if dtype == torch.float64 else -104.0


def gate_tiles(g: Tensor, table: ChunkTable, dtype: torch.dtype) -> Tensor:
    """Cut the caller's g, [B, T, HV] or [B, T, HV, K], into tiles.   [chunks, HV, C, 1 or K]"""
    HV = g.shape[2]
    return to_chunks(_with_channels(g), table, HV, dtype).unflatten(0, (-1, HV))


def gate_tokens(dg: Tensor, table: ChunkTable, out: Tensor) -> None:
    """Write tiles [chunks, HV, C, 1 or K] to the tokens of out, [B, T, HV] or [B, T, HV, K]."""
    from_chunks(dg.flatten(0, 1), table, _with_channels(out))


def _with_channels(g: Tensor) -> Tensor:
    return g[..., None] if g.ndim == 3 else g


def log_gate(
    x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, activation: str, lower_bound: float, clamp: float
) -> Tensor:
    """Per-token log gate from the caller's g.

        "given"      g = x
        "softplus"   g = -exp(A_log) softplus(x + dt_bias)
        "bounded"    g = lower_bound * sigmoid(exp(A_log) (x + dt_bias))

    and then g = max(g, clamp) unless clamp is 0, and g = max(g, the dtype's floor).

    Args:
        x: [chunks, HV, C, 1 or K].
        A_log: [HV] or None (rate 1).
        dt_bias: [HV] or [HV * K] or None (0).
    """
    if activation == "softplus":
        u, rate = _biased(x, A_log, dt_bias)
        x = softplus(u).mul_(-rate)
    elif activation == "bounded":
        u, rate = _biased(x, A_log, dt_bias)
        x = sigmoid(u * rate).mul_(lower_bound)
    return x.clamp(min=clamp or log_gate_floor(x.dtype))


def log_gate_bwd(
    x: Tensor,
    dg: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    activation: str,
    lower_bound: float,
    clamp: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Adjoint of `log_gate`: dx like x, dA_log [HV], ddt_bias [HV, 1 or K]; None for a parameter that was not given."""
    g = log_gate(x, A_log, dt_bias, activation, lower_bound, -torch.inf)
    if clamp:
        dg = dg.masked_fill(g < clamp, 0)
    if activation == "given":
        return dg, None, None
    u, rate = _biased(x, A_log, dt_bias)
    if activation == "softplus":
        dx = dg * sigmoid(u) * -rate
        # g is not floored: after a reset dg is zero, and -inf * 0 would be NaN.
        dA_log = torch.where(dg == 0, 0, g * dg)
    else:
        dx = sigmoid_bwd(u * rate, dg * lower_bound) * rate
        dA_log = torch.where(dx == 0, 0, u * dx)
    over_tokens = None if dt_bias is None else dx.sum((0, 2))
    return dx, None if A_log is None else dA_log.sum((0, 2, 3)), over_tokens


def log_gate_tiles(
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    dtype: torch.dtype,
) -> Tensor | None:
    """`log_gate` of the caller's g, zero in rows without a token; None without a gate.   [n, C, 1 or K]"""
    if g is None:
        return None
    x = gate_tiles(g, table, dtype)
    log = log_gate(x, A_log, dt_bias, options.activation, options.lower_bound, options.clamp)
    if options.activation != "given" and table.padding is not None:
        log = log.masked_fill(table.padding[:, None, :, None].to(log.device), 0)
    return log.flatten(0, 1)


def log_gate_tokens_bwd(
    dg: Tensor | None,
    g: Tensor | None,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    table: ChunkTable,
    options: DeltaOptions,
    out: tuple[Tensor | None, Tensor | None, Tensor | None],
) -> None:
    """Adjoint of `log_gate_tiles`.

    Args:
        dg: [n, C, 1 or K] gradient of its result.
        g, A_log, dt_bias, table, options: As given to it.
        out: Gradients of g, which is written, and of A_log and dt_bias, which are added to; None where a gradient is
            not requested.
    """
    to_g, to_A_log, to_dt_bias = out
    if dg is None or g is None or (to_g is None and to_A_log is None and to_dt_bias is None):
        return
    dg = dg.unflatten(0, (-1, g.shape[2]))
    if table.padding is not None:
        dg = dg.masked_fill(table.padding[:, None, :, None].to(dg.device), 0)
    x = gate_tiles(g, table, dg.dtype)
    dx, dA_log, ddt_bias = log_gate_bwd(x, dg, A_log, dt_bias, options.activation, options.lower_bound, options.clamp)
    if to_g is not None:
        gate_tokens(dx, table, to_g)
    if to_A_log is not None and dA_log is not None:
        to_A_log.add_(dA_log.view_as(to_A_log))
    if to_dt_bias is not None and ddt_bias is not None:
        to_dt_bias.add_(ddt_bias.view_as(to_dt_bias))


def running_sum(g: Tensor | None) -> Tensor | None:
    """G, the running sum of floored per-token gates g [n, C, 1 or K]."""
    return None if g is None else g.cumsum(-2)


def from_start(x: Tensor, G: Tensor | None) -> Tensor:
    """x decayed from the chunk's start to its row: x * exp(G)."""
    return x if G is None else x * torch.exp(G)


def to_end(x: Tensor, G: Tensor | None) -> Tensor:
    """x decayed from its row to the chunk's end: x * exp(G_last - G)."""
    return x if G is None else x * torch.exp(G[:, -1:] - G)


def across(G: Tensor | None) -> Tensor | None:
    """Decay of the state over the whole chunk, one factor per row of the state.   [n, 1 or K, 1]"""
    return None if G is None else torch.exp(G[:, -1:]).transpose(1, 2)


def decayed_grams(q: Tensor, k: Tensor, G: Tensor | None) -> tuple[Tensor, Tensor]:
    """Decayed grams of one chunk.

        J[r, s] = sum_c k[r, c] k[s, c] exp(G[r, c] - G[s, c])    s <  r, else 0
        P[r, s] = sum_c q[r, c] k[s, c] exp(G[r, c] - G[s, c])    s <= r, else 0

    Args:
        q, k: [n, C, K].
        G: None, [n, C, 1] or [n, C, K].

    Returns:
        J, P: [n, C, C].
    """
    if G is not None and _per_channel(G):
        J, P = channel_grams((k, q), k, G)
        P.diagonal(dim1=1, dim2=2).copy_((q * k).sum(-1))
        return J, P
    J, P = _grams((k, q), k, G)
    return J.tril_(-1), P.tril_()


def row_grams(rows: tuple[Tensor, ...], column: Tensor, G: Tensor | None) -> list[Tensor]:
    """P of `decayed_grams` of several kinds of rows with one column.   [n, C, C] each"""
    if G is not None and _per_channel(G):
        grams = channel_grams(rows, column, G)
        for row, gram in zip(rows, grams, strict=True):
            gram.diagonal(dim1=1, dim2=2).copy_((row * column).sum(-1))
        return grams
    return [gram.tril_() for gram in _grams(rows, column, G)]


def row_grams_bwd(
    rows: tuple[Tensor, ...],
    column: Tensor,
    G: Tensor | None,
    grams: tuple[Tensor, ...],
    dgrams: tuple[Tensor, ...],
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Adjoint of `row_grams`.

    Args:
        rows, column, G: As given to `row_grams`.
        grams: Its results.
        dgrams: [n, C, C] gradient of each gram, contiguous, zero above the diagonal.

    Returns:
        drows, dcolumn: [n, C, K].
        dg: Gradient of the per-token gate through the grams, shape of G.
    """
    if G is not None and _per_channel(G):
        return channel.row_grams_bwd(rows, column, G, dgrams)
    dg, decayed = None, list(dgrams)
    if G is not None:
        pairs = sum((x * dx for x, dx in zip(grams, dgrams, strict=True)), torch.zeros_like(grams[0]))
        dg = _interval_sum(pairs.tril_(-1))[..., None]
        decay = _pairwise(G, column.dtype)
        decayed = [dgram * decay for dgram in dgrams]
    dcolumn = torch.zeros_like(column)
    for row, dgram in zip(rows, decayed, strict=True):
        dcolumn.baddbmm_(dgram.transpose(1, 2), row)
    return [torch.bmm(dgram, column) for dgram in decayed], dcolumn, dg


def decayed_key_gram(k: Tensor, G: Tensor | None) -> Tensor:
    """J of `decayed_grams` alone. G may have a wider dtype than k."""
    if G is not None and _per_channel(G):
        return channel_grams((k,), k, G)[0]
    return _grams((k,), k, G)[0].tril_(-1)


def decayed_grams_bwd(
    q: Tensor, k: Tensor, G: Tensor | None, J: Tensor, P: Tensor, dJ: Tensor, dP: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Adjoint of `decayed_grams`.

    Args:
        q, k, G: As given to `decayed_grams`.
        J, P: Results of `decayed_grams`.
        dJ, dP: [n, C, C], zero where J and P are.

    Returns:
        dq, dk: [n, C, K].
        dg: Gradient of the per-token gate through the grams, shape of G: the sum over pairs r > s whose interval
            holds the token.
    """
    if G is not None and _per_channel(G):
        return channel_grams_bwd(q, k, G, dJ, dP)
    dg = None
    if G is not None:
        pairs = (dP * P + dJ * J).tril_(-1)
        dg = _interval_sum(pairs)[..., None]
        decay = _pairwise(G, k.dtype)
        dJ, dP = dJ * decay, dP * decay
    dq = torch.bmm(dP, k)
    dk = torch.bmm(dP.transpose(1, 2), q)
    dk.baddbmm_(dJ, k).baddbmm_(dJ.transpose(1, 2), k)
    return dq, dk, dg


def gate_gradient(from_start: Tensor, to_end: Tensor, across: Tensor, G: Tensor, pairs: Tensor) -> Tensor:
    """Gradient of the per-token log gate in interval form: a term is added to all tokens whose decay it contains.

        dg[i] = sum_{r >= i} from_start[r] + sum_{s < i} to_end[s] + across + pairs[i]

    No term is subtracted, so the gate of a reset gets an exact zero.

    Args:
        from_start: [n, C, K] x * dx of every factor decayed from the chunk's start.
        to_end: [n, C, K] x * dx of every factor decayed to the chunk's end.
        across: [n, K] the entering state times its gradient, decayed over the chunk, summed over V.
        G: [n, C, 1] or [n, C, K].
        pairs: Shape of G, from `decayed_grams_bwd`.
    """
    from_start, to_end, across = (to_gate_shape(x, G) for x in (from_start, to_end, across))
    return suffix_sum(from_start) + exclusive_sum(to_end) + across[:, None] + pairs


def token_decay(g: Tensor | None) -> Tensor | None:
    """Decay of the state over each token, shaped to multiply the state's rows.   [n, C, 1 or K, 1]"""
    return None if g is None else torch.exp(g)[..., None]


def to_gate_shape(x: Tensor, g: Tensor) -> Tensor:
    """Sum per-channel terms [..., K] over the channels that share one gate of g: [..., 1 or K]."""
    return x if _per_channel(g) else x.sum(-1, keepdim=True)


def _biased(x: Tensor, A_log: Tensor | None, dt_bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """x + dt_bias, and exp(A_log) shaped to broadcast with it."""
    rate = x.new_ones(()) if A_log is None else torch.exp(A_log.to(x.dtype)).view(-1, 1, 1)
    return x if dt_bias is None else x + dt_bias.to(x.dtype).view(x.shape[1], 1, -1), rate


def _per_channel(G: Tensor) -> bool:
    return G.shape[-1] > 1


def _grams(rows: tuple[Tensor, ...], k: Tensor, G: Tensor | None) -> list[Tensor]:
    """Grams of each of `rows` with k on and below the diagonal, decayed by at most one number per token."""
    grams = [torch.bmm(x, k.transpose(1, 2)) for x in rows]
    if G is not None:
        decay = _pairwise(G, k.dtype)
        for gram in grams:
            gram.mul_(decay)
    return grams


def _pairwise(G: Tensor, dtype: torch.dtype) -> Tensor:
    """exp(G_r - G_s) for s <= r, else 0, in dtype; masked before the exponential.   [n, C, C]"""
    above = torch.ones(G.shape[1], G.shape[1], dtype=torch.bool, device=G.device).triu_(1)
    return torch.exp((G - G.transpose(1, 2)).to(dtype).masked_fill_(above, -torch.inf))


def _interval_sum(pairs: Tensor) -> Tensor:
    """sum over r >= i > s of pairs[r, s], for strictly lower pairs.   [n, C, C] -> [n, C]"""
    return suffix_sum(pairs).tril_(-1).sum(-1)
