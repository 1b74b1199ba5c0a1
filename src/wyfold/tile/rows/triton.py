"""Tiles of whole or partial rows in Triton kernels, for steps whose rows are independent."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor


def row_unit(*tensors: Tensor | None) -> int:
    """UNIT of `load_rows`: the largest power of two up to 16 that divides the row stride of every tensor.

    Triton specialises an integer only on divisibility by 16. To load 16 bytes at a time from rows of 40 columns, it
    must know divisibility by 8.
    """
    return math.gcd(16, *(x.stride(0) for x in tensors if x is not None))


def row_stride(x: Tensor, unit: int) -> int:
    """Row stride of x in multiples of a `row_unit`.

    Raises:
        ValueError: it is no multiple.
    """
    stride, rest = divmod(x.stride(0), unit)
    if rest:
        raise ValueError(f"row_stride: x must have a row stride that is a multiple of {unit}, got {x.stride(0)}")
    return stride


@triton.jit
def row_offsets(i_tile, BR: tl.constexpr):
    """Row indices of a tile, [BR, 1] int64."""
    return (tl.zeros((BR, 1), tl.int64) + i_tile) * BR + tl.arange(0, BR)[:, None]


@triton.jit
def load_rows(p, s_row, o_r, o_column, mask, UNIT: tl.constexpr):
    """Load a tile as float32, zeros where masked; s_row is the row stride in UNITs."""
    return tl.load(p + o_r * s_row * UNIT + o_column, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_rows(p, s_row, o_r, o_column, mask, b_x, UNIT: tl.constexpr):
    """Store a tile, rounded to the tensor's dtype."""
    tl.store(p + o_r * s_row * UNIT + o_column, b_x.to(p.dtype.element_ty), mask=mask)


@triton.jit
def load_columns(p, o_c, W: tl.constexpr):
    """Load the elements of a contiguous vector [W] for a tile's columns, as float32; zeros for None."""
    if p is None:
        return o_c * 0.0
    else:
        return tl.load(p + o_c, mask=o_c < W, other=0.0).to(tl.float32)
