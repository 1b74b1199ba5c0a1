"""Adjoint of a block's keys and map: from its first chunk to its last, then chunk by chunk."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from wyfold.tile.dot.triton import mm
from wyfold.tile.index.triton import (
    TokenRows,
    chunk_span,
    load_tile,
    load_tokens,
    map_slot,
    store_tile,
    store_tokens,
)


class Chunks(NamedTuple):
    """Kernel argument: factors of the chunks, and the gradients of the blocks' keys; one layout.

    Attributes:
        w, W, k: Fields of `PathFactors`.
        dblocks: Field of `PathWorkspace`.
    """

    w: Any
    W: Any
    k: Any
    dblocks: Any
    s_rows: Any
    end: None = None


class Maps(NamedTuple):
    """Kernel argument: tiles [BK, BK] of every slot and key head.

    Attributes:
        dM: [slots, H, BK, BK], field of `PathWorkspace`.
        after: [slots, H, BLOCK, BK, BK], field of `PathFactors`.
        dR: [slots, H, BLOCK, BK, BK] gradients of the maps of each chunk with those that follow it.
    """

    dM: Any
    after: Any
    dR: Any


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_maps_bwd_triton(
    x, maps, packing, N, T, per_sequence,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the maps inside one block of one key head that another block follows."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    if i_s % BLOCK != 0 or left <= BLOCK * BT:
        return
    i_block = map_slot(b, t, T, BLOCK * BT) * H + i_h
    b_dR = load_tile(maps.dM, i_block, 0, 0, BK, BK, BK, BK)
    for c in range(BLOCK):
        at = TokenRows(b, t + c * BT, BT)
        store_tile(maps.dR, i_block * BLOCK + c, 0, 0, b_dR, BK, BK, BK, BK)
        b_W = load_tokens(x.W, x.s_rows, at, i_h, 0, K, BT, BK)
        b_w = load_tokens(x.w, x.s_rows, at, i_h, 0, K, BT, BK)
        b_k = load_tokens(x.k, x.s_rows, at, i_h, 0, K, BT, BK)
        b_dk = load_tokens(x.dblocks, x.s_rows, at, i_h, 0, K, BT, BK)
        b_du = -mm(b_dR, tl.trans(b_W), None, OP, PRECISION)  # [BK, BT]
        b_dR = mm(b_du, b_w, b_dR, OP, PRECISION)
        b_dR = mm(tl.trans(b_dk), b_k, b_dR, OP, PRECISION)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_path_blocks_bwd_triton(
    x, maps, p_dk, p_dW, p_dw, packing, N, T, per_sequence,
    H: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, BLOCK: tl.constexpr, PACKED: tl.constexpr,
    OP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradients of one chunk's keys and factors those of its block, if another block follows it."""
    i_tile = tl.program_id(0).to(tl.int64)
    i_c, i_h = i_tile // H, i_tile % H
    i_n, i_s, b, t, _ = chunk_span(i_c, packing, T, per_sequence, PACKED, BT)
    left = T - t
    if PACKED:
        if i_n == N:
            return
        left = tl.load(packing.cu + i_n + 1) - t
    place = i_s % BLOCK
    BR: tl.constexpr = 64  # rows or columns of a map at a time
    if left <= (BLOCK - place) * BT:
        return
    at = TokenRows(b, t, BT)
    i_map = (map_slot(b, t - place * BT, T, BLOCK * BT) * H + i_h) * BLOCK + place
    b_dblocks = load_tokens(x.dblocks, x.s_rows, at, i_h, 0, K, BT, BK)
    b_w = load_tokens(x.w, x.s_rows, at, i_h, 0, K, BT, BK)
    b_W = load_tokens(x.W, x.s_rows, at, i_h, 0, K, BT, BK)
    for part in range(0, BK, BR):  # columns of k, and of the products with the maps
        b_D = load_tile(maps.after, i_map, 0, part, BK, BK, BK, BR)  # less the identity
        b_sum = load_tokens(p_dk, x.s_rows, at, i_h, part, K, BT, BR)
        b_sum += load_tokens(x.dblocks, x.s_rows, at, i_h, part, K, BT, BR)
        store_tokens(p_dk, x.s_rows, at, i_h, part, mm(b_dblocks, b_D, b_sum, OP, PRECISION), K)
        b_dR = load_tile(maps.dR, i_map, part, 0, BK, BK, BR, BK)
        b_du = -mm(b_W, tl.trans(b_dR), None, OP, PRECISION)
        b_sum = load_tokens(p_dw, x.s_rows, at, i_h, part, K, BT, BR)
        store_tokens(p_dw, x.s_rows, at, i_h, part, b_sum + b_du, K)
    tl.debug_barrier()
    b_sum = load_tokens(p_dW, x.s_rows, at, i_h, 0, K, BT, BK)
    for part in range(0, BK, BR):
        b_D = load_tile(maps.after, i_map, part, 0, BK, BK, BR, BK)
        b_u = load_tokens(x.w, x.s_rows, at, i_h, part, K, BT, BR).to(tl.float32)
        b_u = -(b_u + mm(b_w, tl.trans(b_D), None, OP, PRECISION))
        b_sum = mm(b_u, load_tile(maps.dR, i_map, part, 0, BK, BK, BR, BK), b_sum, OP, PRECISION)
    store_tokens(p_dW, x.s_rows, at, i_h, 0, b_sum, K)
    b_sum = load_tokens(p_dw, x.s_rows, at, i_h, 0, K, BT, BK)
    for part in range(0, BK, BR):
        b_dR = load_tile(maps.dR, i_map, part, 0, BK, BK, BR, BK)
        b_du = -mm(b_W, tl.trans(b_dR), None, OP, PRECISION)
        b_sum = mm(b_du, load_tile(maps.after, i_map, part, 0, BK, BK, BR, BK), b_sum, OP, PRECISION)
    store_tokens(p_dw, x.s_rows, at, i_h, 0, b_sum, K)
