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

from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.path_attention.triton.arguments import Own, Queries, keys_argument
from wyfold.kernels.path_attention.triton.far_keys import (
    KeyGradients,
    map_parts,
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
from wyfold.tile.dot.triton import contracts, exact, operand, precision, workspace
from wyfold.tile.index.triton import Packing

PROGRAMS = 512
"""Tiles of all key heads that a turn takes of a sequence, at least: two for each multiprocessor of a large GPU."""
LANES = 32
"""Tiles of a key head that a turn takes of a sequence, at least."""


def lanes(heads: int, tokens: int, tile: int) -> int:
    """Tiles that a turn takes of a sequence. They depend on a call's tokens only where one turn takes them all."""
    return min(max(LANES, PROGRAMS // heads), -(-tokens // tile))


def empty_workspace(q: Tensor, k: Tensor, v: Tensor, factors: PathFactors, block: int, heads: int) -> PathWorkspace:
    """Allocate what the launches of a backward pass on. Only what lanes add to is zero.

    Args:
        q, k, v: Tokens of some heads of a call.
        factors: Result of `path_factors`.
        block: Chunks of a block.
        heads: Key heads of the whole call.
    """
    (B, T, H, K), (HQ, V), dtype = k.shape, (q.shape[2], v.shape[3]), workspace(q.dtype)
    slots, BK = factors.M.shape[0], key_width(K)
    tile = _tile(q, v)
    rows = lanes(heads, T, tile) * slots * HQ if T > block * CHUNK else 0
    dk, dW, dw, dblocks = (k.new_empty(B, T, H, K, dtype=torch.float32) for _ in range(4))
    delta, others, dend, dblock_end = (q.new_empty(B, T, HQ, dtype=torch.float32) for _ in range(4))
    near_sums = q.new_empty(block - 1, B, T, HQ, dtype=torch.float32)
    near, dnear = (q.new_empty(block - 1, B, T, HQ, K, dtype=dtype) for _ in range(2))
    return PathWorkspace(
        q.new_empty(B, T, HQ, K, dtype=dtype),
        near,
        near_sums,
        dnear,
        q.new_empty(B, T, HQ, K, dtype=torch.float32),
        dk,
        dW,
        dw,
        v.new_empty(B, T, H, V, dtype=torch.float32),
        dblocks,
        k.new_zeros(slots, H, BK, BK, dtype=torch.float32),
        delta,
        others,
        dend,
        dblock_end,
        q.new_empty(block - 1, B, T, HQ, dtype=torch.float32),
        q.new_zeros(slots, HQ, dtype=torch.float32),
        *(q.new_empty(rows, tile, BK, dtype=dtype) for _ in range(2)),
        *(q.new_empty(rows, tile, dtype=torch.float32) for _ in range(2)),
    )


def _tile(q: Tensor, v: Tensor) -> int:
    """Tokens of a tile of queries."""
    key = launch_key(q.dtype, q.shape[3], v.shape[3], "far_rows")
    return tuned("path_attention.triton", key, q.device).blocks["TILE"]


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
    d: PathWorkspace,
) -> None:
    """Write to `d` the gradients of what the softmax reads outside of a query's own chunk.

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
        d: Workspace.
    """
    (_, T, HQ, K), (H, V), dtype = x.q.shape, x.v.shape[2:], x.q.dtype
    slots, tile = d.dM.shape[0], _tile(x.q, x.v)
    L = len(d.far_x) // (slots * HQ) or 1
    sizes = PathSizes(H, HQ, K, V, CHUNK, key_width(K), key_width(V), block, tile, L)
    queries = Queries(d.x, d.near, d.near_sums, do, lse, d.delta)
    keys = keys_argument(factors, x.v, x.g, sums)
    near: dict[str, Any] = {"queries": queries, "tokens": d.x.shape[:2].numel()}
    factor: dict[str, Any] = {"factor": path_scales(scale, gate)}

    def launch(kernel: Any, programs: int, name: str, **named: Any) -> None:
        config = tuned("path_attention.triton", launch_key(dtype, K, V, name), x.q.device)
        launch_kernel(
            kernel,
            grid.chunks * programs,
            keys=keys,
            packing=Packing(grid.cu, grid.first, grid.sequence),
            N=grid.sequences,
            T=grid.tokens,
            per_sequence=grid.per_sequence,
            **factor,
            **named,
            SIZES=sizes,
            PACKED=grid.cu is not None,
            OP=operand(dtype),
            PRECISION=precision(dtype),
            **config.options(contract=contracts(dtype)),
        )

    own = Own(x.q, x.q.stride(), x.k, x.k.stride(), factors.E)
    results: dict[str, Any] = {"own": own, "p_o": o, "s_o": o.stride(), "p_rest": rest, "EXACT": exact(dtype)}
    sums_of_keys: dict[str, Any] = {"SUMS": rest is None}
    launch(wyfold_path_starts_triton, HQ, "starts", **results, **near, **sums_of_keys)
    for turn in range(-(-T // (L * tile)) if len(d.far_x) else 0):
        far: dict[str, Any] = {"scratch": Scratch(d.far_x, d.far_dx, d.far_passed, d.far_others), "slots": slots}
        far["turn"] = turn
        launch(wyfold_path_far_starts_triton, HQ, "far_starts", queries=queries, **far, **sums_of_keys)
        launch(wyfold_path_far_rows_triton, HQ, "far_rows", queries=queries, **far, p_dq=d.dq, p_others=d.others)
        out = KeyGradients(d.dblocks, d.dv, d.dblock_end)
        launch(wyfold_path_far_keys_triton, H, "far_keys", queries=queries, **far, out=out)
        launch(wyfold_path_far_maps_triton, H * map_parts(sizes), "far_maps", **far, p_dM=d.dM, p_dtotal=d.dblock_total)
    own_rows = OwnRows(d.dq, d.others, d.dnear, d.dtotal)
    launch(wyfold_path_own_rows_triton, HQ, "own_rows", **near, out=own_rows)
    own_keys = OwnKeys(d.dk, d.dW, d.dw, d.dv, d.dend)
    launch(wyfold_path_own_keys_triton, H, "own_keys", **near, p_dnear=d.dnear, out=own_keys)
