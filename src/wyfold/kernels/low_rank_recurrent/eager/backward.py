"""`recurrent_bwd` in PyTorch: the forward loop again, then its reverse."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.low_rank_recurrent.eager.forward import run, tile_rows
from wyfold.kernels.records import LowRankGradients, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import to_gate_shape, token_decay
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.state.eager import columns_dot, paired, rows_dot


def recurrent_bwd(
    inputs: LowRankInputs, do: Tensor, S0: Tensor, dST: Tensor, table: ChunkTable
) -> tuple[LowRankGradients, Tensor]:
    """Gradients of a part's inputs and entering states, with the arguments of `recurrent_bwd`."""
    q, a, b, k, v, g = inputs[:6]
    dk = torch.zeros_like(k)
    db = dk if b is k else torch.zeros_like(b)
    dg = None if g is None else torch.zeros_like(g)
    found = LowRankGradients(torch.zeros_like(q), torch.zeros_like(a), db, dk, torch.zeros_like(v), dg)
    HV, columns = S0.shape[1], table.column_rows()
    tiles = [slice(chunks.start * HV, chunks.stop * HV) for chunks, _ in columns]
    S, entering = ranked(S0, table), []
    for c, (_, rows) in zip(tiles, columns, strict=True):
        running = S[: c.stop - c.start]
        entering.append(running.clone())
        run(running, tile_rows(inputs, c), rows, None)
    dS = ranked(dST, table)
    for c, (_, rows), S in zip(reversed(tiles), reversed(columns), reversed(entering), strict=True):
        part = LowRankGradients(*(None if x is None else x[c] for x in found))  # type: ignore[arg-type]
        _run_bwd(S, dS[: c.stop - c.start], tile_rows(inputs, c), do[c], rows, part)
    return found, unranked(dS, table)


def _run_bwd(S: Tensor, dS: Tensor, inputs: LowRankInputs, do: Tensor, rows: int, found: LowRankGradients) -> None:
    """Propagate dS [n, K, V] in place from the last of `rows` tokens to before the first, and fill `found`."""
    q, a, b, k, v, g, before = inputs[:7]
    decay = token_decay(g)
    entering: list[Tensor] = []
    run(S, inputs, rows, None, entering)
    q_pair, a_pair, do_pair, read_pair = paired(q), paired(a), paired(do), paired(v[:, 0])
    for t in reversed(range(rows)):
        S = entering.pop()
        Sd = S if decay is None else S * decay[:, t]
        read = columns_dot(S if before else Sd, a[:, t])
        dS.baddbmm_(q_pair[:, t].transpose(1, 2), do_pair[:, t])
        dq_b, dq_k = ((x[:, t] * (y * do[:, t]).sum(-1, keepdim=True)) for x, y in ((b, read), (k, v[:, t])))
        found.q[:, t] = rows_dot(Sd, do[:, t]) + dq_b + dq_k
        found.v[:, t] = columns_dot(dS, k[:, t])
        if b is k:
            found.k[:, t] = rows_dot(dS, read + v[:, t])
        else:
            found.k[:, t], found.b[:, t] = rows_dot(dS, v[:, t]), rows_dot(dS, read)
        dread = columns_dot(dS, b[:, t])
        found.a[:, t] = rows_dot(S if before else Sd, dread)
        read_pair[:, 0] = dread
        erased = torch.bmm(a_pair[:, t].transpose(1, 2), read_pair)
        if not before:
            dS.add_(erased)
        if decay is not None and found.g is not None:
            found.g[:, t] = to_gate_shape((Sd * dS).sum(-1), found.g)
            dS.mul_(decay[:, t])
        if before:
            dS.add_(erased)
