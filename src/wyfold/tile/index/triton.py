"""Layouts of tokens and tiles in memory: the only tile functions that load and store them.

Offsets are 64-bit. Rows past a chunk's last token and columns past a tensor's width are never accessed; loads return
zeros there.

From sm_90 on, TMA copies whole blocks of a matrix without per-thread addresses. The coordinates of a block are the
32-bit numbers of its first row and column. A block contains whatever lies there: past a chunk's last token, rows of the
next sequence. Arguments named `x_` are pointers or descriptors; USE_TMA selects which.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from wyfold.runtime import triton_support
from wyfold.runtime.check import UnsupportedError
from wyfold.tile.activation.triton import sigmoid, sigmoid_bwd

COORDINATE_LIMIT = 2**31
"""Exclusive upper bound of a TMA coordinate: rows or columns of a matrix."""


def strides(x: Tensor | None) -> tuple[int, ...] | None:
    """Strides of a tensor as a kernel argument; None stays None."""
    return None if x is None else x.stride()


def has_tma(device: torch.device) -> bool:
    """Whether the device has TMA; the interpreter has."""
    return _architecture_has_tma(triton_support.architecture(device))


@functools.cache
def _architecture_has_tma(name: str) -> bool:
    return name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90


class TmaDescriptor(TensorDescriptor):
    """A TMA descriptor that skips the checks of Triton's constructor: the functions below have made them."""

    def __init__(self, base: Tensor, shape: list[int], strides: list[int], block_shape: list[int]):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape


def token_descriptor(x: Tensor, rows: int, columns: int) -> TmaDescriptor | None:
    """Descriptor of x [B, T, H, W] as a matrix [B T, columns of all heads].

    Args:
        x: Tokens, any strides.
        rows, columns: Shape of a block.

    Returns:
        None if the layout in memory does not allow a descriptor.
    """
    (B, T, H, W), (s_b, s_t, s_h, s_w) = x.shape, x.stride()
    width = (H - 1) * s_h + W
    if s_w != 1 or W % columns or s_t * x.itemsize % 16 or x.data_ptr() % 16 or (B > 1 and s_b != T * s_t):
        return None
    if not (0 < s_t and 0 < B * T < COORDINATE_LIMIT and 0 < width < COORDINATE_LIMIT):
        return None
    return TmaDescriptor(x, [B * T, width], [s_t, 1], [rows, columns])


