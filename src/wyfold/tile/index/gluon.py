"""TMA descriptors and shared-memory tiles for Gluon kernels on Hopper, and Gluon names that changed between versions.

A block lies in shared memory as WGMMA reads it: in swizzled rows of 128 bytes where rows are that long.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from wyfold.tile.index.triton.descriptors import TmaDescriptor

# Triton 3.7 and 3.8 renamed the first three of these functions, and 3.9 the last two. A reinterpretation must have the
# size of its source from 3.8 on: a view of the first half is `reinterpret(x, dtype, [2, ...], layout).index(0)`.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "barrier", None) or gl.thread_barrier
copy_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
reinterpret = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret

ELEMENTS = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


class GluonTmaDescriptor(TensorDescriptor):
    """A `TmaDescriptor` with the shared-memory layout of its block."""

    def __init__(self, descriptor: TmaDescriptor, span: int):
        self.base, self.shape, self.strides, self.block_shape = (
            descriptor.base,
            descriptor.shape,
            descriptor.strides,
            descriptor.block_shape,
        )
        self.layout = _layout(tuple(descriptor.block_shape), descriptor.base.dtype, span)


def gluon_descriptors(descriptors: Sequence[Any], span: int = 0) -> list[Any]:
    """Convert every `TmaDescriptor` to what a Gluon kernel takes; return other values unchanged.

    Args:
        descriptors: Arguments of a kernel.
        span: Bytes of a row that are contiguous in shared memory, for longer rows. 0: as many as TMA can place, at most
            128.
    """
    return [GluonTmaDescriptor(x, span) if isinstance(x, TmaDescriptor) else x for x in descriptors]


@functools.cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype, span: int) -> gl.NVMMASharedLayout:
    if span:
        return gl.NVMMASharedLayout(span, 8 * dtype.itemsize, len(shape))
    return gl.NVMMASharedLayout.get_default_for(list(shape), ELEMENTS[dtype])


@gluon.jit
def quarters(squares, descriptor, count: gl.constexpr):
    """View `count` tiles [2 n, 2 n] in shared memory as quarters [n, n].

    The quarter at (row r, column c) of tile i has number 4 i + 2 c + r. The halves of a row are not adjacent: `squares`
    has the layout of `descriptor`, whose rows are half as long.
    """
    n: gl.constexpr = descriptor.block_shape[0]
    return reinterpret(squares, descriptor.dtype, [4 * count, n, n], descriptor.layout)


@gluon.jit
def clear_lower(parts, count: gl.constexpr):
    """Zero the quarter below the diagonal of each tile, which no TMA load writes."""
    n: gl.constexpr = parts.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // n, n // 8], [gl.num_warps(), 1], [1, 0])
    for i in gl.static_range(count):
        parts.index(4 * i + 1).store(gl.zeros([n, n], parts.dtype, L))


@gluon.jit
def tma_load_upper(descriptor, tile, full, parts, i):
    """Load upper triangular tile `tile`, in the layout `prepare` stores, into the quarters of shared-memory tile i."""
    n: gl.constexpr = descriptor.block_shape[0]
    row = tile * (3 * n)
    tma_load(descriptor, [row, 0], full, parts.index(4 * i))
    tma_load(descriptor, [row + n, 0], full, parts.index(4 * i + 2))
    tma_load(descriptor, [row + 2 * n, 0], full, parts.index(4 * i + 3))


@gluon.jit
def tma_store_upper(descriptor, tile, parts, i):
    """Store the quarters of shared-memory tile i: the inverse of `tma_load_upper`."""
    n: gl.constexpr = descriptor.block_shape[0]
    row = tile * (3 * n)
    tma_store(descriptor, [row, 0], parts.index(4 * i))
    tma_store(descriptor, [row + n, 0], parts.index(4 * i + 2))
    tma_store(descriptor, [row + 2 * n, 0], parts.index(4 * i + 3))


@gluon.jit
def clear_rows(tile, rows, BT: gl.constexpr, W: gl.constexpr):
    """Zero rows `rows`.. of a tile [BT, W] in shared memory, which belong to other sequences.

    A product with zero would not suffice: zero times NaN is NaN.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // W, W // 8], [gl.num_warps(), 1], [1, 0])
    x = tile.load(L)
    o_t = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    tile.store(gl.where((o_t < rows)[:, None], x, gl.zeros([BT, W], x.dtype, L)))
    fence_async_shared()
    barrier()


@gluon.jit
def clear_tokens(p_o, s_o, at, h, V: gl.constexpr, BT: gl.constexpr, BV: gl.constexpr):
    """Write zeros to a head's rows that are tokens."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_r = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    o_v = gl.arange(0, BV, layout=gl.SliceLayout(0, L))
    first = p_o + (at.b * s_o[0] + at.t * s_o[1] + h * s_o[2])
    offsets = o_r.to(gl.int64)[:, None] * s_o[1] + o_v.to(gl.int64)[None, :] * s_o[3]
    zeros = gl.zeros([BT, BV], p_o.dtype.element_ty, L)
    gl.store(first + offsets, zeros, mask=(o_r < at.rows)[:, None] & (o_v < V)[None, :])


@gluon.jit
def token_tile(p, s, at, h, K: gl.constexpr, BT: gl.constexpr):
    """Load a head's rows through pointers; rows past the last token are zero.   [BT, K]"""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_r = gl.arange(0, BT, layout=gl.SliceLayout(1, L))
    o_k = gl.arange(0, K, layout=gl.SliceLayout(0, L))
    first = p + (at.b * s[0] + at.t * s[1] + h * s[2])
    offsets = o_r.to(gl.int64)[:, None] * s[1] + o_k.to(gl.int64)[None, :] * s[3]
    return gl.load(first + offsets, mask=(o_r < at.rows)[:, None] & (o_k >= 0)[None, :], other=0.0)


@gluon.jit
def wait_for_launch_ahead():
    """Wait until the launch ahead has ended, in `kernel_launch.overlapping_launches`; elsewhere it has."""
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_next_launch():
    """Let the next launch start as soon as every program has come here, if it is one that waits for this one's end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
