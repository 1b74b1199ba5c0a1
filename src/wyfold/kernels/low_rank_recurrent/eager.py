"""`low_rank_recurrent` and its adjoint in PyTorch: a loop over tokens, batched over sequences and value heads."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import LowRankGradients, LowRankInputs
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import to_gate_shape, token_decay
from wyfold.tile.index.eager import ranked, run_tokens, unranked
from wyfold.tile.state.eager import columns_dot, paired, rows_dot


def recurrent(
    inputs: LowRankInputs, S0: Tensor, table: ChunkTable, scale: float, o: Tensor, leaving: Tensor | None = None
) -> Tensor:
    """Run a part's tokens from the entering states. Takes the arguments of `scan` and returns its result."""
    advance = lambda S, c, rows, out: _run(S, _rows(inputs, c), rows, out)
    return run_tokens(advance, inputs.v, S0, table, scale, o, leaving)


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
        _run(running, _rows(inputs, c), rows, None)
    dS = ranked(dST, table)
    for c, (_, rows), S in zip(reversed(tiles), reversed(columns), reversed(entering), strict=True):
        part = LowRankGradients(*(None if x is None else x[c] for x in found))  # type: ignore[arg-type]
        _run_bwd(S, dS[: c.stop - c.start], _rows(inputs, c), do[c], rows, part)
    return found, unranked(dS, table)


def _rows(inputs: LowRankInputs, c: slice) -> LowRankInputs:
    k = inputs.k[c]
    b = k if inputs.b is inputs.k else inputs.b[c]
    g = None if inputs.g is None else inputs.g[c]
    return inputs._replace(q=inputs.q[c], a=inputs.a[c], b=b, k=k, v=inputs.v[c], g=g)


def _run(S: Tensor, inputs: LowRankInputs, rows: int, out: Tensor | None, states: list[Tensor] | None = None) -> None:
    """Advance S [n, K, V] in place over `rows` tokens; appends the state before each token to `states`."""
    q, a, b, k, v, g, before = inputs[:7]
    decay = token_decay(g)
    q_read, a_read = (q, a) if decay is None else (q * decay[..., 0], a if before else a * decay[..., 0])
    reading, column = torch.stack([a_read, q_read], 2), torch.stack([b, k], 2)
    qb, qk = ((q * x).sum(-1, keepdim=True) for x in (b, k))
    for t in range(rows):
        if states is not None:
            states.append(S.clone())
        read = torch.bmm(reading[:, t], S)
        values = torch.stack([read[:, 0], v[:, t]], 1)
        if out is not None:
            out[:, t] = read[:, 1] + qb[:, t] * values[:, 0] + qk[:, t] * values[:, 1]
        if decay is not None:
            S.mul_(decay[:, t])
        S.baddbmm_(column[:, t].transpose(1, 2), values)


def _run_bwd(S: Tensor, dS: Tensor, inputs: LowRankInputs, do: Tensor, rows: int, found: LowRankGradients) -> None:
    """Propagate dS [n, K, V] in place from the last of `rows` tokens to before the first, and fill `found`."""
    q, a, b, k, v, g, before = inputs[:7]
    decay = token_decay(g)
    entering: list[Tensor] = []
    _run(S, inputs, rows, None, entering)
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
