"""`update` in PyTorch: a dense batch at once, a packed batch one sequence at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from wyfold.kernels.records import Slots
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.tile.activation.eager import silu
from wyfold.tile.rows.eager import widest
from wyfold.tile.taps.eager import taps


def update(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    pool: Tensor,
    slots: Slots,
    grid: ChunkGrid,
    activated: bool,
    y: Tensor,
) -> None:
    """Convolve every sequence's tokens after the inputs in its slot, and update the slot for the next tokens.

    Args:
        x: [B, T, D], any float.
        weight: [D, W], any float.
        bias: [D] or None.
        pool: [slots, D, S], any strides, updated in entries, rounding once.
        slots: Uses `source`, `given`, `pad` and `accepted`. The inputs before the first token begin at entry
            accepted[n] - 1 of the slot, clamped to valid entries.
        grid: The call's boundaries.
        activated: Whether silu is applied to y.
        y: [B, T, D] written; zero for skipped sequences and past the last boundary.
    """
    (D, W), S, dtype = weight.shape, pool.shape[2], widest(x, weight, bias, pool)
    w = weight.to(dtype).t().contiguous()
    b = None if bias is None else bias.to(dtype)
    slot = torch.arange(grid.sequences, device=x.device)
    if slots.source is not None:
        slot = slots.source[:, 0].to(torch.int64)
    begin = torch.zeros_like(slot)
    if slots.accepted is not None:
        begin = (slots.accepted.to(torch.int64) - 1).clamp(0, S - (W - 1))

    def convolved(rows: Tensor, tokens: Tensor) -> Tensor:
        """Outputs of tokens [n, length, D] of some sequences; also updates their slots."""
        entries = begin[rows, None] + torch.arange(W - 1, device=x.device)
        window = pool[slot[rows]].gather(2, entries[:, None].expand(-1, D, -1)).transpose(1, 2).to(dtype)
        if slots.given is not None:
            window = torch.where(slots.given[rows, None, None], window, 0)
        values = torch.cat([window, tokens.to(dtype)], 1)
        kept = values[:, 1 : S + 1].transpose(1, 2)
        pool[slot[rows], :, : kept.shape[2]] = kept.to(pool.dtype)
        out = taps(values, w)
        if b is not None:
            out += b
        return (silu(out) if activated else out).to(y.dtype)

    y.zero_()
    live = ((slot > slots.pad) & (slot < pool.shape[0])).nonzero()[:, 0]
    if grid.cu is None:
        if grid.tokens and live.shape[0]:
            y[live] = convolved(live, x[live])
        return
    borders = grid.cu.tolist()
    for n in live.tolist():
        tokens = slice(borders[n], borders[n + 1])
        if tokens.start < tokens.stop:
            y[:, tokens] = convolved(torch.tensor([n], device=x.device), x[:, tokens])
