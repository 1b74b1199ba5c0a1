"""Sums of log gates inside chunks and blocks, taken directly and never as differences."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.path_records import CHUNK, PathSums
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.index.triton import Packing, TokenRows, chunk_span, load_token_scalars, store_token_scalars


def path_sums(g: Tensor | None, grid: ChunkGrid, block: int) -> PathSums | None:
    """Sums of log gates of a call; None without a gate.

    Args:
        g: [B, T, HQ], any float, any strides.
        grid: Chunks of CHUNK tokens.
        block: Chunks of a block.
    """
    if g is None:
        return None
    out = PathSums(*(g.new_empty(g.shape, dtype=torch.float32) for _ in range(4)))
    launch_kernel(
        wyfold_path_sums_triton,
        grid.chunks * g.shape[2],
        p_g=g,
        s_g=g.stride(),
        out=Sums(*out, out.start.stride()),
        packing=Packing(grid.cu, grid.first, grid.sequence),
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        HQ=g.shape[2],
        BT=CHUNK,
        BLOCK=block,
        PACKED=grid.cu is not None,
        num_warps=1,
        num_stages=1,
        enable_fp_fusion=False,
    )
    return out


class Sums(NamedTuple):
    """Kernel argument: fields of `PathSums`, of one layout."""

    start: Any
    stop: Any
    block_start: Any
    block_stop: Any
    s: Any
    end: None = None


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_sums_triton(
    p_g, s_g, out, packing, N, T, per_sequence,
    HQ: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """Sums of one chunk of one query head."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_q = i_tile // HQ, i_tile % HQ
    i_n, i_s, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    at, place = TokenRows(b, t, rows), i_s % BLOCK
    b_start = tl.cumsum(load_token_scalars(p_g, s_g, at, i_q, BT), 0)
    next_rows = tl.maximum(rows - 1, 0)  # gates of the tokens that follow each token
    b_stop = tl.cumsum(load_token_scalars(p_g, s_g, TokenRows(b, t + 1, next_rows), i_q, BT), 0, reverse=True)
    store_token_scalars(out.start, out.s, at, i_q, b_start, BT)
    store_token_scalars(out.stop, out.s, at, i_q, b_stop, BT)
    for m in range(place):
        before = TokenRows(b, t - (m + 1) * BT, BT)
        b_start += tl.sum(load_token_scalars(p_g, s_g, before, i_q, BT), 0)
    for m in range(1, tl.minimum((left + BT - 1) // BT, BLOCK - place)):
        after = TokenRows(b, t + m * BT, tl.minimum(left - m * BT, BT).to(tl.int32))
        b_stop += tl.sum(load_token_scalars(p_g, s_g, after, i_q, BT), 0)
    store_token_scalars(out.block_start, out.s, at, i_q, b_start, BT)
    store_token_scalars(out.block_stop, out.s, at, i_q, b_stop, BT)
