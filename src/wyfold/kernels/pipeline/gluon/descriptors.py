"""TMA descriptors of the tiles of a chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from wyfold.kernels.records import Prepared
from wyfold.tile.index.gluon import gluon_descriptors
from wyfold.tile.index.triton.descriptors import (
    all_or_none,
    require_descriptors,
    tile_descriptor,
    token_descriptor,
    upper_descriptor,
    vector_descriptor,
)


def chunk_descriptors(
    stage: str,
    q: Tensor | None,
    k: Tensor,
    values: Sequence[Tensor],
    prepared: Prepared,
    squares: Sequence[Tensor | None],
    C: int,
    BW: int,
) -> list[Any]:
    """TMA descriptors of the tiles of a chunk: q, k, values, rows, total, E, squares; None for a tensor that is None.

    Args:
        stage: Name for the error.
        q, k: [B, T, H, K] tokens. With a channel gate their tiles in `prepared` are read instead.
        values: [B, T, HV, V] tensors in blocks of BW columns.
        prepared: From `prepare`. total stays a tensor with a scalar gate: kernels load that number themselves.
        squares: Upper triangular tiles of `prepared`, as the kernel needs them.
        C: Tokens of a chunk.
        BW: Value columns of a part.

    Raises:
        UnsupportedError: The call has more rows than a TMA coordinate can count.
    """
    rows, total, q_tiles, k_tiles, E = prepared[:5]
    K, channel = k.shape[3], q_tiles is not None
    rows_q, rows_k = (q_tiles, k_tiles) if channel else (q, k)

    def of_keys(x: Tensor | None) -> Any:
        return None if x is None else tile_descriptor(x, C, K) if channel else token_descriptor(x, C, K)

    given = rows_q, rows_k, *values, rows, total, E, *squares
    found = (
        of_keys(rows_q),
        of_keys(rows_k),
        *(token_descriptor(x, C, BW) for x in values),
        vector_descriptor(rows.flatten(1), 4 * C),
        vector_descriptor(total, K) if channel else total,
        None if E is None else tile_descriptor(E, C, K),
        *(None if x is None else upper_descriptor(x) for x in squares),
    )
    return gluon_descriptors(require_descriptors(stage, all_or_none(given, found)))
