"""Mini-batches that a call begins or ends inside: sums of earlier calls, and those of this one."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt_records import State
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import ranked, unranked


def last_sums(k: Tensor, N: Tensor, sums: State, table: ChunkTable) -> State:
    """k^T N and sum(N) of each sequence's last mini-batch, with earlier calls' sums; zero if it closed."""
    HV = sums.S.shape[1]
    G, a = ranked(sums.S, table), ranked(sums.c, table)
    last, tiles = _last_chunks(table, HV)
    n = tiles.shape[0]
    tiles = tiles.to(k.device)
    has_more = per_head(last >= table.columns[0], HV, k)
    closed = per_head(~stays_open(table)[last], HV, k)
    rows = N.index_select(0, tiles)
    G[:n] = torch.baddbmm(G[:n].masked_fill(has_more, 0), k.index_select(0, tiles).transpose(1, 2), rows)
    a[:n] = a[:n].masked_fill(has_more, 0) + rows.sum(1, keepdim=True)
    return State(*(unranked(_zeroed(s, closed), table) for s in (G, a)))


def last_sums_bwd(k: Tensor, dsums: State, table: ChunkTable, dN: Tensor, dG: Tensor) -> None:
    """Adjoint of `last_sums`; adds to dN and dG."""
    HV = dsums.S.shape[1]
    last, tiles = _last_chunks(table, HV)
    n = tiles.shape[0]
    tiles = tiles.to(k.device)
    closed = per_head(~stays_open(table)[last], HV, k)
    dS, dc = (_zeroed(ranked(s, table), closed)[:n] for s in dsums)
    dN.index_add_(0, tiles, torch.baddbmm(dc, k.index_select(0, tiles), dS))
    dG.index_add_(0, tiles, dS)


def _zeroed(states: Tensor, rows: Tensor) -> Tensor:
    """Zero the states in place where `rows` [m, 1, 1] is True; states from m on do not change."""
    states[: rows.shape[0]].masked_fill_(rows, 0)
    return states


def first_sums(sums: State | None, table: ChunkTable) -> State | None:
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


def stays_open(table: ChunkTable) -> Tensor:
    """[chunks] bool, True for chunks with fewer than C rows."""
    return table.valid < table.chunk_size


def per_head(chunks: Tensor, HV: int, like: Tensor) -> Tensor:
    """Repeat a number per chunk for each of its tiles.   [chunks] -> [chunks * HV, 1, 1]"""
    return chunks.to(like.device).repeat_interleave(HV).view(-1, 1, 1)
