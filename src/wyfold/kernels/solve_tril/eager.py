"""`solve_tril` in PyTorch: batched over the chunks and heads of a part."""

from __future__ import annotations

from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkTable
from wyfold.tile.index.eager import from_chunks, to_chunks
from wyfold.tile.inverse.eager import inverse
from wyfold.tile.rows.eager import widest


def solve_tril(L: Tensor, table: ChunkTable, out: Tensor) -> None:
    """Write the inverses to out.

    Args:
        L: [B, T, H, C] tokens of the part, any float and any strides; row r of a chunk at its token.
        table: The part's chunk grid.
        out: [B, T, H, C], any float.
    """
    from_chunks(inverse(to_chunks(L, table, L.shape[2], widest(L))), table, out)
