"""`recurrent` and `recurrent_bwd` in PyTorch: a loop over tokens, batched over sequences and value heads."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from wyfold.kernels.records import Inputs, TileGradients
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import to_gate_shape, token_decay
from wyfold.tile.index.eager import ranked, run_tokens, unranked
from wyfold.tile.state.eager import columns_dot, paired, rows_dot

Tiles = TypeVar("Tiles", Inputs, TileGradients)


def recurrent(
    inputs: Inputs, S0: Tensor, table: ChunkTable, scale: float, o: Tensor, leaving: Tensor | None = None
) -> Tensor:
    """Run a part's tokens from the entering states. Takes the arguments of `scan` and returns its result."""
    advance = lambda S, c, rows, out: _run(S, _rows(inputs, c), rows, out)
    return run_tokens(advance, inputs.v, S0, table, scale, o, leaving)


def recurrent_bwd(
    inputs: Inputs, do: Tensor, S0: Tensor, dST: Tensor, table: ChunkTable
) -> tuple[TileGradients, Tensor]:
    """Gradients of a part's inputs and entering states; states are recomputed from the entering ones.

    Args:
        inputs: From `prepare`.
        do: [n, C, V] tiles of the output's gradient, times scale.
        S0, dST: [n, HV, K, V].
        table: The part's chunk table.
    """
    HV = S0.shape[1]
    found = TileGradients(*(None if x is None else torch.zeros_like(x) for x in inputs[:5]))  # type: ignore[arg-type]
    columns = table.column_rows()
    S, entering = ranked(S0, table), []
    for chunks, rows in columns:
        running = S[: (chunks.stop - chunks.start) * HV]
        entering.append(running.clone())
        c = slice(chunks.start * HV, chunks.stop * HV)
        _run(running, _rows(inputs, c), rows, None)
    dS = ranked(dST, table)
    for (chunks, rows), S in zip(reversed(columns), reversed(entering), strict=True):
        c = slice(chunks.start * HV, chunks.stop * HV)
        _run_bwd(S, dS[: c.stop - c.start], _rows(inputs, c), do[c], rows, _rows(found, c))
    return found, unranked(dS, table)


def _rows(tiles: Tiles, c: slice) -> Tiles:
    own = {name: x[c] for name, x in tiles._asdict().items() if isinstance(x, Tensor)}
    return tiles._replace(**own)  # type: ignore[arg-type]  # the fields that are tensors


def _run(S: Tensor, inputs: Inputs, rows: int, out: Tensor | None, states: list[Tensor] | None = None) -> None:
    """Advance S [n, K, V] in place over `rows` tokens; appends the decayed state before each write to `states`."""
    q, k, v, beta = inputs[:4]
    decay = token_decay(inputs.g)
    # Two rows, not one: a single-row product uses another code path in batches of one (docs/facts/cpu.md, CPU-1).
    kq, k_pair, y_pair = torch.stack([inputs.erasing, q], 2), paired(k), paired(v[:, 0])
    qk = (q * k).sum(-1, keepdim=True)
    for t in range(rows):
        if decay is not None:
            S.mul_(decay[:, t])
        if states is not None:
            states.append(S.clone())
        read = torch.bmm(kq[:, t], S)
        y = (v[:, t] - read[:, 0]).mul_(beta[:, t])
        if out is not None:
            out[:, t] = read[:, 1] + qk[:, t] * y
        y_pair[:, 0] = y
        S.baddbmm_(k_pair[:, t].transpose(1, 2), y_pair)


def _run_bwd(S: Tensor, dS: Tensor, inputs: Inputs, do: Tensor, rows: int, found: TileGradients) -> None:
    """Propagate dS [n, K, V] in place from the last of `rows` tokens to before the first, and fill `found`."""
    q, k, v, beta = inputs[:4]
    decay = token_decay(inputs.g)
    decayed: list[Tensor] = []
    _run(S, inputs, rows, None, decayed)
    q_pair, do_pair, de_pair = paired(q), paired(do), paired(v[:, 0])
    erasing = inputs.erasing
    erasing_pair = paired(erasing)
    for t in reversed(range(rows)):
        Sd = decayed.pop()
        e = v[:, t] - columns_dot(Sd, erasing[:, t])
        y = e * beta[:, t]
        dS.baddbmm_(q_pair[:, t].transpose(1, 2), do_pair[:, t])
        found.q[:, t] = rows_dot(Sd, do[:, t]) + k[:, t] * (y * do[:, t]).sum(-1, keepdim=True)
        dn = columns_dot(dS, k[:, t])
        de = beta[:, t] * dn
        found.v[:, t] = de
        found.beta[:, t] = (dn * e).sum(-1, keepdim=True)
        found.k[:, t] = rows_dot(dS, y) - (rows_dot(Sd, de) if inputs.erases else 0)
        de_pair[:, 0] = de
        dS.baddbmm_(erasing_pair[:, t].transpose(1, 2), de_pair, alpha=-1)
        if decay is not None and found.g is not None:
            found.g[:, t] = to_gate_shape((Sd * dS).sum(-1), found.g)
            dS.mul_(decay[:, t])