def tma_readable(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [B, T, H, W] itself if `token_descriptor` can describe it, else a contiguous copy."""
    if token_descriptor(x, rows, columns) is not None:
        return x
    return x.new_empty(x.shape).copy_(x)


def tile_descriptor(x: Tensor, rows: int, columns: int) -> TmaDescriptor | None:
    """Descriptor of a contiguous x [tiles, R, W] as a matrix [tiles R, W], in blocks [rows, columns].

    None if the sizes or the address do not allow a descriptor.
    """
    tiles, R, W = x.shape
    if R % rows or W % columns or W * x.itemsize % 16 or x.data_ptr() % 16 or not 0 < tiles * R < COORDINATE_LIMIT:
        return None
    return TmaDescriptor(x, [tiles * R, W], [W, 1], [rows, columns])


def upper_descriptor(x: Tensor) -> TmaDescriptor | None:
    """Descriptor of the quarters of contiguous upper triangular tiles x [tiles, 3, n, n]; None as in
    `tile_descriptor`."""
    return tile_descriptor(x.flatten(0, 1), x.shape[2], x.shape[3])


def vector_descriptor(x: Tensor, count: int) -> TmaDescriptor | None:
    """Descriptor of blocks of `count` numbers of a contiguous x [tiles, count]; None as in `tile_descriptor`."""
    if count * x.itemsize % 16 or count & (count - 1) or x.data_ptr() % 16 or not 0 < x.numel() < COORDINATE_LIMIT:
        return None
    return TmaDescriptor(x, [x.numel()], [1], [count])


def all_or_none(given: Sequence[Tensor | None], descriptors: Sequence[Any]) -> Sequence[Any] | None:
    """The descriptors if every given tensor has one; else None, and all tensors are passed as pointers."""
    return (
        None
        if any(x is not None and descriptor is None for x, descriptor in zip(given, descriptors, strict=True))
        else descriptors
    )


def require_descriptors(stage: str, descriptors: Sequence[Any] | None) -> Sequence[Any]:
    """The descriptors.

    Raises:
        UnsupportedError: There are none, because the call has more rows than a TMA coordinate can count.
    """
    if descriptors is None:
        raise UnsupportedError(
            f"{stage}: TMA coordinates count up to 2^31 rows, and this call's tiles have more; split the batch",
            {"gluon": "too many chunks"},
        )
    return descriptors


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


class Strength(NamedTuple):
    """Kernel argument: write strength of every token.

    Attributes:
        beta, s_beta: [B, T, HV] strength or its logit, and its strides; None for strength 1.
        most: Strength at which a logit saturates.
        erases: 1.0, or 0.0 for writes that erase nothing; None in kernels that do not ask.
    """

    beta: Any
    s_beta: Any
    most: Any
    erases: Any = None
    end: None = None


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
def segment_coords(i_s, p_sequence, p_first, N):
    """Sequence of segment i_s, the border at its end, whether it begins its sequence, and whether it ends it.

    Past the last segment: sequence N, and neither begins nor ends.
    """
    i_n = tl.load(p_sequence + i_s)
    exists = i_n < N
    begins = tl.load(p_first + i_n) == i_s
    ends = tl.load(p_first + i_n + 1, mask=exists, other=0) == i_s + 1
    return i_n, i_s - i_n, begins & exists, ends


@triton.jit
def slot_coords(i_n, p_source, s_source, p_target, s_target, p_given, slots, pad):
    """Pool slots of sequence i_n, under the rules of `Slots`.

    Returns:
        Slot of the entering state, and whether it holds a state for this call; slot of the leaving state, and whether
        it is written; whether the sequence has a live slot at all.
    """
    i_from = i_n
    if p_source is not None:
        i_from = tl.load(p_source + i_n * s_source).to(tl.int64)
    live = (i_from > pad) & (i_from < slots)
    has_state = live
    if p_given is not None:
        has_state = has_state & (tl.load(p_given + i_n) != 0)
    i_to = i_from
    if p_target is not None:
        i_to = tl.load(p_target + i_n * s_target).to(tl.int64)
    return i_from, has_state, i_to, live & (i_to > pad) & (i_to < slots), live


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
def load_sub_chunks(
    p,
    strides,
    at,
    h,
    column,
    opaque_zero,
    W: tl.constexpr,
    BT: tl.constexpr,
    BW: tl.constexpr,
    BR: tl.constexpr = 16,
):
    """`load_tokens` in sub-chunks of BR rows.   [BT / BR, BR, BW]

    `opaque_zero` is 0, unknown to the compiler. It hides that addresses are multiples of more than BW / 32 elements. So
    32 neighbouring lanes load a row of a sub-chunk, and a thread holds all BR rows of its columns. Sums and selections
    along the rows of a sub-chunk then need no other thread.
    """
    offsets, o_i, o_n, o_w = _sub_chunk_offsets(strides[1], strides[3], column, opaque_zero, BT, BW, BR)
    p_tile = p + (at.b * strides[0] + at.t * strides[1] + h * strides[2])
    mask = o_i < at.rows - o_n
    if W % BW != 0:
        mask = mask & (o_w < W)
    return tl.load(p_tile + offsets, mask=mask, other=0.0)


@triton.jit
def store_token_sub_chunks(p, strides, at, h, column, x, opaque_zero, W: tl.constexpr):
    """`store_tokens` of sub-chunks x [BT / BR, BR, BW]."""
    BR: tl.constexpr = x.shape[1]
    BT: tl.constexpr = x.shape[0] * BR
    offsets, o_i, o_n, o_w = _sub_chunk_offsets(strides[1], strides[3], column, opaque_zero, BT, x.shape[2], BR)
    p_tile = p + (at.b * strides[0] + at.t * strides[1] + h * strides[2])
    tl.store(p_tile + offsets, x.to(p.dtype.element_ty), mask=(o_i < at.rows - o_n) & (o_w < W))


@triton.jit
def to_sub_chunks(x, p, opaque_zero, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Reshape x [BT, BW] float32 to sub-chunks, in the register layout of `load_sub_chunks`.

    The result of a matrix product has the MMA layout, which would spread to every tile it meets. Here x is the fallback
    of a fully masked load, so it takes the load's layout. p: any float32 pointer; it is never read.
    """
    offsets, _, _, _ = _sub_chunk_offsets(BW, 1, 0, opaque_zero, BT, BW, BR)
    return tl.load(
        p + offsets, mask=tl.full(offsets.shape, 0, tl.int32) + opaque_zero > 0, other=x.reshape(offsets.shape)
    )


@triton.jit
def load_tile_sub_chunks(
    p, i_tile, column, opaque_zero, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr
):
    """Load columns of a tile of a contiguous [tiles, BT, W] in sub-chunks.   [BT / BR, BR, BW]"""
    offsets, _, _, o_w = _sub_chunk_offsets(W, 1, column, opaque_zero, BT, BW, BR)
    p_tile = p + i_tile.to(tl.int64) * (BT * W)
    return tl.load(p_tile + offsets, mask=tl.broadcast_to(o_w < W, (BT // BR, BR, BW)), other=0.0)


@triton.jit
def store_sub_chunks(
    p, i_tile, column, x, opaque_zero, W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr = 16
):
    """Store sub-chunks [BT / BR, BR, BW] as columns of a tile of a contiguous [tiles, BT, W], rounding once."""
    offsets, _, _, o_w = _sub_chunk_offsets(W, 1, column, opaque_zero, BT, BW, BR)
    p_tile = p + i_tile.to(tl.int64) * (BT * W)
    x = x.to(p.dtype.element_ty)
    if W % BW == 0:
        tl.store(p_tile + offsets, x)
    else:
        tl.store(p_tile + offsets, x, mask=tl.broadcast_to(o_w < W, (BT // BR, BR, BW)))


@triton.jit
def _sub_chunk_offsets(s_row, s_column, column, opaque_zero, BT: tl.constexpr, BW: tl.constexpr, BR: tl.constexpr):
    """Offsets of the elements of sub-chunks, with the indices that masks need.

    Returns:
        Offsets, row inside the sub-chunk, first row of the sub-chunk, and column of each element.
    """
    o_i = tl.arange(0, BR)[None, :, None]
    o_n = BR * tl.arange(0, BT // BR)[:, None, None]
    o_w = column + tl.arange(0, BW)[None, None, :]
    unit: tl.constexpr = BW // 32 if BW > 32 else 1
    first = o_n.to(tl.int64) * s_row + o_w.to(tl.int64) * s_column + opaque_zero * unit
    return first + o_i.to(tl.int64) * s_row, o_i, o_n, o_w


@triton.jit
def store_tokens(p, strides, at, h, column, x, W: tl.constexpr):
    """Store x [BT, BW] to the rows that are tokens, rounding once."""
    offsets, mask = token_offsets(strides, at, h, column, W, x.shape[0], x.shape[1])
    tl.store(p + offsets, x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_token_block(
    x, strides, at, h, column,
    W: tl.constexpr, BT: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """`load_tokens` through a descriptor or a pointer.

    Args:
        FULL: All rows are tokens. Otherwise rows of other sequences are replaced by zeros here, before any product:
            zero times NaN is NaN.
    """
    if USE_TMA:
        b_x = x.load([(at.b * at.T + at.t).to(tl.int32), (h * strides[2]).to(tl.int32) + column])
        if FULL:
            return b_x
        else:
            return tl.where((tl.arange(0, BT) < at.rows)[:, None], b_x, tl.zeros((BT, BW), b_x.dtype))
    else:
        return load_tokens(x, strides, at, h, column, W, BT, BW)


@triton.jit
def store_token_block(x, strides, at, h, column, b_x, W: tl.constexpr, USE_TMA: tl.constexpr):
    """`store_tokens` through a descriptor, if all rows of the block are tokens, or a pointer."""
    if USE_TMA:
        x.store([(at.b * at.T + at.t).to(tl.int32), (h * strides[2]).to(tl.int32) + column], b_x.to(x.dtype))
    else:
        store_tokens(x, strides, at, h, column, b_x, W)


@triton.jit
def prefetch_tokens(p, strides, at, h, W: tl.constexpr, BT: tl.constexpr):
    """Prefetch one head's rows of a chunk into L2; later loads take about a third as long.

    One request per line of 128 bytes if columns are contiguous. With other strides, only some lines are requested.
    """
    STEP: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((W + STEP - 1) // STEP)
    offsets, mask = token_offsets(strides, at, h, 0, BT, BT, 1)
    o_line = tl.minimum(tl.arange(0, LINES) * STEP, W - 1).to(tl.int64) * strides[3]
    _prefetch(tl.where(mask, p + offsets, p) + o_line[None, :])


@triton.jit
def prefetch_tile(p, i_tile, SIZE: tl.constexpr):
    """Prefetch the i-th SIZE numbers of a contiguous tensor into L2."""
    STEP: tl.constexpr = 1024 // p.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = triton.next_power_of_2((SIZE + STEP - 1) // STEP)
    _prefetch(p + i_tile.to(tl.int64) * SIZE + tl.minimum(tl.arange(0, LINES) * STEP, SIZE - 1))


if torch.version.hip:

    @triton.jit
    def _prefetch(p):
        """No-op: an AMD GPU has no such instruction."""
        tl.static_assert(p.dtype.is_ptr())

else:

    @triton.jit
    def _prefetch(p):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [p.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def load_token_scalars(p, strides, at, h, BT: tl.constexpr):
    """Load one number per token of a tensor [B, T, H] as float32; zero past the last token.   [BT]"""
    o_r = tl.arange(0, BT)
    offsets = at.b * strides[0] + (at.t + o_r.to(tl.int64)) * strides[1] + h * strides[2]
    return tl.load(p + offsets, mask=o_r < at.rows, other=0.0).to(tl.float32)


@triton.jit
def load_strength(strength, at, h, LOGIT: tl.constexpr, BT: tl.constexpr):
    """Load beta of every row, zero in padding; 1 where the caller gave none.   [BT]"""
    o_r = tl.arange(0, BT)
    if strength.beta is None:
        return tl.where(o_r < at.rows, 1.0, 0.0)
    else:  # without it the compiler also compiles the code after the return
        b_beta = load_token_scalars(strength.beta, strength.s_beta, at, h, BT)
        if LOGIT:
            b_beta = tl.where(o_r < at.rows, sigmoid(b_beta) * strength.most, 0.0)
        return b_beta


@triton.jit
def strength_bwd(strength, at, h, b_dbeta, BT: tl.constexpr):
    """Gradient of the logits that `load_strength` read, from that of beta.   [BT]

    Computed from the logits: 1 - beta / most would cancel where they are large.
    """
    b_beta = load_token_scalars(strength.beta, strength.s_beta, at, h, BT)
    return sigmoid_bwd(b_beta, b_dbeta) * strength.most


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
def load_tile_block(
    p, i_tile, row, column, R: tl.constexpr, W: tl.constexpr, BR: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr
):
    """`load_tile` through a descriptor of the tiles' rows [tiles * R, W], or a pointer.   [BR, BW]

    With a descriptor, R is a multiple of BR: a block must not reach into the next tile.
    """
    if USE_TMA:
        return p.load([(i_tile * R + row).to(tl.int32), column])
    else:
        return load_tile(p, i_tile, row, column, R, W, BR, BW)


@triton.jit
def store_tile_block(
    x,
    i_tile,
    row,
    column,
    b_x,
    R: tl.constexpr,
    W: tl.constexpr,
    BR: tl.constexpr,
    BW: tl.constexpr,
    USE_TMA: tl.constexpr,
):
    """`store_tile` through a descriptor or a pointer."""
    if USE_TMA:
        x.store([(i_tile * R).to(tl.int32) + row, column], b_x.to(x.dtype))
    else:
        store_tile(x, i_tile, row, column, b_x, R, W, BR, BW)


@triton.jit
def load_vector(x, i, W: tl.constexpr, BW: tl.constexpr, USE_TMA: tl.constexpr):
    """Load the i-th W numbers of a contiguous tensor through a descriptor or a pointer.   [BW]"""
    if USE_TMA:
        return x.load([(i * W).to(tl.int32)])
    else:
        o_w = tl.arange(0, BW)
        return tl.load(x + i.to(tl.int64) * W + o_w, mask=o_w < W, other=0.0)


@triton.jit
def load_row_factors(x, i_tile, BT: tl.constexpr, USE_TMA: tl.constexpr):
    """Load the row factors of a tile that `prepare` stored: decays in for k and q, decay out, beta.   [BT] each

    One block holds all four. It is split in registers without an exchange between threads.
    """
    if USE_TMA:
        b_x = x.load([(i_tile * 4).to(tl.int32), 0])
        b_even, b_odd = tl.split(tl.reshape(tl.trans(b_x), (BT, 2, 2)))
        b_in_k, b_out = tl.split(b_even)
        b_in_q, b_beta = tl.split(b_odd)
    else:
        p_row = x + i_tile.to(tl.int64) * (4 * BT) + tl.arange(0, BT)
        b_in_k, b_in_q, b_out, b_beta = (
            tl.load(p_row),
            tl.load(p_row + BT),
            tl.load(p_row + 2 * BT),
            tl.load(p_row + 3 * BT),
        )
    return b_in_k, b_in_q, b_out, b_beta


@triton.jit
def map_slot(b, t, T, S: tl.constexpr):
    """Slot of the block of S tokens that begins at token t of buffer row b."""
    return b * ((T + S - 1) // S) + t // S


@triton.jit
def load_map(p_M, i, K: tl.constexpr, BK: tl.constexpr):
    """Load the i-th map, zero past the width.   [BK, BK]"""
    o = tl.arange(0, BK)
    inside = (o[:, None] < K) & (o[None, :] < K)
    return tl.load(p_M + i.to(tl.int64) * (K * K) + o[:, None] * K + o[None, :], mask=inside, other=0.0)


@triton.jit
def store_map(p_M, i, b_D, K: tl.constexpr, BK: tl.constexpr):
    """Store the i-th map, rounding once."""
    o = tl.arange(0, BK)
    inside = (o[:, None] < K) & (o[None, :] < K)
    p = p_M + i.to(tl.int64) * (K * K) + o[:, None] * K + o[None, :]
    tl.store(p, b_D.to(p_M.dtype.element_ty), mask=inside)
