"""`ttt` and `ttt_bwd` in PyTorch: a serial loop over mini-batches for the state, everything else batched over a part.

A column of the chunk table holds the mini-batches with the same number in their sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.ttt import MiniBatches, MiniBatchGradients, State
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import from_chunks, ranked, sum_groups, to_chunks, unranked, wide
from wyfold.tile.inner.eager import (
    Inner,
    attention,
    inner_gradient,
    inner_gradient_bwd,
    read,
    residual_norm,
    residual_norm_bwd,
    step_,
    step_bwd_,
)


def load(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    u: Tensor,
    eta: Tensor,
    col: Tensor | None,
    table: ChunkTable,
    scale: float,
    taken: Tensor | None,
    residual: str,
) -> MiniBatches:
    """Cut a part's tokens into tiles.

    Args:
        q, k: [B, T, H, D] of the part, any strides.
        v: [B, T, HV, D].
        w, u: [HV, D].
        eta, col: [B, T, HV, 1]; col None is a factor of 1.
        table: The part's chunk table.
        scale: Multiplies q.
        taken: [n] int64 on the CPU, number of idle rows at the start of each sequence's first mini-batch. A last
            mini-batch with fewer than C rows then stays open. None: no mini-batch is open.
        residual: "o" or "q".
    """
    HV, dtype = v.shape[2], wide(q.dtype)
    q, k, v, e = (to_chunks(x, table, HV, dtype) for x in (q, k, v, eta))
    w, u = (x.to(dtype).repeat(table.chunks, 1).unsqueeze(1) for x in (w, u))
    e_last = e.gather(1, _per_head(table.valid - 1, HV, e))
    if taken is not None:
        e_last = e_last.masked_fill(_per_head(_stays_open(table), HV, e), 0)
    factors = None if col is None else to_chunks(col, table, HV, dtype)
    raw = q.clone() if residual == "q" else None
    return MiniBatches(q.mul_(scale), k, u - v + k, e, e_last, factors, raw, w, u, _idle(table, taken, HV, e))


def ttt(
    x: MiniBatches, entering: State, sums: State | None, table: ChunkTable, eps: float, o: Tensor, at: State
) -> tuple[State, State | None]:
    """Run a part's mini-batches from the entering states.

    Args:
        x: From `load`.
        entering: [n, HV, ..] state entering each sequence.
        sums: [n, HV, ..] sums of an earlier call for each sequence's first mini-batch; None: no mini-batch is open.
        table: The part's chunk table.
        eps: Epsilon of both norms.
        o: [B, T, HV, D] output of the part's tokens, written.
        at: [chunks, HV, ..] receives the state entering each mini-batch.

    Returns:
        State leaving each sequence, and the sums of its last mini-batch, zero if that closed.
    """
    at, first = _flat(at), _first(sums, table)
    leaving, N = _forward_scan(x, entering, first, table, eps, at)
    written = _written(x, attention(x.q, x.k), N, first, table)
    from_chunks(residual_norm(read(at.S, at.c, x.q, x.e, written), x.w, x.u, eps, x.raw), table, o)
    return leaving, None if sums is None else _last_sums(x.k, N, sums, table)


def ttt_bwd(
    x: MiniBatches,
    entering: State | None,
    sums: State | None,
    do: Tensor,
    dstate: State,
    dsums: State | None,
    table: ChunkTable,
    eps: float,
    at: State,
) -> tuple[MiniBatchGradients, State]:
    """Gradients of a part's tokens and entering states.

    Args:
        x, sums, table, eps: As given to `ttt`; `sums` are constants.
        entering: As given to `ttt`, or None where `at` still holds the states that `ttt` wrote.
        do: [n, C, D] tiles of the output's gradient.
        dstate, dsums: [n, HV, ..] gradients of the results of `ttt`.
        at: [chunks, HV, ..] states entering each mini-batch; computed here unless `entering` is None.

    Returns:
        Gradients of the tiles, and of the entering states, [n, HV, ..].
    """
    at, first = _flat(at), _first(sums, table)
    if entering is not None:
        _forward_scan(x, entering, first, table, eps, at)
    inner = inner_gradient(at.S, at.c, x.k, x.t, x.w, eps, x.idle)
    Bm = attention(x.q, x.k)
    N = _factored(inner.N, x)
    written = _written(x, Bm, N, first, table)
    dO, Xo = residual_norm_bwd(read(at.S, at.c, x.q, x.e, written), x.w, eps, do, x.raw is not None)
    dN = torch.bmm(Bm.transpose(1, 2), x.e * dO).neg_()
    dG = torch.zeros_like(at.S)
    if dsums is not None:
        _last_sums_bwd(x.k, dsums, table, dN, dG)
    scan = _backward_scan(x, inner, N, dO, dN, dG, dstate, first, table)

    pairs = torch.bmm(dO, N.transpose(1, 2)).tril_().mul_(x.e)
    dq = torch.bmm(dO, at.S.transpose(1, 2)).baddbmm_(pairs, x.k, alpha=-1)
    if first is not None:
        m = first.S.shape[0]
        dq[:m].sub_(x.e[:m] * torch.bmm(dO[:m], first.S.transpose(1, 2)))
    dt = x.w * scan.dY
    dk = torch.baddbmm(dt, scan.dZ, at.S.transpose(1, 2))
    dk.baddbmm_(N, dG.transpose(1, 2)).baddbmm_(pairs.transpose(1, 2), x.q, alpha=-1)
    de = (dO * written).sum(-1, keepdim=True).neg_()
    de.scatter_add_(1, _per_head(table.valid - 1, dstate.S.shape[1], de), scan.de_last)
    dw = ((2 * x.w * inner.X + x.t) * scan.dY).addcmul_(do, Xo).sum(1)
    raw = None if x.raw is None else do
    return MiniBatchGradients(dq, dk, dt.neg(), de, scan.dcol, raw, dw, (dt + do).sum(1)), scan.entering


def unload(
    found: MiniBatchGradients,
    table: ChunkTable,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    deta: Tensor,
    dcol: Tensor | None,
    dw: Tensor,
    du: Tensor,
) -> None:
    """Write the gradients of a part's tokens, and add the part's terms to dw and du.

    The value heads that share a key head are summed in a fixed order.

    Args:
        found: From `ttt_bwd`.
        table, scale: As given to `load`.
        dq, dk, dv, deta, dcol: Gradients of the tensors given to `load`, written.
        dw, du: [HV, D] in the accumulation dtype, added to.
    """
    H, HV = dq.shape[2], dv.shape[2]
    q = sum_groups(found.q, H, HV).mul_(scale)
    from_chunks(q if found.raw is None else q.add_(sum_groups(found.raw, H, HV)), table, dq)
    from_chunks(sum_groups(found.k, H, HV), table, dk)
    from_chunks(found.v, table, dv)
    from_chunks(found.e, table, deta)
    if found.col is not None and dcol is not None:
        from_chunks(found.col, table, dcol)
    dw.add_(found.w.unflatten(0, (-1, HV)).sum(0))
    du.add_(found.u.unflatten(0, (-1, HV)).sum(0))


def _forward_scan(
    x: MiniBatches, entering: State, first: State | None, table: ChunkTable, eps: float, at: State
) -> tuple[State, Tensor]:
    """Fill `at`, and return the final states and N."""
    HV = entering.S.shape[1]
    S, c = ranked(entering.S, table), ranked(entering.c, table)
    N = torch.empty_like(x.k)
    for column, rows in enumerate(_columns(table, HV)):
        running, bias, tile = S[: rows.stop - rows.start], c[: rows.stop - rows.start], _rows(x, rows)
        at.S[rows], at.c[rows] = running, bias
        N[rows] = _factored(inner_gradient(running, bias, tile.k, tile.t, tile.w, eps, tile.idle).N, tile)
        step_(running, bias, tile.k, N[rows], tile.e_last)
        if column == 0 and first is not None:
            running.addcmul_(tile.e_last, first.S, value=-1)
            bias.addcmul_(tile.e_last, first.c, value=-1)
    return State(unranked(S, table), unranked(c, table)), N


class _BackwardScan(NamedTuple):
    """Results of the backward scan.

    Attributes:
        dY, dZ: [n, C, D] gradients through the inner gradient.
        de_last: [n, 1, 1] gradients of the closing steps.
        dcol: [n, C, 1] gradients of the factors; None without factors.
        entering: [n, HV, ..] gradients of the states entering the sequences.
    """

    dY: Tensor
    dZ: Tensor
    de_last: Tensor
    dcol: Tensor | None
    entering: State


def _backward_scan(
    x: MiniBatches,
    inner: Inner,
    N: Tensor,
    dO: Tensor,
    dN: Tensor,
    dG: Tensor,
    dstate: State,
    first: State | None,
    table: ChunkTable,
) -> _BackwardScan:
    """Adjoint of `_forward_scan`.

    Args:
        N: [n, C, D] inner gradients times their factors.
        dN: [n, C, D] gradient of N through the outputs and open mini-batches; the part through the state is added.
        dG: [n, D, D] gradient of k^T N, likewise.
    """
    HV = dstate.S.shape[1]
    dS, dc = ranked(dstate.S, table), ranked(dstate.c, table)
    dY, dZ, de_last = torch.empty_like(dN), torch.empty_like(dN), torch.empty_like(x.e_last)
    dcol = None if x.col is None else torch.empty_like(x.col)
    for column, rows in reversed(list(enumerate(_columns(table, HV)))):
        running, bias, tile = dS[: rows.stop - rows.start], dc[: rows.stop - rows.start], _rows(x, rows)
        dwrite = torch.baddbmm(bias, tile.k, running)
        dG[rows].addcmul_(tile.e_last, running, value=-1)
        de_last[rows] = _dot(dwrite, N[rows]).neg_()
        if column == 0 and first is not None:
            de_last[rows] -= _dot(running, first.S) + _dot(bias, first.c)
        dN[rows].addcmul_(tile.e_last, dwrite, value=-1)
        if tile.idle is not None:
            dN[rows].masked_fill_(tile.idle, 0)
        at_rows = Inner(*(y[rows] for y in inner))
        if dcol is not None:
            dcol[rows] = (dN[rows] * at_rows.N).sum(-1, keepdim=True)
        dY[rows], dZ[rows] = inner_gradient_bwd(at_rows, tile.w, _factored(dN[rows], tile))
        step_bwd_(running, bias, tile.q, tile.k, dO[rows], dZ[rows])
    if first is not None:
        de_last.masked_fill_(_per_head(_stays_open(table), HV, de_last), 0)
    return _BackwardScan(dY, dZ, de_last, dcol, State(unranked(dS, table), unranked(dc, table)))


def _factored(N: Tensor, x: MiniBatches) -> Tensor:
    """Multiply each row of N by its factor."""
    return N if x.col is None else N * x.col


def _written(x: MiniBatches, Bm: Tensor, N: Tensor, first: State | None, table: ChunkTable) -> Tensor:
    """Bm N, plus the earlier calls' sums in each sequence's first mini-batch."""
    written = torch.bmm(Bm, N)
    if first is not None:
        m = first.S.shape[0]
        written[:m] += torch.baddbmm(first.c, x.q[:m], first.S)
    return written


def _last_sums(k: Tensor, N: Tensor, sums: State, table: ChunkTable) -> State:
    """k^T N and sum(N) of each sequence's last mini-batch, with earlier calls' sums; zero if it closed."""
    HV = sums.S.shape[1]
    G, a = ranked(sums.S, table), ranked(sums.c, table)
    last, tiles = _last_chunks(table, HV)
    n = tiles.shape[0]
    tiles = tiles.to(k.device)
    has_more = _per_head(last >= table.columns[0], HV, k)
    closed = _per_head(~_stays_open(table)[last], HV, k)
    rows = N.index_select(0, tiles)
    G[:n] = torch.baddbmm(G[:n].masked_fill(has_more, 0), k.index_select(0, tiles).transpose(1, 2), rows)
    a[:n] = a[:n].masked_fill(has_more, 0) + rows.sum(1, keepdim=True)
    return State(*(unranked(_zeroed(s, closed), table) for s in (G, a)))


def _last_sums_bwd(k: Tensor, dsums: State, table: ChunkTable, dN: Tensor, dG: Tensor) -> None:
    """Adjoint of `_last_sums`; adds to dN and dG."""
    HV = dsums.S.shape[1]
    last, tiles = _last_chunks(table, HV)
    n = tiles.shape[0]
    tiles = tiles.to(k.device)
    closed = _per_head(~_stays_open(table)[last], HV, k)
    dS, dc = (_zeroed(ranked(s, table), closed)[:n] for s in dsums)
    dN.index_add_(0, tiles, torch.baddbmm(dc, k.index_select(0, tiles), dS))
    dG.index_add_(0, tiles, dS)


def _zeroed(states: Tensor, rows: Tensor) -> Tensor:
    """Zero the states in place where `rows` [m, 1, 1] is True; states from m on do not change."""
    states[: rows.shape[0]].masked_fill_(rows, 0)
    return states


def _columns(table: ChunkTable, HV: int) -> list[slice]:
    """Slice of the tiles of each column."""
    return [slice(first * HV, (first + count) * HV) for first, count in zip(table.starts, table.columns, strict=True)]


def _rows(x: MiniBatches, rows: slice) -> MiniBatches:
    return MiniBatches(*(None if y is None else y[rows] for y in x))  # type: ignore[arg-type]


def _flat(states: State) -> State:
    return State(*(s.flatten(0, 1) for s in states))


def _first(sums: State | None, table: ChunkTable) -> State | None:
    """Sums of the first column's mini-batches, [m, ..]."""
    if sums is None:
        return None
    return State(*(ranked(s, table)[: table.columns[0] * s.shape[1]] for s in sums))


