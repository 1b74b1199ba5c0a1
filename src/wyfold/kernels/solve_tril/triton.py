"""`solve_tril` in Triton: one program of one warp per chunk and 64 / C heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from wyfold.runtime.chunk_layout import ChunkGrid
from wyfold.runtime.kernel_configs import LaunchKey, dtype_word, tuned
from wyfold.runtime.kernel_launch import launch_kernel
from wyfold.runtime.triton_support import interpreting
from wyfold.tile.index.triton import Packing, chunk_span
from wyfold.tile.inverse.triton import inverse_by_substitution, merge_halves, off_diagonal_block


def solve_tril(L: Tensor, grid: ChunkGrid, out: Tensor) -> None:
    """Write the inverses to out; zeros past a packed batch's last boundary.

    Args:
        L: [B, T, H, C], any strides; row r of a chunk is at its r-th token.
        grid: The call's chunk grid.
        out: [B, T, H, C], any strides.
    """
    H, C = L.shape[2:]
    heads_per_program = 64 // C
    groups = triton.cdiv(H, heads_per_program)
    config = tuned("solve_tril.triton", launch_key(L.dtype, C), L.device)
    launch_kernel(
        wyfold_solve_tril_triton,
        grid.chunks * groups,
        p_L=L,
        s_L=L.stride(),
        p_X=out,
        s_X=out.stride(),
        p_cu=grid.cu,
        p_first=grid.first,
        p_sequence=grid.sequence,
        N=grid.sequences,
        T=grid.tokens,
        per_sequence=grid.per_sequence,
        H=H,
        GROUPS=groups,
        BT=C,
        PACKED=grid.cu is not None,
        EXACT="ieee" if interpreting() else "bf16x6",
        **config.options(),
    )


def launch_key(dtype: torch.dtype, chunk_size: int) -> LaunchKey:
    """Launch configuration key."""
    return LaunchKey(dtype_word(dtype), C=chunk_size)


@triton.jit(do_not_specialize=["N", "T", "per_sequence"])
def wyfold_solve_tril_triton(
    p_L,
    s_L,
    p_X,
    s_X,
    p_cu,
    p_first,
    p_sequence,
    N,
    T,
    per_sequence,
    H: tl.constexpr,
    GROUPS: tl.constexpr,
    BT: tl.constexpr,
    PACKED: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One program inverts four diagonal 16 x 16 blocks of one chunk: of four heads if C = 16, of two heads if C = 32.

    Blocks are numbered [pair, half]: the halves of a pair are merged, and so are the two pairs if C = 64. The block
    between the pairs is loaded last, since registers limit occupancy.
    """
    HEADS: tl.constexpr = 64 // BT
    i = tl.program_id(0).to(tl.int64)
    i_c, i_h = i // GROUPS, i % GROUPS * HEADS
    i_n, _, b, t, rows = chunk_span(i_c, Packing(p_cu, p_first, p_sequence), T, per_sequence, PACKED, BT)
    p_L += b * s_L[0] + t * s_L[1] + i_h * s_L[2]
    p_X += b * s_X[0] + t * s_X[1] + i_h * s_X[2]
    heads = H - i_h
    if PACKED:
        if i_n == N:
            store_blocks(p_X, s_X, tl.zeros((HEADS, BT, BT), tl.float32), 0, 0, 0, rows, heads, HEADS, BT)
            return

    b_L = load_diagonal(p_L, s_L, rows, heads, BT)
    # Pairs of one head are 32 rows and columns apart.
    APART: tl.constexpr = 32 if BT == 64 else 0
    b_lower = load_blocks(p_L, s_L, 16, 0, APART, rows, heads, 2, 16) if BT >= 32 else None
    b_X = inverse_by_substitution(b_L, 2, 2)  # [pair, row, half, column]
    if BT == 16:
        store_diagonal(p_X, s_X, b_X, rows, heads)
    else:
        b_low, b_high = b_X.permute(0, 1, 3, 2).split()
        b_X = merge_halves(b_low, b_lower, b_high, 2, 16, EXACT)
        store_blocks(p_X, s_X, b_X, 0, 0, APART, rows, heads, 2, 32)
    if BT == 64:
        b_below = load_blocks(p_L, s_L, 32, 0, 0, rows, heads, 1, 32)
        b_low, b_high = b_X.permute(1, 2, 0).split()
        b_X = off_diagonal_block(b_low, b_below.reshape(32, 32), b_high, EXACT)
        store_blocks(p_X, s_X, b_X[None], 32, 0, 0, rows, heads, 1, 32)
        store_blocks(p_X, s_X, tl.zeros((1, 32, 32), tl.float32), 0, 32, 0, rows, heads, 1, 32)


