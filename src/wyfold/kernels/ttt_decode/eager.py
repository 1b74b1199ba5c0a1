"""`ttt_decode` in PyTorch: gathers the rows that have a slot, updates them and scatters them back."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.kernels.ttt_decode import Pools
from wyfold.kernels.ttt_records import TTTInputs
from wyfold.tile.index.eager import wide
from wyfold.tile.inner.eager import inner_gradient, residual_norm


def ttt_decode(x: TTTInputs, pools: Pools, slots: Slots, chunk_size: int, scale: float, eps: float, o: Tensor) -> None:
    """Decode one token of every row.

    Args:
        x: Inputs of one token per row, [N, 1, ..].
        pools: Updated in place, rounded once.
        slots: Uses `source` and `pad`.
        chunk_size: Tokens of a mini-batch.
        scale: Multiplies q.
        eps: Epsilon of both norms.
        o: [N, 1, HV, D] written, zero in rows without a slot.
    """
    slot = torch.arange(x.q.shape[0], device=o.device) if slots.source is None else slots.source[:, 0].to(torch.int64)
    rows = ((slot > slots.pad) & (slot < pools.S.shape[0])).nonzero().flatten()
    at, HV, dtype = slot[rows], x.v.shape[2], wide(x.q.dtype)

    def tiles(y: Tensor) -> Tensor:
        """Select live rows and repeat heads.   [N, 1, H or HV, D] -> [rows * HV, 1, D]"""
        return y[rows].to(dtype).transpose(1, 2).repeat_interleave(HV // y.shape[2], 1).flatten(0, 1)

    def heads(y: Tensor) -> Tensor:
        return y[at].to(dtype).flatten(0, 1)

    q, k, v, e = tiles(x.q), tiles(x.k), tiles(x.v), tiles(x.eta)
    w, u = (y.to(dtype).repeat(rows.shape[0], 1).unsqueeze(1) for y in (x.w, x.u))
    S, c, G, a = (heads(y) for y in pools[:4])
    N = inner_gradient(S, c, k, u - v + k, w, eps).N
    if x.col is not None:
        N = N * tiles(x.col)
    G, a = torch.baddbmm(G, k.transpose(1, 2), N), a + N
    stepped, biased = S - e * G, c - e * a
    out = residual_norm(torch.baddbmm(biased, q * scale, stepped), w, u, eps, q if x.residual == "q" else None)

    position = pools.position[at] + 1
    closed = position >= chunk_size
    whole = closed.repeat_interleave(HV)[:, None, None]
    new_pools = (
        torch.where(whole, stepped, S),
        torch.where(whole, biased, c),
        G.masked_fill(whole, 0),
        a.masked_fill(whole, 0),
    )
    for pool, y in zip(pools[:4], new_pools, strict=True):
        pool[at] = y.unflatten(0, (-1, HV)).to(pool.dtype)
    pools.position[at] = position.masked_fill(closed, 0)
    o.zero_()
    o[rows] = out.unflatten(0, (-1, HV)).transpose(1, 2).to(o.dtype)