def _last_chunks(table: ChunkTable, HV: int) -> tuple[Tensor, Tensor]:
    """Last chunk of every sequence that has one, in order of rank, and its tiles, one per head."""
    rank = torch.arange(table.columns[0])
    column = torch.searchsorted(-torch.tensor(table.columns), -rank) - 1  # columns only get shorter
    last = torch.tensor(table.starts)[column] + rank
    return last, (last[:, None] * HV + torch.arange(HV)).flatten()


def _stays_open(table: ChunkTable) -> Tensor:
    """[chunks] bool, True for chunks with fewer than C rows."""
    return table.valid < table.chunk_size


def _idle(table: ChunkTable, taken: Tensor | None, HV: int, like: Tensor) -> Tensor | None:
    """Mask of rows without a token, [n, C, 1] bool; None where every row has one."""
    idle = table.padding
    if taken is not None and bool(taken.any()):
        by_rank = taken if table.order is None else taken[table.order]
        before = torch.zeros(table.chunks, table.chunk_size, dtype=torch.bool)
        before[: table.columns[0]] = torch.arange(table.chunk_size) < by_rank[: table.columns[0], None]
        idle = before if idle is None else before | idle
    return None if idle is None else idle.to(like.device).repeat_interleave(HV, 0).unsqueeze(2)


def _per_head(chunks: Tensor, HV: int, like: Tensor) -> Tensor:
    """Repeat a number per chunk for each of its tiles.   [chunks] -> [chunks * HV, 1, 1]"""
    return chunks.to(like.device).repeat_interleave(HV).view(-1, 1, 1)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """sum(a * b) of every tile.   [n, 1, 1]"""
    return (a * b).sum(-1).sum(-1).view(-1, 1, 1)
