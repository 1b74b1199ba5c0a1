"""`solve_tril` in PyTorch, batched over the chunks and heads of a part."""

from __future__ import annotations

from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import from_chunks, to_chunks
from wyfold.tile.inverse.eager import inverse
from wyfold.tile.rows.eager import widest


def solve_tril(L: Tensor, table: ChunkTable, out: Tensor) -> None:
    """Write the inverses to out.

    Args:
        L: [B, T, H, C] of the part, any float dtype and strides; row r of a chunk is at its r-th token.
        table: The part's chunk table.
        out: [B, T, H, C], any float dtype, written.
    """
    from_chunks(inverse(to_chunks(L, table, L.shape[2], widest(L))), table, out)
