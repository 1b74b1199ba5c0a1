"""Launches of the adjoint of the softmax.

starts      queries on their way back to the start of their block, and <do, o>
rows        gradients of these queries from all blocks before; a part of those of the maps in each lane
keys        gradients of a block's keys, values and gates from the queries of later blocks
own_rows    gradients of queries from the earlier chunks of their block
own_keys    gradients of keys, values, gates and factors from the later chunks of their block
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.path_attention.triton.arguments import Queries
from wyfold.kernels.path_attention.triton.far import (
    KeyGradients,
    RowGradients,
    Scratch,
    wyfold_path_keys_triton,
    wyfold_path_rows_triton,
)
from wyfold.kernels.path_attention.triton.forward import keys_argument, launch_key
from wyfold.kernels.path_attention.triton.own import (
    OwnKeys,
    OwnRows,
    wyfold_path_own_keys_triton,
    wyfold_path_own_rows_triton,
)
from wyfold.kernels.path_attention.triton.starts import wyfold_path_starts_triton
from wyfold.kernels.path_records import CHUNK, PathFactors, PathSizes, PathSums, PathWorkspace, path_scales
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tile_width, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, exact, operand, precision, workspace
from wyfold.tile.index.triton import Packing

PROGRAMS = 128
"""Programs of all heads and lanes of a sequence, at least: one on each multiprocessor of a large GPU."""
LANES = 32
"""Lanes of a key head, at least."""


def lanes(heads: int, tokens: int, tile: int) -> int:
    """Lanes of a key head of a call. They depend on its tokens only where every lane has one tile, or none."""
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
    slots, BK = factors.M.shape[0], tile_width(K)
    L = lanes(heads, T, _tile(q, v))
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
        k.new_zeros(L, slots, H, BK, BK, dtype=torch.float32),
        delta,
        others,
        dend,
        dblock_end,
        q.new_empty(block - 1, B, T, HQ, dtype=torch.float32),
        q.new_zeros(L, slots, HQ, dtype=torch.float32),
    )


def _tile(q: Tensor, v: Tensor) -> int:
    """Tokens of a lane at a time."""
    return tuned("path_attention.triton", launch_key(q.dtype, q.shape[3], v.shape[3], "rows"), q.device).blocks["TILE"]


def path_attention_bwd(
    q: Tensor,
    v: Tensor,
    g: Tensor | None,
    factors: PathFactors,
    sums: PathSums | None,
    grid: ChunkGrid,
    scale: float,
    gate: float,
    block: int,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    d: PathWorkspace,
) -> None:
    """Write to `d` the gradients of what the softmax reads outside of a query's own chunk.

    Args:
        q: [B, T, HQ, K], any strides.
        v: [B, T, H, V].
        g: [B, T, HQ] log gates; None without a gate.
        factors: Result of `path_factors`.
        sums: Result of `path_sums`.
        grid: Chunks of CHUNK tokens.
        scale, gate: Factors of products and of sums of log gates.
        block: Chunks of a block.
        o, do: [B, T, HQ, V] output and its gradient, any strides.
        lse: [B, T, HQ] float32, contiguous.
        d: Workspace.
    """
    (_, T, HQ, K), (H, V), dtype = q.shape, v.shape[2:], q.dtype
    L, BK, tile = d.dM.shape[0], tile_width(K), _tile(q, v)
    sizes = PathSizes(H, HQ, K, V, CHUNK, BK, tile_width(V), block, tile, L)
    queries = Queries(d.x, d.x.stride(), d.near, d.near_sums, do, do.stride(), lse, d.delta, lse.stride())
    keys = keys_argument(factors, v, g, sums)
    near: dict[str, Any] = {"s_near": d.x.numel()}
    chunks: dict[str, Any] = {"packing": Packing(grid.cu, grid.first, grid.sequence), "N": grid.sequences}
    factor: dict[str, Any] = {"factor": path_scales(scale, gate)}

    def launch(kernel: Any, programs: int, name: str, **named: Any) -> None:
        config = tuned("path_attention.triton", launch_key(dtype, K, V, name), q.device)
        launch_kernel(
            kernel,
            programs,
            queries=queries,
            keys=keys,
            T=grid.tokens,
            per_sequence=grid.per_sequence,
            **named,
            SIZES=sizes,
            PACKED=grid.cu is not None,
            OP=operand(dtype),
            PRECISION=precision(dtype),
            **({"EXACT": exact(dtype)} if name == "starts" else {}),
            **config.options(contract=contracts(dtype)),
        )

    tokens = {"p_q": q, "s_q": q.stride(), "p_o": o, "s_o": o.stride()}
    launch(wyfold_path_starts_triton, grid.chunks * HQ, "starts", **tokens, **near, **chunks)
    if T > block * CHUNK:  # a sequence may have two blocks
        tiles = d.dM.shape[:3].numel()
        scratch = Scratch(
            q.new_empty(tiles, tile, BK, dtype=workspace(dtype)), q.new_empty(tiles, tile, dtype=torch.float32)
        )
        lane: dict[str, Any] = {"scratch": scratch, "slots": d.dM.shape[1], "packing": Packing(grid.cu, grid.first)}
        programs, row_out = grid.sequences * H * L, RowGradients(d.dq, d.others, d.dM, d.dblock_total)
        launch(wyfold_path_rows_triton, programs, "rows", **lane, **factor, out=row_out)
        key_out = KeyGradients(d.dblocks, d.dv, d.dv.stride(), d.dblock_end)
        launch(wyfold_path_keys_triton, programs, "keys", **lane, **factor, out=key_out)
    own_rows = OwnRows(d.dq, d.others, d.dnear, d.dtotal)
    launch(wyfold_path_own_rows_triton, grid.chunks * HQ, "own_rows", **near, **chunks, **factor, out=own_rows)
    own_keys = OwnKeys(d.dk, d.dW, d.dw, d.dv, d.dv.stride(), d.dend)
    launch(
        wyfold_path_own_keys_triton,
        grid.chunks * H,
        "own_keys",
        **near,
        **chunks,
        **factor,
        p_dnear=d.dnear,
        out=own_keys,
    )
