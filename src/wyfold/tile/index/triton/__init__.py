"""Layouts of tokens and tiles in memory: the only tile functions that load and store them.

Offsets are 64-bit. Rows past a chunk's last token and columns past a tensor's width are never accessed; loads return
zeros there.

From sm_90 on, TMA copies whole blocks of a matrix without per-thread addresses. The coordinates of a block are the
32-bit numbers of its first row and column. A block contains whatever lies there: past a chunk's last token, rows of the
next sequence. Arguments named `x_` are pointers or descriptors; USE_TMA selects which.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import triton
import triton.language as tl
from torch import Tensor

Record = TypeVar("Record", bound=tuple[Any, ...])


def strides(x: Tensor | None) -> tuple[int, ...] | None:
    """Strides of a tensor as a kernel argument; None stays None."""
    return None if x is None else x.stride()


def with_strides(record: type[Record], **fields: Any) -> Record:
    """A record of kernel arguments from its fields, where s_x is the strides of x unless it is given."""
    names = record._fields  # type: ignore[attr-defined]
    found = {s: strides(x) for name, x in fields.items() if (s := f"s_{name}") in names and s not in fields}
    return record(**fields, **found)


class Packing(NamedTuple):
    """Kernel argument: boundaries of the sequences of a packed batch, and their chunks; all None without boundaries.

    Attributes:
        cu: [N + 1] tokens before each sequence, ascending.
        first: [N + 1] first chunk of each sequence.
        sequence: [chunks] sequence of each chunk; None in kernels whose programs are sequences.
    """

    cu: Any
    first: Any
    sequence: Any = None


class TokenRows(NamedTuple):
    """Rows of a chunk in the token tensors, inside kernels.

    Attributes:
        b: Row of the batch.
        t: First token, in that row.
        rows: Number of tokens, of which none follows.
        T: Tokens of a row of the batch; None where no descriptor is used.
    """

    b: Any
    t: Any
    rows: Any
    T: Any = None


@triton.jit
def chunk_span(i_c, packing, T, per_sequence, PACKED: tl.constexpr, BT: tl.constexpr):
    """Sequence of chunk i_c, its number in the sequence, buffer row, first token, and number of tokens.

    In a packed batch, unused chunks belong to the pseudo-sequence N; chunks past its end hold no token. The count is
    32-bit because every mask compares with it.
    """
    if PACKED:
        i_n = tl.load(packing.sequence + i_c)
        i_s = i_c - tl.load(packing.first + i_n)
        t = tl.load(packing.cu + i_n) + i_s * BT
        rows = tl.load(packing.cu + i_n + 1) - t
        return i_n, i_s, i_n * 0, t, tl.maximum(tl.minimum(rows, BT), 0).to(tl.int32)
    else:
        i_n = i_c // per_sequence
        i_s = i_c - i_n * per_sequence
        t = i_s * BT
        return i_n, i_s, i_n, t, tl.minimum(T - t, BT).to(tl.int32)


@triton.jit
def sequence_span(i_n, packing, T, per_sequence, PACKED: tl.constexpr):
    """First chunk of sequence i_n, its buffer row, first token, and length."""
    if PACKED:
        t = tl.load(packing.cu + i_n)
        return tl.load(packing.first + i_n), i_n * 0, t, tl.load(packing.cu + i_n + 1) - t
    else:
        return i_n * per_sequence, i_n, i_n * 0, i_n * 0 + T


@triton.jit
def token_offsets(strides, at, h, column, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask of rows of head h in a token tensor [B, T, H, W], columns column..   [BT, BW]

    column is a multiple of BW. If W is one too, the mask needs no test of columns.
    """
    o_r = tl.arange(0, BT)
    o_w = column + tl.arange(0, BW)
    first = at.b * strides[0] + at.t * strides[1] + h * strides[2]
    offsets = first + o_r.to(tl.int64)[:, None] * strides[1] + o_w.to(tl.int64)[None, :] * strides[3]
    # Not W % BW: BW may be from a tile's shape, a constexpr in the interpreter, which has no such operation.
    if W // BW * BW == W:
        return offsets, tl.broadcast_to((o_r < at.rows)[:, None], (BT, BW))
    else:
        return offsets, (o_r < at.rows)[:, None] & (o_w < W)[None, :]


