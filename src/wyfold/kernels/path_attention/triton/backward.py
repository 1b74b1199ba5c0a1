"""Launches of the adjoint of the softmax.

starts      queries on their way back to the start of their block, and <do, o>
far_starts  these queries at every block before
far_rows    their gradients there
far_keys    gradients of a block's keys, values and gates from the queries of later blocks
far_maps    gradients of a block's map and sum of log gates
own_rows    gradients of queries from the earlier chunks of their block
own_keys    gradients of keys, values, gates and factors from the later chunks of their block

The far ones take some queries of a sequence at a time, and are launched again for the next ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.path_attention.triton.arguments import Keys, Own, Queries, keys_argument
from wyfold.kernels.path_attention.triton.far_keys import (
    KeyGradients,
    wyfold_path_far_keys_triton,
    wyfold_path_far_maps_triton,
)
from wyfold.kernels.path_attention.triton.far_rows import (
    Scratch,
    wyfold_path_far_rows_triton,
    wyfold_path_far_starts_triton,
)
from wyfold.kernels.path_attention.triton.forward import launch_key
from wyfold.kernels.path_attention.triton.own import (
    OwnKeys,
    OwnRows,
    wyfold_path_own_keys_triton,
    wyfold_path_own_rows_triton,
)
from wyfold.kernels.path_attention.triton.starts import wyfold_path_starts_triton
from wyfold.kernels.path_records import (
    CHUNK,
    PathFactors,
    PathScales,
    PathSizes,
    PathSums,
    PathTiles,
    PathWorkspace,
    path_scales,
)
from wyfold.kernels.path_widths import key_width
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.side_stream import fork_side_stream
from wyfold.tile.dot.triton import contracts, operand, summing, summing_exact, workspace
from wyfold.tile.index.triton import Packing, near_rows

KEPT_TILES = 8192
"""Tiles of queries that a turn keeps, each at a block: 128 MiB in 16 bits at K = 128, and as much of gradients."""
LANES = 32
"""Chunks of queries that a turn takes of a buffer row, at least."""
PROGRAMS = 512
"""Programs of queries from which on a turn has all blocks. With fewer, it has more queries and a part of the blocks."""
RANGES = 8
"""Parts of the blocks, at most: a turn moves its queries through all blocks after those of its part."""


def path_attention_bwd(
    x: PathTiles,
    factors: PathFactors,
    sums: PathSums | None,
    grid: ChunkGrid,
    scale: float,
    gate: float,
    block: int,
    o: Tensor,
    rest: Tensor | None,
    lse: Tensor,
    do: Tensor,
) -> PathWorkspace:
    """Return the gradients of what the softmax reads outside of a query's own chunk.

    Args:
        x: Tokens of the call, [B, T, heads, ..]: q and k of any strides, v and g contiguous; g is None without a gate.
        factors: Result of `path_factors`.
        sums: Result of `path_sums`.
        grid: Chunks of CHUNK tokens.
        scale, gate: Factors of products and of sums of log gates.
        block: Chunks of a block.
        o, rest: [B, T, HQ, V] results of `path_attention`, any strides, the same. Without the rest, <do, o> is computed
            from the keys.
        lse: [B, T, HQ] float32, contiguous.
        do: [B, T, HQ, V] gradient of the output, contiguous.
    """
    (B, T, HQ, K), (H, V), dtype = x.q.shape, x.v.shape[2:], x.q.dtype
    slots, rows, BK = factors.M.shape[0], near_rows(B * T, block), key_width(K)
    sizes = PathSizes(H, HQ, K, V, CHUNK, BK, key_width(V), block)
    launch = _launcher(keys_argument(factors, x.v, x.g, sums), sizes, x.q, grid, path_scales(scale, gate))

    def of_queries(*shape: int) -> Tensor:
        return x.q.new_empty(*shape, dtype=torch.float32)

    def of_keys(like: Tensor) -> Tensor:
        return like.new_empty(like.shape, dtype=torch.float32)

    delta, others, dend, dblock_end = (of_queries(B, T, HQ) for _ in range(4))
    at_start = x.q.new_empty(B, T, HQ, K, dtype=workspace(dtype))
    near = x.q.new_empty(rows, HQ, K, dtype=workspace(dtype))
    near_sums = None if x.g is None else of_queries(rows, HQ)
    queries = Queries(at_start, near, near_sums, do, lse, delta)
    own = Own(x.q, x.q.stride(), x.k, x.k.stride(), factors.E)
    results: dict[str, Any] = {"own": own, "p_o": o, "s_o": o.stride(), "p_rest": rest, "EXACT": summing_exact(dtype)}
    launch(wyfold_path_starts_triton, HQ, "starts", **results, queries=queries, SUMS=rest is None)
    dq, dv, dblocks = of_queries(B, T, HQ, K), of_keys(x.v), of_keys(x.k)
    dM, dblock_total = (of_queries(*shape).zero_() for shape in ((slots, H, BK, BK), (slots, HQ)))

    def between_blocks() -> None:
        """Launch the turns. Their scratch is released with the last one."""
        tile = tuned("path_attention.triton", launch_key(dtype, K, V, "far_rows"), x.q.device).blocks["TILE"]
        rows_at_once = B if grid.cu is None else 1
        chunks, blocks = grid.chunks // rows_at_once, slots // rows_at_once
        lanes, count = _turn_size(rows_at_once * HQ, chunks, blocks, block, whole=rest is None)
        kept = rows_at_once * lanes * count * HQ
        scratch = Scratch(
            *(x.q.new_empty(kept, tile, BK, dtype=workspace(dtype)) for _ in range(2)),
            *(of_queries(kept, tile) for _ in range(2)),
        )
        far: dict[str, Any] = {"scratch": scratch, "lanes": lanes, "count": count, "SIZES": sizes._replace(TILE=tile)}
        out = KeyGradients(dblocks, dv, dblock_end)
        for first, begin in _turns(lanes, count, chunks, blocks, block):
            far |= {"first": first, "begin": begin}
            launch(wyfold_path_far_starts_triton, HQ, "far_starts", queries=queries, **far, SUMS=rest is None)
            with fork_side_stream(x.q.device) as on_side:
                with on_side:  # keys need no gradients of queries
                    launch(wyfold_path_far_keys_triton, H, "far_keys", queries=queries, **far, out=out)
                launch(wyfold_path_far_rows_triton, HQ, "far_rows", queries=queries, **far, p_dq=dq, p_others=others)
                launch(wyfold_path_far_maps_triton, H * BK // 64, "far_maps", **far, p_dM=dM, p_dtotal=dblock_total)

    if T > block * CHUNK:  # a block may be followed by another
        between_blocks()
    dnear, dtotal = torch.empty_like(near), of_queries(rows, HQ)
    launch(wyfold_path_own_rows_triton, HQ, "own_rows", queries=queries, out=OwnRows(dq, others, dnear, dtotal))
    dk, dW, dw = (of_keys(x.k) for _ in range(3))
    own_keys = OwnKeys(dk, dW, dw, dv, dend)
    launch(wyfold_path_own_keys_triton, H, "own_keys", queries=queries, p_dnear=dnear, out=own_keys)
    return PathWorkspace(dq, dk, dW, dw, dv, dblocks, dM, delta, others, dend, dblock_end, dtotal, dblock_total)


def _launcher(keys: Keys, sizes: PathSizes, q: Tensor, grid: ChunkGrid, factor: PathScales) -> Callable[..., None]:
    """Function that launches a kernel, by its name in `launch_key`, with so many programs per chunk."""
    dtype = q.dtype

    def launch(kernel: Any, programs: int, name: str, **named: Any) -> None:
        config = tuned("path_attention.triton", launch_key(dtype, sizes.K, sizes.V, name), q.device)
        launch_kernel(
            kernel,
            grid.chunks * programs,
            keys=keys,
            packing=Packing(grid.cu, grid.first, grid.sequence),
            N=grid.sequences,
            T=grid.tokens,
            per_sequence=grid.per_sequence,
            factor=factor,
            PACKED=grid.cu is not None,
            OP=operand(dtype),
            PRECISION=summing(dtype),
            **{"SIZES": sizes, **named},
            **config.options(contract=contracts(dtype)),
        )

    return launch


def _turn_size(heads: int, chunks: int, blocks: int, block: int, *, whole: bool) -> tuple[int, int]:
    """Chunks of queries and blocks of a turn, of so many in a buffer row. No bit depends on them.

    heads: Query heads of all rows.
    whole: Whether a turn must have all blocks.
    """
    places = KEPT_TILES // heads
    lanes, count = max(LANES, places // blocks), blocks
    if not whole and lanes * heads < PROGRAMS:
        count = min(blocks, max(math.isqrt(places // block), -(-blocks // RANGES), 1))
        lanes = max(LANES, places // count)
    return min(lanes, chunks), count


def _turns(lanes: int, count: int, chunks: int, blocks: int, block: int) -> Iterator[tuple[int, int]]:
    """First chunk of the queries and first slot of the blocks of each turn.

    Turns of the same queries follow each other from far blocks to near ones. A chunk's earlier blocks have slots below
    its number over the chunks of a block, in packed rows as well.
    """
    for first in range(0, chunks, lanes):
        last = min(first + lanes, chunks) - 1
        for begin in range(0, min(last // block, blocks), count):
            yield first, begin