@triton.jit
def diagonal_offsets(strides, rows, heads, BT: tl.constexpr):
    """Offsets of the four diagonal blocks, and the mask of existing rows.   [pair, row, half, column]"""
    o_r = tl.arange(0, 16)[None, :, None, None]
    o_c = tl.arange(0, 16)[None, None, None, :]
    i_pair = tl.arange(0, 2)[:, None, None, None]
    i_half = tl.arange(0, 2)[None, None, :, None]
    if BT == 64:
        head, first = i_pair * 0, 32 * i_pair + 16 * i_half
    elif BT == 32:
        head, first = i_pair, 16 * i_half
    else:
        head, first = 2 * i_half + i_pair, i_pair * 0
    row, column = first + o_r, first + o_c
    offsets = head.to(tl.int64) * strides[2] + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[3]
    return offsets, (row < rows) & (head < heads)


@triton.jit
def load_diagonal(p, strides, rows, heads, BT: tl.constexpr):
    """Load the diagonal blocks; zero in missing rows.   [pair, row, half, column] float32"""
    offsets, mask = diagonal_offsets(strides, rows, heads, BT)
    return tl.load(p + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_diagonal(p, strides, b_x, rows, heads):
    """Store chunks of 16 rows, rounded once."""
    offsets, mask = diagonal_offsets(strides, rows, heads, 16)
    tl.store(p + offsets, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def block_offsets(strides, row, column, APART: tl.constexpr, rows, heads, G: tl.constexpr, h: tl.constexpr):
    """Offsets of G blocks of h rows, starting at (row, column), and the mask of existing rows.   [G, h, h]

    Blocks are APART rows and columns apart; if APART is 0, each is in a different head.
    """
    i_g = tl.arange(0, G)[:, None, None]
    head = i_g if APART == 0 else i_g * 0
    o_r = row + i_g * APART + tl.arange(0, h)[None, :, None]
    o_c = column + i_g * APART + tl.arange(0, h)[None, None, :]
    offsets = head.to(tl.int64) * strides[2] + o_r.to(tl.int64) * strides[1] + o_c.to(tl.int64) * strides[3]
    return offsets, (o_r < rows) & (head < heads)


@triton.jit
def load_blocks(p, strides, row, column, APART: tl.constexpr, rows, heads, G: tl.constexpr, h: tl.constexpr):
    """Load blocks as bfloat16 if stored so, else as float32; zero in missing rows.   [G, h, h]"""
    offsets, mask = block_offsets(strides, row, column, APART, rows, heads, G, h)
    b_x = tl.load(p + offsets, mask=mask, other=0.0)
    return b_x if p.dtype.element_ty == tl.bfloat16 else b_x.to(tl.float32)


@triton.jit
def store_blocks(p, strides, b_x, row, column, APART: tl.constexpr, rows, heads, G: tl.constexpr, h: tl.constexpr):
    """Store blocks, rounded once."""
    offsets, mask = block_offsets(strides, row, column, APART, rows, heads, G, h)
    tl.store(p + offsets, b_x.to(p.dtype.element_ty), mask=mask)
