"""`ttt_bwd` in PyTorch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from wyfold.kernels.ttt.eager.forward import column_slices, factored, flat, forward_scan, tile_rows, written_rows
from wyfold.kernels.ttt.eager.open_batches import first_sums, last_sums_bwd, per_head, stays_open
from wyfold.kernels.ttt_records import MiniBatches, MiniBatchGradients, State
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.inner.eager import (
    Inner,
    attention,
    inner_gradient,
    inner_gradient_bwd,
    read,
    residual_norm_bwd,
    step_bwd_,
)


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
    at, first = flat(at), first_sums(sums, table)
    if entering is not None:
        forward_scan(x, entering, first, table, eps, at)
    inner = inner_gradient(at.S, at.c, x.k, x.t, x.w, eps, x.idle)
    Bm = attention(x.q, x.k)
    N = factored(inner.N, x)
    written = written_rows(x, Bm, N, first, table)
    dO, Xo = residual_norm_bwd(read(at.S, at.c, x.q, x.e, written), x.w, eps, do, x.raw is not None)
    dN = torch.bmm(Bm.transpose(1, 2), x.e * dO).neg_()
    dG = torch.zeros_like(at.S)
    if dsums is not None:
        last_sums_bwd(x.k, dsums, table, dN, dG)
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
    de.scatter_add_(1, per_head(table.valid - 1, dstate.S.shape[1], de), scan.de_last)
    dw = ((2 * x.w * inner.X + x.t) * scan.dY).addcmul_(do, Xo).sum(1)
    raw = None if x.raw is None else do
    return MiniBatchGradients(dq, dk, dt.neg(), de, scan.dcol, raw, dw, (dt + do).sum(1)), scan.entering


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
    """Adjoint of `forward_scan`.

    Args:
        N: [n, C, D] inner gradients times their factors.
        dN: [n, C, D] gradient of N through the outputs and open mini-batches; the part through the state is added.
        dG: [n, D, D] gradient of k^T N, likewise.
    """
    HV = dstate.S.shape[1]
    dS, dc = ranked(dstate.S, table), ranked(dstate.c, table)
    dY, dZ, de_last = torch.empty_like(dN), torch.empty_like(dN), torch.empty_like(x.e_last)
    dcol = None if x.col is None else torch.empty_like(x.col)
    for column, rows in reversed(list(enumerate(column_slices(table, HV)))):
        running, bias, tile = dS[: rows.stop - rows.start], dc[: rows.stop - rows.start], tile_rows(x, rows)
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
        dY[rows], dZ[rows] = inner_gradient_bwd(at_rows, tile.w, factored(dN[rows], tile))
        step_bwd_(running, bias, tile.q, tile.k, dO[rows], dZ[rows])
    if first is not None:
        de_last.masked_fill_(per_head(stays_open(table), HV, de_last), 0)
    return _BackwardScan(dY, dZ, de_last, dcol, State(unranked(dS, table), unranked(dc, table)))


def _dot(a: Tensor, b: Tensor) -> Tensor:
    """sum(a * b) of every tile.   [n, 1, 1]"""
    return (a * b).sum(-1).sum(-1).view(-1, 1, 1)
