"""A part's tokens as tiles, and the gradients of tiles as those of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.ttt.eager.open_batches import per_head, stays_open
from wyfold.kernels.ttt_records import MiniBatches, MiniBatchGradients
from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import from_chunks, sum_groups, to_chunks, wide


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
    e_last = e.gather(1, per_head(table.valid - 1, HV, e))
    if taken is not None:
        e_last = e_last.masked_fill(per_head(stays_open(table), HV, e), 0)
    factors = None if col is None else to_chunks(col, table, HV, dtype)
    raw = q.clone() if residual == "q" else None
    return MiniBatches(q.mul_(scale), k, u - v + k, e, e_last, factors, raw, w, u, _idle(table, taken, HV, e))


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


def _idle(table: ChunkTable, taken: Tensor | None, HV: int, like: Tensor) -> Tensor | None:
    """Mask of rows without a token, [n, C, 1] bool; None where every row has one."""
    idle = table.padding
    if taken is not None and bool(taken.any()):
        by_rank = taken if table.order is None else taken[table.order]
        before = torch.zeros(table.chunks, table.chunk_size, dtype=torch.bool)
        before[: table.columns[0]] = torch.arange(table.chunk_size) < by_rank[: table.columns[0], None]
        idle = before if idle is None else before | idle
    return None if idle is None else idle.to(like.device).repeat_interleave(HV, 0).unsqueeze(2)
