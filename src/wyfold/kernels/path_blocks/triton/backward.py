"""Launches of the adjoints of chunks and blocks.

own_logits      gradients of the queries and gates from those outside of their chunk and from the chunk's own logits
maps, blocks    gradients of a block's keys and map, passed on to its chunks
own_factors     gradients of values; those of keys and factors from the chunk's own logits
solve, tokens   gradients of keys, directions and strengths from those of the factors
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from wyfold.kernels.path_blocks.triton.blocks import (
    Chunks,
    Maps,
    wyfold_path_blocks_bwd_triton,
    wyfold_path_maps_bwd_triton,
)
from wyfold.kernels.path_blocks.triton.forward import launch_key
from wyfold.kernels.path_blocks.triton.own_chunk import (
    KeyGradients,
    Passed,
    QueryGradients,
    Tiles,
    Tokens,
    wyfold_path_own_factors_bwd_triton,
    wyfold_path_own_logits_bwd_triton,
)
from wyfold.kernels.path_blocks.triton.solve import (
    FactorGradients,
    Factors,
    KeyTokens,
    wyfold_path_solve_bwd_triton,
    wyfold_path_tokens_bwd_triton,
)
from wyfold.kernels.path_records import CHUNK, PathFactors, PathSizes, PathTiles, PathWorkspace, path_scales
from wyfold.kernels.path_widths import key_width
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, operand, summing, summing_exact, workspace
from wyfold.tile.index.triton import Packing, strides


def path_factors_bwd(
    x: PathTiles,
    factors: PathFactors,
    grid: ChunkGrid,
    scale: float,
    gate: float,
    block: int,
    lse: Tensor,
    do: Tensor,
    d: PathWorkspace,
    out: PathTiles,
) -> None:
    """Write the gradients of the tokens, from those of the factors and of the chunks' own logits.

    Args:
        x: Tokens of the call, [B, T, heads, ..], any strides; g is None without a gate.
        factors: Result of `path_factors`, with the maps inside blocks.
        grid: Chunks of CHUNK tokens.
        scale, gate: Factors of products and of sums of log gates.
        block: Chunks of a block.
        lse: [B, T, HQ] float32, contiguous.
        do: [B, T, HQ, V] gradient of the output.
        d: What the launches of `path_attention_bwd` left. Its gradients of factors are overwritten.
        out: Gradients in the shapes of x.
    """
    (B, T, H, K), (HQ, V), dtype = x.k.shape, (x.q.shape[2], x.v.shape[3]), x.q.dtype
    sizes = PathSizes(H, HQ, K, V, CHUNK, key_width(K), key_width(V), block)
    key_sizes: dict[str, Any] = {"H": H, "K": K, "BT": CHUNK, "BK": sizes.BK}
    products = {"OP": operand(dtype), "PRECISION": summing(dtype)}
    launch = _launcher(x, grid)
    tokens = _tokens(x, factors, lse, do, d)
    p, dZ, dP, P = (x.q.new_empty(B, T, HQ, CHUNK, dtype=workspace(dtype)) for _ in range(4))
    tiles = Tiles(p, dZ, dP, P, p.stride())
    launch(
        wyfold_path_own_logits_bwd_triton,
        HQ,
        "logits",
        x=tokens,
        passed=Passed(d.dq, d.dq.stride(), d.others, d.dend, d.dblock_end, d.dtotal, d.dblock_total),
        tiles=tiles,
        out=QueryGradients(out.q, out.q.stride(), out.g, strides(out.g)),
        factor=path_scales(scale, gate),
        SIZES=sizes,
        EXACT=summing_exact(dtype),
        **products,
    )
    if T > block * CHUNK:  # a block may be followed by another
        _blocks_bwd(launch, factors, d, {**key_sizes, "BLOCK": block, **products})
    dE = torch.empty_like(factors.E, dtype=torch.float32)
    launch(
        wyfold_path_own_factors_bwd_triton,
        H,
        "factors",
        x=tokens,
        p_dq=d.dq,
        s_dq=d.dq.stride(),
        tiles=tiles,
        out=KeyGradients(d.dk, d.dW, d.dw, dE, d.dv, d.dv.stride(), out.v, out.v.stride()),
        SIZES=sizes,
        **products,
    )
    _solve_bwd(launch, x, factors, FactorGradients(d.dk, d.dW, d.dw, dE), out, key_sizes)


def _launcher(x: PathTiles, grid: ChunkGrid) -> Callable[..., None]:
    """Function that launches a kernel, by its name in `launch_key`, with a program per chunk and head."""
    dtype, K = x.q.dtype, x.k.shape[3]

    def launch(kernel: Any, heads: int, name: str, **named: Any) -> None:
        config = tuned("path_blocks.triton", launch_key(dtype, K, name), x.q.device)
        launch_kernel(
            kernel,
            grid.chunks * heads,
            packing=Packing(grid.cu, grid.first, grid.sequence),
            N=grid.sequences,
            T=grid.tokens,
            per_sequence=grid.per_sequence,
            PACKED=grid.cu is not None,
            **named,
            **({"WARPS": min(4, config.warps)} if name == "solve" else {}),
            **config.options(contract=contracts(dtype)),
        )

    return launch


def _tokens(x: PathTiles, f: PathFactors, lse: Tensor, do: Tensor, d: PathWorkspace) -> Tokens:
    """The call's tokens, factors and gradients of the output as a kernel argument."""
    return Tokens(
        x.q,
        x.q.stride(),
        x.k,
        x.k.stride(),
        x.v,
        x.v.stride(),
        x.g,
        strides(x.g),
        f.w,
        f.W,
        f.w.stride(),
        f.E,
        f.E.stride(),
        do,
        do.stride(),
        lse,
        d.delta,
        lse.stride(),
    )


def _blocks_bwd(launch: Callable[..., None], f: PathFactors, d: PathWorkspace, options: dict[str, Any]) -> None:
    """Add to the gradients of the chunks' keys and factors those of the keys and maps of their blocks."""
    H = f.w.shape[2]
    chunks = Chunks(f.w, f.W, f.k, d.dblocks, f.w.stride())
    maps = Maps(d.dM, f.after, torch.empty_like(f.after))
    launch(wyfold_path_maps_bwd_triton, H, "maps", x=chunks, maps=maps, **options)
    added = {"p_dk": d.dk, "p_dW": d.dW, "p_dw": d.dw}
    launch(wyfold_path_blocks_bwd_triton, H, "blocks", x=chunks, maps=maps, **added, **options)


def _solve_bwd(
    launch: Callable[..., None],
    x: PathTiles,
    f: PathFactors,
    d: FactorGradients,
    out: PathTiles,
    key_sizes: dict[str, Any],
) -> None:
    """Write the gradients of keys, directions and strengths from those of the factors."""
    H, dtype = x.k.shape[2], x.q.dtype
    shared: dict[str, Any] = {
        "x": KeyTokens(x.k, x.k.stride(), x.w, x.w.stride(), x.beta, x.beta.stride()),
        "factors": Factors(f.W, f.w.stride(), f.E, f.E.stride()),
        "d": d,
        **key_sizes,
    }
    strengths = {"p_dbeta": out.beta, "s_dbeta": out.beta.stride()}
    launch(wyfold_path_solve_bwd_triton, H, "solve", **shared, **strengths, EXACT=summing_exact(dtype))
    launch(
        wyfold_path_tokens_bwd_triton,
        H,
        "tokens",
        **shared,
        p_dk=out.k,
        s_dk=out.k.stride(),
        p_dw=out.w,
        s_dw=out.w.stride(),
        OP=operand(dtype),
        PRECISION=summing(dtype),
    )
