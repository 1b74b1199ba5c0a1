"""Chunks and blocks of PaTH attention in Triton: one program per chunk, per block, or per sequence, and key head.

Tiles are stored at their tokens, in contiguous tensors [B, T, H, ..]. The map of a block is stored without the
identity, which would hide its small numbers in 16 bits. Blocks are whole: the last tokens of a sequence need none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.kernels.path_records import CHUNK, PathFactors
from wyfold.kernels.path_widths import key_width
from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.tile.dot.triton import contracts, mm, mm_exact, operand, summing, summing_exact, workspace
from wyfold.tile.index.triton import (
    Packing,
    TokenRows,
    chunk_span,
    load_map,
    load_token_scalars,
    load_tokens,
    map_slot,
    sequence_span,
    store_tile,
    store_tokens,
)
from wyfold.tile.inverse.triton import inverse_transposed


def empty_factors(q: Tensor, k: Tensor, block: int, *, backward: bool) -> PathFactors:
    """Allocate the factors of a call, uninitialised, for blocks of so many chunks.

    Args:
        q, k: Tokens of the call.
        block: Chunks of a block.
        backward: Whether a backward reads the maps inside blocks.
    """
    (B, T, H, K), dtype = k.shape, workspace(q.dtype)
    w, W, end, blocks = (k.new_empty(k.shape, dtype=dtype) for _ in range(4))
    E = k.new_empty(B, T, H, CHUNK, dtype=dtype)
    slots = -(-T // (block * CHUNK))
    BK = key_width(K)
    after = k.new_empty((B * slots, H, block, BK, BK) if backward else 0, dtype=dtype)
    return PathFactors(w, W, end, E, blocks, k.new_empty(B * slots, H, K, K, dtype=dtype), after)


def path_factors(k: Tensor, w: Tensor, beta: Tensor, grid: ChunkGrid, block: int, out: PathFactors) -> None:
    """Write the factors of all chunks, then those of all blocks.

    Args:
        k: [B, T, H, K], any strides.
        w: [B, T, H, K], any float.
        beta: [B, T, H].
        grid: Chunks of CHUNK tokens.
        block: Chunks of a block.
        out: Where they are written.
    """
    (_, _, H, K), dtype = k.shape, k.dtype
    packing = Packing(grid.cu, grid.first, grid.sequence), grid.sequences, grid.tokens, grid.per_sequence
    config, chunk = (tuned("path_blocks.triton", launch_key(dtype, K, name), k.device) for name in (None, "chunks"))
    products = {"OP": operand(dtype), "PRECISION": summing(dtype), "EXACT": summing_exact(dtype)}
    sizes = {"H": H, "K": K, "BT": CHUNK, "BK": key_width(K), "PACKED": grid.cu is not None}
    launch_kernel(
        wyfold_path_chunks_triton,
        grid.chunks * H,
        k,
        k.stride(),
        w,
        w.stride(),
        beta,
        beta.stride(),
        out.w,
        out.W,
        out.k,
        out.w.stride(),
        out.E,
        out.E.stride(),
        *packing,
        **sizes,
        EXACT=products["EXACT"],
        WARPS=min(4, chunk.warps),
        **chunk.options(contract=contracts(dtype)),
    )
    if grid.tokens < block * CHUNK:
        return  # no sequence has a whole block
    launch_kernel(
        wyfold_path_blocks_triton,
        grid.chunks * H * (sizes["BK"] // 64),
        out.w,
        out.W,
        out.k,
        out.blocks,
        out.w.stride(),
        out.M,
        out.after if out.after.numel() else None,
        *packing,
        **sizes,
        BLOCK=block,
        **products,
        **config.options(contract=contracts(dtype)),
    )


def path_cache(
    factors: PathFactors, grid: ChunkGrid, block: int, past: Tensor | None, counts: Tensor | None, out: Tensor
) -> None:
    """Write the keys after the last token of their sequence.

    Args:
        factors: Result of `path_factors`.
        grid: Chunks of CHUNK tokens.
        block: Chunks of a block.
        past, counts: [N, S, H, K] keys of earlier calls, any strides, of which sequence n has the last counts[n]; None
            if there are none.
        out: [B, S + T, H, K], any strides, zero past the last boundary and where there is no earlier key.
    """
    (_, _, H, K), dtype = factors.w.shape, out.dtype
    config = tuned("path_blocks.triton", launch_key(dtype, K, "cache"), out.device)
    S = 0 if past is None else past.shape[1]
    launch_kernel(
        wyfold_path_cache_triton,
        grid.sequences * H,
        factors.w,
        factors.W,
        factors.k,
        factors.blocks,
        factors.w.stride(),
        factors.M,
        past,
        None if past is None else past.stride(),
        counts,
        out,
        out.stride(),
        Packing(grid.cu, grid.first),
        grid.tokens,
        grid.per_sequence,
        S,
        H=H,
        K=K,
        BT=CHUNK,
        BK=key_width(K),
        BLOCK=block,
        PACKED=grid.cu is not None,
        EXACT=summing_exact(dtype),
        **config.options(contract=contracts(dtype)),
    )


def launch_key(dtype: torch.dtype, K: int, launch: str | None = None) -> LaunchKey:
    """Launch configuration key; of the forward, or of a launch of the backward."""
    return LaunchKey(dtype_word(dtype), K, launch=launch)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_chunks_triton(
    p_k, s_k, p_w, s_w, p_beta, s_beta, p_rounded, p_W, p_end, s_rows, p_E, s_E, packing, N, T, per_sequence,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, EXACT: tl.constexpr,
    WARPS: tl.constexpr,
):  # fmt: skip
    """Factors of one chunk of one key head."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, _, b, t, rows = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    if PACKED:
        if i_n == N:
            return
    at, o = TokenRows(b, t, rows), tl.arange(0, BT)
    below = o[:, None] > o[None, :]
    BE: tl.constexpr = 64  # columns at a time: all of them would need more registers than there are
    b_N = tl.zeros((BT, BT), tl.float32)
    b_J = tl.zeros((BT, BT), tl.float32)
    for part in range(0, BK, BE):
        b_w = load_tokens(p_w, s_w, at, i_h, part, K, BT, BE).to(tl.float32)
        store_tokens(p_rounded, s_rows, at, i_h, part, b_w, K)
        b_N += mm_exact(b_w, tl.trans(b_w), None, EXACT)
        b_J += mm_exact(b_w, tl.trans(load_tokens(p_k, s_k, at, i_h, part, K, BT, BE)), None, EXACT)
    b_beta = load_token_scalars(p_beta, s_beta, at, i_h, BT)
    b_L = tl.where(below, b_N * b_beta[:, None], 0.0)
    b_LT = tl.where(o[:, None] < o[None, :], tl.trans(b_N) * b_beta[None, :], 0.0)
    b_A = tl.trans(inverse_transposed(b_L, b_LT, BT, EXACT, WARPS))
    b_E = mm_exact(b_A, tl.where(below, b_J, 0.0) * b_beta[:, None], None, EXACT)
    store_tokens(p_E, s_E, at, i_h, 0, b_E, BT)
    for part in range(0, BK, BE):
        b_w = load_tokens(p_w, s_w, at, i_h, part, K, BT, BE).to(tl.float32)
        b_W = mm_exact(b_A, b_w * b_beta[:, None], None, EXACT)
        store_tokens(p_W, s_rows, at, i_h, part, b_W, K)
        b_end = load_tokens(p_k, s_k, at, i_h, part, K, BT, BE).to(tl.float32)
        store_tokens(p_end, s_rows, at, i_h, part, b_end - mm_exact(tl.trans(b_E), b_w, None, EXACT), K)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_blocks_triton(
    p_w, p_W, p_end, p_blocks, s_rows, p_M, p_after, packing, N, T, per_sequence, H: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, BK: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr, OP: tl.constexpr,
    PRECISION: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Some rows of the map of one whole block of one key head, and the same columns of its keys.

    Rows of a map do not depend on each other. Programs of chunks that begin no block do nothing.
    """
    BR: tl.constexpr = 64
    i_tile = tl.program_id(0).to(tl.int64)
    part = (i_tile % (BK // BR)).to(tl.int32) * BR
    i_h = i_tile // (BK // BR) % H
    i_c = i_tile // (BK // BR * H)
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    if i_s % BLOCK != 0 or left < BLOCK * BT:
        return
    i_block = map_slot(b, t, T, BLOCK * BT) * H + i_h
    b_D = tl.zeros((BR, BK), tl.float32)  # the map less the identity
    for i in range(BLOCK):
        at = TokenRows(b, t + (BLOCK - 1 - i) * BT, BT)
        if p_after is not None:
            store_tile(p_after, i_block * BLOCK + BLOCK - 1 - i, part, 0, b_D, BK, BK, BR, BK)
        b_k = load_tokens(p_end, s_rows, at, i_h, 0, K, BT, BK)
        b_moved = load_tokens(p_end, s_rows, at, i_h, part, K, BT, BR).to(tl.float32)
        b_moved += mm(b_k, tl.trans(b_D), None, OP, PRECISION)
        store_tokens(p_blocks, s_rows, at, i_h, part, b_moved, K)
        b_w = load_tokens(p_w, s_rows, at, i_h, 0, K, BT, BK)
        b_u = tl.trans(load_tokens(p_w, s_rows, at, i_h, part, K, BT, BR)).to(tl.float32)
        b_u += mm_exact(b_D, tl.trans(b_w), None, EXACT)
        b_W = load_tokens(p_W, s_rows, at, i_h, 0, K, BT, BK)
        if OP == tl.bfloat16:
            b_D = mm_exact(-b_u, b_W, b_D, EXACT)
        else:
            b_D -= mm_exact(b_u, b_W, None, EXACT)
    store_tile(p_M, i_block, part, 0, b_D, K, K, BR, BK)


@triton.jit(do_not_specialize=["T", "per_sequence", "S"])
def wyfold_path_cache_triton(
    p_w, p_W, p_end, p_blocks, s_rows, p_M, p_past, s_past, p_counts, p_out, s_out, packing, T, per_sequence, S,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """Keys of one sequence and key head after its last token, from the last to the first."""
    i = tl.program_id(0).to(tl.int64)
    i_n, i_h = i // H, i % H
    _, b, start, length = sequence_span(i_n, packing, T, per_sequence, PACKED)
    b_D = tl.zeros((BK, BK), tl.float32)  # the map of everything that follows, less the identity
    blocks = length // (BLOCK * BT)
    chunks = (length + BT - 1) // BT - blocks * BLOCK
    for tail in range(chunks):
        at = (blocks * BLOCK + chunks - 1 - tail) * BT
        rows = tl.minimum(length - at, BT).to(tl.int32)
        b_k = load_tokens(p_end, s_rows, TokenRows(b, start + at, rows), i_h, 0, K, BT, BK)
        b_w = load_tokens(p_w, s_rows, TokenRows(b, start + at, rows), i_h, 0, K, BT, BK)
        b_W = load_tokens(p_W, s_rows, TokenRows(b, start + at, rows), i_h, 0, K, BT, BK)
        b_moved = b_k.to(tl.float32) + mm_exact(b_k, tl.trans(b_D), None, EXACT)
        store_tokens(p_out, s_out, TokenRows(b, S + start + at, rows), i_h, 0, b_moved, K)
        b_u = tl.trans(b_w).to(tl.float32) + mm_exact(b_D, tl.trans(b_w), None, EXACT)
        b_D -= mm_exact(b_u, b_W, None, EXACT)
    for n in range(blocks):
        first = start + (blocks - 1 - n) * (BLOCK * BT)
        for c in range(BLOCK):
            b_k = load_tokens(p_blocks, s_rows, TokenRows(b, first + c * BT, BT), i_h, 0, K, BT, BK)
            b_moved = b_k.to(tl.float32) + mm_exact(b_k, tl.trans(b_D), None, EXACT)
            store_tokens(p_out, s_out, TokenRows(b, S + first + c * BT, BT), i_h, 0, b_moved, K)
        b_M = load_map(p_M, map_slot(b, first, T, BLOCK * BT) * H + i_h, K, BK)
        b_D += b_M.to(tl.float32) + mm_exact(b_D, b_M, None, EXACT)
    if p_past is not None:
        missing = S - tl.load(p_counts + i_n).to(tl.int32)
        for tile in range((S - missing + BT - 1) // BT):
            place = missing + tile * BT
            rows = tl.minimum(S - place, BT).to(tl.int32)
            b_past = load_tokens(p_past, s_past, TokenRows(b, place, rows), i_h, 0, K, BT, BK)
            b_moved = b_past.to(tl.float32) + mm_exact(b_past, tl.trans(b_D), None, EXACT)
            store_tokens(p_out, s_out, TokenRows(b, place, rows), i_h, 0, b_moved, K)