@triton.jit
def load_tokens(p, strides, at, h, column, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr):
    """Load rows of one head; rows past the last token are zero.   [BT, BW]"""
    offsets, mask = token_offsets(strides, at, h, column, W, BT, BW)
    return tl.load(p + offsets, mask=mask, other=0.0)


@triton.jit
def store_tokens(p, strides, at, h, column, x, W: tl.constexpr):
    """Store x [BT, BW] to the rows that are tokens, rounding once."""
    offsets, mask = token_offsets(strides, at, h, column, W, x.shape[0], x.shape[1])
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_token_scalars(p, strides, at, h, BT: tl.constexpr):
    """Load one number per token of a tensor [B, T, H] as float32; zero past the last token.   [BT]"""
    o_r = tl.arange(0, BT)
    offsets = at.b * strides[0] + (at.t + o_r.to(tl.int64)) * strides[1] + h * strides[2]
    return tl.load(p + offsets, mask=o_r < at.rows, other=0.0).to(tl.float32)


@triton.jit
def token_row(strides, b, t, h, column, W: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask of one token of one head, columns column..   [BW]"""
    o_w = column + tl.arange(0, BW)
    first = b * strides[0] + t * strides[1] + h * strides[2]
    return first + o_w.to(tl.int64) * strides[3], o_w < W


@triton.jit
def load_token_row(p, strides, b, t, h, column, exists, W: tl.constexpr, BW: tl.constexpr):
    """Load one token of one head, columns column..; zeros if `exists` is false.   [BW]

    A vector, not a tile of one row: it puts no constraint on the register layouts of the tiles it meets.
    """
    offsets, mask = token_row(strides, b, t, h, column, W, BW)
    return tl.load(p + offsets, mask=mask & exists, other=0.0)


@triton.jit
def store_token_row(p, strides, b, t, h, column, x, W: tl.constexpr, BW: tl.constexpr):
    """Store x [BW] to one token of one head, columns column.., rounding once."""
    offsets, mask = token_row(strides, b, t, h, column, W, BW)
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_token_number(p, strides, b, t, h, exists):
    """Load one number per token and head as float32; zero if `exists` is false."""
    return tl.load(p + b * strides[0] + t * strides[1] + h * strides[2], mask=exists, other=0.0).to(tl.float32)


@triton.jit
def store_token_scalars(p, strides, at, h, x, BT: tl.constexpr):
    """Store x [BT] to the rows that are tokens, rounding once."""
    o_r = tl.arange(0, BT)
    offsets = at.b * strides[0] + (at.t + o_r.to(tl.int64)) * strides[1] + h * strides[2]
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=o_r < at.rows)


@triton.jit
def tile_offsets(i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Offsets and mask inside tile i_tile of a contiguous [tiles, R, W], starting at (row, column).   [BR, BW]

    row and column are multiples of BR and BW. If R and W are too, the mask is all true.
    """
    o_r = row + tl.arange(0, BR)
    o_w = column + tl.arange(0, BW)
    offsets = i_tile.to(tl.int64) * (R * W) + (o_r * W)[:, None] + o_w[None, :]
    return offsets, (o_r < R)[:, None] & (o_w < W)[None, :]


@triton.jit
def load_tile(p, i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Load part of a tile of a contiguous [tiles, R, W]; zeros outside it.   [BR, BW]"""
    offsets, mask = tile_offsets(i_tile, row, column, R, W, BR, BW)
    if R % BR == 0 and W % BW == 0:
        return tl.load(p + offsets)
    else:
        return tl.load(p + offsets, mask=mask, other=0.0)


@triton.jit
def store_tile(p, i_tile, row, column, x, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr):
    """Store part of a tile, rounding once."""
    offsets, mask = tile_offsets(i_tile, row, column, R, W, BR, BW)
    if R % BR == 0 and W % BW == 0:
        tl.store(p + offsets, x.to(p.dtype.element_ty))
    else:
        tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def upper_offsets(i_tile, BT: tl.constexpr):
    """Offsets in upper triangular tiles [tiles, 3, BT / 2, BT / 2], and the mask that excludes the zero quarter.

    Quarters in order: first rows and first columns, first rows and last columns, last rows and last columns.   [BT, BT]
    """
    n: tl.constexpr = BT // 2
    o_r, o_w = tl.arange(0, BT), tl.arange(0, BT)
    at = (o_r * n)[:, None] + (o_w + o_w // n * (n * n - n))[None, :]
    return i_tile.to(tl.int64) * (3 * n * n) + at, (o_r // n)[:, None] <= (o_w // n)[None, :]


@triton.jit
def load_upper(p, i_tile, BT: tl.constexpr):
    """Load an upper triangular tile.   [BT, BT]"""
    offsets, mask = upper_offsets(i_tile, BT)
    return tl.load(p + offsets, mask=mask, other=0.0)


@triton.jit
def store_upper(p, i_tile, x, BT: tl.constexpr):
    """Store the upper triangle of a tile, rounding once."""
    offsets, mask = upper_offsets(i_tile, BT)
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_vector(x, i, W: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr):
    """Load the i-th W numbers of a contiguous tensor through a descriptor or a pointer.   [BW]"""
    if USE_TMA:
        return x.load([(i * W).to(tl.int32)])
    else:
        o_w = tl.arange(0, BW)
        return tl.load(x + i.to(tl.int64) * W + o_w, mask=o_w < W, other=0.0)


@triton.jit
def map_slot(b, t, T, S: tl.constexpr):
    """Slot of the block of S tokens that begins at token t of buffer row b."""
    return b * ((T + S - 1) // S) + t // S


@triton.jit
def near_row(token, place, earlier, rows, BT: tl.constexpr, BLOCK: tl.constexpr):
    """First row of a chunk's queries at the end of an earlier chunk, in tensors of these rows of all chunks.

    The chunk begins at `token` and has `rows` queries. It is number `place` of its block of BLOCK chunks, and has its
    queries once for each of the `place` chunks before it. So the rows of a block are at most (BLOCK - 1) / 2 times its
    tokens, and begin at that many times the tokens before the block.
    """
    start = token - place * BT
    return (BLOCK - 1) * start // 2 + place * (place - 1) // 2 * BT + earlier * rows


def near_rows(tokens: int, block: int) -> int:
    """Number of the rows that `near_row` numbers."""
    return -(-(block - 1) * tokens // 2)


@triton.jit
def load_map(p_M, i, K: tl.constexpr, BK: tl.constexpr):
    """Load the i-th map, zero past the width.   [BK, BK]"""
    o = tl.arange(0, BK)
    inside = (o[:, None] < K) & (o[None, :] < K)
    return tl.load(p_M + i.to(tl.int64) * (K * K) + o[:, None] * K + o[None, :], mask=inside, other=0.0)


@triton.jit
def interleave(x, y):
    """Rows of x and of y, alternating 8 at a time.   2 x [BT, BW] -> [2 BT, BW]

    A thread of a matrix product's result has rows 8 apart, so both kinds of a row are in one thread.
    """
    BW: tl.constexpr = x.shape[1]
    return tl.join(x, y).reshape(x.shape[0] // 8, 8, BW, 2).permute(0, 3, 1, 2).reshape(2 * x.shape[0], BW)


@triton.jit
def separate(x):
    """The inverse of `interleave`.   [2 BT, BW] -> 2 x [BT, BW]"""
    BT: tl.constexpr = x.shape[0] // 2
    BW: tl.constexpr = x.shape[1]
    x, y = x.reshape(BT // 8, 2, 8, BW).permute(0, 2, 3, 1).split()
    return x.reshape(BT, BW), y.reshape(BT, BW)


@triton.jit
def separate_columns(x):
    """`separate` of the columns.   [BW, 2 BT] -> 2 x [BW, BT]"""
    BW: tl.constexpr = x.shape[0]
    BT: tl.constexpr = x.shape[1] // 2
    x, y = x.reshape(BW, BT // 8, 2, 8).permute(0, 1, 3, 2).split()
    return x.reshape(BW, BT), y.reshape(BW, BT)
