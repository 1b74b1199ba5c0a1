"""`ttt` in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt.eager.open_batches import first_sums, last_sums
from wyfold.kernels.ttt_records import MiniBatches, State
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import from_chunks, ranked, unranked
from wyfold.tile.inner.eager import attention, inner_gradient, read, residual_norm, step_


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
    at, first = flat(at), first_sums(sums, table)
    leaving, N = forward_scan(x, entering, first, table, eps, at)
    written = written_rows(x, attention(x.q, x.k), N, first, table)
    from_chunks(residual_norm(read(at.S, at.c, x.q, x.e, written), x.w, x.u, eps, x.raw), table, o)
    return leaving, None if sums is None else last_sums(x.k, N, sums, table)


def forward_scan(
    x: MiniBatches, entering: State, first: State | None, table: ChunkTable, eps: float, at: State
) -> tuple[State, Tensor]:
    """Fill `at`, and return the final states and N."""
    HV = entering.S.shape[1]
    S, c = ranked(entering.S, table), ranked(entering.c, table)
    N = torch.empty_like(x.k)
    for column, rows in enumerate(column_slices(table, HV)):
        running, bias, tile = S[: rows.stop - rows.start], c[: rows.stop - rows.start], tile_rows(x, rows)
        at.S[rows], at.c[rows] = running, bias
        N[rows] = factored(inner_gradient(running, bias, tile.k, tile.t, tile.w, eps, tile.idle).N, tile)
        step_(running, bias, tile.k, N[rows], tile.e_last)
        if column == 0 and first is not None:
            running.addcmul_(tile.e_last, first.S, value=-1)
            bias.addcmul_(tile.e_last, first.c, value=-1)
    return State(unranked(S, table), unranked(c, table)), N


def factored(N: Tensor, x: MiniBatches) -> Tensor:
    """Multiply each row of N by its factor."""
    return N if x.col is None else N * x.col


def written_rows(x: MiniBatches, Bm: Tensor, N: Tensor, first: State | None, table: ChunkTable) -> Tensor:
    """Bm N, plus the earlier calls' sums in each sequence's first mini-batch."""
    written = torch.bmm(Bm, N)
    if first is not None:
        m = first.S.shape[0]
        written[:m] += torch.baddbmm(first.c, x.q[:m], first.S)
    return written


def column_slices(table: ChunkTable, HV: int) -> list[slice]:
    """Slice of the tiles of each column."""
    return [slice(first * HV, (first + count) * HV) for first, count in zip(table.starts, table.columns, strict=True)]


def tile_rows(x: MiniBatches, rows: slice) -> MiniBatches:
    return MiniBatches(*(None if y is None else y[rows] for y in x))  # type: ignore[arg-type]


def flat(states: State) -> State:
    return State(*(s.flatten(0, 1) for s in states))
