"""`recurrent_bwd` in PyTorch: the forward loop again, then its reverse."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import Inputs, TileGradients
from wyfold.kernels.recurrent.eager.forward import run, tile_rows
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.decay.eager import to_gate_shape, token_decay
from wyfold.tile.index.eager import ranked, unranked
from wyfold.tile.state.eager import columns_dot, paired, rows_dot


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
        run(running, tile_rows(inputs, c), rows, None)
    dS = ranked(dST, table)
    for (chunks, rows), S in zip(reversed(columns), reversed(entering), strict=True):
        c = slice(chunks.start * HV, chunks.stop * HV)
        _run_bwd(S, dS[: c.stop - c.start], tile_rows(inputs, c), do[c], rows, tile_rows(found, c))
    return found, unranked(dS, table)


def _run_bwd(S: Tensor, dS: Tensor, inputs: Inputs, do: Tensor, rows: int, found: TileGradients) -> None:
    """Propagate dS [n, K, V] in place from the last of `rows` tokens to before the first, and fill `found`."""
    q, k, v, beta = inputs[:4]
    decay = token_decay(inputs.g)
    decayed: list[Tensor] = []
    run(S, inputs, rows, None, decayed)
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
